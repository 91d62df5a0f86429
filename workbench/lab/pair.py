"""Two sets of toggles on one engine's weights, quickly: who is faster, and where does time go?

The short form of `wb.ab` for a person who tries things: any number of toggles may differ, nothing
is written, and beside the speedup there is a trace of either side. What makes the number believable
is the same: interleaved rounds, an A/A control (the baseline a second time), an interval, and
logits held against the baseline's. The traces are taken after the timing, never during it.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from workbench.bench import answers, stats
from workbench.bench.answers import Answer
from workbench.bench.comparison import order_of
from workbench.bench.workload import Workload, bos_token, check_fits, draw_tokens, run, warm_up
from workbench.config import EXACT, ROUNDING, Toggles
from workbench.engine.engine import Engine
from workbench.errors import UsageError
from workbench.lab import said
from workbench.trace.profile import Profile, profile

TRACED_STEPS = 8  # at most, the last of the test: enough for a typical one


class Pair(NamedTuple):
    """What was found. labels: of the baseline's and the toggled side; tps: their medians, tokens/s.

    before, after: traces of the last TRACED_STEPS steps of the test. device_is_gpu: whether the
    times are a GPU's.
    """

    test: str
    baseline: Toggles
    toggled: Toggles
    labels: tuple[str, str]
    tps: tuple[float, float]
    speedup: stats.Ratio
    band: stats.Band
    answer: Answer
    before: Profile
    after: Profile
    device_is_gpu: bool

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `no difference` or `too few repetitions`."""
        return stats.verdict(self.speedup, self.band)

    @property
    def line(self) -> str:
        """The speedup line."""
        ratio, (before, after) = self.speedup, self.tps
        own = "" if self.device_is_gpu else "; timings of this device, not of a GPU"
        return (
            f"{self.test}: {self.labels[0]} -> {self.labels[1]}: {self.verdict}, "
            f"{ratio.value:.3f}x ({before:.1f} -> {after:.1f} t/s, "
            f"95% CI {stats.interval(ratio.low, ratio.high)}, n={ratio.n}, "
            f"A/A band {stats.interval(*self.band)}); {self.answer}{own}"
        )

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.line)}</p>"


def check(engine: Engine, workload: Workload, rounds: int, seed: int) -> None:
    """Raises UsageError for what `compare` could not measure, whatever the toggles are."""
    check_fits(engine, workload)
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
    """Times `toggled` against `baseline` on variants of `engine`, then traces either.

    progress is told what is being done, in a few words. Raises UsageError and DeviceError for what
    cannot be measured or honoured; all variants are closed then, too, and after an interrupt.
    """
    check(engine, workload, rounds, seed)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(engine.variant(toggles))
            for toggles in (baseline, toggled, baseline)  # the last is the A/A control
        ]
        bos, n_vocab = bos_token(engine), engine.model.n_vocab
        progress("comparing logits")
        answer = _answer(sides, _class_of(baseline, toggled), seed)
        progress("warming up")
        warm_up(sides, workload, seed, bos)
        tps = np.empty((len(sides), rounds))
        for round_ in range(rounds):
            progress(f"round {round_ + 1} of {rounds}")
            tokens = draw_tokens(workload, n_vocab, seed, round_, bos)
            for i in order_of(round_, len(sides)):
                tps[i, round_] = run(sides[i], workload, tokens).tokens_per_second
        progress("tracing")
        before, after = (_trace(side, workload, seed) for side in sides[:2])
        medians = np.median(tps, axis=1)
        return Pair(
            workload.name, baseline, toggled, (_label(sides[0]), _label(sides[1])),
            (float(medians[0]), float(medians[1])),
            stats.speedup(tps[0], tps[1], seed), stats.aa_band(stats.speedup(tps[0], tps[2], seed)),
            answer, before, after, engine.device == "cuda",
        )  # fmt: skip


def _class_of(baseline: Toggles, toggled: Toggles) -> str:
    """The class that the toggled side's logits are held to: that of all toggles that differ."""
    before, after = baseline.to_dict(), toggled.to_dict()
    changed = [name for name in after if after[name] != before[name]]
    rounds = any(toggled.answer_class(name) == ROUNDING for name in changed)
    return ROUNDING if rounds else EXACT


def _answer(sides: list[Engine], kind: str, seed: int) -> Answer:
    """Feeds the same tokens to both sides, a prompt and then one by one, as `wb.ab` does."""
    room = sides[0].config.n_ctx
    n_steps = min(answers.N_STEPS, room - 1)
    fixed = Workload(min(answers.N_PREFILL, room - n_steps), n_steps)
    tokens = draw_tokens(fixed, sides[0].model.n_vocab, seed, bos=bos_token(sides[0]))
    return answers.compare(answers.force(sides[0], tokens), answers.force(sides[1], tokens), kind)


def _trace(engine: Engine, workload: Workload, seed: int) -> Profile:
    """The last steps of the test, traced: the same tokens for every engine of one model."""
    tokens = draw_tokens(workload, engine.model.n_vocab, seed, bos=bos_token(engine))
    n_steps = -(-workload.n_prompt // engine.config.n_ubatch) + workload.n_gen
    engine.reset()
    if tokens.depth:
        engine.prefill(tokens.depth)
    with profile(engine, window=(max(0, n_steps - TRACED_STEPS), TRACED_STEPS)) as traced:
        if tokens.prompt:
            engine.prefill(tokens.prompt)
        for token in tokens.gen:
            engine.step((token,))
    return traced


def _label(engine: Engine) -> str:
    """The side's toggles; where sync=auto chose, also what."""
    auto = engine.toggles.value_of("sync") == "auto"
    return said(engine.toggles) + (f" (chose {engine.sync_mode})" if auto else "")
