"""Joules of a test: its repetitions, one after the other, for 5 s between two counter updates.

    update |idle| repetition | repetition | ... | repetition |idle| update
           ^---------------------- a window ----------------------^

A window begins at an update of the counter (`counter.py`), and ends at the first update after the
last repetition. So it has an idle time at its end, shorter than the counter's cadence, and nothing
is subtracted for it: `idle_s` says how long it was, and `idle_w` what the device draws when idle.
One more repetition comes before the window, so that no window begins on a cold device.

Arms take turns as in every comparison (`compare/rounds.py`), and one arm is the A/A control. The
windows come after the timed rounds of all tests: no throughput is from a window.

`Energy.record` is `result.energy` of run.json:

    counter    str     what was read
    cadence_s  float   time between updates of the idle device, before anything was measured
    window_s   float   the least length of a window
    rounds     int     windows of each arm and test
    idle_w     {test: float}   what the device drew when idle, before the test's windows
    windows    [{test, arm, is_control, window, order, joules, n_tokens, repetitions, seconds,
                 idle_s, mean_w, step_j, uncertainty_j}]

A step is the energy of one update at the window's power. The uncertainty is the energy of the two
reads within which the window's updates came, and of the idle time at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.benchmarks import workload as w
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.compare.stats import MIN_REPETITIONS, percent
from workbench.benchmarks.energy.counter import EnergyCounter, Meter, NvmlCounter
from workbench.common.errors import DeviceError, UsageError
from workbench.common.progress import bar

if TYPE_CHECKING:
    from workbench.backend.base import Backend
    from workbench.config import EngineConfig
    from workbench.engine.engine import Engine

WINDOW_S = 5.0
COARSE = 0.05  # of a window; where one step of the counter is more, there is no figure
EnergyAsked = bool | EnergyCounter


class Energy:
    """The windows of a run.

    record: `result.energy` of run.json, which grows with each window.
    """

    def __init__(self, counter: EnergyCounter, rounds: int = MIN_REPETITIONS):
        """Watches the counter. Raises DeviceError where it stands still, or where its steps are too
        coarse for a window."""
        self.meter = Meter(counter)
        steps = self.meter.watch()
        if steps.cadence_s > COARSE * WINDOW_S:
            share = percent(steps.cadence_s / WINDOW_S)
            raise DeviceError(
                f"{counter.name} steps every {steps.cadence_s:.2f} s, {share} of a window of "
                f"{WINDOW_S:.0f} s, which is too coarse for joules a token; leave energy out"
            )
        self.record: dict[str, Any] = {
            "counter": counter.name, "cadence_s": steps.cadence_s, "window_s": WINDOW_S,
            "rounds": rounds, "idle_w": {}, "windows": [],
        }  # fmt: skip

    def take_over(self, earlier: Mapping[str, Any]) -> None:
        """Takes the windows of a resumed run."""
        self.record["idle_w"] = dict(earlier["idle_w"])
        self.record["windows"] = list(earlier["windows"])

    def measure(
        self,
        engines: Sequence[Engine],
        arms: Sequence[tuple[str, bool]],
        workload: w.Workload,
        seed: int,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        """Measures the missing windows of a test.

        engines: one for each arm.
        arms: name, and whether it is the A/A control.
        saved(): called after each window.
        """
        rounds, test = range(self.record["rounds"]), workload.name
        windows = self.record["windows"]
        there = {(one["window"], one["arm"]) for one in windows if one["test"] == test}
        n_left = sum((r, name) not in there for r in rounds for name, _ in arms)
        if not n_left:
            return
        n_vocab, bos = engines[0].model.n_vocab, w.bos_token(engines[0])
        self.record["idle_w"][test] = self.meter.watch().mean_w
        with bar(f"{test} energy", n_left, "windows", n_left * WINDOW_S) as left:

            def one(round_: int, arm: int) -> bool | None:
                name, is_control = arms[arm]
                if (round_, name) in there:
                    return None
                tokens = w.draw_tokens(workload, n_vocab, seed, round_, bos)
                found = self._window(
                    lambda: w.take_sample(engines[arm], workload, tokens),
                    self.record["idle_w"][test],
                )
                found["n_tokens"] = found["repetitions"] * workload.n_tokens
                named = {"test": test, "arm": name, "is_control": is_control, "window": round_}
                windows.append(named | {"order": len(windows)} | found)
                left.update()
                saved()
                return True

            interleave(rounds, len(arms), one)

    def _window(self, repeat: Callable[[], Any], idle_w: float) -> dict[str, Any]:
        """Repeats for WINDOW_S or more between two updates. idle_w: of the idle device."""
        meter, now_ns, n = self.meter, self.meter.counter.now_ns, 0
        repeat()
        begin = meter.update()
        while now_ns() - begin.ns < WINDOW_S * 1e9:
            repeat()
            n += 1
        ended = now_ns()
        end = meter.update()
        seconds, joules = (end.ns - begin.ns) / 1e9, (end.mj - begin.mj) / 1e3
        mean_w, idle_s = joules / seconds, (end.ns - ended) / 1e9
        return {
            "joules": joules, "n_tokens": 0, "repetitions": n, "seconds": seconds,
            "idle_s": idle_s, "mean_w": mean_w,
            "step_j": mean_w * self.record["cadence_s"],
            "uncertainty_j": mean_w * (begin.late_ns + end.late_ns) / 1e9 + idle_w * idle_s,
        }  # fmt: skip


def take_over_windows(
    energy: Energy | None, earlier: Mapping[str, Any], record: dict[str, Any]
) -> None:
    """Gives the run `record` the windows of the resumed run `earlier`; `energy` goes on with
    them."""
    old = earlier["result"].get("energy")
    if old and energy is not None:
        energy.take_over(old)
    elif old:
        record["result"]["energy"] = old


def energy_of(
    asked: EnergyAsked, engine: Engine, tests: Sequence[w.Workload], smoke: bool = False
) -> Energy | None:
    """What measures the energy of tests on an engine; None where it is not asked for.

    asked: True for the counter of the engine's GPU; or a counter.
    smoke: one window of each arm.

    Raises UsageError for tests and engines whose energy cannot be told, and DeviceError where there
    is no counter, or none that is fine enough.
    """
    if asked is False:
        return None
    counter = counter_of(asked, engine.backend, engine.config, tests)
    return Energy(counter, 1 if smoke else MIN_REPETITIONS)


def counter_of(
    asked: EnergyAsked, backend: Backend, config: EngineConfig, tests: Sequence[w.Workload]
) -> EnergyCounter:
    """The counter for tests on an engine of this configuration. Raises UsageError for tests and
    engines whose energy cannot be told, and DeviceError where there is no counter."""
    if deep := [test.name for test in tests if test.n_depth]:
        raise UsageError(
            f"energy of test {deep[0]} cannot be told: its cells are filled in the same window; "
            "leave energy out, or the depth"
        )
    if config.n_devices > 1:
        raise UsageError("energy is counted for one GPU; leave energy out, or take n_devices=1")
    return NvmlCounter(backend) if isinstance(asked, bool) else asked
