"""llama.cpp's CUDA build beside this engine: what the runs of `make peer-cuda` say.

`tests/peer/cuda.py` records a run folder for each model, `data/results/peer-cuda/MODEL/`. A round
runs every arm once. A sample is one repetition as llama-bench counts it, so both sides have the
same rows. The speed of a round is that of all its counted repetitions together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from data.measure.recorded import NOT_MEASURED, Arms, Between, Recorded, spread, title_of
from data.measure.recorded import complete_run as complete
from data.measure.tables import Line, Part, Table, caption
from workbench.benchmarks.compare.stats import Ratio, median_interval

FOLDER = "peer-cuda"
MODELS = (
    "llama-3.2-1b-bf16", "llama-3-8b-f16", "llama-3-8b-q8_0", "llama-3-8b-q4_0",
    "llama-3.2-1b-q4_k_m", "llama-3.2-3b-q4_k_m", "qwen3-4b-q4_k_m",
)  # fmt: skip
TESTS = ("pp512", "tg128")  # llama-bench's order
SHOWN = "tg128"  # on the first screen
LLAMA, OURS = "llama.cpp", "workbench"
# switch of llama.cpp -> the variables that set it; a process reads each variable once
SWITCHES: dict[str, dict[str, str]] = {
    "default": {},
    "graphs=off": {"GGML_CUDA_DISABLE_GRAPHS": "1"},
    "graph_opt=1": {"GGML_CUDA_GRAPH_OPT": "1"},
    "reuse=off": {"LLAMA_GRAPH_REUSE_DISABLE": "1"},
    "graphs=off reuse=off": {"GGML_CUDA_DISABLE_GRAPHS": "1", "LLAMA_GRAPH_REUSE_DISABLE": "1"},
}
REUSE_PAIRS = (("default", "reuse=off"), ("graphs=off", "graphs=off reuse=off"))


def theirs(switch: str) -> str:
    """The name of llama.cpp's arm with a switch."""
    return LLAMA if switch == "default" else f"{LLAMA} {switch}"


class Best(NamedTuple):
    """A test of one model: the fastest arm of each side, and ours beside theirs."""

    arm_theirs: str
    arm_ours: str
    beside: Between


class Saving(NamedTuple):
    """What llama.cpp saves by reusing a graph: its build, and all else that a new graph entails.

    with_: the switch that both arms share.
    kept, built: us a token with reuse, and without.
    us, low, high: us saved of a token, with its 95 % interval.
    speedup: of a token with reuse.
    """

    with_: str
    kept: float
    built: float
    us: float
    low: float
    high: float
    speedup: Ratio


class PeerRun(Arms):
    """A run of kind `peer`, as read. The control is our first arm once more."""

    def best(self, test: str) -> Best:
        """The fastest arm of each side, by its median."""
        medians = self.rates(test).median()
        a, b = (str(medians[self.side(side)].idxmax()) for side in (LLAMA, OURS))
        return Best(a, b, self.between(test, a, b))

    def savings(self, test: str) -> Iterator[Saving]:
        """The saving of each pair of arms that differ in reuse alone, from differences within a
        round."""
        us = 1e6 / self.rates(test)
        for kept, built in REUSE_PAIRS:
            a, b = theirs(kept), theirs(built)
            if a in us and b in us:
                found = median_interval((us[b] - us[a]).to_numpy(), self.run["seed"])
                yield Saving(
                    kept, float(us[a].median()), float(us[b].median()), *found,
                    self.ratio(test, b, a),
                )  # fmt: skip


def recorded_peer(recorded: Recorded, model: str, of: str = FOLDER) -> PeerRun | None:
    """The run of a model in folder `of`; None where there is none, or one that was cut off."""
    found = complete(recorded.folder / of / model)
    return PeerRun(found) if found is not None else None


def recorded_peers(
    recorded: Recorded, models: Sequence[str] = MODELS, of: str = FOLDER
) -> list[PeerRun]:
    """The runs of folder `of`, in the order of `models`."""
    return [found for model in models if (found := recorded_peer(recorded, model, of))]


