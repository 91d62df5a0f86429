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
from typing import Any, NamedTuple

from data.measure import matrix, peer, skipping, sources, streams
from data.measure.recorded import (
    NOT_MEASURED,
    PHASES,
    Arms,
    Between,
    Recorded,
    model_of,
    spread,
    told,
)
from data.measure.tables import Line, Part, Table, block
from workbench.benchmarks.compare.arms import SETS
from workbench.benchmarks.compare.stats import FASTER, SLOWER, verdict
from workbench.benchmarks.times.gaps import Gaps
from workbench.common.errors import WorkbenchError
from workbench.common.output import write_text
from workbench.config import EXACT, FAMILIES, ROUNDING, CopyStream, SyncMode, Toggles
from workbench.config.presets import best_rows, fixed_presets
from workbench.config.table import ROWS, Row
from workbench.model.gguf.metadata import KEYS, Use

RESULTS = Path("data/results")
PAGES = (  # the first screen; everything; model files
    Path("README.md"), RESULTS / "README.md", Path("workbench/model/README.md"),
)  # fmt: skip
TABLES = (
    "arena_peaks", "attention", "batched", "blocks", "energy_table", "first_requests",
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
    what = f"{arms}, traced, so it shows where time goes and not how much: {model_of(found)}"
    return told(found, what, found["engine"]["device_description"])


THREADS = ("#17795", "#8366", "#16548", "#16991", "#14924")


def rooms(_: Recorded) -> Iterator[Line]:
    """A line for each thread of llama.cpp: its rooms, with the toggles that only they read, from
    the table of toggles. The last line has all other rooms."""
    found: dict[str, list[Row]] = {}
    for row in ROWS.values():
        found.setdefault(row.room, []).append(row)
    of: dict[str, list[str]] = {thread: [] for thread in (*THREADS, "others")}
    for room, rows in found.items():
        threads = (row.thread.removeprefix("llama.cpp ") for row in rows)
        of[next((t for t in threads if t in THREADS), "others")].append(room)

    def family(name: str) -> str:
        return next((f"{f}_..." for f in FAMILIES if name.startswith(f"{f}_")), name)

    for thread, own in of.items():
        texts = [
            f"`{room}`: " + ", ".join(dict.fromkeys(f"`{family(row.name)}`" for row in found[room]))
            for room in own
        ]
        answers = dict.fromkeys(ANSWERS[row.answer] for room in own for row in found[room])
        yield Line({
            "llama.cpp": thread, "rooms in `workbench/`, and the toggles that they read":
            "; ".join(texts), "answers stay": ", or ".join(answers),
        })  # fmt: skip


def keys(_: Recorded) -> Iterator[Line]:
    """The metadata keys of model files, a line each, those with one use together."""
    for key in sorted(KEYS, key=lambda key: [*Use].index(key.use)):
        own = "; llama.cpp does not read it" if key.only_here else ""
        yield Line(
            {"key": f"`{key.name}`", "here": str(key.use), "what it says, or why": key.why + own}
        )


BEFORE, AFTER = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value
GAP = "host gap"
COMMAND = "python -m"  # the heading of the column with the command that prints a row


class Mechanism(NamedTuple):
    """A mechanism that a row of the matrix compares.

    folder, kind: of the row.
    on: the value that the mechanism is switched to.
    test: the test that is shown; GAP for the host gap of a run of gaps.
    later: without a run there is no row in the table.
    """

    name: str
    folder: str
    on: str
    test: str
    kind: str = "ab"
    later: bool = False


MECHANISMS = tuple(Mechanism(*row) for row in (
    ("fewer synchronizations (#17795)", "gaps-on-llama-3.2-1b-f16", AFTER, GAP, "gaps"),
    ("", "sync-own-on-llama-3.2-1b-f16", AFTER, "tg512"),
    ("graph reuse (#8366), in Python", "reuse-ways-llama-3.2-1b-bf16", "set_rows", "tg32"),
    ("a plan for each split (#16548)", "plans-llama-3.2-1b-bf16", "plans=ours plan_scope=split",
     "tg128", "plans", True),
    ("a step is one plan, launched ahead", "plans-llama-3.2-1b-bf16",
     f"{matrix.WHOLE} {matrix.WORD}", "tg128", "plans", True),
    ("fusion", "fusion-fuse-with-all-llama-3-8b-q4_0", "on", "tg32"),
    ("norms in halves", "fusion-defer-norm-with-all-llama-3-8b-q4_0", "on", "tg32"),
    ("dependent launch", "fusion-pdl-with-all-llama-3-8b-q4_0", "on", "tg32"),
    ("no wait between ubatches", "pipeline-one-device-llama-3-8b-q4_0", "outputs", "pp8192"),
    ("the same, layers over two GPUs", "pipeline-step-wait-llama-3-8b-q4_0", "outputs", "pp8192"),
    ("four input buffers, two GPUs", "pipeline-n-copies-llama-3-8b-q4_0", "4", "pp8192"),
))  # fmt: skip
# branches side by side: name, model of the campaign, pair of arms, both values
_PLANNED, _ANYWHERE, *_ = streams.PAIRS
SIDE_BY_SIDE = (
    ("Q, K and V side by side (#16991)", "llama-3-8b-q4_0", _PLANNED, streams.ONE, "3"),
    ("all branches side by side", "llama-3-8b-q4_0", _ANYWHERE, streams.ONE, "4 fork=any"),
    ("streams, or fusion across branches", "llama-3-8b-q4_0", streams.EITHER,
     "branch_fusion=joined", "inside streams=3"),
)  # fmt: skip
# what attention reads: name, folder of `data.measure.skipping`, prompts or generated tokens, both
# arms, and what else they have
_ALONE, _TAIL, _OWN = "skip_masked_kv=off", "skip_masked_kv=tail", "kv_cache=per_sequence"
_SERVED = "what a server has"
ATTENTION_MODEL = "llama-3.2-1b-q4_k_m"
ATTENTION = (
    ("masked cells left unread (#14924)", "ub2048", "prompts", _ALONE, _TAIL, _SERVED),
    ("", "ub8192", "prompts", _ALONE, _TAIL, _SERVED),
    ("cells of its own for each sequence", "together-512", "generated",
     f"kv_cache=unified {_ALONE}", f"{_OWN} {_ALONE}", f"{_SERVED}, no skipping"),
    ("blocks share a sequence's cells", "depth", "generated", "kv_parts=off",
     "kv_parts=parallel_blocks", _SERVED),
)  # fmt: skip


def mechanisms(recorded: Recorded) -> Iterator[Line]:
    """A line for each mechanism: the toggle values compared, and what the recorded comparison
    says."""
    yield from _of_the_matrix(recorded)
    for name, model, pair, off, on in SIDE_BY_SIDE:
        if found := peer.recorded_peer(recorded, model, streams.FOLDER):
            beside = ", no fusion" if streams.UNFUSED in pair.setting else ""
            cells = {
                "mechanism": name, "off": off, "on": on,
                "workload": f"{found.model}, {streams.DECODED}", "with": f"all else on{beside}",
            }  # fmt: skip
            between = found.between(streams.DECODED, *pair.arms)
            yield _line(cells, found, between, f"tests.peer.cuda --campaign streams {model}")
    skipped = skipping.runs(recorded, ATTENTION_MODEL)
    for name, folder, phase, off, on, beside in ATTENTION:
        if run := skipped.get(folder):
            test, n_ubatch = run.run["tests"][-1], run.run["result"]["n_ubatch"]
            what = f"{n_ubatch} at once" if phase == PHASES[0] else phase
            cells = {
                "mechanism": name, "off": off.split()[0], "on": on.split()[0].partition("=")[2],
                "workload": f"{run.model}, {test}, {what}", "with": beside,
            }  # fmt: skip
            command = f"data.measure.skipping {ATTENTION_MODEL} --only {folder.split('-')[0]}"
            yield _line(cells, run, run.between(test, off, on, phase), command)


def _of_the_matrix(recorded: Recorded) -> Iterator[Line]:
    """A line for each of MECHANISMS. A mechanism without a run has a line that says so."""
    for name, folder, on, test, kind, later in MECHANISMS:
        row, run = matrix.the(folder, kind), recorded.run(folder)
        off = row.compared.split("," if SETS not in row.compared else SETS)[0].strip()
        off = off or f"sync={BEFORE}"
        cells = {"mechanism": name, "off": off, "on": on.removeprefix(f"{off.partition('=')[0]}=")}
        if run is None or (test != GAP and test not in run.run["tests"]):
            if not later:
                yield Line(cells | {"verdict": NOT_MEASURED})
            continue
        beside = "all else off" if row.toggles == "baseline" else "all else on"
        cells |= {"workload": f"{model_of(run.run)}, {test}", "with": beside}
        command = f"data.measure {row.step} --like {row.folder}"
        if test == GAP:
            yield _gap(cells, Gaps(run.run, run.samples), command)
        else:
            found = Arms(run)
            yield _line(cells, found, found.between(test, found.names[0], on), command)


def _line(cells: dict[str, str], of: Any, found: Between, command: str) -> Line:
    """The cells that name a row, then tokens a second under both values, and what prints them."""
    numbers = {
        "at off": f"{found.before:.1f} t/s", "at on": f"{found.after:.1f} t/s",
        "speedup": spread(found.ratio), "verdict": found.verdict, COMMAND: f"`{command}`",
    }  # fmt: skip
    return Line(cells | numbers, [of])


def _gap(cells: dict[str, str], found: Gaps, command: str) -> Line:
    """The same for a host gap under both values, with copies on their own stream."""
    own, us = CopyStream.OWN.value, found.table().set_index("arm")["gap_us"]
    arms = {
        arm["sync_mode"]: arm["name"]
        for arm in found.run["arms"]
        if arm["toggles"]["copy_stream"] == own and not arm["is_control"]
    }
    ratio, band = found.ratio(BEFORE, AFTER, own)
    judged = verdict(ratio, band)
    numbers = {
        "at off": f"{us[arms[BEFORE]]:.0f} us", "at on": f"{us[arms[AFTER]]:.0f} us",
        "speedup": spread(ratio),
        "verdict": {FASTER: "shorter", SLOWER: "longer"}.get(judged, judged),
        COMMAND: f"`{command}`",
    }  # fmt: skip
    return Line(cells | numbers, [found])


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
    "mechanisms": [Table("Mechanisms", mechanisms, None, "", by_device=True)],
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
