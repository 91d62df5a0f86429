"""Tables of concurrent streams: where a token forks, which tensors lie in memory meanwhile, and
which lifetimes let branches overwrite each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.times.overlap import RESOLVED_TICKS, measure_overlap
from workbench.common.tables import Table
from workbench.config import Toggles
from workbench.engine.step_programs import fused_graph, unfused_graph
from workbench.graph import arena
from workbench.graph.forks import Branches, chained, interleaved
from workbench.graph.lifetimes import Lifetime, overwritten
from workbench.graph.lifetimes import lifetimes as lifetimes_of
from workbench.program.branches import forked
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import DEVICE, Launch, Wait, compute_stream
from workbench.program.split import split

LIFETIMES = tuple(Toggles.values("lifetimes"))
NONE = "none"


ARMS = ("streams=1", "streams=3", "streams=4 fork=any")


def kept() -> Toggles:
    """The toggles of all arms: programs are kept, and inputs are one copy without a wait."""
    return Toggles(graph_reuse="set_rows", sync="packed_implicit")


def planned() -> Toggles:
    """`kept`, with a plan of the whole step."""
    return switched(kept(), "plans=ours plan_scope=step")


def arms(background: Toggles) -> dict[str, Toggles]:
    """The arms of a comparison of streams, beside the background: as ARMS name them."""
    return {changes: switched(background, changes) for changes in ARMS}


def forks_table(engine: Any, arms: Mapping[str, Toggles]) -> pd.DataFrame:
    """The streams of a token in each arm: launches on the first stream and on others, and how often
    a stream waits for another."""
    rows = []
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            program = side.program()
        commands = list(program.singly())
        on = [c.stream.id for c in commands if isinstance(c, Launch) and not c.by_host]
        rows.append(
            {
                "arm": name,
                "pattern": program.pattern(fold=True),
                "streams": len(set(on)),
                "launches on stream 0": on.count(0),
                "launches beside": len(on) - on.count(0),
                "waits of streams": sum(isinstance(c, Wait) and c.forks for c in commands),
            }
        )
    return Table(rows).shown(code=["pattern"])


def overlap_table(engine: Any, arms: Mapping[str, Toggles], n_tokens: int = 16) -> pd.DataFrame:
    """The share of a token with two kernels or more in flight in each arm, untraced; then the same
    share in a trace. Medians over n_tokens tokens. Arms must not launch ahead."""
    rows, slower = [], []
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            found = measure_overlap(side, n_tokens)
        branches, traced = found.by_branch, found.traced
        assert traced is not None
        known = branches["us"][branches["resolved"]]
        slower.append(f"{traced.slowdown:.2f}")
        rows.append(
            {
                "arm": name,
                "overlap": f"{found.overlap:.1%}",
                "us a branch": f"{known.min():.1f} to {known.max():.1f}" if len(known) else NONE,
                "branches unresolved": f"{(~branches['resolved']).sum()} of {len(branches)}",
                "us a token": round(found.plain_us, 1),
                "overlap traced": f"{traced.overlap:.1%}",
            }
        )
    return Table(rows).shown(
        keys=["arm"],
        constant={
            "the device's clock goes on by": f"{found.tick_ns} ns",
            "unresolved": f"shorter than {RESOLVED_TICKS} of these ticks",
            "times as long when traced": ", ".join(slower),
        },
    )


def by_test(comparison: AB) -> Table:
    """The table of a comparison with several tests, without the baseline's tokens a second, which
    stand in the row of the A/A control. Where tests have different numbers of rounds, the line
    above the table has them, and n is no column."""
    table = comparison.table()
    shown = Table(table.drop(columns="t/s baseline")).shown(**table.attrs)
    if shown["n"].nunique() == 1:
        return shown
    rounds = shown.groupby("Test", sort=False)["n"].first()
    said = ", ".join(f"{n} ({test})" for test, n in rounds.items())
    return Table(shown.drop(columns="n")).shown(**table.attrs, constant={"n": said})


class _ForkedStep:
    """A token's nodes on the device, their streams, and the arena's inputs."""

    def __init__(self, engine: Any, toggles: Toggles):
        with engine.variant(toggles) as side:
            shape = side.program().shape
            graph = unfused_graph(side.model, shape, side._residents.caches, toggles)
            n_streams = int(toggles.streams)
            joined, backend_of = fused_graph(graph, toggles, side._loaded.placement, n_streams)
            splits = forked(split(joined, backend_of), n_streams, toggles.fork)
            mine = [part for part in splits if part.backend == DEVICE]
            self.branches: Branches = chained([part.branches for part in mine])
            self.given = [t for part in mine for t in part.inputs]
            self.keep = [*joined.outputs]
            self.scratch_bytes = side.backend.scratch_bytes

    def layout(self, lifetimes: str) -> list[Lifetime]:
        """The arena's layout with these lifetimes."""
        visible = self.branches if lifetimes == "visibility" else None
        nodes = interleaved(self.branches) if lifetimes == "interleaved" else self.branches.nodes
        made = arena.layout(nodes, self.given, self.keep, self.scratch_bytes, (), visible)
        return lifetimes_of(made, self.branches, self.keep)


