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
from tests.cpu.test_logits import SHARP_TOLERANCE, TOLERANCE
from tests.profiles import share
from workbench.backend.base import open_backend
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine import load as loaded
from workbench.graph.fuse import FUSIONS
from workbench.program.as_json import program_as_json
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


def choices() -> list[Toggles]:
    """Each pattern alone, all, and some at random."""
    rng = np.random.default_rng(3)
    picked = [[name for name in FUSIONS if rng.random() < 0.5] for _ in range(5)]
    return [
        *(Toggles(**dict.fromkeys(names, "on")) for names in [*([n] for n in FUSIONS), *picked]),
        ALL,
    ]


@pytest.mark.parametrize(("preset", "quant", "device"), share(ON_EACH, every=3))
def test_bit_equal_whatever_is_fused(engine: GetEngine, preset: str, quant: str, device: str):
    base = engine(preset, quant, device)
    wanted = logits(base, Toggles())
    assert len(np.unique(wanted.argmax(axis=-1))) > 10
    for toggles in choices():
        assert np.array_equal(logits(base, toggles), wanted), toggles


# of a program of two layers: none, then each pattern alone in the order of FUSIONS, then all
LAUNCHES = {
    ("tiny-llama", "Q4_K"): (53, 48, 48, 49, 53, 49, 47, 49, 49, 53, 19),
    ("tiny-llama-bias", "Q8_0"): (61, 56, 56, 57, 53, 57, 55, 57, 57, 61, 19),
    ("tiny-qwen3", "Q8_0"): (61, 52, 56, 57, 61, 57, 55, 57, 57, 61, 19),
    ("tiny-qwen3", "F16"): (52, 43, 52, 48, 52, 48, 46, 48, 52, 52, 19),
}


@pytest.mark.parametrize(("preset", "quant"), MODELS)
def test_launches_of_a_program(engine: GetEngine, preset: str, quant: str):
    base = engine(preset, quant, "embedded")
    sets = [Toggles(), *(Toggles(**{name: "on"}) for name in FUSIONS), ALL]
    found = tuple(launches(base, toggles) for toggles in sets)
    assert found == LAUNCHES[preset, quant]
    assert launches(base, ALL, 16) == found[-1]


def test_fused_launches_follow_exact_toggles_too(engine: GetEngine):
    """Fusion beside other schedules: the program's ranges are right whatever copies overlap."""
    base = engine("tiny-qwen3", "Q8_0", "embedded")
    wanted = logits(base, Toggles())
    for exact in (
        {"sync": "implicit", "copy_stream": "compute"},
        {"sync": "write_read_boundary"},
        {"graph_reuse": "set_rows", "sync": "auto"},
    ):
        assert np.array_equal(logits(base, Toggles(**ALL.to_dict() | exact)), wanted), exact


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


# of a program of two layers, norms halved: with no pattern, with all of them
HALVED_LAUNCHES = {
    ("tiny-llama", "Q4_K"): (59, 16), ("tiny-llama-bias", "Q8_0"): (67, 16),
    ("tiny-qwen3", "Q8_0"): (67, 16), ("tiny-qwen3", "F16"): (58, 16),
}  # fmt: skip


@pytest.mark.parametrize(("preset", "quant"), MODELS)
def test_launches_with_halved_norms(engine: GetEngine, preset: str, quant: str):
    base = engine(preset, quant, "embedded")
    every = Toggles(**ALL.to_dict() | {"defer_norm": "on"})
    for n_tokens in (1, 8):
        found = tuple(launches(base, toggles, n_tokens) for toggles in (HALVED, every))
        assert found == HALVED_LAUNCHES[preset, quant]
    for n_tokens in (9, 16):
        assert launches(base, every, n_tokens) == LAUNCHES[preset, quant][-1]


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


def test_float_activations_change_nothing_without_quantised_weights(engine: GetEngine):
    base = engine("tiny-qwen3", "F16", "embedded")
    float_path = Toggles(activations="float")
    assert launches(base, float_path) == launches(base, Toggles())
    assert np.array_equal(logits(base, float_path), logits(base, Toggles()))


# programmatic launches ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["embedded", "host"])
def test_programmatic_launches_are_refused_in_one_line(engine: GetEngine, device: str):
    base = engine("tiny-llama", "Q4_K", device)
    with pytest.raises(DeviceError) as refused, base.variant(Toggles(pdl="on")):
        pass
    assert str(refused.value) == (
        f"the {device} device cannot honour pdl=on: it has no programmatic dependent launch "
        "(CUDA, compute capability 9.0 or later); use pdl=off"
    )


@pytest.mark.parametrize("fused", [Toggles(), ALL], ids=["unfused", "fused"])
def test_launches_are_marked_where_the_device_can(tiny_model, monkeypatch, fused: Toggles):
    def able(name: str, threads: int):
        early = {"programmatic": True} if name == "null" else {}
        return open_backend(name, threads, **early)

    monkeypatch.setattr(loaded, "open_backend", able)
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=64, toggles=wb.Toggles()
    ) as engine:
        for pdl in ("off", "on"):
            with engine.variant(Toggles(**fused.to_dict() | {"pdl": pdl})) as used:
                commands = [c for c in used.program(1).commands if isinstance(c, Launch)]
                device = [c.programmatic for c in commands if c.stream.backend == 1]
                host = [c.programmatic for c in commands if c.stream.backend == 0]
                assert set(device) == {pdl == "on"} and set(host) == {False}
                shown = program_as_json(used.program(1))["commands"]
                assert sum("programmatic" in c for c in shown) == len(device) * (pdl == "on")
