"""One call for a load on an engine of this process, or an engine process; and its run folder."""

from __future__ import annotations

import math

import numpy as np
import pytest

import workbench as wb
from workbench.common.errors import UsageError, WorkbenchError
from workbench.config import EngineConfig
from workbench.engine.slots.asks import Ask
from workbench.server.wire import messages
from workbench.server.wire.worker import OwnEngine, WorkerSettings
from workbench.traffic import records as rec
from workbench.traffic.bench import BenchSpec, load_served, serve_bench
from workbench.traffic.bench_text import report, step_figures
from workbench.traffic.latency import Slo
from workbench.traffic.load import CLOSED, POISSON, Arrivals
from workbench.traffic.targets import Asking, over_pipe

CONFIG = EngineConfig("embedded", n_ctx=4 * 64, n_seqs=4, n_ubatch=16, n_kv_pad=16, threads=1)
ASKED = {"n_prompt": "uniform:2-9", "n_gen": "uniform:1-5", "n_requests": 9, "n_warm_up": 2}
IDS = np.arange(100, 800, dtype=np.int32)
INF = math.inf


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, config=CONFIG, toggles="baseline") as loaded:
        yield loaded


class Noted(OwnEngine):
    """The pipe to an engine of this process, and what was sent through it. dies_after: so many
    messages. full: whether requests are refused, as with a queue that is full."""

    def __init__(self, engine, dies_after: float = INF, full: bool = False):
        super().__init__(engine, 4)
        self.left, self.asked, self.cancelled, self.most = dies_after, list[Ask](), list[int](), 0
        if full:
            self.slots.n_waiting = -4  # as many as there are slots

    def send(self, message: Ask | messages.Cancel) -> None:
        (self.asked if isinstance(message, Ask) else self.cancelled).append(message)
        super().send(message)

    def poll(self, timeout: float | None = 0.0) -> bool:
        self.most = max(self.most, self.slots.totals().n_running)
        return super().poll(timeout)

    def recv(self):
        self.left -= 1
        if self.left < 0:
            raise EOFError
        return super().recv()


def spec(n_prompt="uniform:2-9", n_gen="uniform:1-5", **more) -> BenchSpec:
    return BenchSpec.of(n_prompt, n_gen, IDS, **({"n_requests": 12} | more))


def test_an_engine_serves_every_request_itself(engine, tmp_path):
    told = []
    made = wb.serve_bench(
        engine, slots=4, concurrency="1,4", rate="inf", slo="e2e:60s", out=tmp_path / "run",
        on_row=told.append, **ASKED,
    )  # fmt: skip
    assert [row.setting.name for row in made.rows] == ["rate=inf", "concurrency=1", "concurrency=4"]
    assert [row.figures["completed"] for row in told] == [9, 9, 9]
    for row in made.rows:
        assert row.figures["failed"] == row.figures["short"] == 0 and not row.client
        assert row.figures["request_goodput"] == row.figures["request_throughput"]
        assert row.engine["n_made_tokens"] == row.figures["total_output_tokens"]
        assert row.engine["n_prompt_tokens"] == row.figures["total_input_tokens"]
        assert 0 < row.engine["sampling_s"] < row.figures["duration"]
    _, one, four = (step_figures(row) for row in made.rows)
    assert one["n_steps"] > four["n_steps"] and one["tokens_per_step"] < four["tokens_per_step"]
    share = f"Sampling (share of the time):            {four['sampling_share']:.2f}"
    assert share in report(made.rows[2])
    about = made.run["engine"]
    assert about["slots"] == 4 and about["toggles"] == engine.toggles.to_dict()
    again = load_served(tmp_path / "run")
    assert [row.engine for row in again.rows] == [row.engine for row in made.rows]
    assert "| concurrency=4 |" in repr(made) and "<table" in made._repr_html_()


