"""When a step's plan is launched before the step is submitted (`backend/gate.py`).

The next step is one like the step under way where `Batches.look_ahead` has made it. Its program is
kept and has the very same shape. So its inputs lie where the step under way has its own. If nobody
opens the gate, the device computes that step once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.engine.reuse import Key
from workbench.graph.ir import StepShape
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.watch import Watch


def launch_ahead(engine: Engine, shape: StepShape, watch: Watch) -> int:
    """Launches the step behind the one under way, which has this shape and watch; the ns it took.
    Nothing is launched where the next step is another, or where a recorder looks on: its marks
    would be behind the launch."""
    start = now_ns()
    if engine._batches.next_shape == shape and engine._recorder is None:
        prepared = engine._programs.peek(Key(shape, engine._turn))
        if prepared is not None and (ahead := watch.of(prepared).ahead) is not None:
            ahead.arm()
    return now_ns() - start
