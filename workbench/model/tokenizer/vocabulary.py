"""Compares the statements of a file about its vocabulary.

The token list, its scores and types, the rows of embedding and output, `vocab_size` and the special
ids must all agree on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.common.errors import ModelFileError
from workbench.model.gguf.file import GGUFFile
from workbench.model.gguf.metadata import TOKENIZER_KEYS, Use
from workbench.model.gguf.walk import REWRITE, StringArray, shown

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_PREFIX = "tokenizer.ggml."
_TOKENS = f"{_PREFIX}tokens"
# older converters wrote this for a missing token; allowed in keys without effect
_NO_TOKEN = (-1, (1 << 32) - 1)
_IDS = {key.name: key.use for key in TOKENIZER_KEYS if key.name.endswith("_token_id")}


def check_vocabulary(file: GGUFFile) -> None:
    """Compares all numbers of tokens in a file, and checks that special ids are tokens.

    Every number is compared with the length of the token list, or else with the rows of the
    embedding; a file with neither passes. Raises ModelFileError, one line with both numbers, where
    the scores, the types, the rows of embedding and output, or `vocab_size` differ. Raises
    ModelFileError for a special id that is no token; an id without effect may stand for no token.
    """
    listed = _length(file, _TOKENS)
    if listed is not None:
        n, those = listed, f"tokens in {_TOKENS}"
    elif EMBEDDING in file.tensors:
        n, those = file.tensors[EMBEDDING].shape[0], f"rows of {EMBEDDING}"
    else:
        return
    for what, other in _counts(file):
        if other != n:
            raise ModelFileError(f"{shown(file.path)}: {what} for {n} {those}; {REWRITE}")
    for key, use in _IDS.items():
        value = file.get(key, int, 0)
        if not 0 <= value < n and not (use == Use.WITHOUT_EFFECT and value in _NO_TOKEN):
            raise ModelFileError(
                f"{shown(file.path)}: metadata key {key!r} is {value}, outside the vocabulary of "
                f"{n}; {REWRITE}"
            )


def _counts(file: GGUFFile) -> Iterator[tuple[str, int]]:
    """The statements of a file about its number of tokens: in words, with the number."""
    for name in (EMBEDDING, OUTPUT):
        if name in file.tensors:
            rows = file.tensors[name].shape[0]
            yield f"tensor {name} has {rows} rows", rows
    for key in (f"{_PREFIX}scores", f"{_PREFIX}token_type"):
        n = _length(file, key)
        if n is not None:
            yield f"metadata key '{key}' has {n} entries", n
    key = f"{file.metadata.get('general.architecture')}.vocab_size"
    if key in file.metadata:
        size = file.get(key, int)
        yield f"metadata key {shown(key)!r} is {size}", size


def _length(file: GGUFFile, key: str) -> int | None:
    """The length of an array; None for a value that is no array, which its reader refuses."""
    values = file.metadata.get(key)
    return len(values) if isinstance(values, StringArray | np.ndarray | list) else None
