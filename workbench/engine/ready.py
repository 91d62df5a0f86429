"""Kernels are compiled before a clock runs, not in the first step that wants them."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from workbench import progress
from workbench.backend import compiled
from workbench.graph.ir import Node, StepShape

_ready: weakref.WeakKeyDictionary[Any, set[StepShape]] = weakref.WeakKeyDictionary()
_said = compiled.Compiled()


def make_ready(engine: Any, shapes: Iterable[StepShape]) -> None:
    """Has every backend compile what steps of these shapes launch and no cache has. Says what this
    process has compiled since it last said so, loading included."""
    known = _ready.setdefault(engine, set())
    new = [shape for shape in dict.fromkeys(shapes) if shape not in known]
    if not new or engine.recorder is not None:  # what is traced shows what a first step does
        say()
        return
    wanted: dict[int, dict[tuple, Node]] = defaultdict(dict)  # by backend, then by kind
    for shape in new:
        for node, backend in engine._made.nodes_of(shape):
            wanted[backend].setdefault(kind(node), node)
    with progress.bar("compiling kernels", sum(map(len, wanted.values())), "launches") as left:
        for b, nodes in wanted.items():
            engine._open.backends[b].make_ready(list(nodes.values()), left)
    known |= {*new}
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
