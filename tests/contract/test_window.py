"""Models with a sliding window: the reference's answers, whatever the toggles, and the mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests import reference
from tests.profiles import examples
from workbench.common.errors import ModelFileError
from workbench.config import Toggles
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.cache.masks import HIDDEN
from workbench.engine.engine import Engine
from workbench.model.synth import models as synth
from workbench.model.synth import shapes as presets

WINDOW = 21
RNG = np.random.default_rng(23)
PROMPTS = [RNG.integers(3, 900, n).tolist() for n in (70, 9, 40)]
NEXT = RNG.integers(3, 900, (3, 30)).tolist()
# NMSE. With F32 weights only the cache rounds, K and V to halves. Measured: 2.3e-7.
TOLERANCE = 1e-6
REGIONS = {"kv_cache": "per_sequence", "graph_reuse": "set_rows"}
TOGGLES = [
    {},
    REGIONS,
    *(
        {"skip_masked_kv": way, "skip_gate": "always", **more}
        for way in ("in_loop", "tail", "classes")
        for more in ({}, REGIONS)
    ),
    {"kv_parts": "parallel_blocks", "skip_masked_kv": "classes", "skip_gate": "always"},
    {"kv_parts": "stream_k", "attn_kernel": "vec", **REGIONS},
    {"graph_reuse": "patch_pointers"},
    {"graph_reuse": "set_rows", "plans": "ours", "kv_growth": "full", "fuse": "on"},
    {"results": "behind", "graph_reuse": "set_rows", "batch_sizes": "padded"},
]


def write(preset: str, path: Path, monkeypatch, window: int = WINDOW) -> Path:
    shape = dataclasses.replace(presets.find_preset(preset), window=window)
    monkeypatch.setitem(presets.PRESETS, "windowed", shape)
    return synth.write_model("windowed", "F32", path, progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write("tiny-llama", tmp_path_factory.mktemp("m") / "windowed.gguf", monkeypatch)


def load(path: Path, device: str = "embedded", **toggles: str) -> Engine:
    return wb.Engine.load(
        path, device=device, n_ctx=768, n_ubatch=32, n_kv_pad=64, n_seqs=3, threads=2,
        toggles=Toggles(**toggles),
    )  # fmt: skip


def answers(engine: Engine) -> list[np.ndarray]:
    """Each sequence's logits behind its prompt and behind tokens of all three at once."""
    found = [[engine.prefill(p, "last", sequence=i)] for i, p in enumerate(PROMPTS)]
    for step in range(len(NEXT[0])):
        work = [(i, [NEXT[i][step]], "last") for i in range(3)]
        for i, rows in enumerate(engine.submit(work).each()):
            found[i].append(rows)
    return [np.concatenate(rows) for rows in found]


@pytest.fixture(scope="module")
def wanted(model) -> list[np.ndarray]:
    each = []
    for prompt, following in zip(PROMPTS, NEXT, strict=True):
        each.append(reference.forward(model, prompt + following)[len(prompt) - 1 :])
    return each


@pytest.mark.parametrize("toggles", TOGGLES, ids=lambda t: ",".join(t.values()) or "baseline")
def test_it_is_the_reference_s(model, wanted, toggles):
    with load(model, **toggles) as engine:
        assert engine.cache.window == engine.model.hparams.window == WINDOW
        for found, rows in zip(answers(engine), wanted, strict=True):
            assert reference.nmse(found, rows) < TOLERANCE


def test_without_the_window_the_answers_are_others(model, wanted, tiny_model):
    """The same weights: only what is longer than the window differs."""
    whole = reference.forward(tiny_model("tiny-llama", "F32"), PROMPTS[0])
    windowed = reference.forward(model, PROMPTS[0])
    assert np.array_equal(whole[:WINDOW], windowed[:WINDOW])
    assert reference.nmse(whole[-1:], windowed[-1:]) > 1e-3


@pytest.mark.parametrize("device", ["embedded", "host"])
def test_what_is_behind_the_window_may_go(model, device):
    """The token takes a cell that was given up, so the order of the sums differs: rounding."""
    with load(model, device) as engine:
        engine.prefill(PROMPTS[0], "none")
        wanted = engine.step(NEXT[0][:1])
        engine.reset()
        engine.prefill(PROMPTS[0], "none")
        engine.cache.remove(0, 0, len(PROMPTS[0]) - WINDOW + 1)
        assert reference.nmse(engine.step(NEXT[0][:1]), wanted) < 1e-10
        engine.cache.remove(0, len(PROMPTS[0]))
        engine.cache.remove(0, 0, len(PROMPTS[0]) - WINDOW + 2)
        assert reference.nmse(engine.step(NEXT[0][:1]), wanted) > 1e-6


def test_a_window_of_some_layers_is_refused(tmp_path, monkeypatch):
    added = synth._add_metadata

    def with_pattern(writer, *rest):
        added(writer, *rest)
        writer.add_sliding_window_pattern([True, False])

    monkeypatch.setattr(synth, "_add_metadata", with_pattern)
    path = write("tiny-qwen3", tmp_path / "m.gguf", monkeypatch)
    with pytest.raises(ModelFileError) as caught:
        load(path)
    what = "qwen3.attention.sliding_window_pattern is not supported; use a model whose layers all"
    assert str(caught.value) == f"{path}: {what} have the window"


@given(st.data())
@settings(max_examples=examples(60))
def test_the_mask_is_what_can_be_said_of_each_cell(data: st.DataObject) -> None:
    """Several sequences in one region or each in its own, in steps of any lengths."""
    window, regions = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 3]))
    cache = KVCache(96, 8, 3, n_regions=regions, window=window)
    known: dict[int, list[tuple[int, int]]] = {s: [] for s in range(3)}  # cells and positions
    for _ in range(data.draw(st.integers(1, 6))):
        sequence, n = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5))
        cells = cache.find([(sequence, n)])
        positions = cache.length(sequence) + np.arange(n, dtype=np.int32)
        n_kv = cache.extent(cells)
        mask = np.full((n, n_kv), 1, np.uint16)
        if n == 1:
            cache.masks_of_one([sequence], cells, [0], mask)
        else:
            cache.mask(sequence, positions, cells, mask)
        known[sequence] += zip(cache.in_region(cells).tolist(), positions.tolist(), strict=True)
        for row, position in zip(mask, positions.tolist(), strict=True):
            seen = {cell for cell, at in known[sequence] if position - window < at <= position}
            assert set(np.flatnonzero(row == 0)) == seen
            assert set(np.unique(row)) <= {0, int(HIDDEN)}
        cache.store(np.full(n, sequence), positions, cells)
