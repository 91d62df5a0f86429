"""One call for a load: an engine of this process, an engine process, a server by its address."""

from __future__ import annotations

import math

import numpy as np
import pytest

import workbench as wb
from tests.traffic.fake_server import serving as fake_server
from workbench.common.errors import UsageError
from workbench.config import EngineConfig
from workbench.engine.slots.asks import Ask, Totals
from workbench.server.wire import messages
from workbench.server.wire.worker import OwnEngine, WorkerSettings
from workbench.traffic import records as rec
from workbench.traffic.bench import engine_figures, load_served
from workbench.traffic.bench_text import report, step_figures
from workbench.traffic.latency import Slo
from workbench.traffic.load import CLOSED, CONSTANT, Arrivals, draw, lengths
from workbench.traffic.targets import Asking, over_pipe

CONFIG = EngineConfig("embedded", n_ctx=4 * 64, n_seqs=4, n_ubatch=16, n_kv_pad=16)
ASKED = {"n_prompt": "uniform:2-9", "n_gen": "uniform:1-5", "n_requests": 9, "n_warm_up": 2}


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, config=CONFIG, toggles="baseline") as loaded:
        yield loaded


def test_an_engine_serves_every_request_itself(engine, tmp_path):
    told = []
    made = wb.serve_bench(
        engine, slots=4, concurrency="1,3", rate="inf", slo="e2e:60s", out=tmp_path / "run",
        on_row=told.append, **ASKED,
    )  # fmt: skip
    assert [row.setting.name for row in made.rows] == ["rate=inf", "concurrency=1", "concurrency=3"]
    assert [row.figures["completed"] for row in told] == [9, 9, 9]
    for row in made.rows:
        assert row.figures["failed"] == row.figures["short"] == 0 and not row.client
        assert row.figures["request_goodput"] == row.figures["request_throughput"]
        counted = row.engine
        assert counted["n_made_tokens"] == row.figures["total_output_tokens"]
        assert counted["n_prompt_tokens"] == row.figures["total_input_tokens"]
        assert 0 < counted["sampling_s"] < row.figures["duration"]
    engine_of_run = made.run["engine"]
    assert engine_of_run["slots"] == 4 and engine_of_run["toggles"] == engine.toggles.to_dict()
    again = load_served(tmp_path / "run")
    assert [row.engine for row in again.rows] == [row.engine for row in made.rows]
    assert [row.figures["duration"] for row in again.rows] == [
        row.figures["duration"] for row in made.rows
    ]
    assert "| concurrency=3 |" in repr(made) and "<table" in made._repr_html_()


def test_requests_come_at_random_or_one_like_the_other(engine):
    made = wb.serve_bench(engine, slots=4, rate="500", arrivals="constant", **ASKED)
    assert [row.setting for row in made.rows] == [Arrivals(CONSTANT, 500.0)]
    with pytest.raises(UsageError, match="poisson or constant"):
        wb.serve_bench(engine, slots=4, rate="500", arrivals="never", **ASKED)


def test_fewer_in_flight_take_more_steps(engine):
    rows = wb.serve_bench(engine, slots=4, concurrency="1,4", **ASKED).rows
    one, four = (step_figures(row) for row in rows)
    assert one["n_steps"] > four["n_steps"] and one["tokens_per_step"] < four["tokens_per_step"]
    assert f"Sampling (share of the time):            {four['sampling_share']:.2f}" in report(
        rows[1]
    )


