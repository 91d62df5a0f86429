"""How many examples the properties are tried with: `quick` in `make test`, `long` in
`make test-slow`, which says `--hypothesis-profile=long`. Where CI is set the examples are always
the same: a gate judges the change, not the draw."""

from __future__ import annotations

import os

from hypothesis import settings

SHARES = {"quick": 30, "long": 1000}  # of a hundred


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
