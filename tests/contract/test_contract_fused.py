"""Fusion, float activations and programmatic launches through the engine, on both CPU devices.

The CPU backends run a fused node part by part, so that its twin is at hand: logits are bit-equal
whatever is fused, and what is tested is what surrounds the kernels: graph, arena, program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import workbench as wb
from tests import reference
from tests.contract.test_contract_logits import SHARP_TOLERANCE, TOLERANCE
from tests.profiles import share
from workbench.config import Toggles
from workbench.graph.fuse import FUSIONS
from workbench.program.commands import Launch

MODELS = [("tiny-llama", "Q4_K"), ("tiny-qwen3", "Q8_0"), ("tiny-llama-bias", "Q8_0"),
          ("tiny-qwen3", "F16")]  # fmt: skip
ON_EACH = [(*model, device) for model in MODELS for device in ("embedded", "host")]
ALL = Toggles().switched("fuse", "on")
HALVED = Toggles(defer_norm="on")
TOKENS = np.random.default_rng(11).integers(0, 1024, 30).tolist()
N_PREFILL = 24

GetEngine = Callable[[str, str, str], wb.Engine]


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[GetEngine]:
    """`engine(preset, quant, device)`: with no toggle on, one each for the whole module."""
    engines: dict[tuple, wb.Engine] = {}

    def get(preset: str, quant: str, device: str) -> wb.Engine:
        key = (preset, quant, device)
        if key not in engines:
            engines[key] = wb.Engine.load(
                tiny_model(preset, quant), device=device, n_ctx=64, n_kv_pad=32, n_ubatch=16,
                threads=2, toggles=Toggles(graph_reuse="set_rows"),
            )  # fmt: skip
        return engines[key]

    yield get
    for made in engines.values():
        made.close()


def logits(base: wb.Engine, toggles: Toggles) -> np.ndarray:
    """A prompt of 24 in two ubatches, then token by token; all rows."""
    with base.variant(toggles) as used:
        rows = [used.prefill(TOKENS[:N_PREFILL], outputs="all")]
        rows += [used.step([token]) for token in TOKENS[N_PREFILL:]]
        return np.concatenate(rows)


def launches(base: wb.Engine, toggles: Toggles, n_tokens: int = 1) -> int:
    with base.variant(toggles) as used:
        return used.program(n_tokens).counts()["launches"]


# halved norms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "quant", "device"), share(ON_EACH, every=3))
def test_halved_norms(engine: GetEngine, tiny_model, preset: str, quant: str, device: str):
    """They round otherwise than whole ones and are no further off; and however they are fused, they
    are the same. The prompt's second ubatch and all steps are of so few tokens that they apply."""
    base = engine(preset, quant, device)
    whole, found = logits(base, Toggles()), logits(base, HALVED)
    wanted = reference.forward(tiny_model(preset, quant), TOKENS)
    assert np.array_equal(found[:16], whole[:16]) and not np.array_equal(found, whole)
    assert reference.nmse(found, wanted) <= TOLERANCE[quant]
    assert reference.nmse(found, whole) <= TOLERANCE[quant]
    every = Toggles(**ALL.to_dict() | {"defer_norm": "on"})
    for toggles in (every, *(every.switched(name, "off") for name in FUSIONS)):
        assert np.array_equal(logits(base, toggles), found), toggles


@pytest.mark.parametrize(("preset", "quant"), MODELS)
def test_halved_norms_differ_in_last_bits_alone(engine: GetEngine, preset: str, quant: str):
    """Twelve short sequences, so that a value tipped over a rounding edge spoils few rows."""
    base = engine(preset, quant, "embedded")
    rows: list[float] = []
    for tokens in np.random.default_rng(12).integers(0, 1024, (12, 3)).tolist():
        each = []
        for toggles in (Toggles(), HALVED):
            with base.variant(toggles) as used:
                each.append(np.concatenate([used.step([token]) for token in tokens]))
        rows += [reference.nmse(*pair) for pair in zip(*each, strict=True)]
    assert 0 < np.quantile(rows, 0.25) <= SHARP_TOLERANCE


# activations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["embedded", "host"])
@pytest.mark.parametrize(("preset", "quant"), MODELS[:3])
def test_float_activations(engine: GetEngine, tiny_model, preset, quant, device):
    """As close to float64 as unquantised weights are; rounded activations are further off."""
    base = engine(preset, quant, device)
    toggles = Toggles(activations="float")
    wanted = reference.forward(tiny_model(preset, quant), TOKENS)
    found, rounded = logits(base, toggles), logits(base, Toggles())
    assert reference.nmse(found, wanted) <= TOLERANCE["F32"]
    assert TOLERANCE["F32"] < reference.nmse(rounded, wanted) <= TOLERANCE[quant]
    fused = Toggles(**ALL.to_dict() | {"activations": "float"})
    assert np.array_equal(logits(base, fused), found)
    halved = logits(base, toggles.switched("defer_norm", "on"))
    assert reference.nmse(halved, wanted) <= TOLERANCE["F32"]
    with base.variant(toggles) as used:
        ops = [c.node.op for c in used.program(1).commands if isinstance(c, Launch)]
        assert "quantize" not in ops and "mul_mat" in ops


# programmatic launches ---------------------------------------------------------------------------
