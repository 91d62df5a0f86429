"""mul_mat and repacking on the CPU against float64 products of the same blocks and activations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backend.cpu.kernel_runs import check_shares, repack, run, run_parts
from tests.oracles.dequantize import dequantize
from tests.profiles import long, share
from workbench.backend.cpu.compile import host_isas
from workbench.backend.cpu.isa import ISAS, available
from workbench.backend.cpu.kernels import op_table
from workbench.graph import ops
from workbench.graph.ir import F32, Q8_ACT, QUANTISED, WEIGHT_DTYPES, Node, Tensor
from workbench.model.gguf.quants import quantize_activations, random_blocks, unpack_activations

BY_NAME = {d.name: d for d in WEIGHT_DTYPES}
QUANTISED_NAMES = [name for name, dtype in BY_NAME.items() if dtype in QUANTISED]
# of a type in blocks of 256 the kernels take by far the longest to compile
NAMES = [long(name) if name.endswith("_K") else name for name in BY_NAME]
QUANTISED_PARAMETERS = [
    p for p, name in zip(NAMES, BY_NAME, strict=True) if name in QUANTISED_NAMES
]
# rows, blocks of 32 or more columns, tokens: every small batch, rows that fill no group of 16
CASES = [
    (1, 1, 1), (3, 2, 2), (7, 1, 3), (83, 2, 4), (17, 3, 5), (16, 1, 6), (1, 1, 7), (83, 1, 8),
    (33, 2, 9), (33, 9, 17), (147, 1, 10), (19, 1, 71),
]  # fmt: skip


class Case:
    """A product of random blocks and activations, and its twin in float64.

    as_floats: the activations are float32 though the weights are quantised.
    """

    def __init__(
        self, name: str, rows: int, cols: int, n_tokens: int, as_floats: bool = False,
        x: np.ndarray | None = None,
    ):  # fmt: skip
        rng, dtype = np.random.default_rng([rows, cols, n_tokens]), BY_NAME[name]
        self.dtype, self.rows, self.cols = dtype, rows, cols
        self.blocks = random_blocks(rng, dtype, rows, cols, 0.5)
        self.floats = rng.standard_normal((n_tokens, cols)).astype(np.float32) if x is None else x
        self.quantised = dtype in QUANTISED and not as_floats
        self.layouts = op_table.LAYOUTS if dtype in QUANTISED else ("file",)
        self.w = Tensor("w", dtype, (rows, cols))
        self.x = Tensor("x", Q8_ACT if self.quantised else F32, (n_tokens, cols))
        self.node: Node = ops.make("mul_mat", "y", self.w, self.x)
        self.activations = quantize_activations(self.floats) if self.quantised else self.floats

    def arrays(self, layout: str = "file") -> dict[Tensor, np.ndarray]:
        size = op_table.repacked_bytes(self.dtype, self.rows, self.cols, layout)
        guarded = np.full(size + 128, 0xA5, np.uint8)
        source = np.ascontiguousarray(self.blocks)
        repack(
            int(guarded.ctypes.data) + 64, int(source.ctypes.data), self.dtype, self.rows,
            self.cols, layout,
        )  # fmt: skip
        assert (guarded[:64] == 0xA5).all() and (guarded[-64:] == 0xA5).all()
        return {self.w: guarded[64:-64].copy(), self.x: self.activations}

    def check(self, out: np.ndarray) -> None:
        exact = self.floats.astype(np.float64)
        if self.quantised:
            quants, scales, _ = unpack_activations(self.activations, self.cols)
            exact = quants * np.repeat(scales.astype(np.float64), 32, axis=1)
        weights = dequantize(self.blocks, self.dtype, (self.rows, self.cols)).astype(np.float64)
        twin, norm = exact @ weights.T, np.abs(exact) @ np.abs(weights).T
        assert (np.abs(out.view(np.float32).reshape(twin.shape) - twin) <= 1e-6 * norm).all()

    def check_all(self) -> None:
        """The product: the same bits of every layout and number of parts."""
        given = {layout: self.arrays(layout) for layout in self.layouts}
        found = [run_parts(self.node, arrays, layout) for layout, arrays in given.items()]
        self.check(found[0])
        for layout, arrays in given.items() if self.rows > 80 else ():
            check_shares(self.node, arrays, 3, layout)
        assert all(np.array_equal(one, found[0]) for one in found), "layouts give the same bits"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows,blocks,n_tokens", CASES)
def test_product_is_the_twins(name: str, rows: int, blocks: int, n_tokens: int) -> None:
    Case(name, rows, blocks * max(BY_NAME[name].block, 32), n_tokens).check_all()
    if name not in QUANTISED_NAMES:  # any number of columns
        Case(name, 6, 31 * blocks, n_tokens).check_all()
    elif n_tokens < 9:
        Case(name, rows, 256 * blocks, n_tokens, as_floats=True).check_all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_rounded_on_the_float_path(name: str) -> None:
    """By unit vectors: the float32 values of the weights themselves, in every layout."""
    case = Case(name, 37, 512, 512, as_floats=True, x=np.eye(512, dtype=np.float32))
    expected = dequantize(case.blocks, case.dtype, (37, 512)).T
    for layout in case.layouts:
        out = run(case.node, case.arrays(layout), layout=layout).view(np.float32)
        assert np.array_equal(out.reshape(512, 37), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(name: str) -> None:
    """Also where a batch is multiplied by blocks and a token alone is not."""
    case = Case(name, 18, 512, 13)
    batch = run(case.node, case.arrays()).reshape(13, -1)
    one = Tensor("one", case.x.dtype, (1, 512))
    node = ops.make("mul_mat", "y", case.w, one)
    for t in (0, 5, 12):
        arrays = {case.w: case.blocks, one: case.activations[t : t + 1]}
        assert np.array_equal(run(node, arrays), batch[t])


@pytest.mark.parametrize("n_tokens", [2, 10])
@pytest.mark.parametrize("name", QUANTISED_PARAMETERS)
def test_extreme_quants_do_not_saturate(name: str, n_tokens: int) -> None:
    """All weight bits set or clear against activations of +-127: the largest integer sums."""
    x = np.ones((n_tokens, 256), np.float32)
    x[1::2] = -1
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        case = Case(name, 16, 256, n_tokens, x=x)
        blocks = case.blocks.reshape(-1, case.dtype.block_bytes)
        heads = {"Q6_K": slice(0, 208), "Q4_K": slice(4, 144), "Q5_K": slice(4, 176)}
        blocks[:, heads.get(name, slice(1 if name == "MXFP4" else 2, None))] = fill
        for layout in op_table.LAYOUTS:
            case.check(run(case.node, case.arrays(layout), layout=layout))


OTHER_ISAS = {
    "avxvnni": ("Q8_0", "Q6_K"), "avx2": ("Q8_0", "Q4_K", "MXFP4"),
    "generic": ("Q8_0", "Q4_0", "MXFP4"),
}  # fmt: skip


@pytest.mark.parametrize("n_tokens,as_floats", [(5, False), (11, False), (5, True)])
@pytest.mark.parametrize(
    "isa,name", share([(i.name, n) for i in host_isas()[1:] for n in OTHER_ISAS[i.name]], every=2)
)
def test_other_instruction_sets_give_the_same_bits(
    isa: str, name: str, n_tokens: int, as_floats: bool
) -> None:
    """Integer sums are exact however they are formed, and the float work is the same."""
    case = Case(name, 33, 256, n_tokens, as_floats=as_floats)
    arrays = case.arrays("rows16")
    if name == "Q8_0":  # -128, which is its own negative, in every other word of the first unit
        arrays[case.w][32:544].view(np.uint32)[::2] = 0x80808080
    best = run(case.node, arrays, layout="rows16")
    assert np.isfinite(best.view(np.float32)).all()
    assert np.array_equal(run(case.node, arrays, layout="rows16", isa=isa), best)


def test_instruction_sets_layouts_and_kernels_are_chosen() -> None:
    every = dict.fromkeys(ISAS["avx512vnni"].needs, True)
    assert [isa.name for isa in available(every)] == ["avx512vnni", "generic"]
    for lacking in every:  # each of them counts
        assert available(every | {lacking: False})[0].name != "avx512vnni"
    assert [isa.name for isa in available({"avx2": True, "fma": True})] == ["avx2", "generic"]
    for dtype in WEIGHT_DTYPES:
        layout = op_table.weight_layout(dtype)
        rows = 32 if layout == "rows16" else 17
        assert op_table.repacked_bytes(dtype, 17, 256, layout) == rows * dtype.row_bytes(256)
        assert (layout == "rows16") == (dtype in QUANTISED)
    for name, n_tokens, as_floats, kernel in (
        ("Q4_0", op_table.BATCH, False, "mul_mat"), ("F16", op_table.BATCH + 1, False, "mul_mat"),
        ("Q4_0", op_table.BATCH + 1, False, "mul_mat_blocked"),
        ("Q6_K", 1, True, "mul_mat_float"), ("Q6_K", 100, True, "mul_mat_float"),
    ):  # fmt: skip
        node = Case(name, 1, 256, n_tokens, as_floats=as_floats).node
        assert op_table.kernel_of(node) == (kernel, name)
    for wrong in (("mul_mat", "Q4_0"), "rows4"), (("rms_norm",), "rows16"):
        with pytest.raises(KeyError):
            op_table.kernel(*wrong)