def layer_frames(engine: Any, toggles: Toggles, layer: int) -> dict[str, pd.DataFrame]:
    """For `plots.lifetimes`: the tensors of a layer in memory, with each of the lifetimes. `lost`
    names the writers of a tensor's bytes."""
    step = _ForkedStep(engine, toggles)
    nodes = step.branches.nodes
    inside = {i for i, node in enumerate(nodes) if node.layer == layer}
    frames = {}
    for value in LIFETIMES:
        found = step.layout(value)
        lost: dict[Any, list[tuple[int, int, int, str]]] = {}
        for one in overwritten(found, step.branches):
            if one.by.first in inside:
                writer = one.by.name.replace(f"-{layer}", "")
                lost.setdefault(one.lost.of, []).append(
                    (one.offset, one.nbytes, one.by.first, writer)
                )
        frames[f"lifetimes={value}"] = pd.DataFrame(
            {
                "name": each.name.replace(f"-{layer}", ""),
                "offset": each.offset,
                "nbytes": each.nbytes,
                "first": each.first,
                "last": min(each.last, max(inside)),
                "stream": compute_stream(step.branches.streams[each.first]),
                "lost": lost.get(each.of, []),
            }
            for each in found
            if each.first in inside
        )
    return frames


def victims_table(engine: Any, toggles: Toggles, layer: int) -> Table:
    """Every tensor of a layer that loses bytes: its writer, and who may still read it then, by
    lifetimes. Readers are nodes, each with its stream."""
    step, rows = _ForkedStep(engine, toggles), []
    branches, end = step.branches, f"-{layer}"
    for value in LIFETIMES:
        for one in overwritten(step.layout(value), branches):
            writer = one.by.first
            if branches.nodes[writer].layer != layer:
                continue
            readers = [i for i in one.lost.users if i != one.lost.first]
            beside = [i for i in readers if branches.streams[i] != branches.streams[writer]]
            rows.append(
                {
                    "lifetimes": value,
                    "bytes": one.nbytes,
                    "victim": one.lost.name.replace(end, ""),
                    "writer": _on(branches, writer, end),
                    "may still read it": ", ".join(_on(branches, i, end) for i in beside),
                }
            )
    columns = ["lifetimes", "bytes", "victim", "writer", "may still read it"]
    return Table(rows, columns=columns).shown(keys=["lifetimes", "victim"])


def _on(branches: Branches, i: int, end: str) -> str:
    """A node and its stream: `Kcur_rope (stream 0)`."""
    name = branches.nodes[i].name.replace(end, "")
    return f"{name} (stream {compute_stream(branches.streams[i])})"


def lifetimes_table(unsafe: Any, toggles: Toggles) -> pd.DataFrame:
    """The bytes that each of the lifetimes needs, and the check that finds it wrong. unsafe: an
    engine that runs racing programs."""
    rows = []
    step = _ForkedStep(unsafe, toggles)
    for value in LIFETIMES:
        found = step.layout(value)
        pairs = overwritten(found, step.branches)
        with unsafe.variant(toggles.switched("lifetimes", value)) as side:
            races = check_cycle([side.program()]).n_races
        dropped = {}
        for how in ("writes", "all"):
            both = toggles.switched("lifetimes", value).switched("validate", how)
            with unsafe.variant(both) as side:
                side.program()
                dropped[how] = bool(side.counters["programs_unforked"])
        rows.append(
            {
                "lifetimes": value,
                "arena bytes": max(each.offset + each.nbytes for each in found),
                "overwritten": len(pairs) or NONE,
                "races": races or NONE,
                "writes finds it": _said(dropped["writes"], bool(races)),
                "all finds it": _said(dropped["all"], bool(races)),
            }
        )
    return Table(rows)


def _said(found: bool, wrong: bool) -> str:
    if not wrong:
        return "finds something" if found else "nothing to find"
    return "yes" if found else "no"
