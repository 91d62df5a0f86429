"""K and V in the cache as F16, BF16, F32 or Q8_0: the same tokens fed, what an engine answers, and
what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import workbench as wb
from tests import reference
from workbench.benchmarks.llama.llama_bench import bench
from workbench.common.errors import UsageError
from workbench.config import CACHE_TYPES, EngineConfig, Toggles
from workbench.engine.engine import Engine

RNG = np.random.default_rng(17)
PROMPT, NEXT = RNG.integers(3, 900, 40).tolist(), RNG.integers(3, 900, 6).tolist()
# What K, or V, of a type may add to the NMSE of logits against a cache of F16. Measured at most:
# 1.1e-7 (F32; the rounding to F16 that it lacks), 6.5e-6 (BF16), 7.0e-5 (Q8_0).
TOLERANCE = {"f16": 0.0, "f32": 4e-7, "bf16": 2e-5, "q8_0": 2e-4}
PAIRS = [(k, v) for k in CACHE_TYPES for v in CACHE_TYPES]


def load(path, k: str = "f16", v: str = "f16", device: str = "embedded", **toggles: str) -> Engine:
    return wb.Engine.load(
        path, device=device, n_ctx=192, n_ubatch=32, n_kv_pad=32, n_seqs=3, threads=2,
        toggles=Toggles(**toggles), cache_type_k=k, cache_type_v=v,
    )  # fmt: skip


def answers(engine: Engine) -> np.ndarray:
    """Logits behind a prompt, behind tokens one by one, of a copy, and behind a shift."""
    engine.prefill(PROMPT, "none")
    rows = [engine.step([token]) for token in NEXT]
    engine.cache.copy(0, 2)
    rows.append(engine.step(NEXT, "all", 2))
    engine.cache.remove(2)
    engine.cache.remove(0, 3, 9)
    engine.cache.shift(0, -6, 9)
    rows.append(engine.step(NEXT, "all"))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-qwen3", "F32")


@pytest.fixture(scope="module")
def halves(model) -> np.ndarray:
    with load(model) as engine:
        return answers(engine)


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_it_answers_as_with_halves_and_devices_agree_to_the_bit(model, halves, k, v):
    with load(model, k, v) as engine:
        found = answers(engine)
        n_cells, width = engine.cache.n_cells, engine.model.hparams.n_embd_kv
        for pair in engine._residents.caches:
            assert [t.dtype.name.lower() for t in pair] == [k, v]
            assert [t.nbytes for t in pair] == [n_cells * t.dtype.row_bytes(width) for t in pair]
    assert reference.nmse(found, halves) <= TOLERANCE[k] + TOLERANCE[v]
    assert np.array_equal(found, halves) == ((k, v) == ("f16", "f16"))
    with load(model, k, v, "host") as engine:
        assert np.array_equal(answers(engine), found)


WAYS = [
    {"kv_cache": "per_sequence", "graph_reuse": "set_rows"},
    {"graph_reuse": "patch_pointers"},
    {"graph_reuse": "pointer_table"},
    {"fuse": "on", "skip_masked_kv": "classes", "skip_gate": "always"},
    {"kv_parts": "stream_k", "streams": "3"},
]


@pytest.mark.parametrize("toggles", WAYS, ids=lambda t: ",".join(t.values()))
@pytest.mark.parametrize(("k", "v"), [("q8_0", "q8_0"), ("bf16", "f32"), ("q8_0", "f16")])
def test_every_way_of_storing_copying_and_attending(model, halves, k, v, toggles):
    with load(model, k, v, **toggles) as engine:
        found = answers(engine)
    assert reference.nmse(found, halves) <= TOLERANCE[k] + TOLERANCE[v]


def test_heads_that_blocks_do_not_fill_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    from workbench.model.synth import models as synth
    from workbench.model.synth import shapes as presets

    odd = presets.find_preset("tiny-llama")
    monkeypatch.setitem(presets.PRESETS, "odd", dataclasses.replace(odd, head_dim=48))
    path = synth.write_model("odd", "F16", tmp_path / "odd.gguf", progress=False)
    for which in ("k", "v"):
        what = f"cache_type_{which}=q8_0: heads of {path} have 48 elements, no multiple of 32; use"
        with pytest.raises(UsageError) as caught:
            wb.Engine.load(path, device="embedded", **{f"cache_type_{which}": "q8_0"})
        assert str(caught.value) == f"{what} f16, bf16 or f32"
    for name in ("f16", "bf16", "f32"):
        with load(path, name, name) as engine:
            assert np.isfinite(engine.step(PROMPT[:5])).all()


def test_what_is_no_type_is_refused_in_one_line(call, model):
    for name in ("cache_type_k", "cache_type_v"):
        with pytest.raises(UsageError, match=f"{name}='q4_0' must be one of f16, bf16, f32, q8_0$"):
            EngineConfig(**{name: "q4_0"})
    status, _, err = call("bench", "-m", model, "-ctk", "q5_1", "-p", 1, "-n", 0)
    assert status == 2 and err.strip() == (
        "error: cache_type_k='q5_1' must be one of f16, bf16, f32, q8_0"
    )


def test_it_stands_in_records_and_in_rows_of_llama_bench(call, model, tmp_path):
    with load(model, "q8_0", "bf16") as engine:
        (row,) = bench(engine, (4,), (), repetitions=1, out=tmp_path / "run")
    assert (row.fields["type_k"], row.fields["type_v"]) == ("q8_0", "bf16")
    config = json.loads((tmp_path / "run" / "run.json").read_text())["engine"]["config"]
    assert (config["cache_type_k"], config["cache_type_v"]) == ("q8_0", "bf16")
    asked = ("-ctk", "q8_0", "--cache-type-v", "f32", "--device", "embedded", "-r", 1)
    status, out, _ = call("bench", "-m", model, "-p", 4, "-n", 0, "-o", "json", *asked)
    assert status == 0 and (found := json.loads(out)[0])
    assert (found["type_k"], found["type_v"]) == ("q8_0", "f32")


@pytest.mark.parametrize(
    ("k", "v", "cell"), [("f16", "f16", 4), ("q8_0", "q8_0", 2 * 34 / 32), ("f32", "bf16", 6)]
)
def test_inspect_says_what_a_token_takes(call, model, k, v, cell):
    """2 layers of 2 kv heads with 128 elements."""
    status, out, _ = call("model", "inspect", model, "--json", "-ctk", k, "-ctv", v)
    found = json.loads(out)
    assert status == 0 and found["cache_bytes_per_token"] == cell * 2 * 2 * 128
    status, out, _ = call("model", "inspect", model, "-ctk", k, "-ctv", v)
    types = k if k == v else f"K {k}, V {v}"
    assert f"({found['cache_bytes_per_token']:,} bytes, {types})" in out.splitlines()[-1]
