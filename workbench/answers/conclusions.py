"""The answers of notebooks in sentences, each to the question in the notebook's title.

Tables and comparisons go in, sentences come out, shown as prose in a notebook and on a terminal.
Nothing is measured here. Every figure comes from the notebook's own run, so a notebook that runs
elsewhere answers for that machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.answers import claims
from workbench.answers.kept import MEASURED
from workbench.answers.kept import theirs as at_theirs
from workbench.answers.waits import AFTER, BEFORE, HERE
from workbench.benchmarks.compare.comparison import AB, background
from workbench.benchmarks.compare.stats import median_interval
from workbench.benchmarks.runs import results
from workbench.common.tables import prose_html
from workbench.config import PlanRule

if TYPE_CHECKING:
    from workbench.benchmarks.times.gaps import Gaps

DECIDED = ("faster", "slower")
PR = PlanRule.PR.value


class Conclusion(str):
    """Sentences, a line for each; shows itself as prose in a notebook and on a terminal."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<p class="wb-answer">{"<br>".join(map(prose_html, self.splitlines()))}</p>'


def concluded(lines: Iterable[str], *comparisons: AB) -> Conclusion:
    """The lines, and then the sentences about the comparisons."""
    return Conclusion("\n".join([*lines, *(line for one in comparisons for line in effects(one))]))


def effects(comparison: AB) -> Iterable[str]:
    """A sentence for each test and verdict: the arms that differ from the baseline, and by how
    much."""
    run, summary = comparison.run, comparison.summary()
    what = comparison.assigned(comparison.label(run["arms"][0]))
    beside = f" (beside {background(run)})"
    for test, rows in summary[~summary["is_control"]].groupby("test", sort=False):
        decided = rows[rows["verdict"].isin(DECIDED)].sort_values("speedup", ascending=False)
        for row in decided.itertuples():
            arm = comparison.assigned(row.label)
            yield (
                f"In {test}{beside}, {arm} is {row.speedup:.3f} times as fast as {what} "
                f"(95% CI {row.low:.3f}..{row.high:.3f})."
            )
        undecided = rows[~rows["verdict"].isin(DECIDED)]
        for verdict, part in undecided.groupby("verdict", sort=False):
            yield f"In {test}{beside}, {verdict} from {what}: {listed(part['label'])}."


