"""Two sets of toggles on one engine's weights, quickly: which is faster, and where does time go?

The short form of `wb.ab` for a person who tries things. Any number of toggles may differ, nothing
is written, and there is a trace of each side beside the speedup. The number is as reliable as that
of `ab`: interleaved rounds, an A/A control (the baseline a second time), an interval, and logits
compared with the baseline's. The traces are taken after the timing, never during it.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from workbench.benchmarks.compare import answers, resolution, stats
from workbench.benchmarks.compare.answers import Answer
from workbench.benchmarks.compare.arms import answer_between
from workbench.benchmarks.compare.rounds import Repetition, Trials
from workbench.benchmarks.times.profiling import trace_last
from workbench.benchmarks.workload import Workload, bos_token, check_fits, check_untraced
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.config import SyncMode, Toggles, differing
from workbench.engine.engine import Engine
from workbench.engine.exclusive import Stopped
from workbench.trace.profile import Profile


class Pair(NamedTuple):
    """The result of a comparison.

    labels: the toggles of the baseline and of the toggled side, where they differ.
    tps: the medians of both sides, in tokens/s.
    n_asked: the rounds that were asked for; `speedup.n` rounds were finished.
    traces: of the last steps of the test on each side; None where the run was stopped before.
    device_is_gpu: whether the times are a GPU's.
    control: the ratio of the A/A control, from which the band follows.
    """

    test: str
    baseline: Toggles
    toggled: Toggles
    labels: tuple[str, str]
    tps: tuple[float, float]
    speedup: stats.Ratio
    band: stats.Band
    answer: Answer
    n_asked: int
    traces: tuple[Profile, Profile] | None
    device_is_gpu: bool
    control: stats.Ratio | None = None

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `no difference` or `too few repetitions`."""
        return stats.verdict(self.speedup, self.band)

    @property
    def stopped(self) -> str:
        """`stopped after 3 of 10 rounds`, or empty for a run that went to its end."""
        if self.traces is not None:
            return ""
        return f"stopped after {self.speedup.n} of {self.n_asked} rounds"

    @property
    def line(self) -> str:
        """The speedup line."""
        ratio, (before, after) = self.speedup, self.tps
        own = "" if self.device_is_gpu else "; timings of this device, not of a GPU"
        found = ": ".join(filter(None, (self.stopped, self.verdict)))
        return (
            f"{self.test}: {self.labels[0]} -> {self.labels[1]}: {found}, "
            f"{ratio.value:.3f}x ({before:.1f} -> {after:.1f} t/s, "
            f"95% CI {stats.interval(ratio.low, ratio.high)}, n={ratio.n}, "
            f"A/A band {stats.interval(*self.band)}); {self.answer}{own}"
        )

    @property
    def unresolved(self) -> str:
        """What this run could not resolve, and what would help; mostly empty."""
        return resolution.sentence({self.labels[1]: self.speedup}, self.band, self.control)

    def __repr__(self) -> str:
        return "\n".join(filter(None, (self.line, self.unresolved)))

    def _repr_html_(self) -> str:
        lines = (html.escape(line) for line in repr(self).splitlines())
        return f"<p>{'<br>'.join(lines)}</p>"


def check_pair(engine: Engine, workload: Workload, rounds: int, seed: int) -> None:
    """Raises UsageError where `compare` could not measure, whatever the toggles are."""
    check_fits(engine.toggles, engine.config, workload)
    bos_token(engine)  # refuses a closed engine
    if rounds < 1:
        raise UsageError(f"rounds={rounds} must be at least 1 ({stats.MIN_REPETITIONS} to judge)")
    if seed < 0:
        raise UsageError(f"seed={seed} must be 0 or more")


def compare(
    engine: Engine,
    baseline: Toggles,
    toggled: Toggles,
    workload: Workload,
    *,
    rounds: int = 5,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Pair:
    """Times `toggled` against `baseline` on variants of `engine`, then traces each.

    progress: called with a few words on what is being done.

    If the measurement is stopped (Ctrl-C, or `engine.exclusive`), the finished rounds are returned.
    Before the end of the first round KeyboardInterrupt or Stopped is raised. Raises UsageError and
    DeviceError for toggles that cannot be measured or honoured. All variants are always closed.
    """
    check_pair(engine, workload, rounds, seed)
    check_untraced(engine)
    import scipy.stats  # noqa: F401  # slow, and a run that is stopped is to end at once

    with ExitStack() as stack:
        sides = [
            stack.enter_context(engine.variant(toggles))
            for toggles in (baseline, toggled, baseline)  # the last is the A/A control
        ]
        progress("comparing logits")
        (answer,) = answers.compare_engines(sides[:2], [answer_between(baseline, toggled)], seed)
        progress("warming up")
        trials, traces = Trials(sides, [workload], rounds, seed), None
        try:
            trials.measure(workload, begins=_told(progress))
            progress("tracing")
            traces = trace_last(sides[0], workload, seed), trace_last(sides[1], workload, seed)
        except (KeyboardInterrupt, Stopped):
            if not trials.finished(workload.name):
                raise
        found = np.array(trials.counted(workload.name)).T
        medians = np.median(found, axis=1)
        control = stats.speedup(found[0], found[2], seed)
        return Pair(
            workload.name, baseline, toggled, _labels(sides[0], sides[1]),
            (float(medians[0]), float(medians[1])), stats.speedup(found[0], found[1], seed),
            stats.aa_band(control), answer, rounds, traces, is_gpu(sides[0].device), control,
        )  # fmt: skip


def _told(progress: Callable[[str], None]) -> Callable[[Repetition], None]:
    """Tells `progress` which round begins, and about how long is left."""
    begun = list[float]()  # when each repetition began, in s

    def begins(one: Repetition) -> None:
        begun.append(time.monotonic())
        left_s = (begun[-1] - begun[0]) / max(one.round_, 1) * (one.n_rounds - one.round_)
        left = f", about {left_s:,.0f} s left" if one.round_ and left_s >= 1 else ""
        progress(f"round {one.round_ + 1} of {one.n_rounds}{left}")

    return begins


def _labels(before: Engine, after: Engine) -> tuple[str, str]:
    """The toggles of each side where they differ; where sync=auto chose a mode, also that mode."""
    auto = f"sync={SyncMode.AUTO}"
    first, second = (
        label.replace(auto, f"{auto} (chose {side.sync_mode})")
        for label, side in zip(
            differing(before.toggles, after.toggles), (before, after), strict=True
        )
    )
    return first, second
