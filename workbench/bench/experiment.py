"""A comparison while it is measured: rounds in turn, the run folder kept up to date, resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from workbench.bench import answers, provenance, results, until
from workbench.bench.arms import Arm
from workbench.bench.comparison import AB, order_of
from workbench.bench.results import SampleTable
from workbench.bench.until import Until
from workbench.bench.workload import Sample, Workload, bos_token, draw_tokens, run, warm_up
from workbench.errors import UsageError
from workbench.output import check_folder
from workbench.progress import HIDDEN, Bar, bar


def open_out(out: Path | None, resume: bool) -> results.Run | None:
    """The run to continue, None for a new one. Raises UsageError for a folder that is there and not
    to be resumed, and for one to be resumed that is not."""
    if resume:
        if out is None:
            raise UsageError("resume needs the run folder to continue; give it as out")
        found = results.load_run(out)
        check_folder(out)
        return found
    if out is not None:
        check_folder(out)
        if out.exists():
            raise UsageError(f"{out} exists already; resume it, or choose another folder")
    return None


class Experiment:
    """The state of one comparison while it is measured; it lives in `ab`."""

    def __init__(
        self,
        engine: Any,
        toggle: str,
        arms: list[Arm],
        workloads: list[Workload],
        rounds: int,
        seed: int,
        smoke: bool,
        asked: Until | None = None,
    ):
        self.engine, self.toggle, self.arms, self.workloads = engine, toggle, arms, workloads
        self.rounds, self.seed, self.smoke, self.until = rounds, seed, smoke, asked
        self.bos = bos_token(engine)
        self.answers: list[list[answers.Answer]] = [[] for _ in arms]
        self.warm_ups: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, dict[str, Any]] = {}  # by test: `until.Ended`
        self.spent = 0.0  # of `until.at_most_s`, seconds
        self.each_s = 0.0  # what a repetition took in the warm-up
        self.rates: dict[tuple[str, str, int], float] = {}  # t/s by arm, test and round
        self.rows: dict[str, list[list[float]]] = {}  # the same of whole rounds, by test
        self.begun = self.saved = time.monotonic()

    # the run folder -----------------------------------------------------------------------------

    def open(self, out: Path | None, name: str, resume: bool) -> None:
        """Takes or makes the run this experiment writes to. Raises UsageError where it cannot."""
        self.out = out
        earlier = open_out(out, resume)
        run_id = (out or results.new_run_folder(name=name)).name
        self.record = self._new_record(run_id, name)
        self.duration_before = 0.0
        samples = None
        if earlier is not None:
            self._check_same(earlier.run, out)
            run_id, samples = earlier.run["run_id"], earlier.samples
            self.record |= {k: earlier.run[k] for k in ("run_id", "name", "started")}
            self.record["result"]["sessions"] = [
                *earlier.run["result"]["sessions"],
                *self.record["result"]["sessions"],
            ]
            self.duration_before = earlier.run["duration_s"]
            cells = results.rates(samples)[["arm", "test", "repetition", "tps"]]
            self.rates = {(a, t, r): tps for a, t, r, tps in cells.itertuples(index=False)}
            for arm, old in zip(self.record["arms"], earlier.run["arms"], strict=True):
                arm["counters"] = old["counters"]
            found = earlier.run["result"]
            self.warm_ups = dict(found["warm_up"])
            self.ended = dict((found.get("until") or {}).get("tests", {}))
            for known, arm in zip(self.answers, self.arms, strict=True):
                if arm.name in found["answers"]:
                    known.append(answers.Answer.from_dict(found["answers"][arm.name]))
        self.samples = SampleTable(run_id, samples)

    def _new_record(self, run_id: str, name: str) -> dict[str, Any]:
        now = provenance.utc_now()
        found = provenance.collect(self.engine)
        return {
            "schema": results.SCHEMA,
            "run_id": run_id,
            "kind": "ab",
            "name": name,
            "status": results.INTERRUPTED,
            "started": now,
            "duration_s": 0.0,
            **found,
            "seed": self.seed,
            "tests": [w.name for w in self.workloads],
            "repetitions": self.rounds,
            "arms": [
                {
                    "name": arm.name,
                    "is_control": arm.is_control,
                    "toggles": arm.toggles.to_dict(),
                    "sync_mode": "",
                    "program": {},
                    "counters": {},
                }
                for arm in self.arms
            ],
            "result": {
                "toggle": self.toggle,
                "smoke": self.smoke,
                "warm_up": {},
                "until": None,
                "answers": {},
                "sessions": [{"started": now, "commit": found["commit"]}],
            },
        }

    def _check_same(self, old: dict[str, Any], out: Path | None) -> None:
        """Raises UsageError, naming the difference, where `old` measured something else."""

        def identity(record: dict[str, Any]) -> dict[str, Any]:
            return {
                "arms": [(a["name"], a["toggles"]) for a in record["arms"]],
                "tests": record["tests"],
                "seed": record["seed"],
                "model": record["model"].get("hash"),
                "engine": record["engine"]["config"],
                "device": record["engine"]["device_description"],
                "commit": record["commit"]["hash"],
            }

        was, now = identity(old), identity(self.record)
        for key, value in was.items():
            if now[key] != value:
                raise UsageError(
                    f"{out} cannot be resumed: its {key} is {value}, and now it would be {now[key]}"
                )

    def save(self, status: str) -> AB:
        """The result so far, written to the run folder where there is one."""
        result = self.record["result"]
        result["warm_up"] = self.warm_ups
        if self.until is not None:
            result["until"] = self.until._asdict() | {"tests": self.ended}
            rounds = (ended["rounds"] for ended in self.ended.values())
            self.record["repetitions"] = max(rounds, default=self.rounds)
        result["state_after"] = provenance.state()
        result["answers"] = {
            arm.name: answers.merge(every).to_dict()
            for arm, every in zip(self.arms, self.answers, strict=True)
            if every
        }
        seconds = self.duration_before + time.monotonic() - self.begun
        self.record |= {"status": status, "duration_s": round(seconds, 3)}
        made = AB(self.record, self.samples.frame())
        if self.out is not None:
            made.save(self.out)
        self.saved = time.monotonic()
        return made

    # measuring ----------------------------------------------------------------------------------

    def measure(self, progress: Callable[[int, int, str], None] | None) -> AB:
        self.begun = self.saved = time.monotonic()
        with ExitStack() as stack:
            self.engines = []
            for arm in self.arms:
                variant = self.engine.variant(arm.toggles)
                stack.callback(variant.close)
                self.engines.append(variant)
            try:
                self._check_answers()
                for n, workload in enumerate(self.workloads):
                    self._measure_test(workload, progress, len(self.workloads) - n)
            except KeyboardInterrupt:
                if not self.samples.n_cells:
                    raise
                return self.save(results.INTERRUPTED)
            except Exception:
                if self.samples.n_cells:
                    self.save(results.INTERRUPTED)
                raise
            return self.save(results.COMPLETE)

    def _check_answers(self) -> None:
        """Feeds the same tokens to every arm, and compares the logits with the baseline's."""
        room = self.engine.config.n_ctx
        n_steps = min(answers.N_STEPS, room - 1)
        fixed = Workload(min(answers.N_PREFILL, room - n_steps), n_steps)
        tokens = draw_tokens(fixed, self.engine.model.n_vocab, self.seed, bos=self.bos)
        with bar("comparing logits", fixed.n_tokens * len(self.arms), "tokens") as left:
            baseline = answers.force(self.engines[0], tokens, left)
            for i, arm in enumerate(self.arms[1:], 1):
                forced = answers.force(self.engines[i], tokens, left)
                self.answers[i].append(answers.compare(baseline, forced, arm.answer))

    def _measure_test(
        self,
        workload: Workload,
        progress: Callable[[int, int, str], None] | None,
        tests_left: int,
    ) -> None:
        test, n_arms = workload.name, len(self.arms)
        for engine, record in zip(self.engines, self.record["arms"], strict=True):
            record["sync_mode"] = engine.sync_mode
            record["program"][test] = describe(engine, workload)
        with ExitStack() as stack:
            left = HIDDEN
            for round_, n_rounds in self._rounds(workload, tests_left):
                cells = (n_rounds - round_) * n_arms
                if left is HIDDEN:
                    limit_s = self.until.at_most_s if self.until else math.inf
                    what, expected_s = label_of(workload, self.workloads), cells * self.each_s
                    n_tokens = cells * workload.n_cells
                    left = stack.enter_context(
                        bar(what, n_tokens, "tokens", min(expected_s, limit_s))
                    )
                left.total = left.done + cells * workload.n_cells
                left.detail = until.reached(self.ended.get(test))
                self._measure_round(workload, round_, n_rounds, progress, left)
            if progress is not None and left is not HIDDEN:
                total = len(self._whole(test)) * n_arms
                progress(total, total, test)

    def _measure_round(
        self,
        workload: Workload,
        round_: int,
        n_rounds: int,
        progress: Callable[[int, int, str], None] | None,
        left: Bar,
    ) -> None:
        """One repetition of every arm, but for those that a resumed run has."""
        test, n_arms = workload.name, len(self.arms)
        tokens = draw_tokens(workload, self.engine.model.n_vocab, self.seed, round_, self.bos)
        taken: dict[int, Sample] = {}
        for nth, i in enumerate(order_of(round_, n_arms)):
            arm = self.arms[i]
            if (arm.name, test, round_) in self.rates:
                continue
            if progress is not None:
                progress(round_ * n_arms + nth, n_rounds * n_arms, f"{test} {arm.name}")
            before = self.engines[i].counters
            taken[i] = sample = run(self.engines[i], workload, tokens, left)
            self.samples.add(
                arm.name, arm.is_control, test, round_, sample.token_ns, sample.token_n
            )
            self.rates[arm.name, test, round_] = sample.tokens_per_second
            _accumulate(self.record["arms"][i]["counters"], before, self.engines[i].counters)
        self._compare_round(taken)
        if self.out is not None and time.monotonic() - self.saved > results.CHECKPOINT_SECONDS:
            self.save(results.INTERRUPTED)

    def _rounds(self, workload: Workload, tests_left: int) -> Iterator[tuple[int, int]]:
        """The rounds to run, and how many there will be: a fixed number, or until it is known.
        The engines are warmed up before the first.

        What is left of `at_most_s` is shared among the tests that are left. A resumed run has all
        of it again.
        """
        test = workload.name

        def warm() -> None:
            begun = time.monotonic()
            warm = warm_up(self.engines, workload, self.seed, self.bos, once=self.smoke)
            self.warm_ups[test] = warm._asdict()
            self.each_s = (time.monotonic() - begun) / warm.rounds / len(self.arms)

        if self.until is None:
            missing = [
                r for r in range(self.rounds)
                if any((arm.name, test, r) not in self.rates for arm in self.arms)
            ]  # fmt: skip
            if missing:
                warm()
            yield from ((r, self.rounds) for r in missing)
            return
        before = self.ended.get(test, {}).get("seconds", 0.0)
        yield from until.rounds(
            until.share(self.until, self.spent, tests_left),
            lambda: self._whole(test),
            lambda ended: self.ended.update({test: ended._asdict()}),
            prepare=warm,
            seed=self.seed,
            least=self.rounds,
            seconds_before=before,
        )
        self.spent += self.ended[test]["seconds"] - before

    def _whole(self, test: str) -> list[list[float]]:
        """t/s of the rounds that every arm has run, (rounds, arms)."""
        rows, names = self.rows.setdefault(test, []), [arm.name for arm in self.arms]
        while all((name, test, len(rows)) in self.rates for name in names):
            rows.append([self.rates[name, test, len(rows)] for name in names])
        return rows

    def _compare_round(self, taken: dict[int, Sample]) -> None:
        """Holds every arm's last logits of a round against the baseline's of the same round."""
        if 0 not in taken:
            return
        row = taken[0].last_logits[None]
        for i, sample in taken.items():
            if i:
                found = answers.compare(row, sample.last_logits[None], self.arms[i].answer)
                self.answers[i].append(found)


def label_of(workload: Workload, every: Sequence[Workload]) -> str:
    """`tg128`, and of several tests `tg128 (test 2 of 3)`."""
    where = f" (test {every.index(workload) + 1} of {len(every)})" if len(every) > 1 else ""
    return f"{workload}{where}"


def describe(engine: Any, workload: Workload) -> dict[str, Any]:
    """What a token of the test (or its first ubatch, if it generates none) issues: the pattern, and
    per step the waits, copies, launches and bytes. It is the proof that a toggle removed work."""
    n_tokens = 1 if workload.n_gen else min(workload.n_prompt, engine.config.n_ubatch)
    n_past = workload.n_depth + (workload.n_prompt if workload.n_gen else 0)
    program = engine.program(n_tokens=n_tokens, n_outputs=1, n_past=n_past)
    return {
        "n_tokens": n_tokens,
        "pattern": program.pattern(),
        "folded_pattern": program.pattern(fold=True),
        "counts": program.counts(),
    }


def _accumulate(sums: dict[str, float], before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, value in after.items():
        sums[key] = sums.get(key, 0) + value - before[key]
