"""Joules a token: the counter's updates, windows between them, ratios beside an A/A control."""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from types import SimpleNamespace

import pytest
from cuda.bindings import driver

import workbench as wb
from tests.benchmarks.recorded_counter import RecordedCounter
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.energy import joules
from workbench.benchmarks.energy.counter import Meter, NvmlCounter
from workbench.benchmarks.energy.windows import WINDOW_S, Energy, counter_of
from workbench.benchmarks.llama.bench import Bench
from workbench.benchmarks.llama.llama_bench import format_rows, measured, workloads
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import parse_tests
from workbench.cli import main
from workbench.common.errors import DeviceError, UsageError

SPEC = "sync=per_copy,copy_boundary"
STILL = [(0, 0)] * 3


@pytest.fixture
def engine(tiny_model):
    with wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64) as made:
        yield made


@pytest.mark.parametrize("what", ["idle", "matmul", "read", "after_read"])
def test_the_cadence_and_the_step_of_a_counter_are_measured(what):
    """An H100's counter: updates every 100 ms, whatever it does; a step is the power over that."""
    counter = RecordedCounter(what)
    steps = Meter(counter).watch(15)
    assert steps.cadence_s == pytest.approx(0.1, rel=0.05)
    assert steps.mean_w == pytest.approx(counter.watts(), rel=0.03)
    assert steps.step_j == pytest.approx(0.1 * counter.watts(), rel=0.1)


def test_an_update_is_found_within_one_read():
    counter = RecordedCounter("read")
    for one in [Meter(counter).update() for _ in range(20)]:
        before = max(ns for ns in counter.ns if ns <= one.ns % counter.ns[-1])
        assert one.ns % counter.ns[-1] - before <= one.late_ns + 1 and one.late_ns < 0.006e9


def test_a_counter_that_stands_still_or_is_too_coarse_is_refused():
    with pytest.raises(DeviceError, match="stood still for 3 s"):
        Energy(RecordedCounter(STILL))
    with pytest.raises(DeviceError, match=r"steps every 1\.00 s, 20 % of a window of 5 s"):
        Energy(RecordedCounter("read", slower=10))


def test_windows_of_a_comparison(engine, tmp_path):
    """Each lies between two updates and has 5 s or more; arms take turns; the folder has them, and
    the tables are made from the folder."""
    counter = RecordedCounter("read", work_ns=1_300_000_000)
    found = wb.ab(
        engine, SPEC, tests="tg2", rounds=5, out=tmp_path / "run", energy=counter,
    )  # fmt: skip
    record = json.loads((tmp_path / "run" / "run.json").read_text())["result"]["energy"]
    assert record["cadence_s"] == pytest.approx(0.1, rel=0.02)
    assert record["idle_w"]["tg2"] == pytest.approx(counter.watts(), rel=0.03)
    names, windows = [arm["name"] for arm in found.run["arms"]], record["windows"]
    turns = [[one["arm"] for one in windows if one["window"] == n] for n in range(5)]
    assert turns[0] == names and turns[1] == names[::-1] and len(windows) == 15
    for one in windows:
        assert one["seconds"] >= WINDOW_S and 0 < one["idle_s"] < 0.11
        assert one["joules"] == pytest.approx(one["seconds"] * counter.watts(), rel=0.02)
        assert one["n_tokens"] == 2 * one["repetitions"] >= 6
        reads_j = one["mean_w"] * 2 * counter.read_ns / 1e9
        idle_j = record["idle_w"]["tg2"] * one["idle_s"]
        assert one["uncertainty_j"] == pytest.approx(reads_j + idle_j)
        assert one["uncertainty_j"] < 0.1 * one["joules"]
    read = AB.load(tmp_path / "run")
    row, control = read.summary().to_dict("records")
    each = [one["joules"] / one["n_tokens"] for one in windows if one["arm"] == names[0]]
    assert row["j_per_token_baseline"] == pytest.approx(sorted(each)[2])
    assert row["energy_verdict"] == "no difference"
    assert control["energy_verdict"] == "A/A control"
    assert list(read.table().columns[-2:]) == ["J/token", "energy"]
    assert "energy of copy_boundary: no difference" in read.verdict
    assert "idle it draws 3" in read.verdict and "of a window" in read.verdict


