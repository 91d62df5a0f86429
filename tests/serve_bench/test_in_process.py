"""serve_bench from Python, over the pipe to an engine process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.serve_bench import fake_engine as fake
from tests.serve_bench.fake_engine import FakeEngine, running
from workbench.common.errors import UsageError, WorkbenchError
from workbench.traffic import records as rec
from workbench.traffic.bench import BenchSpec, load_served, serve_bench
from workbench.traffic.latency import Slo
from workbench.traffic.load import CLOSED, POISSON, Arrivals
from workbench.traffic.targets import Asking, LoadTarget, over_pipe

IDS = np.arange(100, 800, dtype=np.int32)
INF = float("inf")


def spec(n_prompt="uniform:2-9", n_gen="uniform:1-5", ids=IDS, **more) -> BenchSpec:
    ids = np.asarray(ids, np.int32)
    return BenchSpec.of(n_prompt, n_gen, ids, **({"n_requests": 12} | more))


def test_each_setting_has_a_row_and_each_request_is_asked_once():
    asked = spec(n_warm_up=2, asking=Asking(temperature=0.5), seed=5)
    settings = [Arrivals(CLOSED, 3), Arrivals(POISSON, 500.0), Arrivals(POISSON, INF)]
    engine, told = FakeEngine(), []
    with running(engine) as pipe:
        made = serve_bench(over_pipe(pipe), settings, asked, on_row=told.append)
    assert [row.setting for row in made.rows] == settings == [row.setting for row in told]
    assert not made.interrupted and made.run["kind"] == "serve"
    for row in made.rows:
        assert row.figures["completed"] == 12 and row.figures["failed"] == 0
        assert row.figures["short"] == 0 and row.client == {}
        assert row.figures["total_output_tokens"] == asked.load(row.setting, 0).n_wanted.sum()
    assert made.rows[0].figures["max_concurrent_requests"] == 3
    numbers = [ask.number for ask in engine.asked]
    assert len(numbers) == 3 * (2 + 12) and sorted(numbers) == list(range(1, 43))
    load = asked.load(settings[0], 0)
    ask = next(a for a in engine.asked if a.number == 3)
    assert ask.tokens.tolist() == load.prompt(0).tolist() and ask.ends == frozenset()
    assert ask.sampling.temperature == 0.5 and ask.seed == load.sampling_seed(0) == 17


def test_a_closed_loop_is_never_above_its_number_and_all_at_once_fills_the_slots():
    engine = FakeEngine(n_slots=8)
    with running(engine) as pipe:
        serve_bench(over_pipe(pipe), [Arrivals(CLOSED, 3)], spec(n_gen="4", n_warm_up=0))
        assert max(engine.steps) <= 3
    engine = FakeEngine(n_slots=8)
    with running(engine) as pipe:
        serve_bench(over_pipe(pipe), [Arrivals(POISSON, INF)], spec(n_gen="4", n_warm_up=0))
    assert max(engine.steps) == 8


FAULTS = [
    (fake.REFUSED_ID, rec.REFUSED, "no room"),
    (fake.TOO_LONG_ID, rec.FAILED, "no room"),
    (fake.FAILED_ID, rec.FAILED, "a bad step"),
]


@pytest.mark.parametrize(("fault", "status", "why"), FAULTS)
def test_what_the_engine_refuses_is_counted(fault, status, why):
    asked = spec(ids=[fault], n_requests=3)
    with running(FakeEngine()) as pipe:
        target = over_pipe(pipe)
        with pytest.raises(WorkbenchError, match=f"no warm-up request ended well .{status}: {why}"):
            serve_bench(target, [Arrivals(CLOSED, 2)], asked)
        made = serve_bench(target, [Arrivals(CLOSED, 2)], asked._replace(n_warm_up=0))
    assert made.rows[0].figures["failures"] == {status: 3}
    assert made.rows[0].warnings[0] == f"3 requests did not end well: 3 {status}"


def test_the_end_of_the_time_cancels_what_is_in_flight_and_the_next_setting_is_its_own():
    asked = spec(ids=[fake.ENDLESS_ID], n_warm_up=0, most_s=0.1)
    engine = FakeEngine()
    with running(engine) as pipe:
        target = over_pipe(pipe)
        made = serve_bench(target, [Arrivals(CLOSED, 2), Arrivals(CLOSED, 3)], asked)
        after = serve_bench(target, [Arrivals(CLOSED, 2)], spec())
    for row, n in zip(made.rows, (2, 3), strict=True):
        assert row.figures["unfinished"] == n and row.figures["failures"] == {}
        assert row.warnings == ["12 of 12 requests were not measured to their end"]
    assert len(engine.cancelled) == 5 and after.rows[0].figures["completed"] == 12


def test_an_engine_that_dies_ends_the_measuring_and_what_had_ended_is_saved(tmp_path):
    with running(FakeEngine(dies_after=20)) as pipe:
        target = over_pipe(pipe)
        with pytest.raises(WorkbenchError, match=r"engine process died with \d+ requests in fl"):
            serve_bench(target, [Arrivals(CLOSED, 2)], spec(n_requests=500), out=tmp_path / "run")
    found = load_served(tmp_path / "run")
    assert found.interrupted and 0 < found.rows[0].figures["completed"] < 40


def test_whole_answers_are_http_s():
    with running(FakeEngine()) as pipe:
        target = over_pipe(pipe)
        asked = spec(asking=Asking(streamed=False), n_warm_up=0)
        with pytest.raises(UsageError, match="sends tokens as they come"):
            serve_bench(target, [Arrivals(CLOSED, 2)], asked)
        with pytest.raises(UsageError, match="whole answers show no TTFT and no TPOT"):
            slo = Slo.of("ttft:1s")
            serve_bench(target, [Arrivals(CLOSED, 2)], asked._replace(slo=slo))
        with pytest.raises(UsageError, match="there is no setting to measure"):
            serve_bench(target, [], asked)


# the run folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [IDS, [fake.REFUSED_ID]], ids=["served", "refused"])
def test_the_folder_has_every_request_and_gives_the_same_figures_again(tmp_path, ids):
    asked = spec(ids=ids, n_warm_up=0, parallel=4)
    settings = [Arrivals(CLOSED, 3), Arrivals(POISSON, INF)]
    with running(FakeEngine()) as pipe:
        made = serve_bench(over_pipe(pipe), settings, asked, out=tmp_path / "run")
    found = load_served(tmp_path / "run")
    assert [row.setting for row in found.rows] == settings
    for one, again in zip(made.rows, found.rows, strict=True):
        assert repr(one.figures) == repr(again.figures)
        assert (one.n_requests, one.client) == (again.n_requests, again.client)
    assert found.run["result"]["spec"]["n_prompt"] == "uniform:2-9"
    assert found.run["tests"] == ["uniform:2-9/uniform:1-5"]
    with pytest.raises(UsageError, match=r"is there already|exists"):
        serve_bench(None, settings, asked, out=tmp_path / "run")


def test_another_objective_can_be_asked_of_a_folder(tmp_path):
    with running(FakeEngine()) as pipe:
        serve_bench(over_pipe(pipe), [Arrivals(CLOSED, 3)], spec(), out=tmp_path / "run")
    (row,) = load_served(tmp_path / "run").rows
    assert row.figures["request_goodput"] is None
    (row,) = load_served(tmp_path / "run", Slo.of("e2e:100s")).rows
    assert row.figures["request_goodput"] == row.figures["request_throughput"]
    (row,) = load_served(tmp_path / "run", Slo.of("e2e:1us")).rows
    assert row.figures["request_goodput"] == 0


def test_ctrl_c_keeps_what_has_ended(tmp_path):
    """It strikes as the second setting's third request ends."""
    seen = []

    def struck(pipe) -> LoadTarget:
        target = over_pipe(pipe)
        real = target.offer

        def offer(load, asking, most_s=INF):
            for records in real(load, asking, most_s):
                yield records
                seen.extend(records)
                if len(seen) >= 12 + 3:
                    raise KeyboardInterrupt

        target.offer = offer  # type: ignore[method-assign]
        return target

    with running(FakeEngine()) as pipe:
        settings = [Arrivals(CLOSED, 2), Arrivals(CLOSED, 1)]
        made = serve_bench(struck(pipe), settings, spec(n_warm_up=0), out=tmp_path / "run")
    assert made.interrupted and [r.figures["completed"] for r in made.rows] == [12, len(seen) - 12]
    assert "requests were not measured to their end" in made.rows[1].warnings[0]
    found = load_served(tmp_path / "run")
    assert found.interrupted and found.run["status"] == "interrupted"
    with running(FakeEngine()) as pipe, pytest.raises(KeyboardInterrupt):
        target = over_pipe(pipe)
        target.offer = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore
        serve_bench(target, [Arrivals(CLOSED, 2)], spec(n_warm_up=0))
