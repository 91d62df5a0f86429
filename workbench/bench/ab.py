"""Is the toggled engine faster, and is its answer the same? One comparison, interleaved.

`rounds.py` shows the order in which the arms are measured. Before that every arm is warmed up until
its times settle (`workload.warm_up`), and its logits are compared with the baseline's. The last
logits of every timed repetition are compared, too, since all arms of a round are fed the same
tokens. Nothing here draws, and nothing is timed while traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.bench.arms import comparison_spec
from workbench.bench.comparison import AB
from workbench.bench.experiment import Experiment
from workbench.bench.until import AT_MOST_S
from workbench.bench.until import make as make_until
from workbench.bench.workload import Workload, check_untraced
from workbench.config import Toggles
from workbench.engine import exclusive
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


@exclusive.door
def ab(
    engine: Engine,
    toggle: str,
    values: Sequence[str] | None = None,
    tests: str | Workload | Sequence[str | Workload] = "tg32",
    rounds: int = 10,
    seed: int = 0,
    background: Toggles | None = None,
    out: str | Path | None = None,
    *,
    name: str | None = None,
    smoke: bool = False,
    resume: bool = False,
    until: float | None = None,
    at_most_s: float = AT_MOST_S,
    progress: Callable[[int, int, str], None] | None = None,
) -> AB:
    """Compares values of one toggle, or sets of toggles, on the weights of `engine`.

    toggle: `"sync=per_copy,copy_boundary"` or the name alone, with `values`; the first value is the
    baseline. Or sets: `"plans=off | plans=ours plan_scope=step"`, the first the baseline.
    background: all other toggles (default: the engine's). tests: llama-bench test names.
    rounds: repetitions of every arm, at least 5; fewer only with smoke=True, which also warms up
    only once and ends in the verdict "too few repetitions". out: a run folder, written whole at the
    end and every 10 s on the way. resume: continue the run in `out`, skipping what it holds. until:
    repeat until the half-width of every speedup's interval is that share (0.01 for 1 %), the A/A
    control's too; `rounds` (and 10) is then the least, and at_most_s of measuring, over all tests,
    ends it in any case; a run that is resumed has all of that again. It stops on the width, never
    on what the interval excludes. progress(done, total, what) is called between repetitions; with
    until, total is an estimate.

    Ctrl-C ends the measuring: what is finished is kept, saved and returned, marked interrupted. It
    is saved, too, when the device fails, before the error is raised. Raises UsageError for a
    request that cannot be measured, DeviceError where the device cannot honour a value.
    """
    exclusive.check(engine._loaded)
    made = comparison_spec(toggle, values, tests, rounds, background or engine.toggles, smoke)
    check_untraced(engine)
    made.check(engine.config)
    asked = make_until(until, at_most_s)
    if asked is not None and smoke:
        raise UsageError("smoke=True measures next to nothing; leave out until, or smoke")
    experiment = Experiment(
        engine, made.toggle, made.arms, made.workloads, rounds, seed, smoke, asked
    )
    experiment.open(Path(out) if out is not None else None, name or made.spec, resume)
    return experiment.measure(progress)
