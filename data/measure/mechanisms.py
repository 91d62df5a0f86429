"""What each mechanism is worth: README's first table, and the whole of it on the page of results.

Both tables have the same lines. A line is one comparison, so it has one answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from data.measure import matrix, peer, skipping, streams
from data.measure.recorded import (
    NOT_MEASURED,
    PHASES,
    Arms,
    Between,
    Recorded,
    card_of,
    model_of,
    spread,
)
from data.measure.tables import Line, Part, Table
from workbench.benchmarks.compare.arms import SETS
from workbench.benchmarks.compare.stats import FASTER, SLOWER, verdict
from workbench.benchmarks.times.gaps import Gaps
from workbench.config import CopyStream, SyncMode

BEFORE, AFTER = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value
GAP = "host gap"
ALL_ON, ALL_OFF = "all else on", "all else off"


class Mechanism(NamedTuple):
    """A mechanism that a row of the matrix compares.

    folder, kind: of the row.
    on: the value that the mechanism is switched to, or the toggles.
    test: the test that is shown; GAP for the host gap of a run of gaps.
    later: without a run there is no line in the table.
    """

    name: str
    folder: str
    on: str
    test: str
    kind: str = "ab"
    later: bool = False


MECHANISMS = tuple(Mechanism(*row) for row in (
    ("fewer waits, gap (#17795)", "gaps-on-llama-3.2-1b-f16", AFTER, GAP, "gaps"),
    ("fewer waits, tokens (#17795)", "sync-own-on-llama-3.2-1b-f16", AFTER, "tg512"),
    ("graph reuse in Python (#8366)", "reuse-ways-llama-3.2-1b-bf16", "set_rows", "tg32"),
    ("a plan for each split (#16548)", "plans-llama-3.2-1b-bf16", "plans=ours plan_scope=split",
     "tg128", "plans", True),
    ("a plan a step, launched ahead", "plans-llama-3.2-1b-bf16",
     f"{matrix.WHOLE} {matrix.WORD}", "tg128", "plans", True),
    ("fusion", "fusion-fuse-with-all-llama-3-8b-q4_0", "on", "tg32"),
    ("norms in halves", "fusion-defer-norm-with-all-llama-3-8b-q4_0", "on", "tg32"),
    ("dependent launch (PDL)", "fusion-pdl-with-all-llama-3-8b-q4_0", "on", "tg32"),
    ("no wait between ubatches", "pipeline-one-device-llama-3-8b-q4_0", "outputs", "pp8192"),
    ("no wait between ubatches", "pipeline-step-wait-llama-3-8b-q4_0", "outputs", "pp8192"),
    ("four copies of each input", "pipeline-n-copies-llama-3-8b-q4_0", "4", "pp8192"),
))  # fmt: skip
# branches side by side: name, pair of arms, both settings
_PLANNED, _ANYWHERE, *_ = streams.PAIRS
SIDE_BY_SIDE_MODEL = "llama-3-8b-q4_0"
SIDE_BY_SIDE = (
    ("Q, K, V side by side (#16991)", _PLANNED, streams.ONE, streams.THREE),
    ("all branches side by side", _ANYWHERE, streams.ONE, streams.ANY),
    ("three streams, not joined QKV", streams.EITHER, "branch_fusion=joined",
     f"{streams.INSIDE} {streams.THREE}"),
)  # fmt: skip
# what attention reads: name, folder of `data.measure.skipping`, prompts or generated tokens, both
# arms, and toggles that both have
_ALONE, _TAIL, _OWN = "skip_masked_kv=off", "skip_masked_kv=tail", "kv_cache=per_sequence"
ATTENTION_MODEL = "llama-3.2-1b-q4_k_m"
ATTENTION = (
    ("masked cells unread (#14924)", "ub2048", "prompts", _ALONE, _TAIL, ""),
    ("masked cells unread (#14924)", "ub8192", "prompts", _ALONE, _TAIL, ""),
    ("own cells for each sequence", "together-512", "generated", f"kv_cache=unified {_ALONE}",
     f"{_OWN} {_ALONE}", _ALONE),
    ("attention in parallel blocks", "depth", "generated", "kv_parts=off",
     "kv_parts=parallel_blocks", ""),
)  # fmt: skip

IN_SHORT = {name: f"{{{name}}}" for name in ("mechanism", "speedup", "verdict", "where")}
IN_FULL = {
    "mechanism": "{mechanism}", "off": "`{off}`", "on": "`{on}`", "beside": "{beside}",
    "model and test": "{model}, {test}", "at off": "{before}", "at on": "{after}",
    "speedup": "{speedup}", "verdict": "{verdict}", "card": "{card}",
    "python -m": "`{command}`",
}  # fmt: skip
NAMES = (
    "1b is llama-3.2-1b and 8b is llama-3-8b, both with random weights. `-ub` is the number of "
    "tokens computed at once, `-npl` the number of sequences. The host gap is the device's idle "
    "time between two tokens. [The whole table](data/results/README.md#mechanisms) has both values "
    "of each switch, the switches beside it, and the command that measures it."
)
BESIDE = (
    "`all else on`: programs are kept, launches are fused and begin early, and norms are in "
    "halves, unless the row says otherwise. `serving`: the toggles of `workbench serve`. The run "
    "folder names every toggle."
)


class Compared(NamedTuple):
    """What a mechanism's recorded comparison is of.

    where: model and test as README's first table has them.
    off, on: the toggles of both sides, as far as they differ.
    beside: the toggles of both sides, in words.
    """

    mechanism: str
    where: str
    off: str
    on: str
    beside: str
    model: str
    test: str
    command: str


def mechanisms(recorded: Recorded) -> Iterator[Line]:
    """A line for each mechanism: the toggles compared, and what the recorded comparison says."""
    yield from _of_the_matrix(recorded)
    for name, pair, off, on in SIDE_BY_SIDE:
        if found := peer.recorded_peer(recorded, SIDE_BY_SIDE_MODEL, streams.FOLDER):
            test, beside = streams.DECODED, ALL_ON
            if streams.UNFUSED in pair.setting:
                beside += f", `{streams.UNFUSED}`"
            command = f"tests.peer.cuda --campaign streams {SIDE_BY_SIDE_MODEL}"
            where = _where(found.model, test)
            compared = Compared(name, where, off, on, beside, found.model, test, command)
            yield _rates(compared, found, found.between(test, *pair.arms))
    skipped = skipping.runs(recorded, ATTENTION_MODEL)
    for name, folder, phase, off, on, both in ATTENTION:
        if run := skipped.get(folder):
            yield _attention(run, name, folder, phase, off, on, both)


def _of_the_matrix(recorded: Recorded) -> Iterator[Line]:
    """A line for each of MECHANISMS. A mechanism without a run has a line that says so."""
    for name, folder, on, test, kind, later in MECHANISMS:
        row, run = matrix.the(folder, kind), recorded.run(folder)
        off = row.compared.split("," if SETS not in row.compared else SETS)[0].strip()
        off = off or f"sync={BEFORE}"
        named = on if "=" in on else f"{off.partition('=')[0]}={on}"
        beside = ALL_OFF if row.toggles == "baseline" else ALL_ON
        if run is None or (test != GAP and test not in run.run["tests"]):
            if not later:
                yield Line(dict.fromkeys(UNKNOWN) | {"mechanism": name, "verdict": NOT_MEASURED})
            continue
        gpus = f"{row.n_devices} {card_of(run.run).split()[1]}" if row.n_devices > 1 else ""
        compared = Compared(
            name, _where(model_of(run.run), test, gpus), off, named, beside, model_of(run.run),
            test, f"data.measure {row.step} --like {row.folder}",
        )  # fmt: skip
        if test == GAP:
            yield _gap(compared, Gaps(run.run, run.samples))
        else:
            found = Arms(run)
            yield _rates(compared, found, found.between(test, found.names[0], on))


def _attention(run: Any, name: str, folder: str, phase: str, off: str, on: str, both: str) -> Line:
    """The line of a run of `data.measure.skipping`."""
    test, n_ubatch = run.run["tests"][-1], run.run["result"]["n_ubatch"]
    whole = f"{test} -ub {n_ubatch}" if phase == PHASES[0] else test
    short = re.sub(r"^pp\d+\+(tg\d+)@b(\d+)$", r"\1 -npl \2", whole)  # what is generated
    beside = "`serving`" + (f", `{both}`" if both else "")
    compared = Compared(
        name, _where(run.model, short), off.split()[0], on.split()[0], beside,
        run.model, whole,
        f"data.measure.skipping {ATTENTION_MODEL} --only {folder.split('-')[0]}",
    )  # fmt: skip
    return _rates(compared, run, run.between(test, off, on, phase))


def _where(model: str, *more: str) -> str:
    """`1b Q4_K, pp8192 -ub 2048`"""
    short = re.sub(r"^llama-3(?:\.2)?-", "", model)
    return ", ".join(filter(None, (short, *more)))


def _rates(compared: Compared, of: Any, found: Between) -> Line:
    """The line with tokens a second under both values."""
    return _line(compared, of, {
        "before": f"{found.before:.1f} t/s", "after": f"{found.after:.1f} t/s",
        "speedup": _spread(found), "verdict": found.verdict,
    })  # fmt: skip


def _spread(found: Between) -> str:
    """The speedup with its interval; with a digit more where two would say of a gain that its
    interval begins or ends at 1."""
    near = "1.00" in (f"{found.ratio.low:.2f}", f"{found.ratio.high:.2f}")
    return spread(found.ratio, 3 if near and found.verdict in (FASTER, SLOWER) else 2)


def _gap(compared: Compared, found: Gaps) -> Line:
    """The line with a host gap under both values, with copies on their own stream."""
    own, us = CopyStream.OWN.value, found.table().set_index("arm")["gap_us"]
    arms = {
        arm["sync_mode"]: arm["name"]
        for arm in found.run["arms"]
        if arm["toggles"]["copy_stream"] == own and not arm["is_control"]
    }
    ratio, band = found.ratio(BEFORE, AFTER, own)
    judged = verdict(ratio, band)
    return _line(compared, found, {
        "before": f"{us[arms[BEFORE]]:.0f} us", "after": f"{us[arms[AFTER]]:.0f} us",
        "speedup": spread(ratio),
        "verdict": {FASTER: "shorter", SLOWER: "longer"}.get(judged, judged),
    })  # fmt: skip


def _line(compared: Compared, of: Any, numbers: dict[str, str]) -> Line:
    engine = of.run["engine"]
    card = card_of(of.run)
    if (n := engine.get("config", {}).get("n_devices", 1)) > 1:
        card = f"{n} x {card}"
    return Line(compared._asdict() | numbers | {"card": card}, [of])


UNKNOWN = (*Compared._fields, "before", "after", "speedup", "verdict", "card")
BLOCKS: dict[str, list[Part]] = {
    "mechanisms": [Table("Mechanisms", mechanisms, IN_SHORT, "", by_device=True), NAMES],
    "mechanisms-in-full": [Table("Mechanisms", mechanisms, IN_FULL, "", by_device=True), BESIDE],
}
