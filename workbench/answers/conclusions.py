"""The answers of notebooks in sentences, each to the question in the notebook's title.

Tables and comparisons go in, sentences come out, shown as prose in a notebook and on a terminal.
Nothing is measured here. Every figure comes from the notebook's own run, so a notebook that runs
elsewhere answers for that machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.answers import claims, fitted
from workbench.answers import together as adding
from workbench.answers import waiting as whom
from workbench.answers.fitted import Fitted
from workbench.answers.kept import MEASURED, theirs
from workbench.answers.loaded import HERE
from workbench.answers.planned import NEVER, UNKNOWN
from workbench.answers.waits import AFTER, BEFORE, NO_GAIN, TOKENS
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.comparison import AB, CONTROL, background
from workbench.benchmarks.compare.stats import interval, median_interval
from workbench.benchmarks.times.token_parts import HOST
from workbench.common.tables import prose_html
from workbench.config import PlanRule

if TYPE_CHECKING:
    from workbench.benchmarks.times.gaps import Gaps

DECIDED = ("faster", "slower")
PR = PlanRule.PR.value
# captures that are not known to be repaid
REPAID = {NEVER: "never repaid", UNKNOWN: "repaid after an unknown number of tokens"}


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
            low, high = rows.iloc[0][["band_low", "band_high"]]
            told = verdict == stats.SAME and np.isfinite(low)
            beyond = f" (A/A band {interval(low, high)})" if told else ""
            than = "as" if verdict == stats.SAME_WORK else "from"
            yield f"In {test}{beside}, {verdict} {than} {what}{beyond}: {listed(part['label'])}."


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
    if not np.isfinite(low):
        return "too few repetitions to tell"
    told = (
        f"{abs(value):.1f} % {'more' if value >= 0 else 'fewer'} tokens a second (95% CI "
        f"{low:.1f}..{high:.1f} %)"
    )
    return told if row["verdict"] in DECIDED else f"{row['verdict']} ({told})"


def token(traced: Any, comparison: AB) -> Conclusion:
    """The parts of one token.

    traced: a profile of the baseline, or its `summary()`.
    comparison: the same baseline untraced, against a program that is kept.
    """
    steps = traced if isinstance(traced, pd.DataFrame) else traced.summary()
    s, run = steps.median(numeric_only=True), comparison.run
    one = comparison.summary().iloc[0]
    toggle, first, test = run["result"]["toggle"], run["arms"][0]["name"], run["tests"][0]
    untraced = listed(
        f"{time(1e6 / tps)} with {toggle}={arm}"
        for arm, tps in ((first, one["tps_baseline"]), (one["arm"], one["tps_toggled"]))
    )
    (claim,) = claims.of("00_tour")
    lines = [
        f"One token is {s['launches']:.0f} launches, {s['copies']:.0f} copies and "
        f"{s['waits']:.0f} waits of the host, and the device works {time(s['device_us'])} of its "
        f"{time(s['step_us'])} (every switch off, traced).",
        f'The thread of {claim.thread}: "{claim.words}".',
        f"Untraced, a token takes {untraced} ({test}).",
        f"Traced, the host takes {time(s['build_us'])} to build the program, "
        f"{time(s['host_us'])} to issue it, {time(s['wait_us'])} in waits. The device stands still "
        f"{time(s['idle_us'])} between its first and its last work.",
    ]
    return concluded(lines, comparison)


def launches(layers: Mapping[str, pd.DataFrame], fused: AB, deferred: AB) -> Conclusion:
    """How many launches a layer needs, and how much fewer launches gain.

    layers: by name, a row for each launch of a layer (`launches.nodes_table`).
    fused, deferred: of `fuse`, and then of `defer_norm`.
    """
    counts = [f"{len(nodes)} {name}" for name, nodes in layers.items()]
    counts[0] = counts[0].replace(" ", " launches ", 1)
    gains = (
        f"{each_arm(one, one.run['tests'][0])} with {name}"
        for name, one in (("fuse", fused), ("defer_norm after it", deferred))
    )
    return concluded([f"A layer takes {listed(counts)}: {listed(gains)}."], fused, deferred)


def waiting(
    waits: pd.DataFrame, found: Mapping[str, Mapping[str, Any]], *comparisons: AB
) -> Conclusion:
    """Where the device waits in a token, and for whom, in the baseline and with `best`.

    waits: `waiting.whom`, traced.
    found: `waiting.parts`, untraced.
    """
    said = []
    for arm, us in waits.iterrows():
        parts, causes = whom.parts_us(found[str(arm)]), us[list(whom.CAUSES)]
        share = 1 - parts[whom.RUN] / parts[whom.TOKEN]
        own = causes.max() / causes.sum()
        why = "for no single cause"
        if own > 0.5:
            why = f"most of it while {causes.idxmax()} ({own:.0%} of the waiting in a trace)"
        said.append(f"in {share:.0%} of a token of {arm} ({time(parts[whom.TOKEN])}), {why}")
    lines = [f"The device waits {'; '.join(said)}."]
    for arm in waits.index:
        parts = whom.parts_us(found[str(arm)])
        lines.append(
            f"Untraced, a token of {arm} has {time(parts[whom.RUN])} of kernels, "
            f"{time(parts[whom.BETWEEN])} between them, {time(parts[whom.LOGITS])} from the last "
            f"kernel to the logits and {time(parts[whom.HOST])} from there to the next kernel."
        )
    return concluded(lines, *comparisons)


def together(gains: pd.DataFrame) -> Conclusion:
    """Whether the gains of switches add.

    gains: `together.gains`.
    """
    every = gains[gains["kind"] == adding.ALL].iloc[0]
    verdicts = {
        adding.MORE: "Together the switches gain more than the product of their gains",
        adding.LESS: "Together the switches gain less than the product of their gains",
        adding.AS: "Whether the switches gain more or less together than the product of their "
        "gains cannot be told",
    }
    first = verdicts.get(every["together"], "Whether the gains multiply is not known")
    lines = [
        f"{first}: {every['label']} are {_speedup(every)}, the product is {every['product']:.2f}, "
        f"an interaction of {every['interaction']:.2f} (95% CI "
        f"{interval(every['inter_low'], every['inter_high'])})."
    ]
    for verdict, words in ((adding.MORE, "gain more together"), (adding.LESS, "share a gain")):
        pairs = gains[(gains["kind"] == adding.PAIR) & (gains["together"] == verdict)]
        if len(pairs):
            found = (f"{row.label} ({row.interaction:.2f})" for row in pairs.itertuples())
            lines.append(f"These pairs {words}: {listed(found)}.")
    for row in gains[gains["kind"] == adding.ALONE].to_dict("records"):
        rest = adding.without(gains, row["names"][0])
        lines.append(
            f"{row['label']} alone: {_speedup(row)} ({row['verdict']}); added to all others: "
            f"{every['speedup'] / rest['speedup']:.2f}."
        )
    return concluded(lines)


def _speedup(row: Mapping[str, Any]) -> str:
    return f"{row['speedup']:.2f} times as fast (95% CI {interval(row['low'], row['high'])})"


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
    lines = [
        against(
            "02_sync_modes",
            f"{AFTER} has {gained(comparison, AFTER)} beside {background(comparison.run)}, where a "
            f"token takes {time(_token_us(comparison))}; beside {background(gaps.run)} the gap "
            f"between tokens is {_shorter(gaps)}",
        ),
        _worth(worth),
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


def _worth(worth: pd.DataFrame) -> str:
    """What fewer waits are worth beside each model's token, of `waits.worth_table`."""
    fewer = worth.columns[worth.columns.get_loc("a wait, us") + 1]
    gains = [
        f"{row[fewer]} of {time(row['a token, us'])} ({row['model']})"
        for row in worth.to_dict("records")
        if row[fewer] != NO_GAIN
    ]
    said = listed(gains) if gains else "nothing that can be told"
    return f"{fewer} waits are worth, in a token {TOKENS}: {said}."


