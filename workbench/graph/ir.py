"""The graph: what one step computes. Pure data; no device, no program, no values.

A graph follows from the step shape alone. Two steps of one shape have the same topology, and may
share everything built from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.common.sizes import round_up

ALIGN = 256  # bytes: what the widest device wants of a tensor's address


class DType(NamedTuple):
    """An element type: `block` elements are stored in `block_bytes` bytes.

    Names and block geometry are ggml's (`ggml-common.h`). Only Q8_ACT is our own: see `row_bytes`.
    """

    name: str
    block: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row of `cols` elements; raises UsageError where cols does not fit blocks.

        A row of Q8_ACT is activations quantised to 8 bits in blocks of 32. It has three planes, one
        after the other: `cols` int8 quants, `cols/32` float32 scales, `cols/16` int16 sums of the
        quants of each half block. Padding to a multiple of 64 bytes follows.
        """
        if cols % self.block:
            raise UsageError(f"a row of {cols} {self.name} elements is no multiple of {self.block}")
        if self.name == "Q8_ACT":
            return round_up(cols + cols // 32 * 4 + cols // 16 * 2, 64)
        return cols // self.block * self.block_bytes


F32 = DType("F32", 1, 4)
F16 = DType("F16", 1, 2)
BF16 = DType("BF16", 1, 2)
U8 = DType("U8", 1, 1)
I32 = DType("I32", 1, 4)
I64 = DType("I64", 1, 8)
Q8_0 = DType("Q8_0", 32, 34)
Q4_0 = DType("Q4_0", 32, 18)
Q4_K = DType("Q4_K", 256, 144)
Q5_K = DType("Q5_K", 256, 176)
Q6_K = DType("Q6_K", 256, 210)
MXFP4 = DType("MXFP4", 32, 17)
Q8_ACT = DType("Q8_ACT", 32, 40)

WEIGHT_DTYPES = (F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4)
DTYPES = {d.name: d for d in (*WEIGHT_DTYPES, U8, I32, I64, Q8_ACT)}
CACHE_DTYPES = (F16, BF16, F32, Q8_0)  # of K and V
QUANTISED = frozenset((Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4))


class Kind(StrEnum):
    WEIGHT = "weight"  # from the model file; never written
    CACHE = "cache"  # K or V of one layer; outlives the step
    INPUT = "input"  # written by the host before the step
    ACTIVATION = "activation"  # lives inside the step
    OUTPUT = "output"  # an activation the host reads after the step


class Tensor:
    """A typed array of the graph. Immutable by convention; identity is the object itself.

    shape: in numpy order, so that the last axis is contiguous. A weight of `rows` outputs and
        `cols` inputs has shape (rows, cols).
    storage: the tensor whose bytes a view shares, from the first byte on. Every other tensor is its
        own storage.
    """

    __slots__ = ("_storage", "dtype", "kind", "name", "nbytes", "shape")

    def __init__(
        self, name: str, dtype: DType, shape: tuple[int, ...], kind: Kind = Kind.ACTIVATION
    ):
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.kind = kind
        self.nbytes = dtype.row_bytes(shape[-1]) * math.prod(shape[:-1])
        # not self: a graph must be free of reference cycles, or rebuilding one for every token
        # leaves the collector hundreds of dead nodes a time
        self._storage: Tensor | None = None

    @property
    def storage(self) -> Tensor:
        return self._storage or self

    def view(self, *shape: int) -> Tensor:
        """The same elements under another shape of equal size."""
        other = Tensor(self.name, self.dtype, shape, self.kind)
        if other.nbytes != self.nbytes:
            raise UsageError(f"{self!r} cannot be viewed as {list(shape)}: sizes differ")
        other._storage = self.storage
        return other

    @property
    def rows(self) -> int:
        """Product of all axes but the last."""
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    def __repr__(self) -> str:
        return f"{self.name}:{self.dtype.name}{list(self.shape)}"


class Input(Tensor):
    """A tensor that the host writes before the step.

    A kept program serves a step if every input of its graph says so. Each answers for itself, and
    an input that does not answer says no (llama.cpp: `llm_graph_input_i::can_reuse`).
    """

    __slots__ = ()

    def __init__(self, name: str, dtype: DType, shape: tuple[int, ...]):
        super().__init__(name, dtype, shape, Kind.INPUT)

    def can_reuse(self, step: StepShape) -> bool:
        """Whether a step of this shape can write its value here. The answer follows from the shape
        alone, so that it is asked once for each kept program."""
        return False


class Node:
    """One op with its sources.

    inputs: the sources. An optional source that is absent is left out.
    outputs: one tensor. If the op stores into one of its inputs (set_rows), it is that input. A
        fused node has as outputs the results of its parts that other nodes read.
    parts: of a fused node (`graph/fuse.py`), the nodes that it stands for, in order. Every other
        node has none.
    layer: -1 outside of the layers.
    """

    __slots__ = ("inputs", "layer", "name", "op", "outputs", "params", "parts")

    def __init__(
        self,
        op: str,
        name: str,
        output: Tensor,
        inputs: tuple[Tensor, ...],
        params: Mapping[str, Any],
        layer: int,
    ):
        self.op = op
        self.name = name
        self.outputs: tuple[Tensor, ...] = (output,)
        self.inputs = inputs
        self.params = params
        self.layer = layer
        self.parts: tuple[Node, ...] = ()

    @property
    def output(self) -> Tensor:
        """The first output; the only one of a node without parts."""
        return self.outputs[0]

    def __repr__(self) -> str:
        made = ", ".join(t.name for t in self.outputs)
        return f"{made} = {self.op}({', '.join(map(repr, self.inputs))})"


class StepShape(NamedTuple):
    """Everything that the topology of a step follows from.

    n_tokens: tokens computed together.
    n_outputs: rows of logits that are wanted.
    n_kv: cells that attention looks at (padded).
    n_seqs: sequences that the tokens belong to.
    draws: the device draws a token from each row of logits; then the results are these tokens.
    """

    n_tokens: int
    n_outputs: int
    n_kv: int
    n_seqs: int = 1
    draws: bool = False


class Graph:
    """Ordered nodes, with the inputs that the host writes and the outputs that it reads."""

    __slots__ = ("inputs", "nodes", "outputs", "shape")

    def __init__(
        self, nodes: list[Node], inputs: list[Input], outputs: list[Tensor], shape: StepShape
    ):
        self.nodes = nodes
        self.inputs = inputs
        self.outputs = outputs
        self.shape = shape