@pytest.mark.parametrize("changes", [{}, {"sampling": "device", "results": "behind"}], ids=str)
def test_tokens_are_those_of_a_sequence_alone(engine, changes):
    """Also where results come behind: then a poll may bring nothing, and the next one does."""
    prompts = [np.arange(3 + i, 9 + 2 * i, dtype=np.int32) for i in range(3)]
    kept = wb.Toggles(graph_reuse="set_rows", sync="packed_implicit", copy_stream="compute")
    toggles = wb.Toggles(**kept.changed() | changes | ({"host_source": "pinned_ring_2"}
                         if changes else {}))  # fmt: skip
    with engine.variant(toggles) as side:
        alone = []
        for prompt in prompts:
            side.reset()
            alone.append(side.generate(tokens=prompt.tolist(), max_tokens=5, stop_at_eos=False))
        pipe = OwnEngine(side, 3)
        assert isinstance(pipe.recv(), messages.Ready)
        for number, prompt in enumerate(prompts):
            pipe.send(Ask(number, prompt, 5))
        made: dict[int, list[int]] = {0: [], 1: [], 2: []}
        n_ended = 0
        while n_ended < 3:
            if pipe.poll():
                said = pipe.recv()
                for number, token in zip(said.numbers.tolist(), said.tokens.tolist(), strict=True):
                    made[number].append(token)
                n_ended += len(said.ended)
    assert [made[i] for i in range(3)] == [one.tokens for one in alone]


def test_what_cannot_be_served_is_refused_and_a_late_one_cancelled(engine):
    own = OwnEngine(engine, 2)
    target = over_pipe(own)
    load = draw(Arrivals(CLOSED, 2), 4, lengths("-p", "300"), lengths("-n", "3"), np.arange(1, 99))
    found = [one for part in target.offer(load, Asking()) for one in part]
    assert [one.status for one in found] == [rec.FAILED] * 4
    assert "the context of a request is 256" in found[0].why
    load = draw(Arrivals(CLOSED, 2), 4, lengths("-p", "8"), lengths("-n", "50"), np.arange(1, 99))
    found = [one for part in target.offer(load, Asking(), most_s=0.0) for one in part]
    assert found == []
    begun = target.offer(load, Asking(), most_s=1e-4)
    assert {one.status for part in begun for one in part} <= {rec.UNFINISHED, rec.OK}
    assert not own.slots.totals().n_running
    again = [one for part in target.offer(load, Asking()) for one in part]
    assert [one.status for one in again] == [rec.OK] * 4, "nothing of the load before is left"


def test_nobody_waits_for_what_cannot_come(engine):
    pipe = OwnEngine(engine, 1)
    pipe.recv()
    assert not pipe.poll() and not pipe.poll(0.001)
    with pytest.raises(EOFError):
        pipe.recv()
    with pytest.raises(UsageError, match="5 slots; this engine has 4 sequences"):
        OwnEngine(engine, 5)


def test_an_engine_process_is_begun_and_ended(tiny_model):
    settings = WorkerSettings(str(tiny_model("tiny-llama", "Q8_0")), CONFIG, 4)
    made = wb.serve_bench(settings, concurrency="3", **ASKED)
    (row,) = made.rows
    assert row.figures["completed"] == 9 and row.figures["failed"] == 0
    assert row.engine["n_made_tokens"] == row.figures["total_output_tokens"]
    assert made.run["engine"]["toggles"]["preset"] == "best"
    assert made.run["engine"]["toggles"]["kv_growth"] == "geometric"
    assert made.run["model"]["architecture"] == "llama"


def test_a_server_is_reached_by_its_address():
    with fake_server() as server:
        made = wb.serve_bench(server.url, concurrency="2", **ASKED)
    (row,) = made.rows
    assert row.figures["completed"] == 9 and row.client["processes"] == 1
    assert not row.engine and step_figures(row) == {} and "Engine" not in report(row)
    assert made.run["engine"]["url"] == server.url


def test_counts_are_of_one_setting():
    before = Totals(10, 100, 5, 50, 1.0, 0.25, 0, 0, 0, 0)
    after = Totals(14, 130, 5, 62, 1.5, 0.375, 1, 2, 3, 4)
    assert engine_figures(before, after) == {
        "n_steps": 4, "n_prompt_tokens": 30, "n_made_tokens": 12, "step_s": 0.5,
        "sampling_s": 0.125,
    }  # fmt: skip
    assert engine_figures(None, after)["n_steps"] == 14
    assert engine_figures(before, None) == {}
    assert Slo.of("e2e:60s").ttft == math.inf
