"""What engines do in `test_nvtx_runs.py`, in a process that has a tool for NVTX from its begin.

python nvtx_scenarios.py MODEL    # on stdout: of each scenario, its facts and what NVTX was told
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import sitecustomize  # the tool is there (`nvtx_injection.environment`)

import workbench as wb
from workbench.common.errors import UsageError
from workbench.config import Toggles

PROMPT = [1, 2, 3, 4, 5]
PLANS = Toggles(
    graph_reuse="set_rows", plans="ours", plan_scope="step", sync="packed_implicit",
    copy_stream="compute",
)  # fmt: skip
BEHIND = PLANS.switched("results", "behind").switched("host_source", "pinned_ring_2")
Facts = dict[str, Any]


def kinds(engine: wb.Engine, n_past: int) -> Facts:
    """How many commands of each kind a step of one token has."""
    return dict(Counter(c.kind for c in engine.program(n_past=n_past).commands))


def commands(base: wb.Engine) -> Facts:
    """A prompt of three ubatches, and two tokens."""
    base.prefill(PROMPT)
    base.step([6])
    base.step([7])
    return {"kinds": kinds(base, len(PROMPT))}


def replays(base: wb.Engine) -> Facts:
    with base.variant(PLANS) as engine:
        engine.generate(tokens=PROMPT, max_tokens=6, stop_at_eos=False)
        return engine.counters


def ahead(base: wb.Engine) -> Facts:
    with base.variant(PLANS.switched("launch_ahead", "on")) as engine:
        engine.generate(tokens=PROMPT, max_tokens=12, stop_at_eos=False)
        return engine.counters


def behind(base: wb.Engine) -> Facts:
    """Two steps under way at once, and one that is under way when the engine is closed."""
    with base.variant(BEHIND) as engine:
        first = engine.submit([(0, [1], "last")])
        second = engine.submit([(0, [2], "last")])
        first.wait()
        second.wait()
        engine.submit([(0, [3], "last")])
    return {}


def stamped(base: wb.Engine) -> Facts:
    """Stamps put calls of their own between those of the program."""
    with base.stamped() as found:
        base.step([1])
        base.step([2])
    return {"kinds": kinds(base, 0), "n_stamps": len(found)}


def traced(base: wb.Engine) -> Facts:
    with wb.profile(base) as prof:
        base.step([1])
    return {"categories": dict(Counter(s.category for s in prof.recorder.spans
                                       if s.lane == "host"))}  # fmt: skip


def traced_without(base: wb.Engine) -> Facts:
    with wb.profile(base, nvtx=False):
        base.step([1])
    return {}


def traced_alone(base: wb.Engine) -> Facts:
    """The trace has ranges of its own where the engine has none."""
    with wb.Engine.load(
        base.model.path, device="embedded", n_ctx=64, threads=1, nvtx="off", toggles=Toggles()
    ) as engine:
        engine.step([1])
        with wb.profile(engine) as prof:
            engine.step([2])
    return {"categories": dict(Counter(s.category for s in prof.recorder.spans
                                       if s.lane == "host"))}  # fmt: skip


def failing(base: wb.Engine) -> Facts:
    """A step that is refused in a prompt, and one whose results fail."""
    with contextlib.suppress(UsageError), base.ranges.scope("prompt", "prompt", 1):
        base.step([base.model.n_vocab])
    pending = base.submit([(0, [1], "last")])
    broken = mock.patch.object(pending.step.program, "finish", side_effect=OSError)
    with broken, contextlib.suppress(OSError):
        pending.wait()
    return {"n_past": base.n_past}


SCENARIOS: tuple[Callable[[wb.Engine], Facts], ...] = (
    commands, replays, ahead, behind, stamped, traced, traced_without, traced_alone,
    failing,
)  # fmt: skip


def main(model: str) -> None:
    found, tool = {}, sitecustomize.tool
    with wb.Engine.load(
        model, device="embedded", n_ctx=64, n_ubatch=2, threads=1, toggles=Toggles()
    ) as base:
        for scenario in SCENARIOS:
            base.reset()
            tool.events.clear()
            facts = scenario(base)
            found[scenario.__name__] = {"facts": facts, "events": tool.events[:]}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
