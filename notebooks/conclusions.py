"""What a notebook found, in sentences: the answer to the question in its title.

Tables and comparisons go in, sentences come out; nothing is measured here. Every figure is one of
the run's own, so that a notebook that runs elsewhere answers for that machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.bench import results
from workbench.bench.comparison import AB, background
from workbench.frames import prose_html

if TYPE_CHECKING:
    from workbench.bench.gaps import Gaps

DECIDED = ("faster", "slower")


class Conclusion(str):
    """Sentences, a line for each; shows itself as prose in a notebook and on a terminal."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<p class="wb-answer">{"<br>".join(map(prose_html, self.splitlines()))}</p>'


def token(traced: Any, comparison: AB) -> Conclusion:
    """What one token looks like. traced: a profile of the baseline, or its `summary()`; comparison:
    the same baseline untraced, against the program that is kept."""
    steps = traced if isinstance(traced, pd.DataFrame) else traced.summary()
    s, run = steps.median(numeric_only=True), comparison.run
    times = results.percentiles(comparison.samples).set_index(["test", "arm"])["p50_us"]
    arms = [arm["name"] for arm in run["arms"] if not arm["is_control"]]
    toggle, test = run["result"]["toggle"], run["tests"][0]
    untraced = _listed(f"{time(times[test, arm])} with {toggle}={arm}" for arm in arms)
    lines = [
        f"One token is {s['launches']:.0f} launches, {s['copies']:.0f} copies and "
        f"{s['waits']:.0f} waits of the host; untraced it takes {untraced} ({test}).",
        f"Traced, it takes the host {time(s['step_us'])}: {time(s['build_us'])} to build the "
        f"program, {time(s['host_us'])} to issue it, {time(s['wait_us'])} in waits.",
        f"The device works {time(s['device_us'])} of that. It stands still {time(s['idle_us'])} "
        "between its first and its last work.",
    ]
    return Conclusion("\n".join([*lines, *_effects(comparison)]))


def launches(layers: Mapping[str, pd.DataFrame], *comparisons: AB) -> Conclusion:
    """How many launches a layer needs, and what fewer of them bring.

    layers: by name, a row for each launch of a layer (`launches.nodes_table`).
    """
    counts = [f"{len(nodes)} {name}" for name, nodes in layers.items()]
    counts[0] = counts[0].replace(" ", " launches ", 1)
    first = f"A layer takes {_listed(counts)}."
    return Conclusion("\n".join([first, *(line for ab in comparisons for line in _effects(ab))]))


def waits(decode: pd.DataFrame, train: pd.DataFrame, gaps: Gaps, *comparisons: AB) -> Conclusion:
    """Which waits are superfluous and which are enough, what they cost, and what fewer bring.

    decode, train: of `proofs.proof_table`. gaps, comparisons: measured.
    """
    rows, table = decode.set_index("ordering"), gaps.table().set_index("arm")
    own, one = (rows.loc[f"per_copy, {stream}"] for stream in ("own", "compute"))
    lines = [
        f"Of llama.cpp's {own['waits']} waits between tokens, {own['superfluous']} are superfluous "
        f"with copies on a stream of their own, and {one['superfluous']} with one stream."
    ]
    for stream, fit in gaps.fits.items():
        most = table.loc[table.loc[table["copy_stream"] == stream, "waits"].idxmax()]
        lines.append(
            f"A wait adds {fit.wait_us:.2f} us to the gap between tokens (95% CI "
            f"{fit.low_us:.2f} to {fit.high_us:.2f}): it is {most['gap_us']:.1f} us with "
            f"{most['waits']} waits, {fit.base_us:.1f} us without any."
        )
    for when, proved in (("Between tokens", decode), ("Between ubatches of a prompt", train)):
        lines += _proved(proved, when)
    return Conclusion("\n".join([*lines, *(line for ab in comparisons for line in _effects(ab))]))


def _proved(table: pd.DataFrame, when: str) -> Iterable[str]:
    """Which waits the checker calls enough under per_copy, and the orderings that race."""
    rows = table.set_index("ordering")
    for stream, where in (("own", "copies on a stream of their own"), ("compute", "one stream")):
        enough = str(rows.loc[f"per_copy, {stream}", "because"]).removeprefix("enough: ")
        yield f"{when}, with {where}, enough: {enough}."
    racing = [
        f"{str(ordering).replace(', ', ' (')})"
        for ordering, races in rows["races"].items()
        if races != "none"
    ]
    yield f"{when} these race: {_listed(racing)}." if racing else f"{when} nothing races."


def _effects(comparison: AB) -> Iterable[str]:
    """A sentence for each test and verdict: which arms differ from the baseline, by how much."""
    run, summary = comparison.run, comparison.summary()
    toggle = run["result"]["toggle"]
    what = f"{toggle}={comparison.label(run['arms'][0])}"
    beside = f" (beside {background(run)})"
    for test, rows in summary[~summary["is_control"]].groupby("test", sort=False):
        decided = rows[rows["verdict"].isin(DECIDED)].sort_values("speedup", ascending=False)
        for row in decided.itertuples():
            yield (
                f"In {test}{beside}, {toggle}={row.label} is {row.speedup:.3f} times as fast as "
                f"{what} (95% CI {row.low:.3f}..{row.high:.3f})."
            )
        undecided = rows[~rows["verdict"].isin(DECIDED)]
        for verdict, part in undecided.groupby("verdict", sort=False):
            yield f"In {test}{beside}, {verdict} from {what}: {_listed(part['label'])}."


def time(us: float) -> str:
    """`3.10 ms`, `746 us` or `12.3 us`; `unknown` for what was not measured."""
    if not np.isfinite(us):
        return "unknown"
    if us >= 1000:
        return f"{us / 1000:.2f} ms"
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def _listed(words: Iterable[str]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
