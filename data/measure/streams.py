"""Concurrent streams (#16991) in the thread's columns, beside llama.cpp's own in the same run.

`python -m tests.peer.cuda --campaign streams` records a run folder for each model,
`data/results/peer-streams/MODEL/`: llama.cpp with and without GGML_CUDA_GRAPH_OPT, and this engine
with one stream and with several. It is there without plans and with one plan of each step, without
fusion and with fusion that stays inside branches. Both arms of a pair have the same fused nodes.
Another line has fusion across branches against streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from data.measure.matrix import DIRECT, ONE_COPY
from data.measure.peer import LLAMA, OURS, PeerRun, recorded_peer, where
from data.measure.recorded import Recorded
from data.measure.tables import Line, Part, Table
from workbench.bench.stats import Ratio, verdict

FOLDER = "peer-streams"
MODELS = (
    "llama-3-8b-q8_0", "llama-3-8b-q4_0", "qwen3-8b-f16", "qwen3-4b-q4_k_m", "llama-3.2-1b-bf16",
)  # fmt: skip
SWITCHED = ("default", "graph_opt=1")  # of llama.cpp
CONTROL, DECODED = "pp512", "tg128"
ONE, THREE, ANY = "streams=1", "streams=3", "streams=4 fork=any"
UNFUSED, INSIDE = "fuse=off defer_norm=off", "branch_fusion=inside"
NO_PLANS = "plans=off launch_ahead=off plan_end=event"
PLAN = f"plans=ours plan_scope=step {DIRECT} {ONE_COPY}"


class Pair(NamedTuple):
    """One stream against several. name: what a table calls it. setting: what both arms have.
    several: what the second has besides."""

    name: str
    setting: str
    several: str = THREE

    @property
    def arms(self) -> tuple[str, str]:
        """Names of the arms in a run."""
        return f"{OURS} {self.setting} {ONE}", f"{OURS} {self.setting} {self.several}"


PAIRS = (
    Pair("no plans, no fusion", f"best {NO_PLANS} {UNFUSED}"),
    Pair("plans, no fusion", f"best {PLAN} {UNFUSED}"),
    Pair("plans, no fusion, any fork", f"best {PLAN} {UNFUSED}", ANY),
    # llama.cpp launches nothing before what is in front of it has ended
    Pair("plans, no fusion, pdl=off", f"best {PLAN} {UNFUSED} pdl=off"),
    Pair("no plans, fusion inside branches", f"best {NO_PLANS} {INSIDE}"),
    Pair("plans, fusion inside branches", f"best {PLAN} {INSIDE}"),
)
# which of the two a preset takes; what is fused differs here
EITHER = Pair("plans, fusion across branches or streams", f"best {PLAN}", f"{INSIDE} {THREE}")
# what a run has of ours, each once
SETTINGS = (
    *dict.fromkeys(arm.removeprefix(f"{OURS} ") for pair in (*PAIRS, EITHER) for arm in pair.arms),
)
THEIRS = Pair("llama.cpp, GGML_CUDA_GRAPH_OPT", "")
FASTER, SAME = "faster", "no difference"


def verdict_of(test: str, found: str, ours: Ratio, theirs: Ratio) -> str:
    """What a row says of the thread's claim: tokens are faster, prompts as they were. Reproduced is
    what gains at least what llama.cpp gains in the same run, within both intervals."""
    if test == CONTROL:
        return "reproduced" if found == SAME else f"not reproduced: {found}"
    if found != FASTER:
        return f"not reproduced: {found}"
    return "reproduced" if ours.high >= theirs.low else "direction only"


def lines(recorded: Recorded) -> Iterator[Line]:
    """A model, a pair and a test: t/s with one stream and with several, speedup, verdicts."""
    for model in MODELS:
        peer = recorded_peer(recorded, model, FOLDER)
        for test in reversed(peer.run["tests"]) if peer else ():
            assert peer is not None
            theirs = peer.ratio(test, LLAMA, f"{LLAMA} graph_opt=1")
            yield _line(peer, THEIRS.name, test, LLAMA, f"{LLAMA} graph_opt=1", None)
            for pair in PAIRS:
                yield _line(peer, pair.name, test, *pair.arms, theirs)
            yield _line(peer, EITHER.name, test, *EITHER.arms, None)


def _line(
    peer: PeerRun, name: str, test: str, one: str, several: str, theirs: Ratio | None
) -> Line:
    ratio, band = peer.ratio(test, one, several), peer.band(test)
    found = verdict(ratio, band)
    values = {
        "model": peer.model, "setting": name, "test": test,
        "one": peer.interval(test, one)[0], "several": peer.interval(test, several)[0],
        "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "found": found,
        "claim": "" if theirs is None else verdict_of(test, found, ratio, theirs),
    }  # fmt: skip
    return Line(values, [peer])


def caption(recorded: Recorded) -> str:
    return where(recorded, MODELS, FOLDER)


CELLS = {
    "Model": "{model}", "Setting": "{setting}", "Test": "{test}", "t/s one stream": "{one:.2f}",
    "t/s streams": "{several:.2f}", "Speedup": "{ratio:.3f} ({low:.3f}..{high:.3f})",
    "Verdict": "{found}", "The thread's claim": "{claim}",
}  # fmt: skip
BLOCKS: dict[str, list[Part]] = {
    "streams": [Table("Concurrent streams on a GPU", lines, CELLS, said=caption)],
}
