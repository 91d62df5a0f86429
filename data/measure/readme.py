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

from data.measure import blocks, mechanisms, peers, presets, scheduling, targets
from data.measure.recorded import NOT_MEASURED, commit_of, model_of
from workbench.config import EXACT, FAMILIES, ROUNDING, Toggles
from workbench.errors import WorkbenchError
from workbench.output import write_text
from workbench.report.tables import markdown

RESULTS = Path("data/results")
PAGES = (Path("README.md"), RESULTS / "README.md")  # the first screen; everything
ANSWERS = {EXACT: "bit-equal", ROUNDING: "within a tolerance"}
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def picture(folder: Path) -> str:
    """What `timelines.png` shows, and of which commit and device; `timelines.json` says so."""
    path = folder / "timelines.json"
    if not path.is_file():
        return f"Timelines: {NOT_MEASURED}."
    found = json.loads(path.read_text())
    return (
        f"`{'` and `'.join(found['arms'])}`, traced, so it shows where time goes and not how much: "
        f"{model_of(found)}; {found['engine']['device_description']}; "
        f"commit {commit_of(found)}; {found['date'][:10]}."
    )


def rooms(folder: Path) -> str:
    """A row per room: the toggles that only it reads, from their own metadata."""
    found: dict[str, list[dataclasses.Field]] = {}
    for field in dataclasses.fields(Toggles):
        found.setdefault(field.metadata["room"], []).append(field)
    rows = [
        {
            "room": f"`workbench/{room}`",
            "toggles": ", ".join(f"`{name}`" for name in _families(f.name for f in fields)),
            "llama.cpp": ", ".join(_threads(fields)),
            "the answer stays": ", ".join(
                dict.fromkeys(ANSWERS[f.metadata["answer"]] for f in fields)
            ),
        }
        for room, fields in found.items()
    ]
    return markdown(pd.DataFrame(rows))


def _threads(fields: Iterable[dataclasses.Field]) -> Iterable[str]:
    """Numbers of llama.cpp's pull requests, each once."""
    named = (field.metadata["thread"] for field in fields)
    return dict.fromkeys(thread.removeprefix("llama.cpp ") for thread in named if thread)


def _families(names: Iterable[str]) -> Iterable[str]:
    """Toggles of a family as one name, `fuse_...`."""
    return dict.fromkeys(
        next((f"{family}_..." for family in FAMILIES if name.startswith(f"{family}_")), name)
        for name in names
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "mechanisms": mechanisms.table,
    "rooms": rooms,
    "timelines": picture,
    "targets-cuda": targets.table,
    **blocks.BLOCKS,
    **peers.BLOCKS,
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
