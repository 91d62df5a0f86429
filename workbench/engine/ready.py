"""Kernels are compiled before a clock runs, not in the first step that wants them."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from workbench import progress
from workbench.backend import compiled
from workbench.graph.ir import Node
from workbench.program.commands import Launch

_ready: weakref.WeakKeyDictionary[Any, set[tuple[int, int]]] = weakref.WeakKeyDictionary()
_said = compiled.Compiled()


def make_ready(engine: Any, steps: Iterable[tuple[int, int]]) -> None:
    """Has every backend compile what steps of (n_tokens, n_outputs) launch and no cache has. Says
    what this process has compiled since it last said so, loading included."""
    known = _ready.setdefault(engine, set())
    new = set(steps) - known
    if not new or engine.recorder is not None:  # what is traced shows what a first step does
        say()
        return
    wanted: dict[int, dict[tuple, Node]] = defaultdict(dict)  # by backend, then by kind
    for n_tokens, n_outputs in sorted(new):
        for c in engine.program(n_tokens, n_outputs).singly():
            if isinstance(c, Launch):
                wanted[c.stream.backend].setdefault(kind(c.node), c.node)
    with progress.bar("compiling kernels", sum(map(len, wanted.values())), "launches") as left:
        for b, nodes in wanted.items():
            engine._open.backends[b].make_ready(list(nodes.values()), left)
    known |= new
    say()


def say() -> None:
    """One line on what was compiled since the last one, where it took long enough to be noticed."""
    global _said
    found = compiled.so_far()
    if (new := found.since(_said)).ns > compiled.WORTH_SAYING_NS:
        progress.note(str(new))
        _said = found


def kind(node: Node) -> tuple:
    """What nodes have in common that want the same kernels."""
    operands = ((t.dtype, t.shape, t.kind) for t in (*node.inputs, *node.outputs))
    return (node.op, node.params.get("activations"), *operands, *map(kind, node.parts))