def time(us: float) -> str:
    """`3.10 ms`, `746 us` or `12.3 us`; `unknown` for NaN."""
    if not np.isfinite(us):
        return "unknown"
    if us >= 1000:
        return f"{us / 1000:.2f} ms"
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def listed(words: Iterable[str]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def against(notebook: str, here: str) -> str:
    """The first sentence of an answer: what the thread has, and what was found here."""
    claim = claims.verdict(notebook)
    of = f" ({claim.card})" if claim.card else ""
    return f"The thread of {claim.thread} has {claim.gain}{of}; here {here}."


def gained(comparison: AB, arm: str) -> str:
    """`4.1 % more tokens a second (95% CI 2.0..6.3 %)` of an arm in a comparison's first test; with
    its verdict in front where that does not decide."""
    row = comparison.summary().set_index("arm").loc[arm]
    if isinstance(row, pd.DataFrame):
        row = row.iloc[0]
    value, low, high = (100 * (row[name] - 1) for name in ("speedup", "low", "high"))
    told = (
        f"{abs(value):.1f} % {'more' if value >= 0 else 'fewer'} tokens a second (95% CI "
        f"{low:.1f}..{high:.1f} %)"
    )
    return told if row["verdict"] in DECIDED else f"{row['verdict']}, {told}"


def token(traced: Any, comparison: AB) -> Conclusion:
    """The parts of one token.

    traced: a profile of the baseline, or its `summary()`.
    comparison: the same baseline untraced, against a program that is kept.
    """
    steps = traced if isinstance(traced, pd.DataFrame) else traced.summary()
    s, run = steps.median(numeric_only=True), comparison.run
    times = results.percentiles(comparison.samples).set_index(["test", "arm"])["p50_us"]
    arms = [arm["name"] for arm in run["arms"] if not arm["is_control"]]
    toggle, test = run["result"]["toggle"], run["tests"][0]
    untraced = listed(f"{time(times[test, arm])} with {toggle}={arm}" for arm in arms)
    (claim,) = claims.of("00_tour")
    lines = [
        f'The thread of {claim.thread}: "{claim.words}"; here the device works '
        f"{time(s['device_us'])} of a token of {time(s['step_us'])}, every switch off and traced.",
        f"One token is {s['launches']:.0f} launches, {s['copies']:.0f} copies and "
        f"{s['waits']:.0f} waits of the host; untraced it takes {untraced} ({test}).",
        f"Traced, the host takes {time(s['build_us'])} to build the program, "
        f"{time(s['host_us'])} to issue it, {time(s['wait_us'])} in waits. The device stands still "
        f"{time(s['idle_us'])} between its first and its last work.",
    ]
    return concluded(lines, comparison)


def launches(layers: Mapping[str, pd.DataFrame], *comparisons: AB) -> Conclusion:
    """How many launches a layer needs, and how much fewer launches gain.

    layers: by name, a row for each launch of a layer (`launches.nodes_table`).
    """
    counts = [f"{len(nodes)} {name}" for name, nodes in layers.items()]
    counts[0] = counts[0].replace(" ", " launches ", 1)
    return concluded([f"A layer takes {listed(counts)}."], *comparisons)


def waits(
    proved: Mapping[str, pd.DataFrame],
    wrong: pd.DataFrame,
    gaps: Gaps,
    worth: pd.DataFrame,
    comparison: AB,
) -> Conclusion:
    """Which waits are superfluous and which suffice, what goes wrong without them, the cost of
    waits, and the gain of fewer.

    proved: `decode` and `train`, of `proofs.proof_table`.
    wrong, worth: of `raced.wrong_table` and `waits.worth_table`.
    gaps, comparison: measured.
    """
    rows, table = proved["decode"].set_index("ordering"), gaps.table().set_index("arm")
    own, one = (rows.loc[f"per_copy, {stream}"] for stream in ("own", "compute"))
    here = worth[worth["where"] == HERE].iloc[-1]
    shorter, low, high = median_interval(gaps.less(BEFORE, AFTER, next(iter(gaps.fits))))
    lines = [
        against(
            "02_sync_modes",
            f"{AFTER} makes the gap between tokens {shorter:.1f} us shorter (95% CI {low:.1f}.."
            f"{high:.1f}), beside a token of {time(here['a token, us'])} of {here['model']}; end "
            f"to end: {gained(comparison, AFTER)}",
        ),
        f"Of llama.cpp's {own['waits']} waits between tokens, {own['superfluous']} are superfluous "
        f"with copies on a stream of their own, and {one['superfluous']} with one stream.",
    ]
    for fit in gaps.fits.values():
        most = table.loc[table["waits"].idxmax()]
        lines.append(
            f"A wait adds {fit.wait_us:.2f} us to the gap between tokens (95% CI "
            f"{fit.low_us:.2f} to {fit.high_us:.2f}): it is {most['gap_us']:.1f} us with "
            f"{most['waits']} waits, {fit.base_us:.1f} us without any."
        )
    for when, run in (("Between tokens", "decode"), ("Between ubatches of a prompt", "train")):
        lines += _proved(proved[run], when)
    return concluded([*lines, _seen(wrong)], comparison)


def _seen(wrong: pd.DataFrame) -> str:
    """What went wrong where orderings that race were run, of `raced.wrong_table`."""
    racing = wrong[wrong["pairs that race"] > 0]
    seen = [f"{row.wrong} of {row.of} prompts with {row.ordering}" for row in racing.itertuples()]
    safe = wrong.loc[wrong["pairs that race"] == 0, "ordering"]
    if not racing["wrong"].any():
        return (
            f"On the embedded device no prompt went wrong with {listed(racing['ordering'])}: that "
            "proves nothing, for the checker names what races. Run it again."
        )
    n = int(wrong.loc[wrong["pairs that race"] == 0, "wrong"].sum())
    return (
        f"On the embedded device wrong tokens came from {listed(seen)}; from {n or 'none'} with "
        f"{listed(safe)}."
    )


def reuse(kept: Mapping[str, pd.DataFrame], theirs: str, comparison: AB) -> Conclusion:
    """The cost of building the graph anew, and the gain of keeping it.

    kept: the tables of `kept.py`: `phases`, `steps`, `layers` and `worth`.
    theirs: the recorded sentence about llama.cpp's own build; may be empty.
    comparison: of `graph_reuse`, from `rebuild` on.
    """
    phases, steps, layers, worth = (kept[n] for n in ("phases", "steps", "layers", "worth"))
    by_phase = phases.set_index("phase")
    built = by_phase["rebuild"][lambda us: (by_phase["set_rows"] == 0) & (us > 0)]
    ways = [way for way in by_phase if way != "rebuild"]
    finding = listed(f"{time(by_phase.loc['reuse', way])} with {way}" for way in ways)
    alike, once = steps.iloc[:5], layers.iloc[:-1]
    tokens, reused = alike["steps"].sum(), alike["reused"].sum()
    costliest = once.loc[once["us more a token"].idxmax()]
    claimed = worth[worth["whose"].str.contains("#8366")]
    issued = {way: by_phase.loc["issue", way] for way in ("rebuild", "set_rows")}
    lines = [
        against("03_graph_reuse", _of_python(worth, theirs)),
        f"Building the graph anew costs a token {time(built.sum())} here: "
        f"{listed(f'{phase} {time(us)}' for phase, us in built.items())}.",
        f"Finding a kept program takes {finding}. Issuing it takes {time(issued['set_rows'])}, "
        f"and {time(issued['rebuild'])} where it is new.",
        f"Of {tokens} tokens one after the other {reused} reuse a program: all but the first and "
        f"the {tokens - 1 - reused} with which n_kv grows.",
        f"Of the layers of reuse, {costliest['toggle']} costs most when it is done again: "
        f"{time(costliest['us more a token'])} a token.",
        f"The {listed(f'{s - 1:.0%}' for s in claimed['speedup of a kept graph'])} of #8366 would "
        f"be a build of {listed(map(time, claimed['a build costs, us']))} beside this device's "
        "token.",
        *filter(None, [theirs]),
    ]
    return concluded(lines, comparison)


def _of_python(worth: pd.DataFrame, theirs: str) -> str:
    """The speedup that was measured, and that at llama.cpp's build time, recorded; without a record
    that at the table's middle build time."""
    shown = worth.set_index("whose")["speedup of a kept graph"]
    found, between = f"{shown[MEASURED]:.1f} times as fast is Python's price", at_theirs(theirs)
    if between is not None:
        low, high = between
        return f"{found}: at llama.cpp's build time, recorded, it is {low:.2f} to {high:.2f}"
    middle = worth.iloc[1]
    return (
        f"{found}: with a build of {middle['a build costs, us']:.0f} us it would be "
        f"{middle['speedup of a kept graph']:.3f}"
    )


def plans(planned: Mapping[str, pd.DataFrame], half: AB, whole: AB) -> Conclusion:
    """When a captured graph repays its capture, and how much of the gap is left.

    planned: the tables of `planned.py`: `calls`, `forced` and `gap`; and `proof` of
        `proofs.proof_table`, eager first.
    half, whole: of `plans`, from `off` on, with half the layers on the host and with none.
    """
    calls, gap = (planned[name].set_index("arm") for name in ("calls", "gap"))
    lines = [
        against(
            "04_plans",
            f"{gained(half, PR)} with half of the layers on the host, and {gained(whole, PR)} with "
            f"none there (plans={PR})",
        ),
        _by_the_clock(gap["repaid after tokens"]),
        f"The device is given {calls['nodes'].iloc[0]} kernels and copies a token; calls of the "
        f"host for them: {listed(f'{n} ({arm})' for arm, n in calls['calls'].items())}.",
        *_updates(planned["forced"]),
        *_left(gap),
        *_as_eager(planned["proof"].set_index("ordering")),
    ]  # fmt: skip
    return concluded(lines, half, whole)


def _by_the_clock(after: pd.Series) -> str:
    """When plans have repaid their capture: `repaid after tokens` of the gaps' table."""
    repaid = [f"{tokens} ({arm})" for arm, tokens in after.items() if tokens.isdigit()]
    if repaid:
        return f"By the device's clock captures are repaid after so many tokens: {listed(repaid)}."
    return "By the device's clock no plan is known to repay its captures: no token is shorter."


def _left(gap: pd.DataFrame) -> Iterable[str]:
    """The gap between the kernels of two tokens, and the time that each plan saves of a token."""
    between = listed(f"{time(us)} ({arm})" for arm, us in gap["gap us"].items())
    yield f"Between the kernels of two tokens are {between}."
    for arm, row in gap[gap["repaid after tokens"] != ""].iterrows():
        after, saved = row["repaid after tokens"], row["saved us"]
        if after.isdigit():
            yield (
                f"A token is {saved} us shorter with {arm}; its captures took "
                f"{time(row['captures us'])}, repaid after {after} tokens."
            )
        else:
            said = "longer" if after == "never" else "no shorter for sure"
            yield f"A token is {said} with {arm}: by {saved} us."


def _updates(forced: pd.DataFrame) -> Iterable[str]:
    """Which arms update plans with every token, and the cost of a growing n_kv in other arms."""
    often = forced["updated"] > forced["tokens"] / 2
    for row in forced[often].to_dict("records"):
        yield (
            f"{row['arm']} updates its plan for {row['updated']} of {row['tokens']} tokens; its "
            f"plans take {time(row['us for these'])} in all."
        )
    said = (
        f"{row['made']} made and {row['updated']} updated ({row['arm']})"
        for row in forced[~often].to_dict("records")
    )
    if not often.all():
        yield f"Plans where n_kv grows: {listed(said)}."


def streams(forks: pd.DataFrame, lifetimes: pd.DataFrame, *comparisons: AB) -> Conclusion:
    """Whether Q, K and V side by side help, and which tensors may share memory meanwhile.

    forks: `branches.forks_table`; lifetimes: `branches.lifetimes_table`.
    """
    side = forks.set_index("arm")
    most = side["streams"].idxmax()
    lines = [
        f"With {most} a token has {side.loc[most, 'launches beside']} of its launches beside the "
        f"first stream, on {side.loc[most, 'streams']} streams, and "
        f"{side.loc[most, 'waits of streams']} waits between them.",
    ]
    rows = lifetimes.set_index("lifetimes")
    wrong = [str(name) for name, races in rows["races"].items() if str(races) != "none"]
    missed = [name for name in wrong if rows.loc[name, "writes finds it"] == "no"]
    if wrong:
        lines.append(f"Side by side, memory races with lifetimes {listed(wrong)}.")
    if missed:
        lines.append(f"A check of writes against writes misses that of {listed(missed)}.")
    more = rows.loc["visibility", "arena bytes"] - rows.loc["serial", "arena bytes"]
    lines.append(f"An arena that is right takes {more:,} bytes more than the serial one.")
    return concluded(lines, *comparisons)


def skipping(
    visits: pd.DataFrame,
    prompts: pd.DataFrame,
    phases: pd.DataFrame,
    ragged: pd.DataFrame,
    parts: AB,
    answers: pd.DataFrame,
) -> Conclusion:
    """The gain of not reading masked cells, by tokens at once, sequences and depth.

    visits: `masked.visits_table`.
    prompts: of `skipped.ubatch_frames`.
    phases, ragged, answers: `skipped.phase_summary`, `ragged_table`, `answers_table`.
    parts: of `kv_parts`.
    """
    lines = [
        f"A token of each of {row['tokens']} sequences visits {row['in_loop']} of the blocks with "
        f"in_loop, {row['classes, gate open']} with classes and {row['tail, gate open']} with tail "
        f"(kv_cache={row['cache']})."
        for row in visits.to_dict("records")
        if row["step"].startswith("a token of")
    ]
    for gate, of in visits.groupby("gate", sort=False):
        steps = (f"{row.step} ({row.cache}, {row.tokens} tokens)" for row in of.itertuples())
        lines.append(f"The gate of #14924 is {gate} to {listed(steps)}.")
    lines += [
        f"{of['test'].iloc[0]}, {n:,} tokens at once, beside nothing skipped: {_by_verdict(of)}."
        for n, of in prompts.groupby("x")
    ]
    lines += [
        f"Generated by {n} sequences of {depth} cells, beside {phases.attrs['baseline']}: "
        f"{_by_verdict(of)}."
        for (n, depth), of in phases[
            (phases["phase"] == "generated") & ~phases["is_control"]
        ].groupby(["n_seqs", "depth"])
    ]
    faster = [f"{row.speedup:.2f} times as fast with {row.way}" for row in ragged.itertuples()]
    lines.append(
        f"Prompts of random lengths, {ragged['tokens a prompt'].iloc[0]} tokens in the mean, once "
        f"each: {listed(faster[1:])}."
    )
    exact = answers["answer"].str.contains("bit-equal")
    alike = "; ".join(f"{n} of {of}" for n, of in _counted(answers[exact]).items())
    lines.append(f"Logits are bit-equal to the baseline's in so many arms: {alike or 'none'}.")
    lines += [
        f"Of {row.comparison}, {row.arms.replace('; ', ', ')} beside {row.baseline}: {row.answer}."
        for row in answers[~exact].itertuples()
    ]
    return concluded(lines, parts)


def _by_verdict(rows: pd.DataFrame) -> str:
    """`faster 1.60 (in_loop) and 1.50 (tail); no difference: classes`."""
    said = []
    for verdict, of in rows.groupby("verdict", sort=False):
        if verdict in DECIDED:
            ordered = of.sort_values("speedup", ascending=False)
            pairs = zip(ordered["label"], ordered["speedup"], strict=True)
            said.append(f"{verdict} {listed(f'{ratio:.2f} ({arm})' for arm, ratio in pairs)}")
        else:
            names = "" if len(of) == len(rows) else f": {listed(of['label'])}"
            said.append(f"{verdict}{names}")
    return "; ".join(said)


def _counted(answers: pd.DataFrame) -> dict[int, str]:
    """Comparisons by the number of arms with equal answers: `5: prompts, 64 at once`."""
    n_arms = answers["arms"].str.count(";") + 1
    return {
        int(n): listed(answers["comparison"][n_arms == n])
        for n in sorted(set(n_arms), reverse=True)
    }


def serving(figures: pd.DataFrame, sampling: pd.DataFrame, ways: pd.DataFrame) -> Conclusion:
    """How throughput trades against latency, by setting and by the way to the engine.

    figures: `loaded.figures_of` with output_throughput, mean_tpot_ms and mean_ttft_ms.
    sampling, ways: `loaded.sampling_table`, `ways_table`.
    """
    lines = []
    for name, of in figures.groupby("setting", sort=False):
        of = of.set_index("in_flight").sort_index()
        few, many = of.iloc[0], of.iloc[-1]
        lines.append(
            f"{name}: from {of.index[0]} to {of.index[-1]} in flight {_times(many, few, RATE)} the "
            f"tokens a second ({few[RATE]:,.0f} to {many[RATE]:,.0f}), for "
            f"{_times(many, few, TPOT)} the time of a token ({few[TPOT]:.2f} to "
            f"{many[TPOT]:.2f} ms) and {_times(many, few, TTFT)} the time to the first "
            f"({few[TTFT]:.1f} to {many[TTFT]:.1f} ms)."
        )
    for n, of in figures.groupby("in_flight"):
        best = of.loc[of[RATE].idxmax()]
        soon = of.loc[of[TPOT].idxmin()]
        lines.append(
            f"At {n} in flight the most tokens a second has {best['setting']} ({best[RATE]:,.0f}), "
            f"the shortest time of a token {soon['setting']} ({soon[TPOT]:.2f} ms)."
        )
    shares = (
        f"{row['of all the time']} ({row['setting']}, {row['sampling']})"
        for row in sampling.to_dict("records")
    )
    lines.append(f"Choosing tokens takes of all the time: {listed(shares)}.")
    for n, of in ways.groupby("in flight"):
        said = (f"{row['of this process']} ({row['way']})" for row in of.to_dict("records")[1:])
        lines.append(f"Of the tokens a second in this process, {n} in flight: {listed(said)}.")
    lines.append(ONCE)
    return concluded(lines)


RATE, TPOT, TTFT = "output_throughput", "mean_tpot_ms", "mean_ttft_ms"
ONCE = "Each point is one run, so it has no interval: small differences may be none."


def _times(many: pd.Series, few: pd.Series, name: str) -> str:
    return f"{many[name] / few[name]:.1f} times"


def _as_eager(proof: pd.DataFrame) -> Iterable[str]:
    racing = [name for name, races in proof["races"].items() if races != "none"]
    if racing:
        yield f"These race: {listed(racing)}."
    elif len(set(proof["because"])) == 1:
        enough = proof["because"].iloc[0].removeprefix("enough: ")
        yield f"Nothing races. With plans as without, this is enough: {enough}."
    else:
        said = (f"{why} ({name})" for name, why in proof["because"].items())
        yield f"Nothing races; {listed(said)}."


def _proved(table: pd.DataFrame, when: str) -> Iterable[str]:
    """Which waits of per_copy suffice by the checker, and which orderings race."""
    rows = table.set_index("ordering")
    for stream, where in (("own", "copies on a stream of their own"), ("compute", "one stream")):
        enough = str(rows.loc[f"per_copy, {stream}", "because"]).removeprefix("enough: ")
        yield f"{when}, with {where}, enough: {enough}."
    racing = [
        f"{str(ordering).replace(', ', ' (')})"
        for ordering, races in rows["races"].items()
        if races != "none"
    ]
    yield f"{when} these race: {listed(racing)}." if racing else f"{when} nothing races."
