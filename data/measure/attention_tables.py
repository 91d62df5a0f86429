"""What the run of `data.measure.attention` says: its bandwidth, and what ways to skip cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from data.measure.recorded import Recorded
from data.measure.tables import Line, Part, Table, caption, filled
from workbench.bench import results
from workbench.frames import markdown

FOLDER = "attention"


class AttentionRun:
    """A run of kind `attention`, read."""

    def __init__(self, found: results.Run):
        self.run, self._samples = found.run, found.samples

    @property
    def arms(self) -> list[str]:
        return [arm["name"] for arm in self.run["arms"]]

    def us(self, test: str) -> pd.DataFrame:
        """us of an attention launch, by round and arm: the median of a round's replays."""
        rows = self._samples[self._samples["test"] == test]
        table = rows.groupby(["repetition", "arm"])["ns"].median().unstack().dropna()
        return table / 1e3 / self.run["result"]["per_replay"][test]

    def lines(self) -> Iterator[Line]:
        """A test and an arm: how long, how much of the bandwidth, and against the first arm."""
        result = self.run["result"]
        for test in self.run["tests"]:
            table = self.us(test)
            shape, _, mask = test.rpartition(" ")
            for arm in self.arms:
                took = float(table[arm].median())
                kv_parts, way, *control = arm.split(" ", 2)
                gbps = result["bytes"][test] / took / 1e3
                values: dict[str, Any] = {
                    "shape": shape, "mask": mask, "kv_parts": kv_parts,
                    "way": " ".join([way, *control]), "us": took, "gbps": gbps,
                    "share": 100 * gbps / result["read_gbps"],
                    "times": took / float(table[self.arms[0]].median()),
                }  # fmt: skip
                yield Line(values, [self])


def recorded_attention(recorded: Recorded) -> Iterator[AttentionRun]:
    """The complete runs, by folder."""
    for path in sorted((recorded.folder / FOLDER).glob(f"*/{results.RUN_JSON}")):
        found = results.load_run(path.parent)
        if found.run["status"] == results.COMPLETE:
            yield AttentionRun(found)


def every(recorded: Recorded) -> Iterator[Line]:
    for found in recorded_attention(recorded):
        yield from found.lines()


def where(recorded: Recorded) -> str:
    return " ".join(
        caption(
            [one],
            f"read bandwidth {one.run['result']['read_gbps']:.0f} GB/s, "
            f"{one.run['repetitions']} rounds; *GB/s* counts K and V of the cells that are seen",
        )
        for one in recorded_attention(recorded)
    )


CELLS = {
    "shape": "{shape}", "mask": "{mask}", "kv_parts": "{kv_parts}", "skip_masked_kv": "{way}",
    "us a layer": "{us:.1f}", "GB/s": "{gbps:.0f}", "% of read": "{share:.0f}",
    "times the first": "{times:.3f}",
}  # fmt: skip


def shown(folder: Path) -> str:
    """The table of the run folder, as text."""
    found = AttentionRun(results.load_run(folder))
    rows = [{k: filled(t, line.values) for k, t in CELLS.items()} for line in found.lines()]
    return markdown(pd.DataFrame(rows))


BLOCKS: dict[str, list[Part]] = {
    "attention": [Table("Attention of many sequences", every, CELLS, said=where)],
}
