"""A tokenizer, and a live server that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.live import Live, live, texts_of
from workbench.server.text import TokenTexts


@pytest.fixture(scope="session")
def texts(tiny_model: Callable[[str, str], Path]) -> TokenTexts:
    return texts_of(tiny_model("tiny-llama", "F16"))


@pytest.fixture(scope="session")
def spm_texts(tiny_model: Callable[[str, str], Path]) -> TokenTexts:
    return texts_of(tiny_model("tiny-llama-spm", "F16"))


@pytest.fixture(scope="session")
def server(texts: TokenTexts) -> Iterator[Live]:
    with live(texts) as made:
        yield made
