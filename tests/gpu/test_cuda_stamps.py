"""Stamps on the GPU: a pair is its own step's, with launches ahead too; nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.gpu.harness import one_by_one, tokens_for
from tests.late_host import LATE, never_passed  # noqa: F401 - of every test
from workbench.config import Toggles
from workbench.trace.spans import now_ns

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
    AHEAD | {"results": "direct", "pdl": "on", "plan_end": "word"},
]


def test_the_clock_goes_on_in_steps_and_is_the_host_s(backend):
    first = backend.clock()
    time.sleep(0.01)
    clock = backend.clock()
    print(f"%globaltimer goes on by {clock.tick_ns} ns; off the host's by {clock.error_ns} ns")
    assert 0 < clock.tick_ns <= 2_000_000 and clock.tick_ns <= clock.error_ns < OFF_NS
    apart = abs(first.ahead_ns - clock.ahead_ns)
    assert apart <= first.error_ns + clock.error_ns + 10_000  # of drift


@pytest.mark.parametrize("values", WAYS, ids=lambda v: "-".join(v.values()))
def test_stamps_lie_in_their_step_and_change_nothing(engine, backend, values):
    if "pdl" in values and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")
    tokens = tokens_for("tiny-llama", 30)
    late = [7, 15, 16, 22] if "launch_ahead" in values else []
    with engine("tiny-llama", "Q4_0").variant(Toggles(**values)) as used:
        if "plans" in values:
            used.issuer.rings.n_pairs = 8  # so that they go round
        wanted = one_by_one(used, tokens)
        for _ in range(2):
            before, around, rows = used.counters, [], []
            used.reset()
            with used.stamped() as stamps:
                for i, token in enumerate(tokens):
                    if i in late:
                        time.sleep(LATE)
                    called = now_ns()
                    rows.append(used.step([token]).copy())
                    around.append((called, now_ns()))
            assert np.array_equal(np.concatenate(rows), wanted)
            for (begin, end), (called, returned) in zip(stamps, around, strict=True):
                assert called - OFF_NS < begin < end < returned + OFF_NS
            assert (np.diff(np.array(stamps).ravel()) > 0).all()
        used.reset()
        counts = used.counters
        assert np.array_equal(one_by_one(used, tokens), wanted)
        captured = "plans_captured" if "plans" in values else "programs_built"
        assert used.counters[captured] == before[captured], "plain and stamped are kept"
        if late:
            n, missed = (counts[name] - before[name]
                         for name in ("plans_ahead", "plans_ahead_missed"))  # fmt: skip
            assert n > 15 and missed >= len(late) - 1
        if values.get("pdl") == "on":
            graphs: list[Any] = [plan.captured for plan in used.issuer.plans]
            plain, stamped = sorted(graphs, key=lambda g: len(g.nodes))[:: len(graphs) - 1]
            (n, early), (n_plain, early_plain) = stamped.edges(), plain.edges()
            assert n == n_plain + 2 and early_plain <= early + 1 <= early_plain + 2 and early > 3
