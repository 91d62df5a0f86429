"""How long a token takes, and where the time goes: a test is measured untraced, and then traced.

The times of tokens come from untraced steps, by the device's own stamps (`Engine.stamped`). The
shares of kernels, host phases and gaps come from a trace of the same test, taken afterwards in the
same process (`trace/analysis.py`). Tracing slows the host, and the profile reports the slowdown.

    untraced, stamped   | step 0 | step 1 | ... | step n-1 |   repeated
    traced              |  not traced   |  window  |  not  |   once

The read bandwidth, to which kernels are compared, is measured first, by `kernel_rigs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks import workload as w
from workbench.benchmarks.kernels.kernel_rigs import rig_of
from workbench.benchmarks.workload import check_fits
from workbench.common.errors import DeviceError, UsageError
from workbench.common.progress import Bar, bar
from workbench.engine.look.phases import PHASES as OF_ENGINE
from workbench.program.commands import HOST, Launch
from workbench.trace.profile import Profile, profile
from workbench.trace.spans import Recorder, now_ns

if TYPE_CHECKING:
    from workbench.engine.batch import Outputs
    from workbench.engine.engine import Engine

MOST_TRACED = 8  # steps of the default window
WRITE_EVERY = 4  # steps between two updates of the progress bar, at least
STEPS = ["repetition", "step", "n_tokens", "host_us", "kernels_us", "gap_us", "step_us"]
# their counters are in Engine.counters
PHASES = list(OF_ENGINE)


class Bandwidth(NamedTuple):
    """The read bandwidth.

    gbps: None where it could not be measured.
    note: the way of reading, or why nothing was measured; and a warning for a faulty card.
    """

    gbps: float | None
    note: str


class Profiled(NamedTuple):
    """The result of `profile_test`.

    steps: a row for each untraced step (`step_times`).
    phases: the host's time by phase, a row for each untraced step (`counted_steps`).
    stamped: whether `steps` has the device's times. False for a device that computes inside the
        host's call: then the host's times are the device's.
    window: (first, n) of the traced steps.
    trace: the trace.
    read: the read bandwidth.
    """

    test: str
    repetitions: int
    steps: pd.DataFrame
    phases: pd.DataFrame
    stamped: bool
    window: tuple[int, int]
    trace: Profile
    read: Bandwidth


def n_steps_of(workload: w.Workload, n_ubatch: int) -> int:
    """The number of steps of the test, without the steps that fill its depth."""
    return math.ceil(workload.n_prompt / n_ubatch) + workload.n_gen


def last_steps(n_steps: int) -> tuple[int, int]:
    """The window of the last MOST_TRACED steps, (first, n): enough for a typical step."""
    return max(0, n_steps - MOST_TRACED), min(n_steps, MOST_TRACED)


def window_of(
    workload: w.Workload, n_ubatch: int, asked: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The steps to trace, (first, n): the window `asked`, or the last 8 steps (or all, if fewer).

    Raises UsageError for a window outside the test, and for a test of several sequences.
    """
    if workload.n_seqs:
        raise UsageError(
            f"{workload.name} has several sequences, and a profile is of one sequence; name a test "
            "such as tg32, or measure this one with `workbench bench -npl`"
        )
    n_steps = n_steps_of(workload, n_ubatch)
    first, n = asked or last_steps(n_steps)
    if first < 0 or n < 1 or first + n > n_steps:
        raise UsageError(
            f"window {first},{n} does not lie in {workload.name}, which has {n_steps} steps here; "
            f"give FIRST,N with FIRST from 0 and FIRST + N at most {n_steps}"
        )
    return first, n


def profile_test(
    engine: Engine,
    workload: w.Workload,
    window: tuple[int, int] | None = None,
    *,
    repetitions: int = 5,
    seed: int = 0,
    collector: str = "auto",
) -> Profiled:
    """Runs the test `repetitions` times stamped, then once traced in `window`.

    Raises UsageError for a test that does not fit the context, for a window outside it, and while
    the engine is traced.
    """
    check_fits(engine.toggles, engine.config, workload)
    w.check_untraced(engine)
    window = window_of(workload, engine.config.n_ubatch, window)
    if repetitions < 1:
        raise UsageError(f"repetitions={repetitions} must be at least 1")
    bos, n_vocab = w.bos_token(engine), engine.model.n_vocab
    read = read_bandwidth(engine)
    w.warm_up([engine], workload, seed, bos)
    stamped = runs_on_device(engine)
    drawn = [w.draw_tokens(workload, n_vocab, seed, n, bos) for n in range(repetitions + 1)]
    steps = step_times(engine, drawn[:-1], stamped)
    phases = counted_steps(engine, drawn[-1])
    untraced = steps[["n_tokens", "host_us"]].itertuples(index=False)
    trace = trace_steps(engine, drawn[-1], window, collector, list(untraced))
    trace.about |= {"test": workload.name, "window": f"{window[0]},{window[1]}"}
    return Profiled(workload.name, repetitions, steps, phases, stamped, window, trace, read)


def trace_steps(
    engine: Engine,
    tokens: w.Tokens,
    window: tuple[int, int],
    collector: str = "auto",
    untraced: Sequence[tuple[int, float]] = (),
) -> Profile:
    """Traces the steps of a test in `window`. untraced: tokens and us of steps measured before; the
    profile compares its steps with them."""
    engine.reset()
    _fill(engine, tokens)
    with profile(engine, window=window, collector=collector) as trace:
        assert isinstance(trace.recorder, Recorder)
        for n_tokens, us in untraced:
            trace.recorder.untraced(int(n_tokens), round(1e3 * us))
        for ids, outputs in _steps(engine, tokens):
            engine.step(ids, outputs)
    return trace