def _token_us(comparison: AB) -> float:
    """A token of the baseline in a comparison's first test."""
    return 1e6 / float(comparison.summary()["tps_baseline"].iloc[0])


def _shorter(gaps: Gaps) -> str:
    """How much shorter the gap is with AFTER than with BEFORE; not for sure where its interval
    holds 0."""
    us, low, high = median_interval(gaps.less(BEFORE, AFTER, next(iter(gaps.fits))))
    words, size = ("shorter", (us, low, high)) if us >= 0 else ("longer", (-us, -high, -low))
    said = f"{size[0]:.1f} us {words} (95% CI {size[1]:.1f}..{size[2]:.1f})"
    return said if low > 0 or high < 0 else f"not shorter for sure: {said}"


def _seen(wrong: pd.DataFrame) -> str:
    """What went wrong where orderings that race were run, of `raced.wrong_table`."""
    racing = wrong[wrong["pairs that race"] > 0]
    safe = wrong.loc[wrong["pairs that race"] == 0, "ordering"]
    seen, unseen = racing[racing["wrong"] > 0], racing.loc[racing["wrong"] == 0, "ordering"]
    if racing.empty:
        return "No ordering that was run on the embedded device races."
    if seen.empty:
        return (
            f"On the embedded device no prompt went wrong with {listed(racing['ordering'])}: that "
            "proves nothing, for the checker names what races. Run it again."
        )
    went = (
        f"{row.wrong} of {row.prompts} prompts with {row.ordering}" for row in seen.itertuples()
    )
    lucky = (
        f", nor here with {listed(unseen)}, though the checker finds races" if len(unseen) else ""
    )
    n = int(wrong.loc[wrong["pairs that race"] == 0, "wrong"].sum())
    return (
        f"On the embedded device wrong tokens came from {listed(went)}; from {n or 'none'} with "
        f"{listed(safe)}{lucky}."
    )


