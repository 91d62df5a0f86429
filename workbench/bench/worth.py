"""What a kept graph is worth to an engine whose build costs so many us (llama.cpp #8366).

The device is idle while the host builds. So a token without a kept graph takes the time of one with
it, and the build. A ratio that was measured here is the price of this engine's Python; the same
sum, with the build of another engine, says what it would be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.engine.phases import per_step

BUILD_US = (0, 25, 50, 100, 200, 400)  # of a table
# speedups of #8366 in its thread, Llama 7B and 13B Q4 on seven GPUs
CLAIMED = (1.03, 1.07)
BUILD = ("graph", "fuse", "split", "layout", "lower", "prepare")  # phases that a kept program saves


def speedup(token_us: float, build_us: float) -> float:
    """Of a kept graph. token_us: a token with it; build_us: what building it anew costs."""
    return (token_us + build_us) / token_us


def build_us(token_us: float, speedup: float) -> float:
    """The build with which a kept graph has this speedup."""
    return token_us * (speedup - 1)


def phases_us(counters: Mapping[str, int]) -> dict[str, float]:
    """us a step by phase, of the counters of an arm or an engine."""
    return {row.phase: row.us for row in per_step(counters)}


def own_build_us(arm: Mapping[str, Any]) -> float:
    """us a token of all phases of this engine's build, of an arm that keeps nothing."""
    phases = phases_us(arm["counters"])
    return sum(phases[phase] for phase in BUILD)
