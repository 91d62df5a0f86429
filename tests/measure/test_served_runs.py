"""Prompts of random lengths, and load through HTTP: from the call to the page, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.measure import (
    first_requests,
    over_http,
    random_lengths,
    readme,
    served_arms,
)
from data.measure.command import Options
from data.measure.over_http import PIPE, STREAMED, WHOLE, HttpRun
from data.measure.peer import LLAMA
from data.measure.random_lengths import RandomRun
from data.measure.recorded import NOT_MEASURED, Recorded
from tests.peer import fake_llama_bench
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
MODEL = "tiny-llama-q8_0"
N_GEN = 3
RANDOM, HTTP = random_lengths.RUNS, over_http.RUNS
PAGES = {RANDOM.name: "Prompts of random lengths", HTTP.name: "Throughput"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_models):
    out = tmp_path_factory.mktemp("results")
    random_lengths.main(
        MODEL, means="6,12,20", prompts=4, slots=2, n_gen=N_GEN,
        options=Options("embedded", out / RANDOM.name, tiny_models),
    )  # fmt: skip
    peer = fake_llama_bench.install(tmp_path_factory.mktemp("built")).parent
    over_http.main(
        MODEL, peer=peer, in_flight="1,2", n_prompt=5, n_gen=N_GEN, each=1, rounds=2,
        client_processes=1, options=Options("embedded", out / HTTP.name, tiny_models),
    )  # fmt: skip
    return out


@pytest.fixture
def by_length(measured) -> RandomRun:
    return RandomRun(results.load_run(measured / RANDOM.name / MODEL))


@pytest.fixture
def http(measured) -> HttpRun:
    return HttpRun(results.load_run(measured / HTTP.name / MODEL))


@pytest.mark.slow
def test_both_arms_are_sent_the_same_prompts_and_all_end(by_length):
    points = by_length.points
    assert len(points) == 2 * 3 and set(points["arm"]) == {"off", "tail"}
    assert (points["completed"] == 4).all() and (points["failed"] == 0).all()
    for _, of in points.groupby("test"):
        assert of["total_input_tokens"].nunique() == 1
        assert (of["total_output_tokens"] == 4 * 3).all()
    off, tail = (arm["toggles"] for arm in by_length.run["arms"])
    assert off["skip_masked_kv"] == "off" and tail["skip_masked_kv"] == "tail"
    assert {k: v for k, v in off.items() if off[k] != tail[k]} == {"skip_masked_kv": "off"}
    order = points["arm"].tolist()
    assert order == ["off", "tail", "tail", "off", "tail", "off"]


@pytest.mark.slow
def test_runtimes_are_fitted_by_their_mean_length(by_length):
    off = by_length.points[by_length.points["arm"] == "off"]
    fit = by_length.fit("off")
    found = [fit(x) for x in off["mean"]]
    np.testing.assert_allclose(found, off["duration"], rtol=1e-6)  # three points fix all three
    assert "seconds by the mean length x: skip_masked_kv=off: " in by_length.said()
    two = RandomRun(results.Run(Path(), by_length.run | {
        "result": {"points": by_length.run["result"]["points"][:4]}}, None))  # fmt: skip
    assert two.fit("off") is None and two.said() == ""


@pytest.mark.slow
def test_three_ways_take_the_same_load_in_turn(http):
    points = http.points
    assert len(points) == 3 * 2 * 2 and (points["completed"] == 16).all()
    first = points[points["round"] == 0]["arm"].drop_duplicates().tolist()
    second = points[points["round"] == 1]["arm"].drop_duplicates().tolist()
    assert first == [PIPE, WHOLE, STREAMED] == second[::-1]
    (_, test) = http.run["tests"]
    table = http.rates(test)
    own = points[(points["arm"] == WHOLE) & (points["test"] == test)]
    np.testing.assert_allclose(
        table[WHOLE], own["total_output_tokens"] / own["duration"], rtol=1e-6
    )
    assert http.times(test, PIPE) == 1.0
    # two sequences at once, as the program says it: 5 tokens at 2 us each, 3 steps of 1.2 ms
    wanted = 2 * N_GEN / (2 * 5 * 2e-6 + N_GEN * 1.2e-3)
    assert table[LLAMA].tolist() == [pytest.approx(wanted, rel=1e-3)] * 2
    times = table[PIPE] / table[LLAMA]
    assert times.min() <= http.times(test, PIPE, LLAMA) <= times.max()
    assert http.times(test, PIPE, "nobody") is None
    # two rounds: the ratio lies between those of either
    each = table[STREAMED] / table[PIPE]
    assert each.min() - 1e-9 <= http.times(test, STREAMED) <= each.max() + 1e-9


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_an_event_has_its_time_at_the_front_and_at_the_client(http):
    for test in http.run["tests"]:
        found = http.event_us(test)
        # the front, and two that read large bodies
        assert found["n_fronts"] == 3 and found["front_us"] >= 0 and found["client_us"] > 0
        assert 0.5 < found["per_event"] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_run_says(measured, tmp_path, name):
    text = " ".join(readme.made(name, Recorded(measured)).split())
    runs = {RANDOM.name: RANDOM, HTTP.name: HTTP}[name]
    for line in runs.lines(Recorded(measured)):
        key, digits = ("ratio", 3) if name == RANDOM.name else ("whole_ratio", 2)
        assert f"| {line.values[key]:.{digits}f} |" in text
        if name == HTTP.name:
            v = line.values
            assert f"| {v['theirs']:.0f} | {v['pipe']:.0f} | {v['of_theirs']:.2f} |" in text
    assert "tiny-llama Q8_0" in text and "commit" in text
    nothing = readme.made(name, Recorded(tmp_path))
    assert nothing.startswith(PAGES[name]) and NOT_MEASURED in nothing


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_the_time_of_a_front_leaves_the_engine_out():
    """A process that works for 0.3 s and has a child with much memory: the child is the engine."""
    engine = "import time; x = bytearray(1 << 28); time.sleep(60)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {engine!r}])\n"
        "while time.process_time() < 0.3: pass\n"
        "time.sleep(1.0); print(child.pid, flush=True); sys.stdin.read(); child.kill()"
    )
    before = served_arms.children_of(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = served_arms.front_time(process.pid)
            if found is not None and found.n_fronts == 1 and found.cpu_s < 2:
                break
        assert served_arms.children_of(os.getpid()) - before == {process.pid}
        assert found.n_fronts == 1 and 0.2 < found.cpu_s < 2
        process.stdin.close()


def test_what_cannot_be_measured_is_refused(tmp_path):
    given = Options(out=tmp_path)
    with pytest.raises(UsageError, match="--prompts"):
        random_lengths.main(MODEL, prompts=0, options=given)
    with pytest.raises(UsageError, match="--in-flight"):
        over_http.main(MODEL, in_flight="0,1", options=given)
    with pytest.raises(UsageError, match="--starts"):
        first_requests.main(MODEL, starts=0, options=given)


@pytest.mark.slow
def test_the_first_requests_of_each_start_stand_beside_the_next(tmp_path, tiny_models, capsys):
    first_requests.main(
        MODEL, starts=2, requests=4, in_flight=2, n_prompt=5, n_gen=N_GEN,
        options=Options("embedded", tmp_path, tiny_models),
    )  # fmt: skip
    found = results.load_run(tmp_path / MODEL)
    assert found.run["status"] == "complete" and found.run["kind"] == first_requests.RUNS.name
    ns = found.samples.groupby("repetition", observed=True)["ns"]
    for (_, took), start in zip(ns, first_requests.FirstRun(found).starts, strict=True):
        assert len(took) == 8 and start.begin_s > 0
        assert start.first_ms == took.to_numpy()[:4].max() / 1e6
        assert start.next_ms == took.to_numpy()[4:].max() / 1e6
    said = capsys.readouterr().out
    assert "start 0: healthy after" in said and "median ratio of 2 starts: " in said


@pytest.mark.parametrize("name", PAGES)
def test_recorded_runs_are_complete(name):
    for path in (RESULTS / name).glob("*/run.json"):
        run = results.load_run(path.parent).run
        assert run["status"] == "complete"
        assert all(point["failed"] == 0 for point in run["result"]["points"])