def reuse(kept: Mapping[str, pd.DataFrame], recorded: str, comparison: AB) -> Conclusion:
    """The cost of building the graph anew, and the gain of keeping it.

    kept: the tables of `kept.py`: `phases`, `steps`, `layers` and `worth`.
    recorded: the sentence about llama.cpp's own build; may be empty.
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
        against("03_graph_reuse", _of_python(worth, recorded)),
        f"Building the graph anew costs a token {time(built.sum())} beside best's other switches: "
        f"{listed(f'{phase} {time(us)}' for phase, us in built.items())}.",
        f"Finding a kept program takes {finding}. Issuing it takes {time(issued['set_rows'])}, "
        f"and {time(issued['rebuild'])} where it is new.",
        f"Of {tokens} tokens one after the other {reused} reuse a program: all but the first and "
        f"the {tokens - 1 - reused} with which n_kv grows.",
        f"Of the layers of reuse, {costliest['toggle']} costs most when it is done again, all "
        f"else off: {time(costliest['us more a token'])} a token.",
        f"The {listed(f'{s - 1:.0%}' for s in claimed['speedup of a kept graph'])} of #8366 would "
        f"be a build of {listed(map(time, claimed['a build costs, us']))} beside this device's "
        "token.",
        *filter(None, [recorded]),
    ]
    return concluded(lines, comparison)


def _of_python(worth: pd.DataFrame, sentence: str) -> str:
    """The speedup that was measured, and llama.cpp's own, recorded; without a record that at the
    table's middle build time."""
    shown = worth.set_index("whose")["speedup of a kept graph"]
    found, own = f"{shown[MEASURED]:.1f} times as fast is Python's price", theirs(sentence)
    if own is not None:
        return (
            f"{found}: llama.cpp's own reuse, recorded with {own.n_models} models on {own.card}, "
            f"makes its token {own.low:.2f} to {own.high:.2f} times as fast"
        )
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
    slow = planned["gap"].attrs.get("constant", {}).get(HOST, "")
    lines = [
        against(
            "04_plans",
            f"{_repaid(gap['repaid after tokens'])}{slow and f', where the host {slow}'}, and "
            f"plans={PR} has {gained(half, PR)} with half of the layers on the host; with none "
            f"there: {gained(whole, PR)}",
        ),
        f"The device is given {calls['nodes'].iloc[0]} kernels and copies a token; calls of the "
        f"host for them: {listed(f'{n} ({arm})' for arm, n in calls['calls'].items())}.",
        *_updates(planned["forced"]),
        *_left(gap),
        *_as_eager(planned["proof"].set_index("ordering")),
    ]  # fmt: skip
    return concluded(lines, half, whole)


