"""Tables of the commands of programs: counts, the launches that each fusion removes, and the
launches of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.common.tables import Table
from workbench.config import Toggles
from workbench.graph.ir import DType, Kind
from workbench.program.commands import Launch, Program


def counts_table(programs: Mapping[str, Program]) -> pd.DataFrame:
    """The commands of each program for one step, by its label: the pattern, then the counts."""
    rows = [
        {"program": label, "pattern": program.pattern(fold=True)} | program.counts()
        for label, program in programs.items()
    ]
    return Table(rows)


def launches_table(engine: Any) -> pd.DataFrame:
    """Launches of one token under each fusion toggle of an engine. `engine.variant` makes engines
    with other toggles; no token is computed.

    A row per toggle, last all of them (`fuse`): `alone`, with every other fusion off; `removes`,
    how many fewer launches that is; `without it`, with every other fusion on.
    """
    off, on = (engine.toggles.switched("fuse", value) for value in ("off", "on"))

    def launches(toggles: Toggles) -> int:
        with engine.variant(toggles) as side:
            return sum(c.kind == "launch" for c in side.program().singly())

    none, rows = launches(off), []
    for name in (*Toggles.members("fuse"), "fuse"):
        alone, without = launches(off.switched(name, "on")), launches(on.switched(name, "off"))
        rows.append(
            {"toggle": name, "alone": alone, "removes": none - alone, "without it": without}
        )
    return Table(rows)


def shown_table(table: pd.DataFrame) -> Table:
    """`launches_table` without the patterns that have nothing to join here, which are named; and
    the launches with no pattern and with all of them."""
    every, each = table.iloc[-1], table.iloc[:-1]
    idle = (each["removes"] == 0) & (each["without it"] == each["without it"].min())
    none = ", ".join(each["toggle"][idle]) or "none"
    return Table(each[~idle]).shown(
        keys=["toggle"],
        constant={
            "no pattern": str(every["without it"]), "all patterns": str(every["alone"]),
            "patterns with nothing to join here": none,
        },
    )  # fmt: skip


def nodes_table(program: Program) -> pd.DataFrame:
    """The launches of a layer of a program, in order: op, name, and the ops of a fused node's
    parts.

    The layer is one in the middle, or the first of fewer than three. A launch with a product
    belongs to the product's layer; a norm fused after it may belong to the next layer.
    """
    nodes = [c.node for c in program.singly() if isinstance(c, Launch)]
    layers = sorted({_layer(node) for node in nodes if _layer(node) >= 0})
    layer = layers[len(layers) // 2] if len(layers) > 2 else 0
    rows = [
        {"op": node.op, "node": node.name, "parts": " + ".join(_ops(node)) if node.parts else ""}
        for node in nodes
        if _layer(node) == layer
    ]
    return Table(rows, columns=["op", "node", "parts"])


def weight_types(program: Program) -> list[DType]:
    """The types of the weights that a program's products read, that of the most bytes first."""
    weights = {
        tensor
        for command in program.singly()
        if isinstance(command, Launch)
        for part in _parts(command.node)
        if part.op == "mul_mat"
        for tensor in part.inputs
        if tensor.kind == Kind.WEIGHT
    }
    nbytes = Counter[DType]()
    for weight in weights:
        nbytes[weight.dtype] += weight.nbytes
    return [dtype for dtype, _ in nbytes.most_common()]


def _layer(node: Any) -> int:
    products = (part.layer for part in node.parts if part.op == "mul_mat")
    return int(next(products, node.layer))


def _parts(node: Any) -> list[Any]:
    """The operations that a node stands for."""
    return [one for part in node.parts for one in _parts(part)] if node.parts else [node]


def _ops(node: Any) -> list[str]:
    return [part.op for part in _parts(node)]
