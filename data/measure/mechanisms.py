"""README's first table: what each mechanism is worth, by the comparisons that are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from data.measure import matrix, skipping, streams
from data.measure.peer import recorded_peer
from data.measure.recorded import NOT_MEASURED, PHASES, Arms, Between, Recorded, model_of, spread
from data.measure.tables import Line, OfARun, Part, Table
from workbench.benchmarks.compare.arms import SETS
from workbench.benchmarks.compare.stats import FASTER, SLOWER, verdict
from workbench.benchmarks.times.gaps import Gaps
from workbench.config import CopyStream, SyncMode

BEFORE, AFTER = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value
GAP = "host gap"
COMMAND = "python -m"  # the heading of the column with the command that prints a row


class Mechanism(NamedTuple):
    """A mechanism, the folder that compares it, the value it is switched to, and of the tests the
    one shown; GAP takes the host gap of a run of gaps. kind: of the row of the matrix. later: one
    without a run has no row yet."""

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


class SideBySide(NamedTuple):
    """A row of branches side by side: its name, the model of the campaign, the pair of arms, and
    what the second differs in."""

    name: str
    model: str
    pair: streams.Pair
    off: str
    on: str


_PLANNED, _ANYWHERE, *_ = streams.PAIRS
SIDE_BY_SIDE = (
    SideBySide("Q, K and V side by side (#16991)", "llama-3-8b-q4_0", _PLANNED, streams.ONE, "3"),
    SideBySide(
        "all branches side by side", "llama-3-8b-q4_0", _ANYWHERE, streams.ONE, "4 fork=any"
    ),
    SideBySide(
        "streams, or fusion across branches", "llama-3-8b-q4_0", streams.EITHER,
        "branch_fusion=joined", "inside streams=3",
    ),
)  # fmt: skip


class OfAttention(NamedTuple):
    """A row of what attention reads: its name, a folder of `data.measure.skipping`, prompts or
    generated tokens, and the arms compared. Of prompts it names the ubatch size. beside: what else
    the arms have."""

    name: str
    folder: str
    phase: str
    off: str
    on: str
    beside: str = "what a server has"


_ALONE, _TAIL, _OWN = "skip_masked_kv=off", "skip_masked_kv=tail", "kv_cache=per_sequence"
ATTENTION_MODEL = "llama-3.2-1b-q4_k_m"
ATTENTION = (
    OfAttention("masked cells left unread (#14924)", "ub2048", "prompts", _ALONE, _TAIL),
    OfAttention("", "ub8192", "prompts", _ALONE, _TAIL),
    OfAttention("cells of its own for each sequence", "together-512", "generated",
                f"kv_cache=unified {_ALONE}", f"{_OWN} {_ALONE}", "what a server has, no skipping"),
    OfAttention("blocks share a sequence's cells", "depth", "generated", "kv_parts=off",
                "kv_parts=parallel_blocks"),
)  # fmt: skip


def mechanisms(recorded: Recorded) -> Iterator[Line]:
    """A mechanism: the toggle values compared, and what the recorded comparison says; one whose run
    is missing says so."""
    for name, folder, on, test, kind, later in MECHANISMS:
        row = matrix.the(folder, kind)
        off = row.compared.split("," if SETS not in row.compared else SETS)[0].strip()
        off = off or f"sync={BEFORE}"
        toggle = off.partition("=")[0]
        cells = {"mechanism": name, "off": off, "on": on.removeprefix(f"{toggle}=")}
        run = recorded.run(folder)
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


def side_by_side(recorded: Recorded) -> Iterator[Line]:
    """A row for each of SIDE_BY_SIDE that has a run."""
    for one in SIDE_BY_SIDE:
        found = recorded_peer(recorded, one.model, streams.FOLDER)
        if found is None:
            continue
        beside = ", no fusion" if streams.UNFUSED in one.pair.setting else ""
        cells = {
            "mechanism": one.name, "off": one.off, "on": one.on,
            "workload": f"{found.model}, {streams.DECODED}", "with": f"all else on{beside}",
        }  # fmt: skip
        between = found.between(streams.DECODED, *one.pair.arms)
        yield _line(cells, found, between, f"tests.peer.cuda --campaign streams {one.model}")


def attention(recorded: Recorded) -> Iterator[Line]:
    """A row for each of ATTENTION that has a run."""
    every = skipping.runs(recorded, ATTENTION_MODEL)
    for one in ATTENTION:
        run = every.get(one.folder)
        if run is None:
            continue
        test, n_ubatch = run.run["tests"][-1], run.run["result"]["n_ubatch"]
        what = f"{n_ubatch} at once" if one.phase == PHASES[0] else one.phase
        cells = {
            "mechanism": one.name, "off": one.off.split()[0],
            "on": one.on.split()[0].partition("=")[2],
            "workload": f"{run.model}, {test}, {what}", "with": one.beside,
        }  # fmt: skip
        command = f"data.measure.skipping {ATTENTION_MODEL} --only {one.folder.split('-')[0]}"
        yield _line(cells, run, run.between(test, one.off, one.on, one.phase), command)


def _line(cells: dict[str, str], of: OfARun, found: Between, command: str) -> Line:
    """The cells that name a row, then tokens a second under both values, and what prints them."""
    numbers = {
        "at off": f"{found.before:.1f} t/s", "at on": f"{found.after:.1f} t/s",
        "speedup": spread(found.ratio), "verdict": found.verdict, COMMAND: f"`{command}`",
    }  # fmt: skip
    return Line(cells | numbers, [of])


def _gap(cells: dict[str, str], found: Gaps, command: str) -> Line:
    """The same of the gap under both values; copies ride their own stream."""
    own, us = CopyStream.OWN.value, found.table().set_index("arm")["gap_us"]
    arms = {
        arm["sync_mode"]: arm["name"]
        for arm in found.run["arms"]
        if arm["toggles"]["copy_stream"] == own and not arm["is_control"]
    }
    ratio, band = found.ratio(BEFORE, AFTER, own)
    judged = verdict(ratio, band)
    judged = {FASTER: "shorter", SLOWER: "longer"}.get(judged, judged)
    numbers = {
        "at off": f"{us[arms[BEFORE]]:.0f} us", "at on": f"{us[arms[AFTER]]:.0f} us",
        "speedup": spread(ratio), "verdict": judged,
        COMMAND: f"`{command}`",
    }  # fmt: skip
    return Line(cells | numbers, [found])


def rows(recorded: Recorded) -> Iterator[Line]:
    yield from mechanisms(recorded)
    yield from side_by_side(recorded)
    yield from attention(recorded)


BLOCKS: dict[str, list[Part]] = {
    "mechanisms": [Table("Mechanisms", rows, None, "", by_device=True)],
}