def _repaid(after: pd.Series) -> str:
    """When each plan has repaid its capture: `repaid after tokens` of the gaps' table."""
    by = dict[str, list[str]]()
    for arm, tokens in after[after != ""].items():
        known = f"repaid after {tokens} tokens" if tokens.isdigit() else REPAID[tokens]
        by.setdefault(known, []).append(str(arm))
    if not by:
        return "no plan was captured"
    return f"captures are {listed(f'{when} ({listed(arms)})' for when, arms in by.items())}"


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
            said = "longer" if after == NEVER else "no shorter for sure"
            yield f"A token is {said} with {arm}, which saves {saved} us."


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


def streams(
    forks: pd.DataFrame, lifetimes: pd.DataFrame, planned: AB, *comparisons: AB
) -> Conclusion:
    """Whether Q, K and V side by side help, and which tensors may share memory meanwhile.

    forks: `branches.forks_table`; lifetimes: `branches.lifetimes_table`.
    planned: of streams, with a plan of the step: tests of tokens and of prompts.
    """
    side, tests = forks.set_index("arm"), planned.run["tests"]
    most = side["streams"].idxmax()
    shown = {test: each_arm(planned, test) for test in tests}
    rows = lifetimes.set_index("lifetimes")
    wrong = [str(name) for name, races in rows["races"].items() if str(races) != "none"]
    right = [str(name) for name in rows.index if str(name) not in wrong]
    lines = [
        against(
            "05_streams",
            f"side by side, with plans, {'; '.join(f'{t}: {said}' for t, said in shown.items())}; "
            f"memory may be shared with lifetimes={listed(right or ['none'])} and no other",
        ),
        f"With {most} a token has {side.loc[most, 'launches beside']} of its launches beside the "
        f"first stream, on {side.loc[most, 'streams']} streams, and "
        f"{side.loc[most, 'waits of streams']} waits between them.",
    ]
    missed = [name for name in wrong if rows.loc[name, "writes finds it"] == "no"]
    if wrong:
        lines.append(f"Side by side, memory races with lifetimes {listed(wrong)}.")
    if missed:
        lines.append(f"A check of writes against writes misses that of {listed(missed)}.")
    more = rows.loc["visibility", "arena bytes"] - rows.loc["serial", "arena bytes"]
    lines.append(f"An arena that is right takes {more:,} bytes more than the serial one.")
    return concluded(lines, planned, *comparisons)


def each_arm(comparison: AB, test: str) -> str:
    """The verdicts on a test: `9.7% faster (streams=3) and no difference (streams=4)`; of an arm
    alone without its name."""
    summary = comparison.summary()
    rows = summary[(summary["test"] == test) & ~summary["is_control"]]
    return listed(
        _judged(row) + (f" ({row['label']})" if len(rows) > 1 else "") for _, row in rows.iterrows()
    )


