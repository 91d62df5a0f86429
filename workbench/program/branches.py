"""Branches in a program: which nodes of a step run side by side, and whether that is right.

`graph/forks.py` says which node runs on which stream, `graph/arena.py` which tensors may share
bytes there. This module checks a program before it is issued (toggle `validate`). It refuses a
program which the arena is known to let race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from workbench.common.errors import UsageError
from workbench.config import Lifetimes, Validate
from workbench.graph import ops
from workbench.graph.forks import fork, interleaved
from workbench.graph.ir import Node, Tensor
from workbench.program.check.hazards import Race, races
from workbench.program.commands import HOST, Program, Range
from workbench.program.layout import Layout
from workbench.program.split import Split


def forked(splits: Sequence[Split], n_streams: int, rule: str) -> list[Split]:
    """The splits with their nodes on up to n_streams streams, where `rule` finds branches."""
    return [part if part.backend == HOST else _forked(part, n_streams, rule) for part in splits]


def _forked(part: Split, n_streams: int, rule: str) -> Split:
    branches = fork(part.nodes, n_streams, rule)
    return part._replace(forked=branches) if branches.n_streams > 1 else part


def on_one_stream(splits: Sequence[Split], lifetimes: str) -> list[Split]:
    """The splits in the order for which their memory was laid out, on one stream each."""
    reordered = lifetimes == Lifetimes.INTERLEAVED
    return [
        part._replace(nodes=interleaved(part.forked), forked=None)
        if reordered and part.forked
        else part._replace(forked=None)
        for part in splits
    ]


def _writes(splits: Sequence[Split], layout: Layout, program: Program) -> str:
    """llama.cpp's check: whether nodes that may run side by side write the same bytes. It does not
    look at what they read."""
    for part in splits:
        for before, after in part.forked.side_by_side() if part.forked else ():
            ranges = layout.ranges[part.backend]
            if any(_meet(a, b) for a in _written(before, ranges) for b in _written(after, ranges)):
                return f"{before.name} and {after.name}, side by side, write the same bytes"
    return ""


def _written(node: Node, ranges: Mapping[Tensor, Range]) -> Iterator[Range]:
    for tensor, offset, nbytes in ops.writes(node):
        there = ranges[tensor]
        yield Range(there.buffer, there.offset + offset, nbytes)


def _meet(a: Range, b: Range) -> bool:
    apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    return a.buffer is b.buffer and not apart


def _everything(splits: Sequence[Split], layout: Layout, program: Program) -> str:
    """The hazard checker, on the step and one more like it after it."""
    found = races([program, program])
    return told(found[0], program) if found else ""


def told(race: Race, program: Program) -> str:
    """A race in words."""
    words = [at.describe(program.backends) for at in (race.first, race.second)]
    return (
        f"{words[0]} and {words[1]} race ({race.kind}, {race.nbytes} bytes of {race.buffer.name})"
    )


# what checks a step with branches: (splits, layout, program) -> what is wrong, in words
CHECKS: dict[str, Callable[[Sequence[Split], Layout, Program], str]] = {
    Validate.OFF: lambda splits, layout, program: "",
    Validate.WRITES: _writes,
    Validate.ALL: _everything,
}


def refuse_races(lifetimes: str, n_streams: int, program: Program) -> None:
    """Raises UsageError where lifetimes that can be unsafe let this program race."""
    if lifetimes == Lifetimes.VISIBILITY or n_streams == 1:
        return
    if found := races([program, program]):
        raise UsageError(
            f"toggles lifetimes={lifetimes} and streams={n_streams} race: "
            f"{told(found[0], program)}; use lifetimes={Lifetimes.VISIBILITY}, or unsafe to run "
            "them all the same"
        )
