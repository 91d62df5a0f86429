"""Hybrid runs: layers and single weights on the host, the others on the device, same answer."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from tests.profiles import share
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, Toggles
from workbench.program.commands import DEVICE, HOST, Copy, Launch, Sync

PROMPT, MODELS = (
    [5, 900, 17, 403, 77, 12, 99, 3] * 5,
    [("tiny-llama", "Q8_0"), ("tiny-qwen3", "F32")],
)
PLACED = {
    "everything": {},
    "the last layer and the output": {"n_gpu_layers": 2},
    "the output": {"n_gpu_layers": 1},
    "nothing": {"n_gpu_layers": 0},
    "feed-forward on the host": {"override_tensor": ("ffn_.*=host",)},
    "one weight on the host": {"override_tensor": (r"blk\.1\.attn_q\.weight=host",)},
    "one weight on the device": {"n_gpu_layers": 0, "override_tensor": ("blk.0.ffn_up=device",)},
    "the first that matches wins": {"override_tensor": ("ffn_up=device", "ffn_.*=host")},
}  # fmt: skip


def run(engine: wb.Engine) -> np.ndarray:
    return np.concatenate([engine.prefill(PROMPT, outputs="all"), engine.step([7])])


@pytest.fixture
def load(tiny_model):
    def make(preset: str, quant: str, **config) -> wb.Engine:
        path = tiny_model(preset, quant)
        return wb.Engine.load(
            path, device="embedded", n_ctx=256, n_ubatch=16, threads=2,
            **{"toggles": wb.Toggles()} | config,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("placed", share(PLACED, every=3))
@pytest.mark.parametrize(("preset", "quant"), MODELS)
def test_the_answer_is_the_same_wherever_weights_are(load, preset, quant, placed):
    """Host and embedded device compute with the same kernels: bit by bit, fused and not, with and
    without a wait for each ubatch."""
    with load(preset, quant) as whole, load(preset, quant, **PLACED[placed]) as engine:
        wanted = run(whole)
        for toggles in (
            Toggles(),
            Toggles(sync="copy_boundary", graph_reuse="set_rows", input_order="user_first"),
            Toggles(sync="packed", copy_stream="compute", step_wait="outputs"),
        ):
            with engine.variant(toggles) as variant:
                assert np.array_equal(run(variant), wanted), toggles
        fused, off = (e.variant(Toggles().switched("fuse", "on")) for e in (engine, whole))
        with fused, off:
            assert np.array_equal(run(fused), run(off))


def test_splits_alternate_where_weights_do(load):
    patterns = {name: load_and_see(load, config) for name, config in PLACED.items()}
    assert patterns["everything"] == "h g"
    assert patterns["the last layer and the output"] == "h g"
    assert patterns["nothing"] == "h"
    assert patterns["feed-forward on the host"] == "h g h g h g"
    assert patterns["one weight on the host"] == "h g h g"
    assert patterns["one weight on the device"] == "h g h"


def load_and_see(load, config) -> str:
    """The work of the splits, without waits and copies."""
    with load("tiny-llama", "Q8_0", **config) as engine:
        groups = engine.program().pattern().split()
    return " ".join("".join(c for c in group if c in "gh") for group in groups)


def test_what_a_host_split_takes_from_the_device_is_waited_for(load):
    with load("tiny-llama", "Q8_0", override_tensor=("ffn_.*=host",)) as engine:
        program = engine.program()
    for i, command in enumerate(program.commands):
        if isinstance(command, Copy) and program.splits[command.split] == HOST:
            wait = program.commands[i + 1]
            assert isinstance(wait, Sync) and wait.blocks is command


def test_caches_are_where_their_layer_is(load):
    with load("tiny-llama", "Q8_0", n_gpu_layers=2) as engine:
        stores = [c for c in engine.program().commands
                  if isinstance(c, Launch) and c.node.op in ("set_rows", "attention")]  # fmt: skip
        layers = {(c.node.layer, c.stream.backend) for c in stores}
    assert layers == {(0, HOST), (1, DEVICE)}


def test_a_node_of_several_weights_is_fused_only_where_they_are_together(load):
    """Q on the host, K and V on the device: no product of all three."""
    on = Toggles().switched("fuse", "on")
    with (
        load("tiny-llama", "Q8_0", override_tensor=("attn_q=host",)) as engine,
        engine.variant(on) as fused,
    ):
        ops = [c.node.op for c in fused.program().commands if isinstance(c, Launch)]
    assert "glu" in ops and not {"qkv", "qkv_rope_store"} & set(ops)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"override_tensor": ("ffn_gaet=host",)}, "'ffn_gaet=host' matches no weight of "),
        ({"override_tensor": ("token_embd=device",)}, "token_embd and rope_freqs have backends of"),
        ({"device": "host", "n_gpu_layers": 1}, "the host device has no GPU to put layers on"),
    ],
)
def test_what_a_model_has_not_is_refused_in_one_line(tiny_model, config, says):
    with pytest.raises(UsageError) as refused:
        wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), **({"device": "embedded"} | config))
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_gpu_layers": -2}, "n_gpu_layers=-2 must be -1 (all) or more"),
        ({"override_tensor": ("ffn",)}, "'ffn' is no PATTERN=host and no PATTERN=device"),
        ({"override_tensor": ("ffn=gpu",)}, "'ffn=gpu' is no PATTERN=host"),
        ({"override_tensor": ("(ffn=host",)}, "'(ffn' is no regular expression (missing )"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(fields, says):
    with pytest.raises(UsageError) as refused:
        EngineConfig(**fields)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_devices_without_layers_are_refused(tiny_model):
    with pytest.raises(UsageError, match="n_devices=2: n_gpu_layers=1 leaves some without layers"):
        wb.Engine.load(
            tiny_model("tiny-llama", "Q8_0"),
            device="null",
            n_devices=2,
            n_gpu_layers=1,
            toggles=wb.Toggles(),
        )
