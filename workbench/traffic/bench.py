"""`workbench serve-bench`: offers requests setting after setting, and times every token.

The run folder (kind `serve`) has an arm for each setting, as `concurrency=8` or `rate=4`. In
`samples.parquet` a repetition is a request. Its first row is the prompt: `ns` is the time to the
first token, counted from when the request was due. Each further row is a streamed chunk: `ns` is
the gap before the chunk. An answer that is not streamed has one row. A request without any token
has no row. `requests.parquet` has a row for each request that started:

    run_id string, arm string, request int64, n_prompt, n_wanted, n_made int64 (tokens),
    due_ns, sent_ns, end_ns int64 (from the beginning of the setting),
    status string (a word of `records`), finish string, why string

`n_made` is the server's own count. A chunk's `n_tokens` is 1, though it may hold several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.benchmarks.runs.results import REQUESTS, finite
from workbench.common.checkout import UNKNOWN
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.framed import Framed
from workbench.common.output import check_folder
from workbench.common.progress import bar
from workbench.common.tables import Table, markdown, terminal_columns, to_html
from workbench.engine.slots.asks import Totals
from workbench.traffic.latency import COLUMNS, Figures, Served, Slo, figures, warnings
from workbench.traffic.load import CLOSED, Arrivals, Lengths, Load, draw, lengths
from workbench.traffic.records import OK, UNFINISHED, RequestRecord, Spent
from workbench.traffic.targets import Asking, LoadTarget

SERVED = "serve"  # kind of a run

ASKING = Asking()
NOT_TOLD: Mapping[str, float] = MappingProxyType({})
# heading, key, digits
_COLUMNS = (
    ("ok", "completed", 0), ("failed", "failed", 0), ("req/s", "request_throughput", 2),
    ("good/s", "request_goodput", 2), ("out t/s", "output_throughput", 1),
    ("total t/s", "total_token_throughput", 1), ("peak in flight", "max_concurrent_requests", 0),
    ("TTFT ms", "mean_ttft_ms", 2), ("median TTFT ms", "median_ttft_ms", 2),
    ("P99 TTFT ms", "p99_ttft_ms", 2), ("TPOT ms", "mean_tpot_ms", 2),
    ("P99 TPOT ms", "p99_tpot_ms", 2), ("P99 ITL ms", "p99_itl_ms", 2),
    ("E2EL ms", "mean_e2el_ms", 1), ("P99 E2EL ms", "p99_e2el_ms", 1),
    ("lag ms", "mean_lag_ms", 2),
)  # fmt: skip
COUNTED = ("n_steps", "n_prompt_tokens", "n_made_tokens", "step_s", "sampling_s")  # of Totals


class BenchSpec(NamedTuple):
    """The requests of every setting.

    ids: (k,) int32, the token ids that prompts are drawn from.
    n_warm_up: requests that are sent before each setting and are not counted.
    most_s: the longest time of a setting, s.
    per_slot: at least so many requests for each that is in flight, so that the load is steady.
    parallel: how many requests the server serves at once, where that is known.
    """

    n_prompt: Lengths
    n_gen: Lengths
    ids: np.ndarray
    n_requests: int = 100
    n_warm_up: int = 1
    n_shared: int = 0
    seed: int = 0
    most_s: float = math.inf
    slo: Slo | None = None
    asking: Asking = ASKING
    parallel: int | None = None
    per_slot: int = 0

    @classmethod
    def of(cls, n_prompt: str, n_gen: str, ids: np.ndarray, **more: Any) -> BenchSpec:
        """Lengths as they are typed: `of("1024", "uniform:16-512", np.arange(100, 10_000))`."""
        return cls(lengths("n_prompt", n_prompt), lengths("n_gen", n_gen), ids, **more)

    @property
    def name(self) -> str:
        """The name of the test: `pp1024+tg128` where both lengths are fixed."""
        if self.n_prompt.low == self.n_prompt.high and self.n_gen.low == self.n_gen.high:
            return f"pp{self.n_prompt.low}+tg{self.n_gen.low}"
        return f"{self.n_prompt}/{self.n_gen}"

    def check(self) -> None:
        """Raises UsageError for an objective that cannot be read off answers without a stream."""
        slo = self.slo
        if slo is not None and not self.asking.streamed and min(slo.ttft, slo.tpot) < math.inf:
            raise UsageError("whole answers show no TTFT and no TPOT; use e2e, or stream")

    def load(self, arriving: Arrivals, row: int, n: int | None = None) -> Load:
        """The load of n requests, by default `requests`. Raises UsageError as `load.draw`."""
        n = self.requests(arriving) if n is None else n
        return draw(
            arriving, n, self.n_prompt, self.n_gen, self.ids, n_shared=self.n_shared,
            seed=self.seed, row=row,
        )  # fmt: skip

    def requests(self, arriving: Arrivals) -> int:
        """How many requests a setting has."""
        return requests_of(self.n_requests, self.per_slot, arriving, self.parallel)

    def to_dict(self) -> dict[str, Any]:
        """The spec as run.json holds it."""
        made = self._asdict() | {"n_prompt": str(self.n_prompt), "n_gen": str(self.n_gen)}
        made |= {"n_ids": len(self.ids), "asking": self.asking._asdict()}
        made |= {"slo": None if self.slo is None else self.slo._asdict()}
        return {name: value for name, value in made.items() if name != "ids"}


def requests_of(n_requests: int, per_slot: int, arriving: Arrivals, parallel: int | None) -> int:
    """How many requests a setting has: per_slot for each that is in flight, or that the server
    serves at once; at least n_requests."""
    return max(n_requests, per_slot * (arriving.in_flight or parallel or 0))


class ServedRow(NamedTuple):
    """A setting and its figures (`latency.figures`).

    client: the cost of a client in processes of its own: us_per_chunk, us_per_request, busy (the
        share of a core), processes.
    engine: the engine's own counts (`engine_figures`); empty where the engine reports none.
    """

    setting: Arrivals
    n_requests: int
    figures: Figures
    client: dict[str, float]
    engine: Mapping[str, float] = NOT_TOLD

    @property
    def warnings(self) -> list[str]:
        """Warnings about the figures, a sentence each."""
        return warnings(self.figures, self.n_requests, self.client.get("busy"))


@dataclass(frozen=True, repr=False)
class ServeBench(Framed):
    """The rows of all settings. run: the content of run.json."""

    rows: list[ServedRow]
    run: dict[str, Any]

    @property
    def interrupted(self) -> bool:
        return bool(self.run["status"] == results.INTERRUPTED)

    def table(self) -> Table:
        """A row for each setting."""
        return table_of(self.rows)

    def to_frame(self) -> pd.DataFrame:
        """A row for each setting, with the origin of each row, so that frames of several loads can
        be concatenated.

        Columns: model, device, settings (of the engine, if no defaults), commit, run_id, date,
        setting, and the figures by vLLM's names: requests that completed, failed, are unfinished or
        short; tokens; tokens and requests a second; latencies in ms. NaN where a setting has no
        such figure.
        """
        origin = results.origin(self.run)
        return pd.DataFrame([
            origin | {"setting": row.setting.name}
            | {
                name: math.nan if value is None else value
                for name, value in row.figures.items() if not isinstance(value, dict)
            }
            for row in self.rows
        ])  # fmt: skip

    def points(self, curve: str = "load", latency: str = "mean_tpot_ms") -> Table:
        """A row for each setting, for `plots.throughput_against_latency`: columns curve, label (the
        setting's number), latency_ms (the figure named `latency`), tokens_per_s."""
        return points(self.rows, curve, latency)

    def __repr__(self) -> str:
        return markdown(self.table(), terminal_columns())

    def _repr_html_(self) -> str:
        return to_html(self.table())


def table_of(rows: Sequence[ServedRow]) -> Table:
    """A row for each setting, by its name. Figures that no setting has are left out."""
    made = [
        {"setting": row.setting.name} | {head: row.figures[key] for head, key, _ in _COLUMNS}
        for row in rows
    ]
    table = Table(made, columns=["setting", *(head for head, _, _ in _COLUMNS)])
    table = Table(table.dropna(axis=1, how="all"))
    table.attrs = {"keys": ["setting"], "digits": {head: n for head, _, n in _COLUMNS}}
    return table


def points(rows: Sequence[ServedRow], curve: str, latency: str = "mean_tpot_ms") -> Table:
    """The rows for `report.plots.throughput_against_latency`: columns curve, label (the setting's
    number), latency_ms (the figure named `latency`), tokens_per_s."""
    made = [
        {
            "curve": curve,
            "label": f"{row.setting.value:g}",
            "latency_ms": row.figures[latency],
            "tokens_per_s": row.figures["output_throughput"],
        }
        for row in rows
    ]
    table = Table(made, columns=["curve", "label", "latency_ms", "tokens_per_s"])
    word, name, _ = latency.split("_")
    table.attrs["latency"] = latency_label(word, name).rstrip(":")
    return table


def latency_label(word: str, name: str) -> str:
    """vLLM's words for a latency: `Mean TTFT (ms):` for mean and ttft."""
    return f"{word.capitalize()} {name.upper()} (ms):"


def serve_bench(
    target: LoadTarget,
    settings: Sequence[Arrivals],
    spec: BenchSpec,
    *,
    about: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    on_row: Callable[[ServedRow], None] | None = None,
) -> ServeBench:
    """Offers `target` the load of each setting, one after another.

    about: `model` and `engine` of run.json, as far as they are known.
    out: a run folder to write.
    on_row: called with each row as soon as its setting is done.
    Ctrl-C ends the measuring: requests that have ended are kept, saved and returned, marked
    interrupted. Where no request has ended, KeyboardInterrupt is raised.
    Raises UsageError for no setting and for a folder that exists. Raises WorkbenchError where no
    warm-up request ends well, or the target cannot be used.
    """
    settings = list(dict.fromkeys(settings))
    if not settings:
        raise UsageError("there is no setting to measure; give a rate or a concurrency")
    spec.check()
    if out is not None:
        check_folder(out, new=True)
    folder = Path(out) if out is not None else results.new_run_folder(name="serve")
    run = _new_run(spec, settings, folder.name, about or {})
    record = _Recording(run, Path(out) if out is not None else None, spec)
    with kept(record.draft):
        for row, setting in enumerate(settings):
            _warm_up(target, spec, setting, len(settings) + row)
            before = target.totals
            record.begin(setting)
            load = spec.load(setting, row)
            try:
                offered = target.offer(load, spec.asking, spec.most_s)
                with bar(setting.name, load.n, "requests") as left, closing(offered):
                    for records in offered:
                        record.add(records)
                        left.update(len(records))
            finally:
                record.end(target.spent, engine_figures(before, target.totals))
            if on_row is not None:
                on_row(record.rows[-1])
            record.draft.checkpoint()
    return ServeBench(record.rows, run)


def _warm_up(target: LoadTarget, spec: BenchSpec, setting: Arrivals, row: int) -> None:
    """Sends requests that are not counted; raises WorkbenchError where none of them ends well."""
    if not spec.n_warm_up:
        return
    together = min(spec.n_warm_up, setting.in_flight or spec.n_warm_up)
    load = spec.load(Arrivals(CLOSED, together), row, spec.n_warm_up)
    records = [r for part in target.offer(load, spec.asking, spec.most_s) for r in part]
    if all(r.status == UNFINISHED for r in records) and spec.most_s < math.inf:
        raise WorkbenchError(
            f"no warm-up request ended within {spec.most_s:g} s (--max-seconds, most_s); give more "
            "seconds, or shorter prompts and answers"
        )
    if not any(r.status == OK for r in records):
        why = f"{records[0].status}: {records[0].why}" if records else "none started"
        raise WorkbenchError(f"no warm-up request ended well ({why}); mend that first")


def _new_run(
    spec: BenchSpec, settings: Sequence[Arrivals], name: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    unknown = {"model": {"name": None, "quant": None}, "engine": {"device": UNKNOWN}}
    found = provenance.collect() | unknown | dict(about)
    arms = [new_arm(setting.name, {}) for setting in settings]
    made = new_run(SERVED, name, name, found, arms, [spec.name], spec.n_requests, spec.seed)
    made["result"] |= {
        "spec": finite(spec.to_dict()),
        "settings": [finite(setting._asdict()) for setting in settings],
        "client": {},
        "engine": {},
        "figures": {},
    }
    return made


class _Recording:
    """The run as it grows: rows and samples of finished settings, and records of the next."""

    def __init__(self, run: dict[str, Any], out: Path | None, spec: BenchSpec):
        self.draft = Draft(run, out, self._tables, new=True)
        self.rows: list[ServedRow] = []
        self._run, self._spec = run, spec
        self._frames: list[pd.DataFrame] = []
        self._records: list[RequestRecord] = []
        self._setting = Arrivals(CLOSED, 1)

    def begin(self, setting: Arrivals) -> None:
        self._setting, self._records = setting, []

    def add(self, records: list[RequestRecord]) -> None:
        self._records += records

    def end(self, spent: Sequence[Spent], engine: dict[str, float]) -> None:
        """Ends this setting. engine: the engine's counts during the setting."""
        if not self._records:
            return
        spec, arm = self._spec, self._setting.name
        served = Served.of(self._records, spec.asking.streamed)
        client = client_figures(spent, len(self._records))
        found = figures(served, spec.slo, self._setting.in_flight or spec.parallel)
        n_requests = spec.requests(self._setting)
        self.rows.append(ServedRow(self._setting, n_requests, found, client, engine))
        self._run["result"]["client"][arm] = client
        self._run["result"]["engine"][arm] = engine
        self._run["result"]["figures"][arm] = finite(found)
        self._frames.append(served.requests.assign(run_id=self._run["run_id"], arm=arm))
        rows = served.requests[["request", "due_ns", "n_prompt"]].itertuples(index=False)
        for (request, due, n_prompt), times in zip(rows, served.times, strict=True):
            if len(times):
                gaps, n_tokens = np.diff(times, prepend=due), np.ones(len(times), np.int64)
                n_tokens[0] = n_prompt
                self.draft.samples.add(arm, False, spec.name, int(request), gaps, n_tokens)

    def _tables(self) -> dict[str, pd.DataFrame]:
        columns = ["run_id", "arm", *COLUMNS]
        empty = pd.DataFrame(columns=columns)
        frame = pd.concat(self._frames, ignore_index=True) if self._frames else empty
        return {REQUESTS: frame[columns]}


def client_figures(spent: Sequence[Spent], n_requests: int) -> dict[str, float]:
    """Processor time of the client processes for a chunk and for a request, us. Each figure divides
    all of the time, as if there were no other work. Empty where no client is a process."""
    if not spent:
        return {}
    cpu_us, n_chunks = sum(s.cpu_s for s in spent) * 1e6, sum(s.n_chunks for s in spent)
    return {
        "us_per_chunk": cpu_us / max(n_chunks, 1),
        "us_per_request": cpu_us / max(n_requests, 1),
        "busy": max(s.cpu_s / max(s.wall_s, 1e-9) for s in spent),
        "processes": len(spent),
    }


def engine_figures(before: Totals | None, after: Totals | None) -> dict[str, float]:
    """The engine's counts between two readings; empty where the engine reports none.

    n_steps; tokens of prompts, without those found in the cache; tokens made; step_s and
    sampling_s, the time of the engine's steps and of its draws.
    """
    if after is None:
        return {}
    begun = dict.fromkeys(COUNTED, 0) if before is None else before._asdict()
    return {name: value - begun[name] for name, value in after._asdict().items() if name in COUNTED}


def load_served(folder: str | Path, slo: Slo | None = None) -> ServeBench:
    """Reads a run folder, and computes its figures again from its requests and samples.

    slo: another objective than the run's own. Raises UsageError where the folder is no serve run.
    """
    found = results.load_run(folder)
    if found.run["kind"] != SERVED:
        raise UsageError(f"{folder} is a run of kind {found.run['kind']!r}, not of serve-bench")
    try:
        found, (requests,) = results.load_tables(folder, REQUESTS)
        spec, result = found.run["result"]["spec"], found.run["result"]
        if slo is None and spec["slo"] is not None:
            slo = Slo(**{name: limit for name, limit in spec["slo"].items() if limit is not None})
        streamed = bool(spec["asking"]["streamed"])
        rows = []
        for one in result["settings"]:
            value = math.inf if one["value"] is None else one["value"]
            setting = Arrivals(one["kind"], value)
            of_arm = requests[requests["arm"] == setting.name].reset_index(drop=True)
            if of_arm.empty:
                continue
            times = _times(of_arm, found.samples[found.samples["arm"] == setting.name])
            served = Served(of_arm[list(COLUMNS)], times, streamed)
            made = figures(served, slo, setting.in_flight or spec["parallel"])
            client = result["client"].get(setting.name, {})
            per_slot = int(spec.get("per_slot", 0))  # older runs have none
            n_requests = requests_of(int(spec["n_requests"]), per_slot, setting, spec["parallel"])
            engine = result.get("engine", {}).get(setting.name, {})  # older runs have none
            rows.append(ServedRow(setting, n_requests, made, client, engine))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} is a damaged run of serve-bench: {error!r}") from error
    return ServeBench(rows, found.run)


def _times(requests: pd.DataFrame, samples: pd.DataFrame) -> list[np.ndarray]:
    """When each request's tokens came, from the gaps between them."""
    by = {int(str(k)): part["ns"].to_numpy() for k, part in samples.groupby("repetition")}
    none = np.empty(0, np.int64)
    return [
        due + np.cumsum(by.get(request, none))
        for request, due in zip(requests["request"], requests["due_ns"], strict=True)
    ]
