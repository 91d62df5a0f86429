"""Concurrent streams (#16991) in the thread's columns, beside llama.cpp's own in the same run.

`python -m tests.peer.cuda --campaign streams` records a run folder for each model,
`data/results/peer-streams/MODEL/`: llama.cpp with and without GGML_CUDA_GRAPH_OPT, and this engine
with one stream and with several. Our arms are without plans and with one plan of each step, without
fusion and with fusion inside branches. Both arms of a pair have the same fused nodes. One more line
compares fusion across branches with streams. After all turns the overlap of kernels is measured
(`workbench/benchmarks/times/overlap.py`), with plans that are not launched ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any, NamedTuple

from data.measure.matrix import DIRECT, ONE_COPY
from data.measure.peer import LLAMA, OURS, PeerRun, recorded_peers, where
from data.measure.recorded import NOT_MEASURED, Recorded, spread
from data.measure.tables import Line, Part, Table
from workbench.benchmarks.compare.stats import Ratio

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
    """One stream against several.

    name: in a table.
    setting: the toggles of both arms.
    several: what the second arm has besides.
    """

    name: str
    setting: str
    several: str = THREE

    @property
    def arms(self) -> tuple[str, str]:
        """Names of the arms in a run."""
        return f"{OURS} {self.setting} {ONE}", f"{OURS} {self.setting} {self.several}"


# The first arm is also the A/A control. Without plans the control would show the host's noise.
PAIRS = (
    Pair("plans, no fusion", f"best {PLAN} {UNFUSED}"),
    Pair("plans, no fusion, any fork", f"best {PLAN} {UNFUSED}", ANY),
    # llama.cpp launches no kernel before the one before it has ended
    Pair("plans, no fusion, pdl=off", f"best {PLAN} {UNFUSED} pdl=off"),
    Pair("no plans, no fusion", f"best {NO_PLANS} {UNFUSED}"),
    Pair("no plans, fusion inside branches", f"best {NO_PLANS} {INSIDE}"),
    Pair("plans, fusion inside branches", f"best {PLAN} {INSIDE}"),
)
# the two values that a preset can take; they fuse different nodes
EITHER = Pair("plans, fusion across branches or streams", f"best {PLAN}", f"{INSIDE} {THREE}")
# settings of our arms in a run, each once
SETTINGS = (
    *dict.fromkeys(arm.removeprefix(f"{OURS} ") for pair in (*PAIRS, EITHER) for arm in pair.arms),
)
# settings whose overlap of kernels is measured, by name; a launch ahead notes no times
NOT_AHEAD = "launch_ahead=off plan_end=event"
OVERLAPS = {
    f"plans, no fusion, {several}": f"best {PLAN} {NOT_AHEAD} {UNFUSED} {several}"
    for several in (ONE, THREE, ANY)
}
FASTER, SAME = "faster", "no difference"


def verdict_of(test: str, found: str, ours: Ratio, theirs: Ratio) -> str:
    """A row's verdict on the thread's claim: tokens get faster, and prompts stay as they were. A
    gain is reproduced where it is at least llama.cpp's gain in the same run, within both intervals.
    """
    if found != (SAME if test == CONTROL else FASTER):
        return f"not reproduced: {found}"
    return "reproduced" if test == CONTROL or ours.high >= theirs.low else "direction only"


def lines(recorded: Recorded) -> Iterator[Line]:
    """A line for each model, pair and test: t/s with one stream and with several, speedup,
    verdicts."""
    switch = LLAMA, f"{LLAMA} graph_opt=1"
    for peer in recorded_peers(recorded, MODELS, FOLDER):
        for test in reversed(peer.run["tests"]):
            theirs = peer.ratio(test, *switch)
            yield _line(peer, "llama.cpp, GGML_CUDA_GRAPH_OPT", test, switch, None)
            for pair in PAIRS:
                yield _line(peer, pair.name, test, pair.arms, theirs)
            yield _line(peer, EITHER.name, test, EITHER.arms, None)


def _line(peer: PeerRun, name: str, test: str, arms: tuple[str, str], theirs: Ratio | None) -> Line:
    found = peer.between(test, *arms)
    values = {
        "model": peer.model, "setting": name, "test": test, "one": found.before,
        "several": found.after, "ratio": spread(found.ratio, 3), "found": found.verdict,
        "claim": verdict_of(test, found.verdict, found.ratio, theirs) if theirs else "",
    }  # fmt: skip
    return Line(values, [peer])


def caption(recorded: Recorded) -> str:
    return where(recorded, MODELS, FOLDER)


def either(recorded: Recorded) -> str:
    """The models on which streams win over fusion across branches, for the choice of a preset."""
    found: dict[str, list[str]] = {}
    for peer in recorded_peers(recorded, MODELS, FOLDER):
        beside = peer.between(DECODED, *EITHER.arms)
        found.setdefault(beside.verdict, []).append(f"{peer.model} ({beside.ratio.value:.3f})")
    said = "; ".join(f"{name} on {', '.join(models)}" for name, models in found.items())
    return (
        f"Streams beside fusion across branches, {DECODED}: {said}. `streams=1` is what preset "
        "`best` has: a preset is for a kind of device, and not for a model."
    )


def overlaps(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and setting: the part of a token with two or more kernels in flight."""
    for peer in recorded_peers(recorded, MODELS, FOLDER):
        every = peer.run["result"].get("overlap", {})
        for name, setting in OVERLAPS.items():
            cells = _overlap(every.get(setting, {"failed": ""}))
            yield Line({"Model": peer.model, "Setting": name} | cells, [peer])