@pytest.mark.long
def test_windows_are_resumed_and_kept(engine, tmp_path):
    """A run that ended between two windows goes on with the missing ones; a resumed run that does
    not ask for energy keeps them."""
    out, how = tmp_path / "run", {"tests": "tg2", "rounds": 5}
    counter = RecordedCounter("matmul", work_ns=1_300_000_000)
    stop, read = 1200, counter.read_mj

    def interrupted():
        if counter.n_reads == stop:
            raise KeyboardInterrupt
        return read()

    counter.read_mj = interrupted
    cut = wb.ab(engine, SPEC, **how, out=out, energy=counter)
    had = cut.run["result"]["energy"]["windows"]
    assert cut.interrupted and 0 < len(had) < 15
    again = RecordedCounter("matmul", work_ns=1_300_000_000)
    whole = wb.ab(engine, SPEC, **how, out=out, energy=again, resume=True)
    windows = whole.run["result"]["energy"]["windows"]
    assert windows[: len(had)] == had and len(windows) == 15 and not whole.interrupted
    kept = wb.ab(engine, SPEC, **how, out=out, resume=True)
    assert kept.run["result"]["energy"]["windows"] == windows


def made_run(joules_of: dict[str, float], noise: float = 0.0, step: float = 0.02) -> dict:
    """A run with five windows of 1,000 tokens of each arm."""
    windows = [
        {"test": "tg128", "arm": arm, "is_control": "A/A" in arm, "window": n, "order": 0,
         "joules": each * (1 + noise * ((3 * n + i) % 5 - 2)), "n_tokens": 1000,
         "repetitions": 8, "seconds": 5.1, "idle_s": 0.05, "mean_w": each / 5.1,
         "step_j": step * each, "uncertainty_j": 0.001 * each}
        for n in range(5) for i, (arm, each) in enumerate(joules_of.items())
    ]  # fmt: skip
    energy = {"windows": windows, "idle_w": {"tg128": 120.0}}
    arms = [{"name": arm, "is_control": "A/A" in arm} for arm in joules_of]
    return {"arms": arms, "seed": 0, "tests": ["tg128"], "result": {"energy": energy}}


def test_a_difference_is_told_outside_the_band_alone():
    run = made_run({"off": 2000.0, "on": 1600.0, "word": 2300.0, "same": 2005.0,
                    "off (A/A)": 2001.0}, noise=0.002)  # fmt: skip
    rows = joules.joules(run).set_index("arm")
    assert rows["energy_verdict"].tolist() == [
        "", "less energy", "more energy", "no difference", "A/A control",
    ]  # fmt: skip
    assert rows.loc["on", "energy"] == pytest.approx(0.8, rel=0.01)
    assert rows.loc["off", "j_per_token"] == pytest.approx(2.0, rel=0.01)
    said = joules.lines(run)
    assert "energy of on: less energy, 0.80" in said[0] and "without the host" in said[-1]


def test_there_is_no_figure_where_steps_are_too_coarse():
    run = made_run({"off": 2000.0, "on": 1600.0, "off (A/A)": 2000.0}, step=0.06)
    assert joules.joules(run).empty and joules.lines(run) == []
    run["result"]["energy"] = None
    assert joules.joules(run).empty


