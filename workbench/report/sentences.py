"""Results in sentences, shown as prose in a notebook and on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from workbench.benchmarks.compare.comparison import AB, background
from workbench.common.tables import prose_html

DECIDED = ("faster", "slower")


class Conclusion(str):
    """Sentences, a line for each; shows itself as prose in a notebook and on a terminal."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<p class="wb-answer">{"<br>".join(map(prose_html, self.splitlines()))}</p>'


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
