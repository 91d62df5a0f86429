"""`wb.bench`: llama-bench's tests on one engine, as `workbench bench` measures them."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.benchmarks.compare.stats import half_width, median_interval
from workbench.benchmarks.compare.until import AT_MOST_S
from workbench.benchmarks.energy import joules
from workbench.benchmarks.energy.windows import EnergyAsked
from workbench.benchmarks.given import EngineOrPath, given_engine
from workbench.benchmarks.llama.llama_bench import recorded
from workbench.benchmarks.llama.llama_format import BenchRow
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import Workload, parse_tests
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.framed import Framed
from workbench.common.tables import Table, markdown, terminal_columns, to_html
from workbench.common.whole import check_whole
from workbench.config import said_toggles
from workbench.engine import exclusive
from workbench.engine.choose import Wanted


class Bench(Framed):
    """The measured tests of one engine: what `wb.bench` returns.

    run: `run.json` as a dict.
    samples: every timed token, with the columns of samples.parquet (`benchmarks/README.md`).

    Printed, it is a table of rates and of the times of single tokens. `to_frame` has the numbers;
    `plot`, `to_csv`, `to_parquet` and `save` draw and write.
    """

    def __init__(self, run: dict[str, Any], samples: pd.DataFrame):
        self.run, self.samples = run, samples

    @classmethod
    def load(cls, folder: str | Path) -> Bench:
        """Reads a run folder. Raises UsageError where it is no run folder, or of another kind."""
        found = results.load_run(folder)
        if found.run["kind"] != "bench":
            raise UsageError(f"{folder} holds a run of kind {found.run['kind']!r}, and no bench")
        return cls(found.run, found.samples)

    def save(self, folder: str | Path) -> Path:
        """Writes the run folder; returns its path."""
        return results.write_run(folder, self.run, self.samples)

    def to_frame(self) -> pd.DataFrame:
        """A row per test, with the origin of each row, so that frames of several runs can be
        concatenated.

        Columns: model, device, settings (of the engine, if no defaults), toggles (all that are
        not off), commit, run_id, date, test, n (repetitions), tps (the median of their tokens/s),
        low, high (95 % interval of that median; NaN with one repetition), avg_ts, stddev_ts
        (llama-bench's mean and deviation, tokens/s), and n_tokens, p50_us, p90_us, p99_us,
        ttft_us as `results.percentiles` has them. Where energy was measured, also
        `joules.PER_TOKEN`.
        """
        run = self.run
        origin = results.origin(run, toggles=said_toggles(run["arms"][0]["toggles"]))
        rates, rows = results.rates(self.samples), []
        for test in dict.fromkeys(rates["test"]):
            tps = rates.loc[rates["test"] == test, "tps"].to_numpy()
            middle, low, high = median_interval(tps, run["seed"])
            rows.append(
                origin
                | {"test": test, "n": len(tps), "tps": middle, "low": low, "high": high}
                | {"avg_ts": tps.mean(), "stddev_ts": tps.std(ddof=1) if len(tps) > 1 else 0.0}
            )
        names = [*origin, "test", "n", "tps", "low", "high", "avg_ts", "stddev_ts"]
        frame = pd.DataFrame(rows, columns=names)
        tokens = pd.DataFrame(results.percentiles(self.samples))
        frame = frame.merge(tokens.drop(columns=["arm", "is_control"]), on="test", how="left")
        return joules.beside_tests(frame, run)

    def table(self) -> Table:
        """A row per test for reading: the rate with its interval, and the times of tokens in us."""
        frame = self.to_frame()
        spread = [half_width(*bounds) for bounds in zip(frame["low"], frame["high"], strict=True)]
        return Table(
            {
                "Model": frame["model"],
                "Test": frame["test"],
                "t/s": frame["tps"].round(2),
                "± %": [100 * share for share in spread],
                "n": frame["n"],
                "token p50 us": frame["p50_us"],
                "p90 us": frame["p90_us"],
                "p99 us": frame["p99_us"],
                "first token us": frame["ttft_us"],
                **joules.columns(frame),
            }
        ).shown(
            keys=["Test"],
            digits={"± %": 1} | dict.fromkeys(("token p50 us", "p90 us", "p99 us"), 1)
            | {"first token us": 1},
        )  # fmt: skip

    @property
    def caption(self) -> str:
        """One line under a table: the toggles, the device, the commit and the time of the run."""
        run = self.run
        device, own = run["engine"]["device_description"], ""
        if not is_gpu(run["engine"]["device"]):
            own = "timings of this device, not of a GPU; "
        cut = "interrupted; " if run["status"] == results.INTERRUPTED else ""
        return (
            f"{said_toggles(run['arms'][0]['toggles'])}; {device}; {own}{cut}{results.taken(run)}"
        )

    def __repr__(self) -> str:
        return f"{markdown(self.table(), terminal_columns())}\n\n{self.caption}"

    def _repr_html_(self) -> str:
        return f"{to_html(self.table())}<p><small>{html.escape(self.caption)}</small></p>"


@exclusive.door
def bench(
    engine: EngineOrPath,
    tests: str | Workload | Sequence[str | Workload] = "tg128",
    repetitions: int = 5,
    *,
    toggles: Wanted = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    until: float | str | None = None,
    at_most_s: float | str = AT_MOST_S,
    energy: EnergyAsked = False,
    on_row: Callable[[BenchRow], None] | None = None,
    **settings: Any,
) -> Bench:
    """Measures llama-bench's tests on an engine, as `workbench bench` does.

    engine: an Engine; or the path of a GGUF file, which is opened for the tests and closed again.
    tests: names as llama-bench has them: `"tg128"`, `"pp512,tg128"`, or a list of them.
    repetitions: of each test; with `until` the least. Warm-up comes before, and is not counted.
    toggles: of an engine of a file, as `Engine.load` takes them (None: `best`).
    seed: of the random tokens.
    out: a run folder to write, too, at the end and every 10 s on the way.
    resume: continue the run in `out`; its repetitions are kept, and not measured again.
    until: repeat each test until the half-width of the interval of its median t/s is at most this
        share (0.01, or `"1%"`). At least max(`repetitions`, 10) repetitions are run.
    at_most_s: seconds (or `"30s"`) of measuring, over all tests, after which `until` gives up.
    energy: count joules a token, too: as for `wb.ab`.
    on_row(row): called as soon as a test is finished.
    settings: fields of EngineConfig (device, n_ctx, ...) for an engine of a file. Its context and
        its sequences are made enough for the tests; a context that is given stays as it is,
        except n_ctx=2048: the default's value counts as not given.

    An engine with preset `best` runs a test with another number of sequences than its own on a
    variant with the set for that number. Returns a `Bench`; its frame has a row per test, with t/s
    and p50, p90 and p99 of single tokens in us. On Ctrl-C the run folder is written with the
    finished repetitions, and KeyboardInterrupt is raised. Raises UsageError for tests that do not
    exist or fit, for fewer than 1 repetition, and for an unknown keyword; and what `Engine.load`
    raises.
    """
    workloads = parse_tests(tests)
    check_whole(repetitions=repetitions)
    if toggles is not None:
        _check_toggles(engine)
    with given_engine(engine, bench, settings, toggles, workloads) as opened:
        exclusive.check(opened._loaded)
        _, draft = recorded(
            opened, workloads, repetitions, seed=seed, out=out, resume=resume, until=until,
            at_most_s=at_most_s, energy=energy, on_row=on_row,
        )  # fmt: skip
        return Bench(draft.run, draft.samples.frame())


def _check_toggles(engine: Any) -> None:
    """Raises UsageError for an engine that has its toggles already."""
    if not isinstance(engine, str | Path):
        raise UsageError(
            "toggles are of an engine that is opened from a path; give engine.variant(toggles)"
        )
