"""How many examples the properties are tried with: `quick` in `make test`, `long` in
`make test-slow`, which says `--hypothesis-profile=long`. Where CI is set the examples are always
the same: a gate judges the change, not the draw. Of long products of parameters `make test` has a
share, and `make test-slow` the rest."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SHARES = {"quick": 20, "long": 1000}  # of a hundred


def register() -> None:
    """Makes both known, and the quick one the default."""
    for name, share in SHARES.items():
        settings.register_profile(
            name, max_examples=share, deadline=None, derandomize="CI" in os.environ
        )
    settings.load_profile("quick")


def examples(n: int) -> int:
    """The examples for a property that deserves n, under the profile that is chosen."""
    assert settings.default is not None
    return max(5, n * settings.default.max_examples // 100)


def share(values: Iterable[Any], every: int) -> list[Any]:
    """Of a test's parameters every so many-th for `make test`, and the others marked slow; a tuple
    is several parameters. `every` should have no divisor in common with the inner length of a
    product: then each value has its turn."""
    slow = pytest.mark.slow
    return [
        value if n % every == 0 else pytest.param(*_of(value), marks=slow)
        for n, value in enumerate(values)
    ]


def _of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
