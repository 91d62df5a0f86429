"""The tables of graph reuse: each way to keep a graph, each layer of reuse disabled, growth of the
cache, and the worth of #8366 to an engine by the time that its build takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from data.measure import peer
from data.measure.matrix import LAYERS
from data.measure.recorded import Arms, Recorded, spread
from data.measure.tables import Line, Part, Table
from workbench.answers import kept
from workbench.benchmarks.compare.comparison import AB
from workbench.config import GraphReuse, Redo, Toggles

REDO, WAYS = "redo", "graph_reuse"
REBUILD, KEPT = GraphReuse.REBUILD.value, GraphReuse.SET_ROWS.value


def _cells(arm: dict[str, Any]) -> dict[str, str]:
    """us a token by phase, from an arm's counters."""
    return {phase: f"{us:.1f}" for phase, us in kept.phases_us(arm["counters"]).items()}


def ways(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and way: t/s beside rebuilding, and us a token in each phase."""
    models = set[str]()
    for one in recorded.toggled("reuse", "ab", WAYS):
        before, first = f"{one.found['tps_baseline']:.1f}", one.ab.run["arms"][0]
        if one.model not in models:
            models.add(one.model)
            rebuilt = {"Model": one.model, WAYS: first["name"], "t/s rebuilt": "", "t/s": before}
            yield Line(rebuilt | _cells(first), [one.ab])
        said = {"Model": one.model, WAYS: one.arm["name"], "t/s rebuilt": before,
                "t/s": f"{one.found['tps_toggled']:.1f}", "Speedup": one.speedup(2),
                "verdict": one.found["verdict"]}  # fmt: skip
        yield Line(said | _cells(one.arm), [one.ab])


def layers(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and layer of reuse: what a token costs more with the layer disabled,
    and us in each phase then."""
    for one in recorded.toggled("reuse", "ab", REDO):
        done = [name for name in LAYERS if one.arm["toggles"][name] == Redo.ON]
        before, after = (one.found[f"tps_{which}"] for which in ("baseline", "toggled"))
        cells = {
            "Model": one.model, "done again": ", ".join(n.removeprefix(f"{REDO}_") for n in done),
            "t/s": f"{before:.1f}", "t/s then": f"{after:.1f}",
            "us more": f"{1e6 / after - 1e6 / before:.0f}", "Speedup": one.speedup(2),
            "verdict": one.found["verdict"],
        }  # fmt: skip
        yield Line(cells | _cells(one.arm), [one.ab])


class Worth(NamedTuple):
    """The worth of a kept graph to a model's token."""

    model: str
    us: float
    own_us: float
    own: str
    theirs: peer.Saving | None
    ab: AB

    def ratio(self, build_us: float) -> float:
        """The speedup for an engine whose build takes build_us, while the device is idle."""
        return kept.speedup(self.us, max(build_us, 0))

    def said(self, theirs: peer.Saving) -> str:
        """The speedup at llama.cpp's saving, with its interval."""
        value, low, high = (self.ratio(us) for us in (theirs.us, theirs.low, theirs.high))
        return f"{value:.2f} ({low:.2f}..{high:.2f})"


def worths(recorded: Recorded) -> list[Worth]:
    """A row for each model whose ways were compared."""
    theirs = {
        other.model: saving
        for other in peer.recorded_peers(recorded)
        for test in other.run["tests"]
        for saving in (other.savings(test) if test.startswith("tg") else ())
        if saving.with_ == peer.REUSE_PAIRS[0][0]
    }
    found = []
    for one in recorded.toggled("reuse", "ab", WAYS):
        if one.arm["name"] == KEPT:
            us, own_us = 1e6 / one.found["tps_toggled"], kept.own_build_us(one.ab.run["arms"][0])
            of = theirs.get(one.model)
            found.append(Worth(one.model, us, own_us, one.speedup(2), of, one.ab))
    return found


def verdicts(recorded: Recorded) -> Iterator[Line]:
    """A line for each model: the speedup by the time of a build, at llama.cpp's build, and at this
    engine's."""
    for one in worths(recorded):
        low, high = (kept.build_us(one.us, claim) for claim in kept.CLAIMED)
        of = one.theirs
        yield Line(
            {"Model": one.model, "us a token": f"{one.us:.0f}"}
            | {f"{us} us": f"{one.ratio(us):.3f}" for us in kept.BUILD_US}
            | {
                "llama.cpp's build, us": f"{of.us:.0f} ({of.low:.0f}..{of.high:.0f})" if of else "",
                "at llama.cpp's": one.said(of) if of else "",
                "3 to 7 % is a build of": f"{low:.0f} to {high:.0f} us",
                "this engine's build, us": f"{one.own_us:.0f}",
                "at this engine's": f"{one.ratio(one.own_us):.2f}",
                "measured here (Python)": one.own,
            },
            [one.ab],
        )


def verdict(recorded: Recorded) -> str:
    """#8366 at llama.cpp's own build time: measured in a peer run, else as its thread says."""
    found = worths(recorded)
    said = [
        f"{one.model} {of.us:.0f} us beside a token of {one.us:.0f}, {one.said(of)} (of its own "
        f"token {of.speedup.value:.2f})"
        for one in found
        if (of := one.theirs)
    ]
    if said:
        return (
            "Verdict on #8366, at llama.cpp's build time (what its reuse switch saves on the same "
            f"files and card, with all that a new graph entails): {'; '.join(said)}. Its thread "
            "had 3 to 7 %. This engine's ratio is the price of its Python."
        )
    lows, highs = ([kept.build_us(one.us, c) for one in found] for c in kept.CLAIMED)
    return (
        "Verdict on #8366, at llama.cpp's build time: its own was not measured on this card. Its "
        f"thread has 3 to 7 %, which here would be a build of {min(lows):.0f} to {max(highs):.0f} "
        "us. This engine's ratio is the price of its Python."
    )


BENCHMARK = re.compile(r"test_bench_reuse\.py::test_graph_work\w*(?:\[(.+)\])?")
KEEPING = [way for way in Toggles.values(WAYS) if way != REBUILD]


def graph_work(recorded: Recorded, way: str) -> dict[str, Any] | None:
    """us before the first command of a token is issued, where `way` keeps the graph: the most of
    its benchmarks, and each. A benchmark that names no way is of set_rows."""
    every = (recorded.alone("benchmarks") or {}).get("benchmarks", {})
    found = {}
    for name, of in every.items():
        matched = BENCHMARK.fullmatch(name)
        if matched and way in (matched[1] or KEPT):
            rest = (matched[1] or "").replace(way, "").strip("-")
            found[rest] = of["median_us"]
    said = ", ".join(f"{us:.0f} us {rest}".strip() for rest, us in found.items())
    return {"us": max(found.values()), "said": said} if found else None


def growth(recorded: Recorded) -> Iterator[Line]:
    """A line for each model, test and plans: kv_growth=full beside kv_growth=step, in one run."""
    for _, run in recorded.of("grown", "ab"):
        arms = Arms(run)
        for test, i in product(run.run["tests"], range(0, len(arms.names), 2)):
            step, full = arms.names[i : i + 2]
            found = arms.between(test, step, full)
            cells = {
                "Model": arms.model, "Test": test, "plans": arms.toggles(step)["plans"],
                "t/s step": f"{found.before:.1f}", "t/s full": f"{found.after:.1f}",
                "Speedup": spread(found.ratio, 3), "verdict": found.verdict,
            }  # fmt: skip
            yield Line(cells, [arms])


BLOCKS: dict[str, list[Part]] = {
    "reuse-cuda": [
        Table("Ways to keep a graph", ways, None,
              "{tests}; us a token in each phase; all else on; {n} interleaved repetitions"),
        "One layer of reuse disabled: its phase is done again for every token, and the us in each "
        "phase are those then; all else on:",
        Table("", layers, None, "{tests}; {n} interleaved repetitions"),
    ],
    "reuse-verdict": [
        Table("What #8366 is worth by what a build costs", verdicts, None,
              "speedup of a kept graph: (token + build) / token"),
        verdict,
    ],
    "growth-cuda": [
        Table("How n_kv grows", growth, None, "kv_growth=step and full; {n} interleaved "
              "repetitions"),
    ],
}  # fmt: skip