@pytest.mark.long
def test_an_engine_process_is_begun_and_ended(tiny_model):
    settings = WorkerSettings(str(tiny_model("tiny-llama", "Q8_0")), CONFIG, 4)
    made = wb.serve_bench(settings, concurrency="3", **ASKED)
    (row,) = made.rows
    assert row.figures["completed"] == 9 and row.figures["failed"] == 0
    assert row.engine["n_made_tokens"] == row.figures["total_output_tokens"]
    toggles = made.run["engine"]["toggles"]
    assert (toggles["preset"], toggles["kv_growth"]) == ("best", "geometric")
    assert made.run["model"]["architecture"] == "llama"


def test_each_request_of_each_setting_is_asked_once(engine):
    asked = spec(n_gen="4", n_warm_up=2, asking=Asking(temperature=0.5), seed=5)
    settings = [Arrivals(CLOSED, 3), Arrivals(POISSON, INF)]
    pipe = Noted(engine)
    made = serve_bench(over_pipe(pipe), [settings[0]], asked)
    assert pipe.most == 3 == made.rows[0].figures["max_concurrent_requests"]
    made = serve_bench(over_pipe(pipe := Noted(engine)), settings, asked)
    assert pipe.most == 4 and not made.interrupted and made.run["kind"] == "serve"
    for row, setting in zip(made.rows, settings, strict=True):
        assert row.setting == setting and row.figures["completed"] == 12
        assert row.figures["total_output_tokens"] == asked.load(setting, 0).n_wanted.sum()
    assert sorted(ask.number for ask in pipe.asked) == [*range(1, 1 + 2 * (2 + 12))]
    load = asked.load(settings[0], 0)
    ask = next(a for a in pipe.asked if a.number == 3)
    assert ask.tokens.tolist() == load.prompt(0).tolist() and ask.ends == frozenset()
    assert ask.sampling.temperature == 0.5 and ask.seed == load.sampling_seed(0) == 17
    prompts = [tuple(ask.tokens.tolist()) for ask in pipe.asked if len(ask.tokens) > 3]
    assert len({*prompts}) == len(prompts), "neither a warm-up nor a setting shares a prompt"


def test_what_the_engine_refuses_is_counted(engine):
    target, asked = over_pipe(Noted(engine)), spec(n_prompt="300", n_requests=3)
    why = "the prompt has 300 tokens, and the context of a request is 256"
    with pytest.raises(WorkbenchError, match=f"no warm-up request ended well .{rec.FAILED}: {why}"):
        serve_bench(target, [Arrivals(CLOSED, 2)], asked)
    made = serve_bench(target, [Arrivals(CLOSED, 2)], asked._replace(n_warm_up=0))
    assert made.rows[0].figures["failures"] == {rec.FAILED: 3}
    assert made.rows[0].warnings[0] == f"3 requests did not end well: 3 {rec.FAILED}"


def test_the_end_of_the_time_cancels_what_is_in_flight(engine):
    """The next setting finds nothing of it. A warm-up that does not end in it is told why."""
    with pytest.raises(WorkbenchError, match=r"no warm-up request ended within 0\.02 s .--max-sec"):
        serve_bench(
            over_pipe(Noted(engine)), [Arrivals(CLOSED, 1)],
            spec(n_gen="200", n_prompt="9", most_s=0.02),
        )  # fmt: skip
    asked = spec(n_gen="200", n_prompt="9", n_warm_up=0, most_s=0.02)
    target = over_pipe(pipe := Noted(engine))
    made = serve_bench(target, [Arrivals(CLOSED, 2), Arrivals(CLOSED, 3)], asked)
    assert not pipe.slots.totals().n_running
    after = serve_bench(target, [Arrivals(CLOSED, 2)], spec())
    for row, n in zip(made.rows, (2, 3), strict=True):
        assert row.figures["unfinished"] == n and row.figures["failures"] == {}
        assert "not measured to their end: the row ended by its time" in row.warnings[0]
    assert len(pipe.cancelled) == 5 and after.rows[0].figures["completed"] == 12
    load = asked.load(Arrivals(CLOSED, 2), 0)
    assert [*target.offer(load, Asking(), most_s=0.0)] in ([], [[]])


