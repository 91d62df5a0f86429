"""The inputs of a step: what the host writes before it, the shape and type of each, and whether a
kept graph can be given it again.

Names are llama.cpp's. An input that looks at anything but the step shape is another class: until
`can_reuse` is written for it, no step with it is reused, and the counters name it.
"""

from collections.abc import Callable

from workbench.graph.ir import F16, F32, I32, I64, DType, Input, StepShape
from workbench.graph.shapes import DRAW_SETTINGS


class PerToken(Input):
    """A number for each token of the step, (T,)."""

    __slots__ = ()

    def __init__(self, name: str, dtype: DType, step: StepShape):
        super().__init__(name, dtype, (step.n_tokens,))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_tokens,)


class Mask(Input):
    """What each token sees of the cache, (T, n_kv) F16: 0 for a cell that it sees, else -inf."""

    __slots__ = ()

    def __init__(self, name: str, step: StepShape):
        super().__init__(name, F16, (step.n_tokens, step.n_kv))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_tokens, step.n_kv)


class OutputRows(Input):
    """A number for each row of logits, (n_outputs,) I32: which token it is of (inp_out_ids), or the
    sequence that its token is drawn for (inp_out_seqs)."""

    __slots__ = ()

    def __init__(self, name: str, step: StepShape):
        super().__init__(name, I32, (step.n_outputs,))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_outputs,)


class PerCell(Input):
    """A number for each cell of the cache, (n_kv,) I32."""

    __slots__ = ()

    def __init__(self, name: str, step: StepShape):
        super().__init__(name, I32, (step.n_kv,))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_kv,)


class CellPairs(Input):
    """Cells to copy: to which, from which, (n_kv, 2) I64; -1 where there is nothing to copy."""

    __slots__ = ()

    def __init__(self, name: str, step: StepShape):
        super().__init__(name, I64, (step.n_kv, 2))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_kv, 2)


class Regions(Input):
    """For each sequence of the step its first token, and the first cell of its region of the cache,
    (n_seqs, 2) I32. A sequence's tokens end where the next one's begin."""

    __slots__ = ()

    def __init__(self, name: str, step: StepShape):
        super().__init__(name, I32, (step.n_seqs, 2))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_seqs, 2)


class DrawSettings(Input):
    """How the token of each row of logits is drawn, (n_outputs, 5) F32: temperature, top_k, top_p,
    log(min_p), and a uniform number from 0 to 1."""

    __slots__ = ()

    def __init__(self, name: str, step: StepShape):
        super().__init__(name, F32, (step.n_outputs, DRAW_SETTINGS))

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == (step.n_outputs, DRAW_SETTINGS)


class StoreTable(Input):
    """The first cell of the step, for K and V of each layer, (2 * n_layer,) I64."""

    __slots__ = ()

    def __init__(self, n_layer: int):
        super().__init__(STORE_TABLE, I64, (2 * n_layer,))

    def can_reuse(self, step: StepShape) -> bool:
        return True  # of any step


TOKENS, POSITIONS, MASK = "inp_tokens", "inp_pos", "attn_inp_kq_mask"
K_CELLS, V_CELLS, STORE_TABLE = "attn_inp_k_idxs", "attn_inp_v_idxs", "inp_store_table"
OUT_IDS, DELTAS, REGIONS = "inp_out_ids", "inp_k_shift", "attn_inp_regions"
DRAWS, OUT_SEQS, COPIES = "inp_draws", "inp_out_seqs", "inp_copies"

# by name: the input of a graph for steps of a shape, where it follows from the shape
INPUTS: dict[str, Callable[[StepShape], Input]] = {
    TOKENS: lambda step: PerToken(TOKENS, I32, step),
    POSITIONS: lambda step: PerToken(POSITIONS, I32, step),
    MASK: lambda step: Mask(MASK, step),
    K_CELLS: lambda step: PerToken(K_CELLS, I64, step),
    V_CELLS: lambda step: PerToken(V_CELLS, I64, step),
    OUT_IDS: lambda step: OutputRows(OUT_IDS, step),
    DELTAS: lambda step: PerCell(DELTAS, step),
    REGIONS: lambda step: Regions(REGIONS, step),
    COPIES: lambda step: CellPairs(COPIES, step),
    DRAWS: lambda step: DrawSettings(DRAWS, step),
    OUT_SEQS: lambda step: OutputRows(OUT_SEQS, step),
}


def input_of(name: str, step: StepShape) -> Input:
    """The input called `name` of a graph for steps of a shape."""
    return INPUTS[name](step)