def bests(recorded: Recorded) -> Iterator[Line]:
    """A column for each model: the fastest arm of each side in SHOWN, and the ratio. The column of
    a model without a run says so."""
    peers = {name: recorded_peer(recorded, name) for name in MODELS}
    shown = {name: peer for name, peer in peers.items() if peer and SHOWN in peer.run["tests"]}
    best = {name: peer.best(SHOWN).beside for name, peer in shown.items()}
    rows: dict[str, Callable[[Between], str]] = {
        f"{LLAMA}, t/s": lambda beside: f"{beside.before:.0f}",
        f"{OURS}, t/s": lambda beside: f"{beside.after:.0f}",
        "ratio": lambda beside: spread(beside.ratio),
    }
    for row, cell in rows.items() if shown else ():
        cells = {SHOWN: row}
        for name in MODELS:
            title = shown[name].model if name in shown else title_of(name)
            cells[title] = cell(best[name]) if name in best else NOT_MEASURED
        yield Line(cells, [*shown.values()])


def fastest(recorded: Recorded) -> str:
    """The arms that are the fastest of their side in SHOWN, and a caption for each card."""
    found = [peer.best(SHOWN) for peer in recorded_peers(recorded) if SHOWN in peer.run["tests"]]
    said = [
        " or ".join(f"`{arm}`" for arm in dict.fromkeys(arms))
        for arms in ([best.arm_theirs for best in found], [best.arm_ours for best in found])
    ]
    typed = (
        "`make peer-cuda` measures both; `workbench bench -m 1b.gguf -n 128` prints ours, of the "
        "file that [Commands](#commands) writes. "
    )
    return f"{typed}Each side is its fastest arm: {' and '.join(said)}. {where(recorded)}"


def arms(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and arm: its speed, and how much faster our fastest arm is."""
    for peer in recorded_peers(recorded):
        fastest = {test: peer.best(test).arm_ours for test in reversed(peer.run["tests"])}
        for arm in peer.run["arms"]:
            cells = {"Model": peer.model, "Arm": arm["name"]}
            for test, best in fastest.items():
                middle, low, high = peer.interval(test, arm["name"])
                ours = peer.ratio(test, arm["name"], best)
                cells |= {
                    f"{test} t/s": f"{middle:.1f} ({low:.1f}..{high:.1f})",
                    f"{test} ratio": spread(ours),
                }
            yield Line(cells, [peer])


def savings(recorded: Recorded) -> Iterator[Line]:
    """A line for each model: what llama.cpp's reuse of a graph saves of a token."""
    for peer in recorded_peers(recorded):
        for test in peer.run["tests"]:
            for one in peer.savings(test) if test.startswith("tg") else ():
                cells = one._asdict() | {"speedup": spread(one.speedup)}
                yield Line({"model": peer.model, "test": test} | cells, [peer])


def where(recorded: Recorded, models: Sequence[str] = MODELS, of: str = FOLDER) -> str:
    """A caption for each card."""
    groups: dict[str, list[PeerRun]] = {}
    for peer in recorded_peers(recorded, models, of):
        groups.setdefault(peer.run["engine"]["device_description"], []).append(peer)
    return " ".join(caption(group, _said(group)) for group in groups.values())


def _said(peers: Sequence[PeerRun]) -> str:
    rounds = " and ".join(map(str, sorted({peer.run["repetitions"] for peer in peers})))
    versions = dict.fromkeys(peer.run["result"]["peer"]["version"] for peer in peers)
    return f"in turn in one run, {rounds} rounds; llama.cpp {', '.join(versions)}"


BLOCKS: dict[str, list[Part]] = {
    "peer-cuda": [Table("Beside llama.cpp on a GPU", bests, said=fastest)],
    "peer-cuda-arms": [
        Table("Arms beside llama.cpp on a GPU", arms, said=where),
        "What llama.cpp's own reuse of a graph saves of a token: its build, and all else that a "
        "new graph entails. Differences within a round, and the speedup of its own token:",
        Table(
            "llama.cpp's reuse of a graph", savings,
            {"Model": "{model}", "Test": "{test}", "With": "{with_}", "us, reused": "{kept:.1f}",
             "us, built anew": "{built:.1f}", "us saved": "{us:.1f} ({low:.1f}..{high:.1f})",
             "speedup": "{speedup}"},
            said=where,
        ),
    ],
}  # fmt: skip
