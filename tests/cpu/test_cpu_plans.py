"""Plans on the embedded device: engines that capture and replay give the baseline's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.choices import GraphReuse
from workbench.config import Toggles
from workbench.engine.engine import Engine

RNG = np.random.default_rng(16)
PROMPT = RNG.integers(1, 500, 40).tolist()  # three ubatches
DECODED = RNG.integers(1, 500, 44).tolist()
N = 3 + len(DECODED)
SCOPES = {
    "split": {"plan_scope": "split"},
    "split, copies on their own stream": {
        "plan_scope": "split", "sync": "event_guarded", "copy_stream": "own",
    },
    "step": {"plan_scope": "step", "sync": "implicit", "copy_stream": "compute"},
    "step, two streams": {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["1 worker", "2 workers"])
def base(request, tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", threads=request.param, n_ctx=128,
        n_ubatch=16, toggles=Toggles(),
    ) as engine:  # fmt: skip
        yield engine


def logits(engine: Engine) -> np.ndarray:
    engine.reset()
    steps = [engine.prefill(PROMPT, outputs="all"), *[engine.step([t]) for t in DECODED]]
    return np.concatenate(steps)


@pytest.fixture(scope="module")
def wanted(base):
    return {fuse: logits(base.variant(Toggles(fuse=fuse))) for fuse in ("off", "on")}


@pytest.mark.parametrize("fuse", ["off", "on"])
@pytest.mark.parametrize("reuse", list(GraphReuse))
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("plans", ["ours", "pr", "today"])
def test_logits_with_plans_are_the_baselines(base, wanted, plans, scope, reuse, fuse):
    kept: dict[str, Any] = {"plans": plans, "graph_reuse": reuse, "fuse": fuse, **SCOPES[scope]}
    with base.variant(Toggles(**kept)) as engine:
        assert np.array_equal(logits(engine), wanted[fuse])
        counts = engine.counters
        assert counts["plans_replayed"] + counts["plans_issued"] == N
        if plans == "today":  # no two calls are equal where stores move with every token
            moves = reuse == GraphReuse.PATCH_POINTERS
            assert (counts["plans_replayed"] >= len(DECODED) - 4) != moves
            assert (counts["plans_replayed"] == 0) == moves == (counts["plans_captured"] == 0)
        else:
            assert counts["plans_issued"] == 0 < counts["plans_captured"]
