"""The texts of a file's tokens, as a server has them."""

from __future__ import annotations

from pathlib import Path

from workbench.model.gguf.file import open_gguf
from workbench.model.tokenizer.tokenizer import load_tokenizer
from workbench.server.text import TokenTexts


def texts_of(path: Path) -> TokenTexts:
    with open_gguf(path) as file:
        return TokenTexts(load_tokenizer(file))
