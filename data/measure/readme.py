"""The tables of the pages, regenerated from the recorded runs: `make readme`.

A page of PAGES holds blocks `<!-- begin NAME -->` ... `<!-- end NAME -->`. The function of that
name in BLOCKS fills each from `data/results/`. A test fails where a page and the run folders
disagree: no number is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.measure import (
    arena_peaks,
    attention,
    batched,
    blocks,
    first_requests,
    mechanisms,
    over_http,
    peer,
    plan_tables,
    presets,
    proofs,
    random_lengths,
    reuse_tables,
    scheduling,
    skipping,
    sources,
    streams,
    targets,
    two_commits,
)
from data.measure.recorded import NOT_MEASURED, Recorded, commit_of, model_of
from data.measure.same_logits import block as same_logits
from data.measure.tables import Line, Part, Table, block
from workbench.common.errors import WorkbenchError
from workbench.common.output import write_text
from workbench.config import EXACT, FAMILIES, ROUNDING
from workbench.config.table import ROWS, Row
from workbench.model.gguf.metadata import KEYS, Use

RESULTS = Path("data/results")
PAGES = (  # the first screen; everything; model files
    Path("README.md"), RESULTS / "README.md", Path("workbench/model/README.md"),
)  # fmt: skip
ANSWERS = {EXACT: "bit-equal", ROUNDING: "within a tolerance"}
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def picture(recorded: Recorded) -> str:
    """What `timelines.png` shows, its commit and its device, as `timelines.json` says."""
    found = recorded.alone("timelines")
    if found is None:
        return f"Timelines: {NOT_MEASURED}."
    return (
        f"`{'` and `'.join(found['arms'])}`, traced, so it shows where time goes and not how much: "
        f"{model_of(found)}; {found['engine']['device_description']}; "
        f"commit {commit_of(found)}; {found['date'][:10]}."
    )


THREADS = ("#17795", "#8366", "#16548", "#16991", "#14924")


def rooms(_: Recorded) -> Iterator[Line]:
    """A thread of llama.cpp: its rooms with the toggles that only they read, from the table of
    toggles; at the end all other rooms."""
    found: dict[str, list[Row]] = {}
    for row in ROWS.values():
        found.setdefault(row.room, []).append(row)
    of: dict[str, list[str]] = {thread: [] for thread in (*THREADS, "others")}
    for room, rows in found.items():
        thread = next((t for t in _threads(rows) if t in THREADS), "others")
        of[thread].append(room)
    for thread, own in of.items():
        texts = [
            f"`{room}`: "
            + ", ".join(f"`{name}`" for name in _families(row.name for row in found[room]))
            for room in own
        ]
        answers = dict.fromkeys(ANSWERS[row.answer] for room in own for row in found[room])
        yield Line({
            "llama.cpp": thread, "rooms in `workbench/`, and the toggles that they read":
            "; ".join(texts), "answers stay": ", or ".join(answers),
        })  # fmt: skip


def _threads(rows: Iterable[Row]) -> Iterable[str]:
    """Numbers of llama.cpp's pull requests, each once."""
    return dict.fromkeys(row.thread.removeprefix("llama.cpp ") for row in rows if row.thread)


def _families(names: Iterable[str]) -> Iterable[str]:
    """Toggles of a family as one name, `fuse_...`."""
    return dict.fromkeys(
        next((f"{family}_..." for family in FAMILIES if name.startswith(f"{family}_")), name)
        for name in names
    )


def keys(_: Recorded) -> Iterator[Line]:
    """The metadata keys of model files, a line each, those with one use together."""
    for key in sorted(KEYS, key=lambda key: [*Use].index(key.use)):
        own = "; llama.cpp does not read it" if key.only_here else ""
        yield Line(
            {"key": f"`{key.name}`", "here": str(key.use), "what it says, or why": key.why + own}
        )


BLOCKS: dict[str, list[Part]] = {
    "rooms": [Table("Rooms", rooms)],
    "keys": [Table("Keys", keys)],
    "timelines": [picture],
    **mechanisms.BLOCKS,
    **blocks.BLOCKS,
    **peer.BLOCKS,
    **attention.BLOCKS,
    **batched.BLOCKS,
    **first_requests.BLOCKS,
    **skipping.BLOCKS,
    **random_lengths.BLOCKS,
    **over_http.BLOCKS,
    **streams.BLOCKS,
    **targets.BLOCKS,
    **presets.BLOCKS,
    **scheduling.BLOCKS,
    **reuse_tables.BLOCKS,
    **plan_tables.BLOCKS,
    **proofs.BLOCKS,
    **arena_peaks.BLOCKS,
    **same_logits.BLOCKS,
    **two_commits.BLOCKS,
    "sources": [sources.commits],
}


def made(name: str, recorded: Recorded) -> str:
    """The block of a name; raises WorkbenchError for one nobody fills."""
    if name not in BLOCKS:
        raise WorkbenchError(f"block {name!r} is not one of {', '.join(BLOCKS)}")
    return block(BLOCKS[name], recorded)


def fill(text: str, folder: Path = RESULTS) -> str:
    """`text` with every block regenerated; raises WorkbenchError for a block nobody fills."""
    recorded = Recorded(folder)

    def filled(match: re.Match[str]) -> str:
        return f"{match.group(1)}{made(match.group(2), recorded)}\n{match.group(3)}"

    return BLOCK.sub(filled, text)


if __name__ == "__main__":
    for page in PAGES:
        write_text(page, fill(page.read_text(encoding="utf-8")))
