"""How much of what is long is tried, by three targets: `make test` tries little, `make test-slow`
more, `make test-exhaustive` all.

Properties have as many examples as the profile of their target says (`--hypothesis-profile`).
Where CI is set the examples are always the same: a gate judges the change, not the draw. A single
test that takes a second or more is marked `long`, and is for `make test-slow`, too. So are single
parameters with which a test takes as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SHARES = {"quick": 10, "slow": 25, "exhaustive": 1000}  # of a hundred


def register() -> None:
    """Makes all known, and the quick one the default."""
    for name, share in SHARES.items():
        settings.register_profile(
            name, max_examples=share, deadline=None, derandomize="CI" in os.environ
        )
    settings.load_profile("quick")


def examples(n: int) -> int:
    """The examples for a property that deserves n, under the profile that is chosen."""
    assert settings.default is not None
    return max(5, n * settings.default.max_examples // 100)


def share(values: Iterable[Any], every: int, slow: int = 1) -> list[Any]:
    """Of a test's parameters every so many-th for `make test`; of the others every slow-th for
    `make test-slow`, and the rest for `make test-exhaustive`. A tuple is several parameters. Where
    `every` has no divisor in common with the inner length of a product each value has its turn."""
    tried = list(values)
    others = iter(rest([value for n, value in enumerate(tried) if n % every], slow))
    return [next(others) if n % every else value for n, value in enumerate(tried)]


def rest(values: Iterable[Any], slow: int) -> list[Any]:
    """Of parameters that `make test` has no use for every slow-th for `make test-slow`, and the
    others for `make test-exhaustive`."""
    return [_marked(v, "exhaustive" if n % slow else "slow") for n, v in enumerate(values)]


def tiers(slow: Any, exhaustive: Any) -> list[Any]:
    """Of a parameter that says how much a test tries, the value for `make test-slow` and the one
    for `make test-exhaustive`; those in front of them are for `make test`."""
    return [_marked(slow, "slow"), _marked(exhaustive, "exhaustive")]


def long(*parameters: Any) -> Any:
    """Parameters with which a test takes a second or more."""
    return _marked(parameters, "long")


def exhaustive(*parameters: Any) -> Any:
    """Parameters of a test for `make test-exhaustive` alone."""
    return _marked(parameters, "exhaustive")


def _marked(value: Any, mark: str) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=getattr(pytest.mark, mark))
