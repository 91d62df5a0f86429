"""Is the toggled engine faster, and is its answer the same? One comparison, interleaved.

`rounds.py` shows the order in which the arms are measured. Before a test every arm is warmed up
until its times settle (`workload.warm_up`). The arms' logits are compared with the baseline's once
at the start. The last logits of every timed repetition are compared, too, since all arms of a round
are fed the same tokens. Nothing here draws, and nothing is timed while traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pandas as pd

from workbench.benchmarks.compare import answers
from workbench.benchmarks.compare.arms import ComparisonSpec, IdleToggles, comparison_spec
from workbench.benchmarks.compare.comparison import AB, Comparisons
from workbench.benchmarks.compare.forms import (
    Asked,
    One,
    ToggleSet,
    as_tests,
    comparison_of,
    names_in,
    one_comparison,
)
from workbench.benchmarks.compare.idle import check_engines
from workbench.benchmarks.compare.rounds import Repetition, Trials, order_of
from workbench.benchmarks.compare.until import AT_MOST_S, Until, optional_until
from workbench.benchmarks.energy.windows import (
    Energy,
    EnergyAsked,
    energy_of,
    take_over_windows,
)
from workbench.benchmarks.given import EngineOrPath, given_engine
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import (
    Draft,
    check_same,
    kept,
    new_arm,
    new_run,
    open_out,
    session_of,
    take_over,
)
from workbench.benchmarks.workload import (
    Sample,
    Workload,
    check_untraced,
    make_ready,
    parse_tests,
)
from workbench.common.errors import UsageError
from workbench.config import BASELINE
from workbench.engine import exclusive
from workbench.engine.choose import Wanted

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


Tests = str | Workload | Sequence[str | Workload]


@overload
def ab(
    engine: EngineOrPath, toggle: list[str] | tuple[str, ...], values: None = None,
    tests: Tests = "tg32", rounds: int = 10, seed: int = 0, background: Wanted = None,
    out: str | Path | None = None, **more: Any,
) -> Comparisons: ...  # fmt: skip


@overload
def ab(
    engine: EngineOrPath, toggle: One, values: Sequence[Any] | ToggleSet | None = None,
    tests: Tests = "tg32", rounds: int = 10, seed: int = 0, background: Wanted = None,
    out: str | Path | None = None, **more: Any,
) -> AB: ...  # fmt: skip


@exclusive.door
def ab(
    engine: EngineOrPath,
    toggle: One | Sequence[str],
    values: Sequence[Any] | ToggleSet | None = None,
    tests: Tests = "tg32",
    rounds: int = 10,
    seed: int = 0,
    background: Wanted = None,
    out: str | Path | None = None,
    *,
    name: str | None = None,
    smoke: bool = False,
    resume: bool = False,
    until: float | str | None = None,
    at_most_s: float | str = AT_MOST_S,
    energy: EnergyAsked = False,
    progress: Callable[[int, int, str], None] | None = None,
    **settings: Any,
) -> AB | Comparisons:
    """Compares values of one toggle, or sets of toggles, on the weights of `engine`.

    engine: an Engine; or the path of a GGUF file, which is opened for the comparison and closed
        again.
    toggle, values: what is compared; the first is the baseline.

        * `"sync=per_copy,copy_boundary"`; or the name alone, with `values`.
        * Sets: `"plans=off | plans=ours plan_scope=step"`. A set can have a name before it:
          `"plain: | planned: plans=ours"`.
        * Two sets as `toggle` and `values`: `Toggles(), Toggles(fuse="on")`; or a list of them.
          A mapping changes the background.
        * A list of names: `["sync", "fuse"]`. Each toggle is a comparison of its own: the
          background's value beside every other value that the device can honour.
    tests: llama-bench test names.
    rounds: repetitions of every arm, at least 5. smoke=True allows fewer; it also warms up only
        once, and ends in the verdict "too few repetitions".
    seed: of the random tokens, and of the intervals.
    background: all other toggles, as `Engine.variant` takes them (default: the engine's; for a
        file: everything off).
    out: a run folder, written whole at the end and every 10 s on the way; of several comparisons
        OUT-sync, OUT-fuse, ...
    name: of the run, for lists of runs.
    smoke: see `rounds`.
    resume: continue the run in `out`, without the repetitions that it holds.
    until: repeat until the half-width of the interval of every speedup, the A/A control's too, is
        at most this share (0.01, or `"1%"`). The measuring stops on the width, never on the values
        that the interval excludes. At least max(`rounds`, 10) rounds are run.
    at_most_s: seconds (or `"30s"`) of measuring, over all tests, after which `until` gives up. A
        resumed run has all of this time again.
    energy: count joules a token, too, after all times: 5 windows of 5 s of each arm and test, from
        the energy counter of the engine's GPU (`energy/windows.py`); or from a counter that is
        given.
    progress(done, total, what): called between repetitions; with `until`, total is an estimate.
    settings: fields of EngineConfig (device, n_ctx, ...) for an engine of a file. Its context and
        its sequences are made enough for the tests; a context that is given stays as it is,
        except n_ctx=2048: the default's value counts as not given.

    Returns an `AB`; of a list of names `Comparisons`, an `AB` by each name. Ctrl-C ends the
    measuring: finished repetitions are saved and returned, marked interrupted. They are saved, too,
    when the device fails, before the error is raised. Raises UsageError for a request that cannot
    be measured, and where every arm does what the baseline does (`idle.py`); DeviceError where the
    device cannot honour a value, or has no energy counter; and what `Engine.load` raises.
    """
    workloads = parse_tests(tests)
    with given_engine(engine, ab, settings, BASELINE, workloads) as opened:
        exclusive.check(opened._loaded)

        def measured(asked: Asked, folder: Path | None, name: str | None) -> AB:
            made = comparison_spec(asked.spec, None, workloads, rounds, asked.background, smoke)
            return compare_arms(
                opened, made, rounds, seed, folder, name=name, smoke=smoke, resume=resume,
                until=until, at_most_s=at_most_s, energy=energy, progress=progress,
            )  # fmt: skip

        folder = None if out is None else Path(out)
        if not names_in(toggle):
            return measured(one_comparison(opened, toggle, values, background), folder, name)
        if values is not None:
            raise UsageError(
                f"{values!r} cannot be the values of several toggles; write each as "
                f"'sync=per_copy,packed'; a test is given as tests={as_tests(values)}"
            )
        found = Comparisons()
        each = [(one, *comparison_of(opened, one, background)) for one in names_in(toggle)]
        for one, asked, left in each:
            found.left_out += left
            if asked is None:
                found.left_out.append(f"{one} is left out: no other value can be measured here")
                continue
            key = one.partition("=")[0].strip()
            own = None if folder is None else folder.with_name(f"{folder.name}-{key}")
            try:
                found[key] = measured(asked, own, name and f"{name}: {key}")
            except IdleToggles as why:
                found.left_out.append(f"{key} is left out: {why}")
                continue
            if found[key].interrupted:
                break
        if not found:
            raise UsageError("nothing can be compared: " + "; ".join(found.left_out))
        return found


@exclusive.door
def compare_arms(
    engine: Engine,
    made: ComparisonSpec,
    rounds: int,
    seed: int = 0,
    out: str | Path | None = None,
    *,
    name: str | None = None,
    smoke: bool = False,
    resume: bool = False,
    until: float | str | None = None,
    at_most_s: float | str = AT_MOST_S,
    energy: EnergyAsked = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> AB:
    """As `ab`, with the arms and the tests of `made`. The last arm is the A/A control."""
    exclusive.check(engine._loaded)
    check_untraced(engine)
    made.check_arms(engine.config)
    asked = optional_until(until, at_most_s)
    if asked is not None and smoke:
        raise UsageError("smoke=True measures next to nothing; leave out until, or smoke")
    counted = energy_of(energy, engine, made.workloads, smoke)
    comparison = _Comparison(engine, made, rounds, seed, smoke, asked, counted)
    comparison.open(Path(out) if out is not None else None, name or made.spec, resume)
    return comparison.measure(progress)


class _Comparison:
    """A comparison while it is measured: arms in rounds, a run folder that grows and is resumed."""

    def __init__(
        self,
        engine: Engine,
        made: ComparisonSpec,
        rounds: int,
        seed: int,
        smoke: bool,
        asked: Until | None,
        energy: Energy | None = None,
    ):
        """Arguments as for `ab`. asked: `until` and `at_most_s` as one value."""
        self.energy = energy
        self.engine, self.toggle, self.arms = engine, made.toggle, made.arms
        self.smoke, self.until = smoke, asked
        self.trials = Trials([], made.workloads, rounds, seed, asked, once=smoke)
        self.answers: list[list[answers.Answer]] = [[] for _ in made.arms]
        self._before: dict[str, Any] = {}  # the counters of an arm before its repetition

    # the run folder -----------------------------------------------------------------------------

    def open(self, out: Path | None, name: str, resume: bool) -> None:
        """Begins a new run, or resumes the run in `out`. Raises UsageError as `open_out` and
        `check_same`."""
        earlier = open_out(out, resume)
        run_id = (out or results.new_run_folder(name=name)).name
        record = self._new_record(run_id, name)
        if earlier is not None:
            check_same(earlier.run, record, out)
            self._take_over(earlier, record)
        samples = None if earlier is None else earlier.samples
        self.draft = Draft(record, out, self._complete, samples, new=earlier is None)

    def _new_record(self, run_id: str, name: str) -> dict[str, Any]:
        made = new_run(
            "ab",
            run_id,
            name,
            provenance.collect(self.engine),
            [new_arm(arm.name, arm.toggles.to_dict(), arm.is_control) for arm in self.arms],
            [workload.name for workload in self.trials.workloads],
            self.trials.rounds,
            self.trials.seed,
        )
        made["result"] |= {
            "toggle": self.toggle,
            "smoke": self.smoke,
            "warm_up": {},
            "pace": {},
            "until": None,
            "idle": {},
            "energy": self.energy and self.energy.record,
            "answers": {},
            "sessions": [session_of(made)],
        }
        return made

    def _take_over(self, earlier: results.Run, record: dict[str, Any]) -> None:
        """Takes the name, repetitions, answers, counters and sessions from a resumed run."""
        old, found = earlier.run, earlier.run["result"]
        take_over(old, record)
        self.trials.take_over(earlier, [arm.name for arm in self.arms])
        for arm, old_arm in zip(record["arms"], old["arms"], strict=True):
            arm["counters"] = old_arm["counters"]
        for known, one in zip(self.answers, self.arms, strict=True):
            if one.name in found["answers"]:
                known.append(answers.Answer.from_dict(found["answers"][one.name]))
        take_over_windows(self.energy, old, record)

    def _complete(self) -> dict[str, pd.DataFrame]:
        """Completes run.json before a save; returns no further tables."""
        record, trials = self.draft.run, self.trials
        record["result"]["warm_up"] = trials.warm_ups
        record["result"]["pace"] = trials.pace.to_dict()
        if self.until is not None:
            record["result"]["until"] = self.until._asdict() | {"tests": trials.ended}
            rounds = (ended["rounds"] for ended in trials.ended.values())
            record["repetitions"] = max(rounds, default=trials.rounds)
        record["result"]["state_after"] = provenance.state()
        record["result"]["answers"] = {
            arm.name: answers.merge(every).to_dict()
            for arm, every in zip(self.arms, self.answers, strict=True)
            if every
        }
        return {}

    # measuring ----------------------------------------------------------------------------------

    def measure(self, progress: Callable[[int, int, str], None] | None) -> AB:
        """Measures all tests, as `ab` says; returns the result, finished or interrupted."""
        trials, draft = self.trials, self.draft
        with ExitStack() as stack:
            trials.engines = [
                stack.enter_context(closing(self.engine.variant(arm.toggles))) for arm in self.arms
            ]
            idle = check_engines(trials.engines, self.toggle, self.arms, trials.workloads)
            draft.run["result"]["idle"] = idle
            with kept(draft):
                make_ready(trials.engines, [answers.workload_of(trials.engines), *trials.workloads])
                kinds = [arm.answer for arm in self.arms[1:]]
                found = answers.compare_engines(trials.engines, kinds, trials.seed)
                for known, answer in zip(self.answers[1:], found, strict=True):
                    known.append(answer)
                for workload in trials.workloads:
                    self._measure_test(workload, progress)
                if self.energy is not None:
                    arms = [(arm.name, arm.is_control) for arm in self.arms]
                    for workload in trials.workloads:
                        self.energy.measure(
                            trials.engines, arms, workload, trials.seed, draft.checkpoint
                        )
        return AB(draft.run, draft.samples.frame())

    def _measure_test(
        self, workload: Workload, progress: Callable[[int, int, str], None] | None
    ) -> None:
        test, n_arms, trials = workload.name, len(self.arms), self.trials
        for engine, record in zip(trials.engines, self.draft.run["arms"], strict=True):
            record["sync_mode"] = engine.sync_mode
            record["program"][test] = describe(engine, workload)
        tell = progress or (lambda done, total, what: None)
        missing = False

        def begins(one: Repetition) -> None:
            nonlocal missing
            missing = True
            nth = order_of(one.round_, n_arms).index(one.arm)
            done, total = one.round_ * n_arms + nth, one.n_rounds * n_arms
            tell(done, total, f"{test} {self.arms[one.arm].name}")
            self._before = trials.engines[one.arm].counters

        trials.measure(workload, self._taken, begins, self._compare_round)
        if missing:
            total = len(trials.finished(test)) * n_arms
            tell(total, total, test)

    def _taken(self, one: Repetition, sample: Sample) -> None:
        """Adds a repetition's times and counters."""
        arm = self.arms[one.arm]
        self.draft.samples.add(
            arm.name, arm.is_control, one.workload.name, one.round_,
            sample.token_ns, sample.token_n,
        )  # fmt: skip
        sums = self.draft.run["arms"][one.arm]["counters"]
        for key, value in self.trials.engines[one.arm].counters.items():
            sums[key] = sums.get(key, 0) + value - self._before[key]

    def _compare_round(self, round_: int, taken: dict[int, Sample]) -> None:
        """Compares every arm's last logits of a round with the baseline's."""
        if 0 in taken:
            row = taken[0].last_logits[None]
            for i, sample in taken.items():
                if i:
                    own, kind = sample.last_logits[None], self.arms[i].answer
                    self.answers[i].append(answers.compare_logits(row, own, kind))
        self.draft.checkpoint()


def describe(engine: Engine, workload: Workload) -> dict[str, Any]:
    """The commands of a token of the test, or of its first ubatch if the test generates no token:
    the pattern, and the waits, copies, launches and bytes of a step. These counts prove that a
    toggle removed work."""
    n_ubatch, prompt = engine.config.n_ubatch, workload.n_prompt
    if workload.n_gen:
        n_tokens = n_seqs = n_outputs = min(workload.width, n_ubatch)
        n_past = workload.n_depth + prompt
    else:
        n_tokens, n_past = min(workload.n_prompt_tokens, n_ubatch), workload.n_depth
        n_seqs = -(-n_tokens // prompt)
        n_outputs = max(1, n_tokens // prompt)
    program = engine.program(n_tokens, n_outputs, n_past, n_seqs)
    return {
        "n_tokens": n_tokens,
        "pattern": program.pattern(),
        "folded_pattern": program.pattern(fold=True),
        "counts": program.counts(),
    }