def test_what_cannot_be_measured_is_refused(engine):
    target, asked = over_pipe(Noted(engine)), spec(asking=Asking(streamed=False), n_warm_up=0)
    for n, said in ((1, "sends tokens as they come"), (0, "there is no setting to measure")):
        with pytest.raises(UsageError, match=said):
            serve_bench(target, [Arrivals(CLOSED, 2)] * n, asked)
    with pytest.raises(UsageError, match="5 slots; this engine has 4 sequences"):
        OwnEngine(engine, 5)


@pytest.mark.parametrize("full", [False, True], ids=["served", "refused"])
def test_a_folder_gives_the_same_figures_again(engine, tmp_path, full):
    asked = spec(n_warm_up=0, parallel=4)
    settings = [Arrivals(CLOSED, 3), Arrivals(POISSON, INF)]
    made = serve_bench(over_pipe(Noted(engine, full=full)), settings, asked, out=tmp_path / "run")
    found = load_served(tmp_path / "run")
    assert [row.setting for row in found.rows] == settings
    for one, again in zip(made.rows, found.rows, strict=True):
        assert repr(one.figures) == repr(again.figures)
        assert (one.n_requests, one.client) == (again.n_requests, again.client)
        assert one.figures["failures"] == ({rec.REFUSED: 12} if full else {})
    assert found.run["result"]["spec"]["n_prompt"] == "uniform:2-9"
    with pytest.raises(UsageError, match=r"is there already|exists"):
        serve_bench(None, settings, asked, out=tmp_path / "run")
    for slo, goodput in (("e2e:100s", "request_throughput"), ("e2e:1us", None)):
        figures = load_served(tmp_path / "run", Slo.of(slo)).rows[0].figures
        assert figures["request_goodput"] == (figures[goodput] if goodput else 0)


def test_what_had_ended_is_saved_where_an_engine_dies(engine, tmp_path):
    target = over_pipe(Noted(engine, dies_after=20))
    with pytest.raises(WorkbenchError, match=r"engine process died with \d+ requests in fl"):
        serve_bench(target, [Arrivals(CLOSED, 2)], spec(n_requests=500), out=tmp_path / "run")
    found = load_served(tmp_path / "run")
    assert found.interrupted and 0 < found.rows[0].figures["completed"] < 40


@pytest.mark.parametrize("wanted", [2, [2], "2", (2, 3), [2.0]])
def test_numbers_are_taken_as_they_are(engine, wanted):
    rows = wb.serve_bench(
        engine, slots=4, concurrency=wanted if wanted != [2.0] else None, n_prompt=3, n_gen=2,
        n_requests=2, rate=[1e9] if wanted == [2.0] else None,
    ).rows  # fmt: skip
    n = len(wanted) if isinstance(wanted, tuple) else 1
    assert len(rows) == n and all(row.figures["completed"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurency": "2"}, "keyword 'concurency' does not exist; did you mean concurrency?"),
        ({"n_warmup": 1}, "did you mean n_warm_up?"),
        ({"beside": 3}, "beside=3 are no engines; give a list of engines"),
        ({"beside": ["x"]}, "are no engines"),
        ({"concurrency": ["two"]}, "is no number of requests"),
        ({"n_prompt": "a"}, "is no length"),
    ],
)
def test_a_load_that_makes_no_sense_is_one_line(engine, given, said):
    with pytest.raises(UsageError) as error:
        wb.serve_bench(engine, slots=4, **given)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_path_is_answered_with_what_to_give(tiny_model):
    says = r"is no engine and no URL of a server; give wb.Engine.load\(...\), or a URL as http://"
    for served in (str(tiny_model), tiny_model, "127.0.0.1:8000", None):
        with pytest.raises(UsageError, match=says) as error:
            wb.serve_bench(served, concurrency=1)
        assert "\n" not in str(error.value)