def _overlap(found: dict[str, Any]) -> dict[str, str]:
    """The cells of a record of `Overlap`."""
    if "failed" in found:
        why = f": {found['failed']}" if found["failed"] else ""
        return {"Overlap": f"{NOT_MEASURED}{why}"}
    branches, traced = found["branches"], found["traced"]
    us, n_all = list(compress(branches["us"], branches["resolved"])), len(branches["us"])
    return {
        "Overlap": f"{found['overlap']:.1%}",
        "us with two or more": f"{found['beside_us']:.1f} of {found['total_us']:.1f}",
        "us a branch": f"{min(us):.1f}..{max(us):.1f}" if us else "",
        "Branches unresolved": f"{n_all - len(us)} of {n_all}" if n_all else "",
        "Kernels under ten ticks": f"{found['n_short']:.0f} of {found['n_kernels']:.0f}",
        "silent": f"{found['n_silent']:.0f}",
        "us a token": f"{found['plain_us']:.1f}",
        "with noting": f"{found['us']:.1f}",
        "Overlap traced": f"{traced['overlap']:.1%} ({traced['collector']})" if traced else "",
        "times as long": f"{traced['slowdown']:.2f}" if traced else "",
    }


def ticks(recorded: Recorded) -> str:
    """The resolution of the notes' clock, and the caption."""
    found = {
        one["tick_ns"]
        for peer in recorded_peers(recorded, MODELS, FOLDER)
        for one in peer.run["result"].get("overlap", {}).values()
        if "tick_ns" in one
    }
    tick = f"`%globaltimer` goes on by {' or '.join(map(str, sorted(found)))} ns. " if found else ""
    return tick + caption(recorded)


CELLS = {
    "Model": "{model}", "Setting": "{setting}", "Test": "{test}", "t/s one stream": "{one:.2f}",
    "t/s streams": "{several:.2f}", "Speedup": "{ratio}",
    "Verdict": "{found}", "The thread's claim": "{claim}",
}  # fmt: skip
BLOCKS: dict[str, list[Part]] = {
    "streams": [
        Table("Concurrent streams on a GPU", lines, CELLS, said=caption),
        either,
        "How much of a token has two kernels or more in flight, untraced: every kernel notes its "
        "own begin and end (`%globaltimer`). *us a token* is from the first kernel to the end of "
        "the last, by kernels that note nothing; a trace stands beside it with what it costs. What "
        "is shorter than ten ticks of the clock has no length that could be told. Products by "
        "cuBLAS note nothing and are silent:",
        Table("Overlap of kernels on a GPU", overlaps, said=ticks),
    ],
}
