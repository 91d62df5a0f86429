"""The tables of the pages, regenerated from the recorded runs: `make readme`.

A page of PAGES holds blocks `<!-- begin NAME -->` ... `<!-- end NAME -->`. The function of that
name in BLOCKS fills each from `data/results/`. A test fails where a page and the run folders
disagree, so no number in it is written by hand.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from workbench.config import EXACT, FAMILIES, ROUNDING, Toggles
from workbench.errors import WorkbenchError
from workbench.output import write_text
from workbench.report import blocks, mechanisms, presets, scheduling, targets
from workbench.report.recorded import commit_of
from workbench.report.tables import markdown

RESULTS = Path("data/results")
PAGES = (Path("README.md"), RESULTS / "README.md")  # the first screen; everything
ANSWERS = {EXACT: "bit-equal", ROUNDING: "within a tolerance"}
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


MADE = {
    "quantised": "{name}, by llama.cpp's quantiser",
    "blocks": "{name}, random blocks",
    "rope": "keys of linear RoPE scaling",
    "qwen2": "qwen2 {name}",
    "parts": "in parts, {name}",
}


def peer_files(folder: Path) -> str:
    """How far llama.cpp and the engine are from float64 on files of each kind, from `make peer`."""
    found = json.loads((folder / "peer-files.json").read_text())
    worst: dict[str, dict[str, float]] = {}
    for row in found["files"]:
        name = row["name"].split()[-1] if row["kind"] in ("quantised", "blocks") else row["name"]
        said = worst.setdefault(MADE[row["kind"]].format(name=name), {})
        each = {"llama.cpp": row["llama.cpp"]["nmse"]}
        each |= {expand: of["nmse"] for expand, of in row["workbench"].items()}
        for side, nmse in each.items():
            said[side] = max(nmse, said.get(side, 0.0))
    rows = [
        {"File": name} | {side: f"{of[side]:.1e}" if side in of else "" for side in SIDES}
        for name, of in worst.items()
    ]
    return (
        markdown(pd.DataFrame(rows).rename(columns=SIDES))
        + f"\n\nNMSE of {found['files'][0]['n_tokens']} tokens, one by one, against float64 of the "
        + "file's own values; the worst of tiny-llama, tiny-qwen2 and tiny-qwen3. "
        + f"llama-cpp-python {found['versions']['llama-cpp-python']}; "
        + f"commit {commit_of(found)}; {found['date'][:10]}."
    )


SIDES = {"llama.cpp": "llama.cpp", "f16": "workbench", "q8_0": "with --expand q8_0"}


def rooms(folder: Path) -> str:
    """A row per room: the toggles that only it reads, from their own metadata."""
    found: dict[str, list[dataclasses.Field]] = {}
    for field in dataclasses.fields(Toggles):
        found.setdefault(field.metadata["room"], []).append(field)
    rows = [
        {
            "room": f"`workbench/{room}`",
            "toggles": ", ".join(f"`{name}`" for name in _families(f.name for f in fields)),
            "the answer stays": ", ".join(
                dict.fromkeys(ANSWERS[f.metadata["answer"]] for f in fields)
            ),
        }
        for room, fields in found.items()
    ]
    return markdown(pd.DataFrame(rows))


def _families(names: Iterable[str]) -> Iterable[str]:
    """Toggles of a family as one name, `fuse_...`."""
    return dict.fromkeys(
        next((f"{family}_..." for family in FAMILIES if name.startswith(f"{family}_")), name)
        for name in names
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "mechanisms": mechanisms.table,
    "rooms": rooms,
    "targets-cuda": targets.table,
    "peer-cpu": peer,
    "peer-files": peer_files,
    **blocks.BLOCKS,
    **presets.BLOCKS,
    **scheduling.BLOCKS,
}


def fill(text: str, folder: Path = RESULTS) -> str:
    """`text` with every block regenerated; raises WorkbenchError for a block nobody fills."""

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in BLOCKS:
            raise WorkbenchError(f"block {name!r} is not one of {', '.join(BLOCKS)}")
        return f"{match.group(1)}{BLOCKS[name](folder)}\n{match.group(3)}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in PAGES:
        write_text(page, fill(page.read_text(encoding="utf-8")))
