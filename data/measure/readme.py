"""The tables of the pages, regenerated from the recorded runs: `make readme`.

A page of PAGES holds blocks `<!-- begin NAME -->` ... `<!-- end NAME -->`. The function of that
name in BLOCKS fills each from `data/results/`. A test fails where a page and the run folders
disagree: no number is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from data.measure import sources
from data.measure.recorded import NOT_MEASURED, Recorded, model_of, told
from data.measure.tables import Line, Part, Table, block
from workbench.common.errors import WorkbenchError
from workbench.common.output import write_text
from workbench.config import EXACT, FAMILIES, ROUNDING, Toggles
from workbench.config.presets import best_rows, fixed_presets
from workbench.config.table import ROWS, THREADS, Row, thread_of
from workbench.model.gguf.metadata import KEYS, Use

RESULTS = Path("data/results")
PAGES = (  # the first screen; everything; a new mechanism; model files
    Path("README.md"), RESULTS / "README.md", Path("workbench/README.md"),
    Path("workbench/model/README.md"),
)  # fmt: skip
TABLES = (
    "arena_peaks", "attention", "batched", "blocks", "energy_table", "first_requests", "mechanisms",
    "over_http", "peer", "plan_tables", "proofs", "random_lengths", "scheduling", "skipping",
    "streams", "targets",
)  # fmt: skip
ANSWERS = {EXACT: "bit-equal", ROUNDING: "within a tolerance"}
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def picture(recorded: Recorded) -> str:
    """What `timelines.png` shows, its commit and its device, as `timelines.json` says."""
    found = recorded.alone("timelines")
    if found is None:
        return f"Timelines: {NOT_MEASURED}."
    arms = f"`{'` and `'.join(found['arms'])}`"
    what = f"{arms}; traced, so read the order and not the times; {model_of(found)}"
    return told(found, what, found["engine"]["device_description"])


def rooms(_: Recorded) -> Iterator[Line]:
    """A line for each thread of llama.cpp: its rooms, with the toggles that only they read, from
    the table of toggles. The last line has all other rooms."""
    found: dict[str, list[Row]] = {}
    for row in ROWS.values():
        found.setdefault(row.room, []).append(row)
    of: dict[str, list[str]] = {thread: [] for thread in (*THREADS, "")}
    for room, rows in found.items():
        of[thread_of(rows[0].name)].append(room)

    def family(name: str) -> str:
        return next((f"{f}_..." for f in FAMILIES if name.startswith(f"{f}_")), name)

    for thread, own in of.items():
        texts = [
            f"`{room}`: " + ", ".join(dict.fromkeys(f"`{family(row.name)}`" for row in found[room]))
            for room in own
        ]
        answers = dict.fromkeys(ANSWERS[row.answer] for room in own for row in found[room])
        yield Line({
            "llama.cpp": thread.removeprefix("llama.cpp ") or "others",
            "rooms in `workbench/`, and the toggles that they read": "; ".join(texts),
            "answers stay": ", or ".join(answers),
        })  # fmt: skip


def keys(_: Recorded) -> Iterator[Line]:
    """The metadata keys of model files, a line each, those with one use together."""
    for key in sorted(KEYS, key=lambda key: [*Use].index(key.use)):
        own = "; llama.cpp does not read it" if key.only_here else ""
        yield Line(
            {"key": f"`{key.name}`", "here": str(key.use), "what it says, or why": key.why + own}
        )


def presets(_: Recorded) -> Iterator[Line]:
    """A fixed preset: its toggles that are not as in the baseline."""
    for name, values in fixed_presets().items():
        toggles = ", ".join(f"`{k}={v}`" for k, v in values.items()) or "every one off"
        yield Line({"preset": f"`{name}`", "what it is": values.about, "toggles": toggles})


def best(_: Recorded) -> Iterator[Line]:
    """A line for each toggle of `best` on a kind of device, for one sequence or several: its value,
    how the value won, and in which runs. Of values that won together, also the value for a device
    that cannot have them all."""
    every = {(kind, n): rows for kind, of in best_rows().items() for n, rows in of.items()}
    together = any("alone" in row for rows in every.values() for row in rows.values())
    for (kind, wanted), rows in every.items():
        for name, row in rows.items():
            cells = {"device": kind, "sequences": wanted, "toggle": f"`{name}={row['value']}`",
                     "won by": row["by"]}  # fmt: skip
            if together:
                alone = row.get("alone") or {"value": Toggles().value_of(name)}
                cells["alone"] = f"`{name}={alone['value']}`" if "alone" in row else ""
            yield Line(cells | {"runs": ", ".join(f"`{run}`" for run in row["runs"])})


BLOCKS: dict[str, list[Part]] = {
    "presets": [Table("Presets", presets)],
    "best": [Table("Best", best)],
    "rooms": [Table("Rooms", rooms)],
    "keys": [Table("Keys", keys)],
    "timelines": [picture],
    "sources": [sources.commits],
}
for _name in TABLES:
    BLOCKS |= import_module(f"data.measure.{_name}").BLOCKS


def made(name: str, recorded: Recorded) -> str:
    """The content of a block. Raises WorkbenchError for a name that is not in BLOCKS."""
    if name not in BLOCKS:
        raise WorkbenchError(f"block {name!r} is not one of {', '.join(BLOCKS)}")
    return block(BLOCKS[name], recorded)


def fill(text: str, folder: Path = RESULTS) -> str:
    """`text` with every block made anew. Raises WorkbenchError for a block that is not in
    BLOCKS."""
    recorded = Recorded(folder)

    def filled(match: re.Match[str]) -> str:
        return f"{match.group(1)}{made(match.group(2), recorded)}\n{match.group(3)}"

    return BLOCK.sub(filled, text)


if __name__ == "__main__":
    for page in PAGES:
        write_text(page, fill(page.read_text(encoding="utf-8")))