def skipping(
    visits: pd.DataFrame,
    prompts: pd.DataFrame,
    phases: pd.DataFrame,
    ragged: pd.DataFrame,
    kernels: pd.DataFrame,
    compared: Mapping[str, AB],
    fit: Fitted | None,
) -> Conclusion:
    """The gain of not reading masked cells, by tokens at once, sequences and depth.

    visits: `masked.visits_table`.
    prompts: of `skipped.ubatch_frames`.
    phases, kernels: `skipped.phase_summary` of ways, and of kernels of attention.
    ragged: `skipped.ragged_frame`.
    compared: by name, the comparisons whose answers are counted.
    fit: the recorded requests of random lengths; None where they did not come along.
    """
    ways = ragged[~ragged["is_control"]]
    by_phase = {
        "to the first token": _of(ways, "prompts"), "between tokens": _of(ways, "generated"),
    }  # fmt: skip
    most = prompts[prompts["x"] == prompts["x"].max()]
    lines = [
        against(
            "06_masked_kv",
            f"{fitted.gains(fit)}in this run, with tail: {most['x'].iloc[0]:,} tokens of a prompt "
            f"at once, {_found(most, 'tail')}; tokens of several sequences, "
            f"{_found(_of(phases, 'generated'), 'tail', _sequences)}; requests of random lengths, "
            + listed(f"{_found(rows, 'tail')} {what}" for what, rows in by_phase.items()),
        ),
        *(
            f"{of['test'].iloc[0]}, {n:,} tokens at once, beside nothing skipped: "
            f"{_by_verdict(of)}."
            for n, of in prompts.groupby("x")
        ),
        *_by_test(phases, "beside nothing skipped"),
        *(
            f"Requests of random lengths, {what}, beside nothing skipped: {_by_verdict(rows)}."
            for what, rows in by_phase.items()
        ),
        *_by_test(kernels, f"beside the kernel {kernels.attrs['baseline']}"),
    ]
    for gate, of in visits.groupby("gate", sort=False):
        steps = (f"{row.step} ({row.cache})" for row in of.itertuples())
        lines.append(f"The gate of #14924 is {gate} to {listed(steps)}.")
    lines.append(f"Answers: {listed(_answers(compared))}.")
    return concluded([*lines, *filter(None, [fitted.words(fit)])])


