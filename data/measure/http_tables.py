"""What the runs of `data.measure.over_http` say: throughput through HTTP beside that without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from data.measure.peer import LLAMA
from data.measure.recorded import Recorded, Share, model_of
from data.measure.tables import Line, Part, Table, caption, filled
from workbench.bench import results
from workbench.bench.stats import Ratio, speedup
from workbench.frames import markdown

FOLDER = "over-http"
PIPE, WHOLE, STREAMED = "in process", "HTTP whole", "HTTP streamed"


class HttpRun:
    """A run, read. points: a row for each arm, number of requests in flight, and round."""

    def __init__(self, found: results.Run):
        self.run = found.run
        self.points = pd.DataFrame(found.run["result"]["points"])
        self._rates = results.rates(found.samples)

    @property
    def model(self) -> str:
        return model_of(self.run)

    def rates(self, test: str) -> pd.DataFrame:
        """Generated tokens a second: a row for each round, a column for each arm."""
        rows = self._rates[self._rates["test"] == test]
        return rows.pivot(index="repetition", columns="arm", values="tps").dropna()

    def ratio(self, test: str, arm: str, of: str = PIPE) -> Ratio | None:
        """An arm's throughput over another's, paired by round; None without one of them."""
        table = self.rates(test)
        if not {arm, of} <= set(table):
            return None
        return speedup(table[of].to_numpy(), table[arm].to_numpy(), self.run["seed"])

    def event_us(self, test: str) -> dict[str, Any]:
        """CPU time of an event, us: of the server's processes but the engine's, and the client's.
        Requests that warm up count for neither."""
        own = self.points[(self.points["test"] == test) & (self.points["arm"] == STREAMED)]
        n = own["total_output_tokens"] / own["tokens_per_chunk"]
        warm = 1 + own["n_warm_up"] / own["completed"]  # their share of what the front did
        known = own["front_cpu_s"].notna().all()
        client = pd.DataFrame(list(own["client"]))
        return {
            "front_us": float((own["front_cpu_s"] / warm / n).median() * 1e6) if known else None,
            "client_us": float(client["us_per_chunk"].median()) if len(client.columns) else None,
            "busy": Share(client["busy"].max()) if len(client.columns) else None,
            "n_fronts": int(own["n_fronts"].max()) if known else None,
            "per_event": float(own["tokens_per_chunk"].median()),
        }

    def lines(self) -> Iterator[Line]:
        """Requests in flight: the three arms, their ratios, and what an event costs."""
        for test in self.run["tests"]:
            medians = self.rates(test).median()
            first = self.points[self.points["test"] == test].iloc[0]
            values: dict[str, Any] = {
                "model": self.model, "n": int(first["in_flight"]), "n_requests": first["completed"],
                "pipe": medians[PIPE], "whole": medians[WHOLE], "streamed": medians[STREAMED],
                "whole_ratio": _value(self.ratio(test, WHOLE)),
                "streamed_ratio": _value(self.ratio(test, STREAMED)),
                "theirs": medians.get(LLAMA), "of_theirs": _value(self.ratio(test, PIPE, LLAMA)),
                **self.event_us(test),
            }  # fmt: skip
            yield Line(values, [self])


def _value(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.value


def recorded_http(recorded: Recorded) -> Iterator[HttpRun]:
    """The complete runs, by folder."""
    for path in sorted((recorded.folder / FOLDER).glob(f"*/{results.RUN_JSON}")):
        found = results.load_run(path.parent)
        if found.run["status"] == results.COMPLETE:
            yield HttpRun(found)


def every(recorded: Recorded) -> Iterator[Line]:
    for found in recorded_http(recorded):
        yield from found.lines()


def where(recorded: Recorded) -> str:
    return " ".join(caption([one], _about(one)) for one in recorded_http(recorded))


def _about(found: HttpRun) -> str:
    tests = found.run["tests"]
    shape = tests[0].partition("@")[0]
    peer = found.run["result"].get("peer")
    said = f"{shape} a request, rounds in turn: {found.run['repetitions']}"
    return said + (f"; llama.cpp {peer['version']}" if peer else "")


CELLS = {
    "Model": "{model}", "in flight": "{n}", "requests": "{n_requests}",
    "llama.cpp's batched bench": "{theirs:.0f}", "t/s in process": "{pipe:.0f}",
    "times llama.cpp's": "{of_theirs:.2f}",
    "HTTP whole": "{whole:.0f}", "of it": "{whole_ratio:.2f}",
    "HTTP streamed": "{streamed:.0f}", "of that": "{streamed_ratio:.2f}",
    "tokens an event": "{per_event:.2f}", "front us an event": "{front_us:.1f}",
    "client us": "{client_us:.1f}", "client busy %": "{busy:.0f}", "processes": "{n_fronts}",
}  # fmt: skip


def shown(folder: Path) -> str:
    """The table of one run folder, as text."""
    found = HttpRun(results.load_run(folder))
    rows = [{k: filled(t, line.values) for k, t in CELLS.items()} for line in found.lines()]
    return markdown(pd.DataFrame(rows))


BLOCKS: dict[str, list[Part]] = {
    "over-http": [
        Table("Throughput through HTTP", every, CELLS, said=where),
        "Tokens that are generated in a second, their prompts' time included. A request that ends "
        "makes room for the next; llama.cpp's batched bench has as many sequences, all at once. "
        "*of it* and *of that*: of what the same load reaches in process. The CPU time of an event "
        "is that of the server's processes but the engine's.",
    ],
}
