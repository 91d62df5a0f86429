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

from workbench.bench import results
from workbench.bench.comparison import AB
from workbench.errors import WorkbenchError
from workbench.report.tables import markdown

RESULTS = Path("data/results")
README = Path("README.md")
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def comparisons(folder: Path, device: str) -> list[AB]:
    """The recorded comparisons on `device`, by folder name."""
    found = [AB.load(run.parent) for run in sorted(folder.glob("*/run.json"))]
    return [ab for ab in found if ab.run["engine"]["device"] == device]


def speedups(folder: Path, device: str) -> str:
    """One row per mechanism, workload and model: baseline and best-known toggled rates.

    Every toggled arm is a row, those near 1.00 too. +- is half the range that holds the middle
    half of the repetitions.
    """
    rows = []
    for ab in comparisons(folder, device):
        toggle = ab.run["result"]["toggle"]
        background = ab.run["arms"][0]["toggles"]
        others = ", ".join(v for k, v in background.items() if k != toggle)
        for row in ab.summary().to_dict("records"):
            rows.append(
                {
                    "mechanism": "A/A control"
                    if row["is_control"]
                    else f"{toggle}: {ab.label(ab.run['arms'][0])} -> {row['label']}",
                    "with": others,
                    "Model": ab.model.replace(" with random weights", ""),
                    "Test": row["test"],
                    "t/s baseline": _rate(ab, ab.run["arms"][0]["name"], row["test"]),
                    "t/s toggled": _rate(ab, row["arm"], row["test"]),
                    "Speedup": f"{row['speedup']:.3f}",
                    "95% CI": f"{row['low']:.3f}..{row['high']:.3f}",
                    "verdict": row["verdict"],
                }
            )
    if not rows:
        raise WorkbenchError(f"{folder} holds no comparison on {device}; record one first")
    return markdown(pd.DataFrame(rows)) + "\n\n" + _caption(comparisons(folder, device))


def _rate(ab: AB, arm: str, test: str) -> str:
    """Median tokens per second of an arm, and half its interquartile range."""
    rates = results.rates(ab.samples)
    tps = rates.loc[(rates["arm"] == arm) & (rates["test"] == test), "tps"]
    low, mid, high = tps.quantile([0.25, 0.5, 0.75])
    return f"{mid:.1f} ± {(high - low) / 2:.1f}"


def _caption(found: list[AB]) -> str:
    device = found[0].run["engine"]["device_description"]
    commits = ", ".join(dict.fromkeys(str(ab.run["commit"]["hash"])[:8] for ab in found))
    dates = sorted(ab.run["started"][:10] for ab in found)
    n = sorted({ab.run["repetitions"] for ab in found})
    return (
        f"{device}; {' and '.join(map(str, n))} interleaved repetitions, answers checked in the "
        f"same run; models with random weights of the real shapes; commit {commits}; {dates[0]}."
    )


def peer(folder: Path) -> str:
    """Decode on two CPU threads beside llama.cpp's, from `make peer`."""
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
        for row in found["decode"]
    ]
    cpu = found["machine"]["cpu"]["name"]
    version = found["versions"]["llama-cpp-python"]
    return (
        markdown(pd.DataFrame(rows))
        + f"\n\n{cpu}, 2 threads each, alternating in one run; llama-cpp-python {version}; "
        + f"commit {found['commit']['hash'][:8]}; {found['date'][:10]}."
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "speedups-cuda": lambda folder: speedups(folder, "cuda"),
    "peer-cpu": peer,
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
