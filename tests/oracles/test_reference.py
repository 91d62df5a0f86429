"""The float64 reference itself, against scalar loops."""

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
N_KV = N_HEAD_KV * HEAD_DIM
EPS, THETA = float(np.float32(1e-5)), 500.0  # as the file has them
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPES = {
    "attn_q": (N_EMBD, N_EMBD), "attn_k": (N_KV, N_EMBD), "attn_v": (N_KV, N_EMBD),
    "attn_output": (N_EMBD, N_EMBD), "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD),
    "ffn_down": (N_EMBD, N_FF), "attn_norm": (N_EMBD,), "ffn_norm": (N_EMBD,),
}  # fmt: skip
OF_QWEN = {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}


def write_model(
    path: Path, arch: str, *, tied=False, bias=0.0, factors=(), **metadata: float | str
) -> Path:
    """A small F32 model. bias: the scale of every bias there is. factors: rope_freqs."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(N_LAYER)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    for name, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{arch}.rope.scaling.{name}", value)  # type: ignore[operator]
    shapes = {"token_embd": (N_VOCAB, N_EMBD), "output_norm": (N_EMBD,)}
    for i in range(N_LAYER):
        of_layer = SHAPES | (OF_QWEN if arch == "qwen3" else {})
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_layer.items()}
    shapes |= {} if tied else {"output": (N_VOCAB, N_EMBD)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        values = values * shape[1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * values
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
        if bias and len(shape) > 1 and name.startswith("blk"):
            more = bias * rng.standard_normal(shape[0])
            writer.add_tensor(f"{name}.bias", more.astype(np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scalar_forward(path: Path, tokens: list[int], scale: float) -> list[list[float]]:
    """The same model in scalar loops, position after position with a cache: no NumPy maths."""
    reader = gguf.GGUFReader(path)
    qwen = reader.fields["general.architecture"].contents() == "qwen3"
    w: dict[str, Any] = {t.name: t.data.astype(float).tolist() for t in reader.tensors}
    factors = w.get("rope_freqs.weight", [1.0] * (HEAD_DIM // 2))

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def norm(x, name):
        root = math.sqrt(dot(x, x) / len(x) + EPS)
        return [v / root * g for v, g in zip(x, w[f"{name}.weight"], strict=True)]

    def linear(name, x):
        out = [dot(row, x) for row in w[f"{name}.weight"]]
        return [a + b for a, b in zip(out, w.get(f"{name}.bias", [0] * len(out)), strict=True)]

    def heads(name, x):
        flat = linear(name, x)
        return [flat[i : i + HEAD_DIM] for i in range(0, len(flat), HEAD_DIM)]

    def turn(head, position):
        out = list(head)
        for i in range(HEAD_DIM // 2):
            a, b = (i, i + HEAD_DIM // 2) if qwen else (2 * i, 2 * i + 1)
            angle = position * scale * THETA ** (-2 * i / HEAD_DIM) / factors[i]
            z = complex(head[a], head[b]) * complex(math.cos(angle), math.sin(angle))
            out[a], out[b] = z.real, z.imag
        return out

    cache: list[tuple[list, list]] = [([], []) for _ in range(N_LAYER)]
    logits = []
    for position, token in enumerate(tokens):
        x = w["token_embd.weight"][token]
        for layer, (keys, values) in enumerate(cache):
            of = f"blk.{layer}."
            y = norm(x, f"{of}attn_norm")
            q, k = heads(f"{of}attn_q", y), heads(f"{of}attn_k", y)
            if qwen:
                q = [norm(head, f"{of}attn_q_norm") for head in q]
                k = [norm(head, f"{of}attn_k_norm") for head in k]
            keys.append([turn(head, position) for head in k])
            values.append(heads(f"{of}attn_v", y))
            mixed = []
            for h in range(N_HEAD):
                turned, kv = turn(q[h], position), h * N_HEAD_KV // N_HEAD
                p = [math.exp(dot(turned, k[kv]) / HEAD_DIM**0.5) for k in keys]
                mixed += [dot(p, [v[kv][d] for v in values]) / sum(p) for d in range(HEAD_DIM)]
            x = [a + b for a, b in zip(x, linear(f"{of}attn_output", mixed), strict=True)]
            y = norm(x, f"{of}ffn_norm")
            gate, up = linear(f"{of}ffn_gate", y), linear(f"{of}ffn_up", y)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            x = [a + b for a, b in zip(x, linear(f"{of}ffn_down", inner), strict=True)]
        w.setdefault("output.weight", w["token_embd.weight"])
        logits.append(linear("output", norm(x, "output_norm")))
    return logits


LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "given",
    [{}, {"tied": True}, {"bias": 0.5}, {"factors": (2.0, np.inf)}, LINEAR],
    ids=lambda given: ",".join(given) or "plain",
)
def test_equals_scalar_loops(tmp_path, arch, given):
    path = write_model(tmp_path / "m.gguf", arch, **given)
    logits = reference.forward(path, TOKENS)
    assert logits.dtype == np.float64 and logits.shape == (len(TOKENS), N_VOCAB)
    wanted = scalar_forward(path, TOKENS, 1 / given.get("factor", 1))
    np.testing.assert_allclose(logits, wanted, rtol=1e-10, atol=1e-12)
    rounded = reference.forward(path, TOKENS, rounded=True)  # of F32 the cache alone
    assert 1e-10 < reference.nmse(rounded, logits) < 1e-6  # 2**-11 squared is 2.4e-7


def test_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="architecture 'gpt2'"):
        reference.forward(write_model(tmp_path / "a.gguf", "gpt2"), TOKENS)
    with pytest.raises(ValueError, match="RoPE scaling 'yarn'"):
        reference.forward(write_model(tmp_path / "b.gguf", "llama", type="yarn"), TOKENS)


def test_round_to_8_bits():
    x, wanted = np.zeros((2, 2, 64))
    x[0, :4], wanted[0, :3] = [127, 2.5, 3.5, -0.4], [127, 2, 4]  # steps of 1, ties to even
    x[1, 32:34], wanted[1, 32:34] = [-1.27, 0.019], [-1.27, 0.02]  # the first block stays 0
    np.testing.assert_allclose(reference.round_to_8_bits(x), wanted, atol=1e-15)


def test_an_argmax_counts_where_the_margin_is_clear():
    wanted = np.array([[0.0, 1.0, 3.0], [0.0, 3.0, 3.01]])
    close = np.array([[0.0, 3.2, 3.0], [0.0, 3.05, 3.01]])
    assert reference.decided_argmax_mismatches(close, wanted) == []  # within the noise
    far = np.tile(wanted[:1], (1, 40))
    far[0, -1] = 5.0
    flipped = far.copy()
    flipped[0, 0] = 5.1
    assert reference.decided_argmax_mismatches(flipped, far) == [0]