def test_a_row_of_bench_has_joules(engine, tmp_path):
    counter = RecordedCounter("read", work_ns=1_300_000_000)
    rows = measured(
        engine, workloads((), (2,)), 1, out=tmp_path / "run", energy=counter,
    )  # fmt: skip
    text, (one,) = format_rows(rows), json.loads(format_rows(rows, "json"))
    assert "J/token" in text and one["energy"]["j_per_token"] > 0
    assert one["energy"]["n_windows"] == 5
    run = results.load_run(tmp_path / "run").run
    frame = joules.joules(run)
    assert frame["arm"].tolist() == ["engine", "engine (A/A)"]
    assert frame["j_per_token"][0] == pytest.approx(one["energy"]["j_per_token"])
    made = Bench.load(tmp_path / "run")
    assert made.to_frame()["j_per_token"][0] == frame["j_per_token"][0]
    assert "J/token" in made.table() and "energy" not in made.table()
    plain = measured(engine, workloads((), (2,)), 1)
    assert "J/token" not in format_rows(plain) and '"energy"' not in format_rows(plain, "json")


@pytest.mark.long
def test_a_cell_of_a_sweep_has_joules(tiny_model, tmp_path):
    counter = RecordedCounter("read", work_ns=1_300_000_000)
    made = wb.sweep(
        tiny_model("tiny-llama", "Q8_0"), "tg2", toggles={"sync": ["per_copy", "copy_boundary"]},
        device="embedded", repetitions=1, out=tmp_path / "sweep", energy=counter,
    )  # fmt: skip
    frame = made.to_frame()
    assert (frame["j_per_token"] > 0).all() and "J/token" in made.table()
    assert frame["n_windows"].tolist() == [1, 1]


def test_what_cannot_be_counted_is_refused_before_anything_is_measured(
    engine, tiny_model, tmp_path, capsys
):
    file, out = tiny_model("tiny-llama", "Q8_0"), tmp_path / "run"
    for how, error, says in (
        ({}, DeviceError, "counted by an NVIDIA GPU, and this engine computes on embedded"),
        ({"tests": "tg2@d4", "energy": RecordedCounter("read")}, UsageError, "filled in the same"),
        ({"energy": RecordedCounter(STILL)}, DeviceError, "stood still"),
    ):
        with pytest.raises(error, match=says):
            wb.ab(engine, SPEC, **{"tests": "tg2", "energy": True} | how, out=out)
    with pytest.raises(UsageError, match=r"every cell is left out, .* counted by an NVIDIA GPU"):
        wb.sweep(file, "tg2", device="embedded", out=tmp_path / "sweep", energy=True)
    for command in (["bench", "-n", "2", "-p", "0"], ["ab", "--toggle", SPEC, "--test", "tg2"]):
        asked = [*command, "-m", str(file), "--device", "embedded", "--energy", "--out", str(out)]
        with pytest.raises(SystemExit):
            main(asked)
        assert "error: energy is counted by an NVIDIA GPU" in capsys.readouterr().err
    assert not out.exists()
    two = dataclasses.replace(engine.config, n_devices=2)
    with pytest.raises(UsageError, match="energy is counted for one GPU"):
        counter_of(True, engine.backend, two, parse_tests("tg2"))


def test_the_counter_is_of_the_engines_own_gpu(monkeypatch):
    """By its UUID: with CUDA_VISIBLE_DEVICES the first GPU of a process is any of the machine's."""
    own, ok = uuid.uuid4(), driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuDeviceGet", lambda number: (ok, number))
    monkeypatch.setattr(driver, "cuDeviceGetUuid", lambda n: (ok, SimpleNamespace(bytes=own.bytes)))

    class NVMLError(Exception):
        """As pynvml has it."""

    def energy(handle):
        if handle != f"GPU-{own}":
            raise NVMLError("Not Supported")
        return 1234

    nvml = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    backend = SimpleNamespace(name="cuda", description="a GPU")
    counter = NvmlCounter(backend)
    assert counter.read_mj() == 1234 and 0 < counter.now_ns() < counter.now_ns()
    nvml.nvmlDeviceGetHandleByUUID = lambda name: "another"
    with pytest.raises(DeviceError, match=r"a GPU has no energy counter \(NVML: Not Supported\)"):
        NvmlCounter(backend)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="energy needs pynvml, which is not installed; pip"):
        NvmlCounter(backend)
