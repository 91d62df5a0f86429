"""Tokens and tensors of one file, compared: what differs is refused with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edited import edited
from workbench.common.errors import ModelFileError
from workbench.model.decoder import Model
from workbench.model.gguf.file import open_gguf
from workbench.model.tokenizer.tokenizer import load_tokenizer

T = "tokenizer.ggml."
N = 640  # tokens of tiny-llama-spm


@pytest.fixture(scope="module")
def source(tiny_model) -> Path:
    return tiny_model("tiny-llama-spm", "Q4_0")


def lists(source: Path, n: int) -> dict[str, list]:
    """Tokens, scores and types of `source`, of each as many as n: the first, or made up ones."""
    with open_gguf(source) as file:
        tokens, scores, types = (
            file.get(T + name, list) for name in ("tokens", "scores", "token_type")
        )
    more = range(n - len(tokens))
    return {
        T + "tokens": (tokens + [f"more {i}" for i in more])[:n],
        T + "scores": (scores + [-1e4] * len(more))[:n],
        T + "token_type": (types + [1] * len(more))[:n],
    }


def refusal(path: Path) -> str:
    """The line that both the engine and the front of a server end with."""
    with pytest.raises(ModelFileError) as by_model:
        Model(path)
    with open_gguf(path) as file, pytest.raises(ModelFileError) as by_tokenizer:
        load_tokenizer(file)
    line = str(by_model.value)
    assert line == str(by_tokenizer.value) and line.isprintable() and line.startswith(str(path))
    return line


@pytest.mark.parametrize("n", [N - 124, N - 1, N + 1])
def test_more_or_fewer_tokens_than_rows(source, tmp_path, n):
    line = refusal(edited(source, tmp_path / "m.gguf", keys=lists(source, n)))
    assert f"tensor token_embd.weight has {N} rows for {n} tokens in {T}tokens" in line


def test_a_vocab_size_that_is_not_that_of_tokens(source, tmp_path):
    line = refusal(edited(source, tmp_path / "m.gguf", keys={"llama.vocab_size": 32000}))
    assert f"'llama.vocab_size' is 32000 for {N} tokens" in line
    path = edited(source, tmp_path / "n.gguf", keys={"llama.vocab_size": None})
    assert Model(path).n_vocab == N


def test_an_output_of_other_rows(source, tmp_path):
    with open_gguf(source) as file:
        info = file.tensors["token_embd.weight"]
        rows = file.data("token_embd.weight").reshape(N, -1)[:-8]
    head = {"output.weight": (rows, info.dtype.name)}
    line = refusal(edited(source, tmp_path / "m.gguf", tensors=head))
    assert f"tensor output.weight has {N - 8} rows for {N} tokens" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("bos", N), ("eos", N), ("eot", N + 1), ("eom", (1 << 32) - 1), ("unknown", N),
     ("padding", N), ("seperator", N), ("mask", N), ("fim_pad", N), ("prefix", N)],
)  # fmt: skip
def test_a_special_id_that_is_no_token(source, tmp_path, name, value):
    key = f"{T}{name}_token_id"
    line = refusal(edited(source, tmp_path / "m.gguf", keys={key: value}))
    assert f"'{key}' is {value}, outside the vocabulary of {N}" in line


def test_a_file_without_tokens_still_opens(tiny_model, tmp_path):
    keys = dict.fromkeys((f"{T}tokens", f"{T}token_type", f"{T}merges"))
    source = tiny_model("tiny-llama", "Q4_0")
    assert Model(edited(source, tmp_path / "m.gguf", keys=keys)).n_vocab == 1024
    path = edited(source, tmp_path / "n.gguf", keys=keys | {"llama.vocab_size": 900})
    with pytest.raises(ModelFileError, match=r"is 900 for 1024 rows of token_embd\.weight"):
        Model(path)
