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


def launch_ahead(engine: Engine, shape: StepShape) -> int:
    """Launches the step behind the one under way, which has this shape; the ns it took. Nothing is
    launched where the next step is another, or where anybody looks on: marks around it would be
    behind its launch."""
    start = now_ns()
    watched = engine._recorder is not None or engine._stamps is not None
    if engine._batches.next_shape == shape and not watched:
        prepared = engine._programs.peek(Key(shape, engine._turn))
        if prepared is not None and prepared.ahead is not None:
            prepared.ahead.arm()
    return now_ns() - start