def _of(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    return rows[rows["phase"] == phase]


def _sequences(row: pd.Series) -> str:
    return f"{row['n_seqs']} sequences of {row['depth']} cells"


def _found(rows: pd.DataFrame, label: str, named: Callable[[pd.Series], str] | None = None) -> str:
    """What the arm with this label gains, by verdict: `21.8% faster`; of several rows with several
    verdicts, which `named` tells apart, `1.3% to 2.8% slower (4 sequences of 32 cells and 2
    sequences of 128 cells) and no difference (4 sequences of 256 cells)`."""
    own = rows[rows["label"] == label]
    said, several = list[str](), own["verdict"].nunique() > 1
    for verdict in sorted(own["verdict"].unique(), key=lambda verdict: verdict not in DECIDED):
        of = own[own["verdict"] == verdict]
        sizes = sorted((of["speedup"] - 1).abs())
        shares = dict.fromkeys(f"{share:.1%}" for share in (sizes[0], sizes[-1]))
        size = f"{' to '.join(shares)} " if verdict in DECIDED else ""
        names = f" ({listed(named(row) for _, row in of.iterrows())})" if named and several else ""
        said.append(f"{size}{verdict}{names}")
    return listed(said) if said else "not measured"


def _judged(row: pd.Series) -> str:
    """`21.8% faster`, or a verdict that does not decide."""
    share = f"{abs(row['speedup'] - 1):.1%} " if row["verdict"] in DECIDED else ""
    return f"{share}{row['verdict']}"


def _by_test(phases: pd.DataFrame, beside: str) -> Iterable[str]:
    own = _of(phases[~phases["is_control"]], "generated")
    for _, of in own.groupby(["n_seqs", "depth"]):
        yield f"Generated by {_sequences(of.iloc[0])}, {beside}: {_by_verdict(of)}."


def _answers(compared: Mapping[str, AB]) -> Iterable[str]:
    """How the arms' logits differ from the baseline's: `bit-equal in 8 arms`."""
    found: dict[str, int] = {}
    for comparison in compared.values():
        for arm in comparison.run["arms"][1:]:
            answer = comparison.answer(arm["name"])
            if not arm["is_control"] and answer is not None:
                text = str(answer).partition(" (")[0].partition(": ")[2]
                found[text] = found.get(text, 0) + 1
    for text, n in sorted(found.items(), key=lambda item: -item[1]):
        yield f"{text} in {n} arm{'s' if n > 1 else ''}"


def _by_verdict(rows: pd.DataFrame) -> str:
    """`faster 1.604 (in_loop) and 1.502 (tail); no difference: classes`."""
    said = []
    for verdict, of in rows.groupby("verdict", sort=False):
        if verdict in DECIDED:
            ordered = of.sort_values("speedup", ascending=False)
            pairs = zip(ordered["label"], ordered["speedup"], strict=True)
            said.append(f"{verdict} {listed(f'{ratio:.3f} ({arm})' for arm, ratio in pairs)}")
        else:
            names = "" if len(of) == len(rows) else f": {listed(of['label'])}"
            said.append(f"{verdict}{names}")
    return "; ".join(said)


def serving(
    figures: pd.DataFrame, speedups: pd.DataFrame, arrivals: pd.DataFrame, scaling: pd.DataFrame
) -> Conclusion:
    """How throughput trades against latency, what of the suspects of #14924 costs it, and how
    requests that come at once differ from requests that come one by one.

    figures: `loaded.figures_of`.
    speedups: `loaded.speedups`, of the steady load.
    arrivals: `loaded.arrivals_table`.
    scaling: `loaded.scaling`.
    """
    first = speedups.attrs["first"]
    of = figures[figures["setting"] == first].set_index("in_flight").sort_index()
    few, many = of.iloc[0], of.iloc[-1]
    lines = [
        f"From {of.index[0]} to {of.index[-1]} in flight, with {scaling.attrs['load']}, the tokens "
        f"a second grow {_times(many, few, RATE)}, for {_times(many, few, TPOT)} the time of a "
        f"token ({few[TPOT]:.2f} to {many[TPOT]:.2f} ms) and {_times(many, few, TTFT)} the time to "
        f"the first ({few[TTFT]:.1f} to {many[TTFT]:.1f} ms)."
    ]
    lines += _at_the_threads_load(scaling, of.index[0], of.index[-1])
    lines += [
        f"Measured twice, {first} has {control.speedup:.3f} times the steady tokens a second of "
        f"itself (95% CI {interval(control.low, control.high)}): other effects of that size may be "
        "noise."
        for control in speedups[speedups["verdict"] == CONTROL].itertuples()
        if control.low > 1 or control.high < 1
    ]
    for row in speedups.to_dict("records"):
        if row["verdict"] in DECIDED:
            lines.append(
                f"{row['setting']} has {row['speedup']:.3f} times the steady tokens a second of "
                f"{first} (95% CI {interval(row['low'], row['high'])}): {row['verdict']}."
            )
    others = speedups[~speedups["verdict"].isin((*DECIDED, CONTROL))]
    for verdict, rows in others.groupby("verdict", sort=False):
        lines.append(f"Beside {first}, {verdict}: {listed(rows['setting'])}.")
    waits = (f"{row['TTFT ms']:.1f} ms ({row['requests come']})"
             for row in arrivals.to_dict("records"))  # fmt: skip
    lines.append(f"Until the first token of a request pass in the mean: {listed(waits)}.")
    return concluded(lines)


def _at_the_threads_load(scaling: pd.DataFrame, few: int, many: int) -> Iterable[str]:
    """How the tokens a second grow with the requests of the thread, there and recorded here."""
    by = scaling[scaling["curve"] != HERE].set_index(["x", "curve"])["y"]
    grown = [
        f"{by[many, curve] / by[few, curve]:.1f} times ({curve})"
        for curve in scaling["curve"].unique()
        if {(few, curve), (many, curve)} <= {*by.index}
    ]
    if grown and few < many:
        yield (
            f"With 1024 and 128 tokens a request, {few} to {many} in flight, they grow "
            f"{listed(grown)}."
        )


RATE, TPOT, TTFT = "output_throughput", "mean_tpot_ms", "mean_ttft_ms"


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
