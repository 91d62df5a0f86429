"""Stamps on the GPU: a pair is its own step's, with launches ahead too, and nothing else changes.

What stamps take is printed, for tiny models: a stamped token beside a plain one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.backend.clock.test_stamps import (  # noqa: F401 - `never_passed` is of every test
    decode,
    decode_stamped,
    never_passed,
    ring_goes_round,
    small_rings,
)
from tests.cpu.test_logits import engine, tokens_for  # noqa: F401 - a fixture
from workbench.benchmarks.times.token_parts import token_parts
from workbench.config import Toggles

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

OFF_NS = 50_000  # more than the clocks are ever apart: a step takes longer
BASE: dict[str, Any] = {"graph_reuse": "set_rows", "sync": "packed_implicit", "fuse": "on"}
STEP = BASE | {"plans": "ours", "plan_scope": "step"}
AHEAD = STEP | {"launch_ahead": "on"}
WAYS: list[dict[str, Any]] = [
    BASE,
    BASE | {"plans": "ours", "plan_scope": "split"},
    STEP | {"results": "direct", "pdl": "on"},
    STEP | {"plans": "today"},
    STEP | {"graph_reuse": "patch_pointers"},
    AHEAD,
    AHEAD | {"results": "direct", "pdl": "on"},
    AHEAD | {"results": "direct", "pdl": "on", "plan_end": "word"},
]


def test_the_clock_goes_on_in_steps_and_is_set_to_the_host_s(backend):
    first = backend.clock()
    time.sleep(0.01)
    clock = backend.clock()
    print(f"%globaltimer goes on by {clock.tick_ns} ns; off the host's by {clock.error_ns} ns")
    assert 0 < clock.tick_ns <= 2_000_000 and clock.tick_ns <= clock.error_ns < OFF_NS
    apart = abs(first.ahead_ns - clock.ahead_ns)
    assert apart <= first.error_ns + clock.error_ns + 10_000  # of drift


def test_a_ring_goes_round_on_the_device(backend):
    ring_goes_round(backend)


@pytest.mark.parametrize("values", WAYS, ids=lambda v: "-".join(v.values()))
def test_a_step_s_stamps_lie_in_it_and_change_nothing(engine, backend, values):  # noqa: F811
    if "pdl" in values and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")
    tokens = tokens_for("tiny-llama", 30)
    late = [7, 15, 16, 22] if "launch_ahead" in values else []
    with engine("tiny-llama", "Q4_0", "cuda").variant(Toggles(**values)) as used:
        if "plans" in values:
            small_rings(used, 8)
        wanted = decode(used, tokens)
        for _ in range(2):
            before = used.counters
            assert np.array_equal(decode_stamped(used, tokens, late, OFF_NS), wanted)
            counts = used.counters
        assert np.array_equal(decode(used, tokens), wanted)
        captured = "plans_captured" if "plans" in values else "programs_built"
        assert used.counters[captured] == before[captured], "plain and stamped are kept"
        if late:
            n, missed = (counts[name] - before[name]
                         for name in ("plans_ahead", "plans_ahead_missed"))  # fmt: skip
            print(f"{n} launched ahead, {missed} missed")
            assert n > 15 and missed >= len(late) - 1
        if values.get("pdl") == "on":
            graphs: list[Any] = [plan.captured for plan in used.issuer.plans]
            plain, stamped = sorted(graphs, key=lambda g: len(g.nodes))[:: len(graphs) - 1]
            (n, early), (n_plain, early_plain) = stamped.edges(), plain.edges()
            assert n == n_plain + 2 and early_plain <= early + 1 <= early_plain + 2 and early > 3


def test_what_stamps_take(engine):  # noqa: F811
    arms = {"off": BASE, "a step": STEP, "ahead": AHEAD}
    used = engine("tiny-llama", "Q4_0", "cuda")
    parts = token_parts(used, {n: Toggles(**v) for n, v in arms.items()}, 4)
    for name, of in parts.items():
        us = {part: np.median(of[part]) for part in ("plain", "token", "device", "gap", "host")}
        print(name, ", ".join(f"{part} {median:.1f} us" for part, median in us.items()))
        assert all(median > 0 for part, median in us.items() if part != "host")
