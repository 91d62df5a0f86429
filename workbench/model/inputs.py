"""The inputs of a step: values that the host writes before the step, the shape and type of each,
and whether a kept graph can take the input of another step (#8366).

Names are llama.cpp's. The inputs here depend only on the step shape. An input that depends on
anything else needs a class of its own. Until that class has `can_reuse`, no step with the input is
reused, and the counters name it.
"""

from collections.abc import Callable
from functools import partial

from workbench.graph.ir import F16, F32, I32, I64, DType, Input, StepShape
from workbench.graph.shapes import DRAW_SETTINGS

TOKENS, POSITIONS, MASK = "inp_tokens", "inp_pos", "attn_inp_kq_mask"
K_CELLS, V_CELLS, STORE_TABLE = "attn_inp_k_idxs", "attn_inp_v_idxs", "inp_store_table"
OUT_IDS, DELTAS, REGIONS = "inp_out_ids", "inp_k_shift", "attn_inp_regions"
DRAWS, OUT_SEQS, COPIES = "inp_draws", "inp_out_seqs", "inp_copies"

ShapeOf = Callable[[StepShape], tuple[int, ...]]


class StepInput(Input):
    """An input whose shape follows from the step shape. A step can write its values here if it asks
    for the same shape."""

    __slots__ = ("_shape_of",)

    def __init__(self, name: str, dtype: DType, shape_of: ShapeOf, step: StepShape):
        super().__init__(name, dtype, shape_of(step))
        self._shape_of = shape_of

    def can_reuse(self, step: StepShape) -> bool:
        return self.shape == self._shape_of(step)


class StoreTable(Input):
    """The first cell of the step, for K and V of each layer, (2 * n_layer,) I64."""

    __slots__ = ()

    def __init__(self, n_layer: int):
        super().__init__(STORE_TABLE, I64, (2 * n_layer,))

    def can_reuse(self, step: StepShape) -> bool:
        return True  # of any step


def _per_token(step: StepShape) -> tuple[int, ...]:
    return (step.n_tokens,)


def _per_output(step: StepShape) -> tuple[int, ...]:
    return (step.n_outputs,)


# by name: the input of a graph for steps of a shape
INPUTS: dict[str, Callable[[StepShape], Input]] = {
    name: partial(StepInput, name, dtype, shape_of)
    for name, dtype, shape_of in (
        (TOKENS, I32, _per_token),
        (POSITIONS, I32, _per_token),
        # what each token sees of the cache: 0 for a cell that it sees, else -inf
        (MASK, F16, lambda step: (step.n_tokens, step.n_kv)),
        (K_CELLS, I64, _per_token),
        (V_CELLS, I64, _per_token),
        # of each row of logits, its token in the step
        (OUT_IDS, I32, _per_output),
        # of each cell of the cache, by how many positions it moves
        (DELTAS, I32, lambda step: (step.n_kv,)),
        # of each sequence of the step, its first token and the first cell of its region of the
        # cache. A sequence's tokens end where the next sequence begins
        (REGIONS, I32, lambda step: (step.n_seqs, 2)),
        # cells to copy: to which, from which; -1 where there is nothing to copy
        (COPIES, I64, lambda step: (step.n_kv, 2)),
        # how the token of each row of logits is drawn: temperature, top_k, top_p, log(min_p), and
        # a uniform number from 0 to 1
        (DRAWS, F32, lambda step: (step.n_outputs, DRAW_SETTINGS)),
        # of each row of logits, the sequence that its token is drawn for
        (OUT_SEQS, I32, _per_output),
    )
}


def input_of(name: str, step: StepShape) -> Input:
    """The input called `name` of a graph for steps of a shape."""
    return INPUTS[name](step)