def trace_last(engine: Engine, workload: w.Workload, seed: int) -> Profile:
    """Traces the last steps of a test, with the same tokens for every engine of one model."""
    tokens = w.draw_tokens(workload, engine.model.n_vocab, seed, bos=w.bos_token(engine))
    return trace_steps(engine, tokens, last_steps(n_steps_of(workload, engine.config.n_ubatch)))


def runs_on_device(engine: Engine) -> bool:
    """Whether a token has launches on a device that computes while the host goes on."""
    if engine.backend.capabilities.synchronous:
        return False
    commands = engine.program().singly()
    return any(isinstance(c, Launch) and c.stream.backend != HOST for c in commands)


def step_times(engine: Engine, drawn: list[w.Tokens], stamped: bool = True) -> pd.DataFrame:
    """A row for each step of each repetition, untraced.

    drawn: the tokens of the repetitions.
    stamped: whether the device has times (`runs_on_device`).

    host_us is the time of the step's call. The other times are by the device's clock, and missing
    without stamps:

        kernels_us   from the first kernel of the step to the end of its last kernel
        gap_us       from the end of the previous step's last kernel to the first kernel
        step_us      from the end of the previous step's last kernel to the end of the last kernel

    gap_us and step_us are missing in the first step, and in a step after a progress update.
    """
    cells = sum(map(len, drawn[0]))
    rows = []
    with bar("untraced steps", cells * len(drawn), "tokens") as left:
        for repetition, tokens in enumerate(drawn):
            part = _repetition(engine, tokens, stamped, left)
            rows.append(part.assign(repetition=repetition))
    return pd.concat(rows, ignore_index=True)[STEPS]


def _repetition(engine: Engine, tokens: w.Tokens, stamped: bool, left: Bar) -> pd.DataFrame:
    """The rows of a repetition. A step after an update of the progress bar has no gap."""
    engine.reset()
    _fill(engine, tokens)
    untold, written = len(tokens.depth), []
    sizes, host_us = [], []
    with _stamps(engine, stamped) as stamps:
        for ids, outputs in _steps(engine, tokens):
            begin = now_ns()
            engine.step(ids, outputs)
            host_us.append((now_ns() - begin) / 1e3)
            sizes.append(len(ids))
            untold += len(ids)
            if len(sizes) % WRITE_EVERY == 0 and now_ns() >= left.due_ns:
                left.update(untold)
                untold = 0
                written.append(len(sizes))
    left.update(untold)
    times = np.array(stamps or [(np.nan, np.nan)] * len(sizes)) / 1e3
    begun, ended = times.T
    last = np.concatenate(([np.nan], ended[:-1]))
    last[[n for n in written if n < len(last)]] = np.nan
    return pd.DataFrame(
        {
            "step": range(len(sizes)), "n_tokens": sizes, "host_us": host_us,
            "kernels_us": ended - begun, "gap_us": begun - last, "step_us": ended - last,
        }
    )  # fmt: skip


def _stamps(engine: Engine, stamped: bool) -> AbstractContextManager[Sequence[tuple[float, float]]]:
    return engine.stamped() if stamped else nullcontext([])


def counted_steps(engine: Engine, tokens: w.Tokens) -> pd.DataFrame:
    """A row for each step of a further untraced repetition: n_tokens, and the host's time in each
    phase of PHASES, us. The repetition is not stamped, since reading the counters lengthens
    gaps."""
    engine.reset()
    _fill(engine, tokens)
    rows, before = [], engine.counters
    for ids, outputs in _steps(engine, tokens):
        engine.step(ids, outputs)
        after = engine.counters
        spent = {name: (after[f"{name}_ns"] - before[f"{name}_ns"]) / 1e3 for name in PHASES}
        rows.append({"n_tokens": len(ids)} | spent)
        before = after
    return pd.DataFrame(rows, columns=["n_tokens", *PHASES])


def read_bandwidth(engine: Engine) -> Bandwidth:
    """The read bandwidth of the engine's device, the best of several ways. Allocates up to 4 GiB
    for a moment. Where the memory is not free, gbps is None and the note has the reason."""
    rig = rig_of(engine.backend, quick=False)
    try:
        rates = rig.read_rates()
    except (DeviceError, MemoryError) as error:
        reason = (str(error).splitlines() or ["out of memory"])[0]
        return Bandwidth(None, f"no read bandwidth: {reason}")
    best = max(rates, key=rates.__getitem__)
    note = f"read bandwidth {rates[best]:.1f} GB/s ({best}, the best of {len(rates)} ways)"
    void = rig.void(rates[best])
    return Bandwidth(rates[best], f"{note}; {void}" if void else note)


def _steps(engine: Engine, tokens: w.Tokens) -> list[tuple[list[int], Outputs]]:
    """The arguments of the test's calls of `Engine.step`: the tokens, and which logits are
    wanted."""
    n = engine.config.n_ubatch
    parts = [tokens.prompt[i : i + n] for i in range(0, len(tokens.prompt), n)]
    calls: list[tuple[list[int], Outputs]] = [(part, "none") for part in parts[:-1]]
    return calls + [(part, "last") for part in (*parts[-1:], *([token] for token in tokens.gen))]


def _fill(engine: Engine, tokens: w.Tokens) -> None:
    if tokens.depth:
        engine.prefill(tokens.depth)
