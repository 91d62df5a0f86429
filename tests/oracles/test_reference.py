"""The float64 reference itself: against scalar loops, and what must hold for any weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests import reference

N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_VOCAB, N_LAYER = 16, 4, 2, 24, 11, 2
HEAD_DIM = N_EMBD // N_HEAD
EPS, THETA = 1e-5, 500.0
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write_model(
    path: Path,
    architecture: str,
    *,
    n_layer: int = N_LAYER,
    tied: bool = False,
    bias: float | None = None,
    factors: list[float] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A small F32 model with weights from a fixed seed, so that variants differ as asked only.

    bias: every bias there is, scaled by this. factors: rope_freqs. metadata: extra float or string
    values under the architecture's prefix.
    """
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(n_layer)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    for name, value in (metadata or {}).items():
        key = f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)

    def add(name: str, *shape: int, scale: float = 1.0, offset: float = 0.0) -> None:
        values = offset + scale * rng.standard_normal(shape)
        writer.add_tensor(name, values.astype(np.float32))

    n_kv = N_HEAD_KV * HEAD_DIM
    add("token_embd.weight", N_VOCAB, N_EMBD)
    for block in (f"blk.{i}." for i in range(n_layer)):
        for name, rows, cols in (
            ("attn_q", N_EMBD, N_EMBD),
            ("attn_k", n_kv, N_EMBD),
            ("attn_v", n_kv, N_EMBD),
            ("attn_output", N_EMBD, N_EMBD),
            ("ffn_gate", N_FF, N_EMBD),
            ("ffn_up", N_FF, N_EMBD),
            ("ffn_down", N_EMBD, N_FF),
        ):
            add(f"{block}{name}.weight", rows, cols, scale=cols**-0.5)
            values = rng.standard_normal(rows)
            if bias is not None:
                writer.add_tensor(f"{block}{name}.bias", (bias * values).astype(np.float32))
        norms = [("attn_norm", N_EMBD), ("ffn_norm", N_EMBD)]
        if architecture == "qwen3":
            norms += [("attn_q_norm", HEAD_DIM), ("attn_k_norm", HEAD_DIM)]
        for name, cols in norms:
            add(f"{block}{name}.weight", cols, scale=0.1, offset=1.0)
    add("output_norm.weight", N_EMBD, scale=0.1, offset=1.0)
    if not tied:
        add("output.weight", N_VOCAB, N_EMBD, scale=N_EMBD**-0.5)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scalar_forward(path: Path, tokens: list[int]) -> list[list[float]]:
    """The same model in scalar loops, position after position with a cache: no NumPy maths."""
    reader = gguf.GGUFReader(path)
    qwen = reader.fields["general.architecture"].contents() == "qwen3"
    w = {t.name: t.data.astype(float).tolist() for t in reader.tensors}

    def norm(x, weight):
        scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + EPS)
        return [v * scale * g for v, g in zip(x, weight, strict=True)]

    def linear(name, x):
        out = [sum(a * b for a, b in zip(row, x, strict=True)) for row in w[f"{name}.weight"]]
        return [a + b for a, b in zip(out, w.get(f"{name}.bias", [0] * len(out)), strict=True)]

    def turn(head, position):
        out = list(head)
        for i in range(HEAD_DIM // 2):
            a, b = (i, i + HEAD_DIM // 2) if qwen else (2 * i, 2 * i + 1)
            z = complex(head[a], head[b]) * np.exp(1j * position * THETA ** (-2 * i / HEAD_DIM))
            out[a], out[b] = z.real, z.imag
        return out

    cache: list[tuple[list, list]] = [([], []) for _ in range(N_LAYER)]
    logits = []
    for position, token in enumerate(tokens):
        x = w["token_embd.weight"][token]
        for layer, (keys, values) in enumerate(cache):
            block = f"blk.{layer}."
            y = norm(x, w[f"{block}attn_norm.weight"])

            def heads(name, y=y, block=block):
                flat = linear(f"{block}{name}", y)
                return [flat[i : i + HEAD_DIM] for i in range(0, len(flat), HEAD_DIM)]

            q, k = heads("attn_q"), heads("attn_k")
            if qwen:
                q = [norm(head, w[f"{block}attn_q_norm.weight"]) for head in q]
                k = [norm(head, w[f"{block}attn_k_norm.weight"]) for head in k]
            keys.append([turn(head, position) for head in k])
            values.append(heads("attn_v"))
            mixed = []
            for h in range(N_HEAD):
                turned, kv = turn(q[h], position), h * N_HEAD_KV // N_HEAD
                p = [
                    math.exp(sum(a * b for a, b in zip(turned, k[kv], strict=True)) / HEAD_DIM**0.5)
                    for k in keys
                ]
                mixed += [
                    sum(a * v[kv][d] for a, v in zip(p, values, strict=True)) / sum(p)
                    for d in range(HEAD_DIM)
                ]
            x = [a + b for a, b in zip(x, linear(f"{block}attn_output", mixed), strict=True)]
            y = norm(x, w[f"{block}ffn_norm.weight"])
            gate, up = linear(f"{block}ffn_gate", y), linear(f"{block}ffn_up", y)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            x = [a + b for a, b in zip(x, linear(f"{block}ffn_down", inner), strict=True)]
        w.setdefault("output.weight", w["token_embd.weight"])
        logits.append(linear("output", norm(x, w["output_norm.weight"])))
    return logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [None, 0.5])
def test_equals_scalar_loops(tmp_path, architecture, tied, bias):
    path = write_model(tmp_path / "m.gguf", architecture, tied=tied, bias=bias)
    logits = reference.forward(path, TOKENS)
    assert logits.dtype == np.float64 and logits.shape == (len(TOKENS), N_VOCAB)
    np.testing.assert_allclose(logits, scalar_forward(path, TOKENS), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_causal(tmp_path, architecture):
    path = write_model(tmp_path / "m.gguf", architecture)
    whole = reference.forward(path, TOKENS)
    other_end = reference.forward(path, [*TOKENS[:5], 7, 7, 0])
    np.testing.assert_allclose(whole[:5], other_end[:5], rtol=1e-12)
    assert np.abs(whole[5:] - other_end[5:]).max() > 1e-2


def test_position_matters_only_through_rope(tmp_path):
    """With infinite frequency factors nothing turns: one layer cannot tell the order of a past."""
    inf = [np.inf, np.inf]
    still = write_model(tmp_path / "a.gguf", "llama", n_layer=1, factors=inf)
    turning = write_model(tmp_path / "b.gguf", "llama", n_layer=1)

    def swapped(path):
        one, other = (reference.forward(path, [*past, 4])[-1] for past in ([1, 2], [2, 1]))
        return np.abs(one - other).max()

    assert swapped(still) < 1e-12
    assert swapped(turning) > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_linear_scaling_is_a_common_factor(tmp_path, architecture):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    scaled = write_model(tmp_path / "a.gguf", architecture, metadata=scaling)
    factors = write_model(tmp_path / "b.gguf", architecture, factors=[4.0, 4.0])
    plain = write_model(tmp_path / "c.gguf", architecture)
    logits = reference.forward(scaled, TOKENS)
    np.testing.assert_allclose(logits, reference.forward(factors, TOKENS), rtol=1e-12)
    assert reference.nmse(logits, reference.forward(plain, TOKENS)) > 1e-4


def test_rotation_depends_on_distance_alone(tmp_path):
    """The dot product of two turned vectors is the same one position later."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, HEAD_DIM))
    for architecture in ("llama", "qwen3"):
        path = write_model(tmp_path / f"{architecture}.gguf", architecture)
        model = reference.open_model(path)
        turned_a, turned_b = (
            reference.rope(model, np.broadcast_to(v, (6, 1, HEAD_DIM)))[:, 0] for v in (a, b)
        )
        np.testing.assert_allclose(
            [turned_a[i] @ turned_b[i + 2] for i in range(4)], turned_a[0] @ turned_b[2], rtol=1e-12
        )


def test_a_rewritten_file_is_read_again(tmp_path):
    path = write_model(tmp_path / "m.gguf", "llama")
    before = reference.forward(path, TOKENS)
    path.unlink()
    after = reference.forward(write_model(path, "llama", tied=True), TOKENS)
    assert np.abs(after - before).max() > 1e-2


def test_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="architecture 'gpt2'"):
        reference.forward(write_model(tmp_path / "a.gguf", "gpt2"), TOKENS)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    with pytest.raises(ValueError, match="RoPE scaling 'yarn'"):
        reference.forward(write_model(tmp_path / "b.gguf", "llama", metadata=yarn), TOKENS)


def test_round_to_8_bits():
    x = np.zeros((2, 64))
    x[0, :4] = [127, 2.5, 3.5, -0.4]  # steps of 1, ties to even
    x[1, 32:35] = [-1.27, 0.019, 0.0]  # steps of 0.01; the first block stays 0
    wanted = np.zeros((2, 64))
    wanted[0, :4] = [127, 2, 4, 0]
    wanted[1, 32:35] = [-1.27, 0.02, 0.0]
    np.testing.assert_allclose(reference.round_to_8_bits(x), wanted, atol=1e-15)


def test_rounded_keeps_the_cache_in_f16_and_f32_products_whole(tmp_path):
    path = write_model(tmp_path / "m.gguf", "llama")
    plain = reference.forward(path, TOKENS)
    rounded = reference.forward(path, TOKENS, rounded=True)
    assert 1e-10 < reference.nmse(rounded, plain) < 1e-6  # 2**-11 squared is 2.4e-7


def test_nmse_and_argmax_rule():
    wanted = np.array([[0.0, 1.0, 3.0], [0.0, 3.0, 3.01]])
    assert reference.nmse(wanted, wanted) == 0
    assert reference.nmse(wanted + 0.1, wanted) == pytest.approx(6 * 0.01 / np.sum(wanted**2))
    # row 0: a clear margin, so another argmax counts; row 1: within the noise, so it does not
    assert reference.decided_argmax_mismatches(wanted[:, [0, 2, 1]] - 0.0, wanted) == []
    close = wanted.copy()
    close[0, 1] = 3.2
    close[1, 1] = 3.05
    assert reference.decided_argmax_mismatches(close, wanted) == []
    far = np.tile(wanted[:1], (1, 40))
    flipped = far.copy()
    flipped[0, 0] = far.max() + 0.2
    assert reference.decided_argmax_mismatches(flipped, far) == []  # the largest value is not alone
    far[0, -1] = 5.0
    flipped = far.copy()
    flipped[0, 0] = 5.1
    assert reference.decided_argmax_mismatches(flipped, far) == [0]
