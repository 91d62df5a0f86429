"""How long no kernel runs between two tokens, and how much of this time one wait adds.

The *host gap* is the time from the end of a token's last kernel to the next token's first kernel.
The device's own clock measures the gap (`Engine.stamped`), in untraced steps: plans are stamped
inside, at their kernels. Without plans the gap ends when the stream reaches the first kernel. The
gap holds the copy of the logits to the host, the host's work, the copies of inputs to the device,
and the waits around all copies. Orderings with different waits have different gaps. A line is laid
through the gaps over the number of waits. Its slope is the cost of one wait, without the noise of
the rest of a token. Such a line does not tell kinds of waits apart. `Gaps.differences` has the cost
of each kind, from one mode to the next.

A host that slows down for a tenth of a second doubles the gaps of this time. So every arm decodes
only a few tokens before the next arm. Arms are compared within a round, in which all arms have the
same host. The result is the median over the rounds.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.compare.ab import describe
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.compare.stats import Band, Ratio, aa_band, median_interval, speedup
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run, open_out
from workbench.benchmarks.times.token_parts import WARM_UP, stamped_steps
from workbench.benchmarks.workload import Tokens, Workload, draw_tokens
from workbench.common.errors import UsageError
from workbench.common.progress import bar
from workbench.common.tables import Table, markdown, terminal_columns, to_html
from workbench.config import SyncMode, Toggles
from workbench.engine.cache.kv_cache import n_regions
from workbench.engine.cache.room import Room

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

CONTROL = " (A/A)"
COUNTED = ("waits", "stream_waits", "copies")  # among a token's commands
# (mode, next mode) -> the removed waits or copies
DIFFERENCES = {
    (SyncMode.PER_COPY, SyncMode.BLOCKING_COPIES): "waits before copies but one, for one after",
    (SyncMode.BLOCKING_COPIES, SyncMode.COPY_BOUNDARY): "a wait for each copy",
    (SyncMode.COPY_BOUNDARY, SyncMode.WRITE_READ_BOUNDARY): "the wait before the copies",
    (SyncMode.WRITE_READ_BOUNDARY, SyncMode.IMPLICIT): "the wait after the copies",
    (SyncMode.COPY_BOUNDARY, SyncMode.EVENT_GUARDED): "the wait after the copies, for an event",
    (SyncMode.COPY_BOUNDARY, SyncMode.PACKED): "copies but one",
}


class Fit(NamedTuple):
    """The line gap = base_us + wait_us * waits.

    wait_us: the median over the rounds of the slopes. A round's slope is by least squares through
        the medians of its arms.
    low_us, high_us: the 95 % interval of wait_us, a bootstrap over rounds; NaN with one round.
    base_us: chosen so that the line goes through the middle of the arms' medians.
    """

    wait_us: float
    low_us: float
    high_us: float
    base_us: float


GAPS = ("gap_us", "low_us", "high_us")  # columns of a table: median and quartiles


class Difference(NamedTuple):
    """How much shorter the gap of mode `after` is than that of mode `before`, on a copy stream.

    what: the removed waits or copies.
    n_waits: how many host waits were removed.
    us, low_us, high_us: the median over the rounds of the difference within a round, with its 95 %
        interval.
    """

    copy_stream: str
    before: str
    after: str
    what: str
    n_waits: int
    us: float
    low_us: float
    high_us: float


class Gaps(NamedTuple):
    """A run of `host_gaps`: run.json, and a row for each gap (column `ns`)."""

    run: dict[str, Any]
    samples: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """A row for each arm: mode, copy stream, pattern, waits (the host's), stream_waits (the
        device's), copies and bytes of a token (the logits' included), and the gap: median and
        quartiles, us."""
        rows = []
        for arm in self.run["arms"]:
            (program,) = arm["program"].values()
            us = self.samples.loc[self.samples["arm"] == arm["name"], "ns"] / 1e3
            low, mid, high = us.quantile([0.25, 0.5, 0.75])
            rows.append(
                {
                    "arm": arm["name"],
                    "sync": arm["sync_mode"],
                    "copy_stream": arm["toggles"]["copy_stream"],
                    "pattern": program["folded_pattern"],
                    **{name: program["counts"][name] for name in COUNTED},
                    "bytes": program["counts"]["copied_bytes"],
                    **dict(zip(GAPS, (mid, low, high), strict=True)),
                }
            )
        return Table(rows).shown(keys=["arm"], code=["pattern"], digits=dict.fromkeys(GAPS, 1))

    @property
    def fits(self) -> dict[str, Fit]:
        """The line of each copy stream, through the arms with as many copies and as many device
        waits as its first arm."""
        found, rounds = {}, self._rounds()
        others = [name for name in COUNTED if name != "waits"]
        for stream, part in self.table().set_index("arm").groupby("copy_stream", sort=False):
            alike = (part[others] == part[others].iloc[0]).all(axis=1)
            waits = part.loc[alike, "waits"]
            found[str(stream)] = fit_line(waits.to_numpy(float), rounds[waits.index].to_numpy())
        return found

    @property
    def differences(self) -> list[Difference]:
        """The entries of `DIFFERENCES` whose modes the run has, on each copy stream."""
        found, rounds = [], self._rounds()
        for stream, arms in self._modes():
            for (before, after), what in DIFFERENCES.items():
                if before in arms.index and after in arms.index:
                    n = int(arms["waits"][before] - arms["waits"][after])
                    us = median_interval(_less(rounds, arms, before, after))
                    found.append(Difference(stream, str(before), str(after), what, n, *us))
        return found

    def less(self, before: str, after: str, copy_stream: str) -> np.ndarray:
        """How much shorter the gap of mode `after` is than that of `before`, us, (rounds,). Raises
        KeyError where the run lacks one of the modes on this copy stream."""
        return _less(self._rounds(), dict(self._modes())[copy_stream], before, after)

    def ratio(self, before: str, after: str, copy_stream: str) -> tuple[Ratio, Band]:
        """The ratio of the gaps of the modes `before` and `after` (above 1: `after` is shorter),
        and the A/A band of the run's control. Raises KeyError as `less` does."""
        rounds, arms = 1 / self._rounds(), dict(self._modes())[copy_stream]["arm"]
        first = self.run["arms"][0]["name"]
        band = aa_band(speedup(rounds[first].to_numpy(), rounds[first + CONTROL].to_numpy()))
        return speedup(rounds[arms[before]].to_numpy(), rounds[arms[after]].to_numpy()), band

    def _modes(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """The rows of `table` by copy stream, with the mode as the index, without the control."""
        table = self.table()
        table = table[~table["arm"].str.endswith(CONTROL)]
        for stream, part in table.groupby("copy_stream", sort=False):
            yield str(stream), part.set_index("sync")

    def _rounds(self) -> pd.DataFrame:
        """The median gap by round and arm, us."""
        return (
            self.samples.pivot_table(
                index="repetition", columns="arm", values="ns", aggfunc="median"
            )
            / 1e3
        )

    @property
    def verdict(self) -> str:
        """A line for each copy stream: the cost of a wait; then the device."""
        n, device = len(self._rounds()), self.run["engine"].get("device_description")
        lines = [
            f"copy_stream={stream}: one wait adds {fit.wait_us:.2f} us to the gap (95% CI "
            f"{fit.low_us:.2f} to {fit.high_us:.2f}, n={n}), {fit.base_us:.1f} us without any"
            for stream, fit in self.fits.items()
        ]
        if self.run["status"] == results.INTERRUPTED:
            asked = self.run["repetitions"]
            lines.append(f"interrupted: not every one of {asked} rounds was run")
        return "\n".join(filter(None, [*lines, self.unresolved, str(device)]))

    @property
    def unresolved(self) -> str:
        """The smallest difference that this machine can resolve, by the A/A control. Empty where
        every difference is larger and the control's interval holds 0, and with one round."""
        rounds = self._rounds()
        control = next(name for name in rounds if str(name).endswith(CONTROL))
        apart = rounds[control] - rounds[str(control).removesuffix(CONTROL)]
        _, low, high = median_interval(apart.to_numpy())
        least = max(abs(low), abs(high))
        below = [d for d in self.differences if abs(d.us) <= least]
        if np.isnan(low) or not (below or low > 0 or high < 0):
            return ""
        said = f"this machine cannot resolve less than {least:.2f} us of gap here now"
        if low > 0 or high < 0:
            said = (
                f"the A/A control's gap is {low:.2f} to {high:.2f} us off: the baseline, measured "
                f"twice, differs from itself. T{said[1:]}"
            )
        if below:
            found = (f"{d.before} -> {d.after} ({d.us:.2f} us, {d.copy_stream})" for d in below)
            said += f", and less is {', '.join(found)}"
        return (
            f"{said}. What helps: {4 * len(rounds)} rounds (by the width, they halve that), or a "
            "quiet machine"
        )

    def shown(self) -> Table:
        """The table as a lesson shows it: arm, pattern, the three counts, and the gap with its
        quartiles."""
        table = self.table()
        few = table[["arm", "pattern", *COUNTED]].copy()
        few["gap_us"] = [
            f"{us:.1f} ({low:.1f}..{high:.1f})" for us, low, high in table[[*GAPS]].to_numpy()
        ]
        return Table(few).shown(keys=["arm"], code=["pattern"], right=["gap_us"])

    def __repr__(self) -> str:
        return f"{markdown(self.shown(), terminal_columns())}\n\n{self.verdict}"

    def _repr_html_(self) -> str:
        lines = "<br>".join(html.escape(line) for line in self.verdict.splitlines())
        return f"{to_html(self.shown())}<p>{lines}</p>"


def _less(rounds: pd.DataFrame, arms: pd.DataFrame, before: str, after: str) -> np.ndarray:
    """`Gaps.less`, from `Gaps._rounds` and the rows of a copy stream."""
    return (rounds[arms["arm"][before]] - rounds[arms["arm"][after]]).to_numpy()


def fit_line(waits: np.ndarray, gap_us: np.ndarray) -> Fit:
    """The `Fit` of gaps over waits. waits: of each arm, (arms,). gap_us: medians, (rounds, arms).
    Raises UsageError where all arms have the same number of waits, since no slope exists."""
    if len(set(waits.tolist())) < 2:
        raise UsageError("every arm waits as often; compare orderings with different waits")
    slope = median_interval(np.polyfit(waits, gap_us.T, 1)[0])
    left = np.median(gap_us, axis=0) - slope[0] * waits
    return Fit(*slope, float(np.median(left)))


def host_gaps(
    engine: Engine,
    arms: Mapping[str, Toggles],
    *,
    n_tokens: int = 5,
    rounds: int = 60,
    seed: int = 0,
    out: str | Path | None = None,
    name: str = "gaps",
) -> Gaps:
    """Decodes n_tokens random tokens with each arm, in `rounds` rounds (`compare/rounds.py`). The
    first arm is measured once more as the A/A control. A repetition gives n_tokens - 1 gaps.

    out: a run folder, written every 10 s on the way and at the end. Ctrl-C keeps the whole rounds.

    Raises UsageError for no arms, for an arm with the control's name, and for a device without a
    clock or streams (the host). Also for tokens that do not fit the context, for fewer than two
    tokens, and for a folder that exists already.
    """
    if not arms:
        raise UsageError("there are no arms to compare; name some, as {'per_copy': Toggles()}")
    if engine.backend.capabilities.synchronous:
        raise UsageError(f"the {engine.device} device has no gap: it computes when it is called")
    if taken := [arm for arm in arms if arm.endswith(CONTROL)]:
        raise UsageError(f"arm {taken[0]!r}: names that end with {CONTROL!r} are the control's")
    if n_tokens < 2 or rounds < 1:
        raise UsageError(f"n_tokens={n_tokens} and rounds={rounds} leave no gap to measure")
    for toggles in arms.values():
        room = Room(engine.config.n_ctx, n_regions(toggles, engine.config))
        room.check(0, n_tokens + WARM_UP)
    baseline = next(iter(arms))
    every = {**arms, baseline + CONTROL: arms[baseline]}
    decoded = Workload(0, n_tokens + WARM_UP)
    test = f"tg{n_tokens}"
    folder = Path(out) if out is not None else None
    open_out(folder, resume=False)
    run = _new_run(engine, every, test, rounds, seed, name)
    draft = Draft(run, folder)
    with ExitStack() as stack:
        sides = [stack.enter_context(engine.variant(toggles)) for toggles in every.values()]
        for arm, side in zip(run["arms"], sides, strict=True):
            arm["sync_mode"] = side.sync_mode
            arm["program"] = {test: describe(side, Workload(0, n_tokens))}
        for side in sides:  # so that no first step is timed
            _gaps_of(side, draw_tokens(decoded, engine.model.n_vocab, seed, 0))
        left = stack.enter_context(bar(name, rounds * len(sides), "repetitions"))

        def measure(round_: int, i: int) -> np.ndarray:
            ns = _gaps_of(sides[i], draw_tokens(decoded, engine.model.n_vocab, seed, round_))
            left.update()
            return ns

        def whole(round_: int, found: dict[int, np.ndarray]) -> None:
            """Adds a round. Only whole rounds count, in which all arms had the same host."""
            for i, ns in found.items():
                arm = run["arms"][i]
                draft.samples.add(
                    arm["name"], arm["is_control"], test, round_, ns, np.ones_like(ns)
                )
            draft.checkpoint()

        with kept(draft):
            interleave(range(rounds), len(sides), measure, whole)
    return Gaps(run, draft.samples.frame())


def load(folder: str | Path) -> Gaps:
    """Reads a run folder of `host_gaps`."""
    found = results.load_run(folder)
    return Gaps(found.run, found.samples)


def _gaps_of(engine: Engine, tokens: Tokens) -> np.ndarray:
    """The gaps between the tokens after the warm-up, ns, int64."""
    engine.reset()
    for token in tokens.gen[:WARM_UP]:
        engine.step([token])
    _, stamps = stamped_steps(engine, tokens.gen[WARM_UP:])
    begun, ended = np.array(stamps, np.int64).T
    return begun[1:] - ended[:-1]


def _new_run(
    engine: Engine, arms: Mapping[str, Toggles], test: str, rounds: int, seed: int, name: str
) -> dict[str, Any]:
    made = [new_arm(arm, t.to_dict(), arm.endswith(CONTROL)) for arm, t in arms.items()]
    return new_run("gaps", name, name, provenance.collect(engine), made, [test], rounds, seed)
