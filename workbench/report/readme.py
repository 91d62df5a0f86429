"""README's tables and captions, regenerated from the recorded runs: `make readme`.

README.md holds blocks `<!-- begin NAME -->` ... `<!-- end NAME -->`; each is filled from
`data/results/` by the function of that name in BLOCKS. A test fails where README and the run
folders disagree, so no number in it is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from workbench.errors import WorkbenchError
from workbench.report import blocks, scheduling, targets
from workbench.report.recorded import commit_of
from workbench.report.tables import markdown

RESULTS = Path("data/results")
README = Path("README.md")
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def peer(folder: Path) -> str:
    """Decode and prefill on two CPU threads beside llama.cpp's, from `make peer`."""
    found = json.loads((folder / "peer-cpu.json").read_text())
    rows = [
        {
            "Model": f"{row['preset']} {row['quant']}",
            "Test": row["test"],
            "t/s llama.cpp": f"{row['median_t_s']['llama.cpp']:.1f}",
            "t/s workbench": f"{row['median_t_s']['workbench']:.1f}",
            "Ratio": f"{row['ratio']:.2f}",
            "95% CI": f"{row['ci95'][0]:.2f}..{row['ci95'][1]:.2f}",
        }
        for row in [*found["decode"], *found.get("prefill", [])]
    ]
    cpu = found["machine"]["cpu"]["name"]
    version = found["versions"]["llama-cpp-python"]
    return (
        markdown(pd.DataFrame(rows))
        + f"\n\n{cpu}, 2 threads each, alternating in one run; llama-cpp-python {version}; "
        + f"commit {commit_of(found)}; {found['date'][:10]}."
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "targets-cuda": targets.table,
    "peer-cpu": peer,
    **blocks.BLOCKS,
    **scheduling.BLOCKS,
}


def fill(text: str, folder: Path = RESULTS) -> str:
    """`text` with every block regenerated; raises WorkbenchError for a block nobody fills."""

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in BLOCKS:
            raise WorkbenchError(f"README block {name!r} is not one of {', '.join(BLOCKS)}")
        return f"{match.group(1)}{BLOCKS[name](folder)}\n{match.group(3)}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    README.write_text(fill(README.read_text()))
