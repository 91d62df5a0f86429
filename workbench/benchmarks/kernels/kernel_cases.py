"""The measurements of `bench-kernels`: weight types by named shapes of real models by batch.

A shape names the weights that multiply one activation in an operation of a layer:

    qkv      Q, K and V in one launch          o, down, head   one product each
    glu      gate, up and swiglu in one launch, with the quantisation that follows it
    gate_up  the same two weights as two products
    expert   one expert's product; gate and down, where their shapes differ

Every launch reads its weights once. Its bytes are counted as those of the weights only.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.graph import ir, ops
from workbench.graph.fuse import fuse
from workbench.model.synth.shapes import PRESETS

TYPES = (ir.F16, ir.BF16, ir.Q8_0, ir.Q4_0, ir.Q4_K, ir.Q5_K, ir.Q6_K, ir.MXFP4)
MODELS = {"1b": "llama-3.2-1b", "4b": "qwen3-4b", "8b": "llama-3-8b"}
MOST_BATCH = 4096
FUSIONS = ("fuse_qkv", "fuse_glu", "fuse_epilogue_quantize")


class WeightShape(NamedTuple):
    """Weights of `rows` and `cols` that multiply one activation. how: product, qkv or glu."""

    name: str
    rows: tuple[int, ...]
    cols: int
    how: str = "product"


def _of_model(short: str, preset: str) -> list[WeightShape]:
    p = PRESETS[preset]
    q, kv = p.n_head * p.head_dim, p.n_head_kv * p.head_dim
    return [
        WeightShape(f"{short}.qkv", (q, kv, kv), p.n_embd, "qkv"),
        WeightShape(f"{short}.o", (p.n_embd,), q),
        WeightShape(f"{short}.glu", (p.n_ff, p.n_ff), p.n_embd, "glu"),
        WeightShape(f"{short}.gate_up", (p.n_ff, p.n_ff), p.n_embd),
        WeightShape(f"{short}.down", (p.n_embd,), p.n_ff),
        WeightShape(f"{short}.head", (p.n_vocab,), p.n_embd),
    ]


# The experts' shapes: n_embd and the experts' n_ff of the models' published config.json.
SHAPES: dict[str, WeightShape] = {
    shape.name: shape
    for shape in (
        *(shape for short, preset in MODELS.items() for shape in _of_model(short, preset)),
        WeightShape("gpt-oss-20b.expert", (2880,), 2880),
        WeightShape("qwen3-30b-a3b.gate", (768,), 2048),
        WeightShape("qwen3-30b-a3b.down", (2048,), 768),
    )
}


class KernelCase(NamedTuple):
    """A weight type and a shape, measured at several batches on one set of weights."""

    dtype: ir.DType
    shape: WeightShape

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(self.shape.rows) * self.dtype.row_bytes(self.shape.cols)

    @property
    def misfit(self) -> str | None:
        """Why such a weight is impossible, in one line; None where it is possible."""
        cols, block = self.shape.cols, self.dtype.block
        if cols % block == 0:
            return None
        return f"rows of {cols} are no multiple of the {block} in a block of {self.dtype.name}"

    def weights(self) -> tuple[ir.Tensor, ...]:
        shapes = ((rows, self.shape.cols) for rows in self.shape.rows)
        return tuple(
            ir.Tensor(f"w{i}", self.dtype, s, ir.Kind.WEIGHT) for i, s in enumerate(shapes)
        )

    def nodes(self, weights: Sequence[ir.Tensor], batch: int) -> list[ir.Node]:
        """The nodes for one activation `x` of `batch` tokens, in order. qkv and glu are fused.
        Results are of Kind.OUTPUT."""
        quantised = self.dtype in ir.QUANTISED
        x = ir.Input("x", ir.Q8_ACT if quantised else ir.F32, (batch, self.shape.cols))
        nodes = [ops.make("mul_mat", f"y{i}", w, x) for i, w in enumerate(weights)]
        if self.shape.how == "glu":
            nodes.append(ops.make("swiglu", "h", *(node.output for node in nodes)))
            if quantised:
                nodes.append(ops.make("quantize", "h (q8)", nodes[-1].output))
            nodes[-1].output.kind = ir.Kind.OUTPUT
        else:
            for node in nodes:
                node.output.kind = ir.Kind.OUTPUT
        graph = ir.Graph(nodes, [x], [nodes[-1].output], ir.StepShape(batch, batch, 0))
        return fuse(graph, FUSIONS).nodes if self.shape.how != "product" else nodes


def parse_types(text: str) -> list[ir.DType]:
    """`Q4_0,F16` as types; `all`: every type of TYPES. Raises UsageError, with the known names, for
    an unknown name."""
    known = {dtype.name: dtype for dtype in TYPES}
    return [known[name] for name in _chosen(text, "type", {n: [n] for n in known}, str.upper)]


def parse_shapes(text: str) -> list[WeightShape]:
    """`8b.o,1b` as shapes (a model alone: all of its shapes); `all`: every shape. Raises
    UsageError, with the known names, for an unknown name."""
    known = {name: [name] for name in SHAPES}
    for name in SHAPES:
        known.setdefault(name.rpartition(".")[0], []).append(name)
    return [SHAPES[name] for name in _chosen(text, "shape", known, str.lower)]


def _chosen(
    text: str, what: str, known: dict[str, list[str]], canonical: Callable[[str], str]
) -> list[str]:
    names = [canonical(part.strip()) for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError(f"no {what} is named; choose from all, {', '.join(known)}")
    found: list[str] = []
    for name in names:
        if name.lower() == "all":
            found += [n for group in known.values() for n in group]
        elif name in known:
            found += known[name]
        else:
            said = choices(name, ("all", *known))
            raise UsageError(f"{what} {name!r} does not exist; {said}")
    return list(dict.fromkeys(found))


def parse_batches(text: str) -> list[int]:
    """`1,2,8` or `1-8` as numbers of tokens. Raises UsageError for any other text."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            low = high = 0
        if not 1 <= low <= high <= MOST_BATCH:
            raise UsageError(
                f"batch {part.strip()!r} is no number of tokens from 1 to {MOST_BATCH}; write "
                "them as 1,2,8 or 1-8"
            )
        found += range(low, high + 1)
    return list(dict.fromkeys(found))
