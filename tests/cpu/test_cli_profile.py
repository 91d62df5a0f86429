"""`workbench profile`: untraced times, labelled tables of a trace, and the file."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from tests.trace import chrome_decode
from workbench.benchmarks.times import profiling
from workbench.benchmarks.times.profiling import Bandwidth, profile_test
from workbench.benchmarks.workload import draw_tokens, parse
from workbench.cli import main
from workbench.common.errors import DeviceError, UsageError
from workbench.common.progress import Bar
from workbench.config import EngineConfig, Toggles
from workbench.engine.engine import Engine
from workbench.report import profiles
from workbench.trace.lanes import ABOUT


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs the command in this process; returns (exit status, stdout, stderr)."""
    monkeypatch.setattr(profiling, "read_bandwidth", lambda engine: Bandwidth(10.0, "read 10 GB/s"))
    monkeypatch.setenv("COLUMNS", "300")  # titles on one line

    def run(*arguments: object) -> tuple[int, str, str]:
        status = 0
        try:
            main(["profile", *(str(a) for a in arguments)])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run


def columns(out: str, title: str) -> list[str]:
    """The columns of the table under the line that begins with `title`."""
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(title))
    header = next(line for line in lines[at + 1 :] if line.startswith("|"))
    return [c.strip() for c in header.strip("|").split("|")]


def test_one_command_gives_untraced_times_tables_and_the_trace(call, model, tmp_path):
    out = tmp_path / "t.json"
    status, text, err = call(
        "-m", model, "--device", "embedded", "--test", "tg6", "-r", 2, "--window", "2,3", "-o", out
    )
    assert status == 0, err
    assert {"untraced us", "untraced gap us", "untraced kernels us"} <= set(
        columns(text, "tg6: untraced")
    )
    titles = [line for line in text.splitlines() if "(traced" in line]
    assert [t.split(" (")[0] for t in titles] == ["Kernels", "The host", "No kernel runs"]
    for title in titles:
        assert re.search(r"traced, \d+\.\d\d times as slow as untraced; steps 2 to 4", title)
    assert {"op", "calls", "traced us", "traced %", "traced GB/s", "traced % read",
            "traced launch"} <= set(columns(text, "Kernels"))  # fmt: skip
    assert "read 10 GB/s" in titles[0] and "| mul_mat" in text
    assert {"phase", "untraced us", "traced us"} <= set(columns(text, "The host"))
    assert columns(text, "No kernel")[1:] == ["between steps", "between launches"]
    for column in re.findall(r"[^|\n]*\b(?:us|GB/s|%)[^|\n]*(?=\|)", text):
        if "us" in column.split() or "GB/s" in column:
            assert "traced" in column, f"{column!r} says whether it was traced"
    assert f"wrote {out}" in err

    made = chrome_decode.decode(out.read_bytes())
    steps = [s for s in made.slices if s.category == "step"]
    assert len(steps) == 3 and {s.args["n_tokens"] for s in steps} == {1}
    about = made.instants[ABOUT]
    assert about["test"] == "tg6" and about["window"] == "2,3" and len(about["model.hash"]) == 64
    assert {f"toggles.{n}" for n in Toggles.names()} <= set(about) and about["commit"]
    assert {a.kind for a in made.arrows} >= {"issue", "wait"}


def test_a_prompt_by_node_and_the_other_format(call, model, tmp_path):
    out = tmp_path / "t.pftrace.gz"
    status, text, err = call(
        "-m", model, "--device", "embedded", "--test", "pp24+tg2", "--n-ubatch", 16, "-r", 1,
        "--by", "node", "-o", out,
    )  # fmt: skip
    assert status == 0, err
    assert {"step", "op", "node"} <= set(columns(text, "Kernels"))
    found = set(re.findall(r"^\| (token|ubatch of \d+) ", text, re.MULTILINE))
    assert found == {"token", "ubatch of 8", "ubatch of 16"}
    assert out.read_bytes()[:2] == b"\x1f\x8b"


def test_the_host_computes_in_its_own_call_and_has_no_gap(call, model):
    status, text, err = call("-m", model, "--device", "host", "--test", "tg3", "-r", 1)
    assert status == 0, err
    assert "by the host's clock: nothing here runs beside the host" in text
    assert "none, for nothing here runs beside the host" in text
    assert "| mul_mat (host) " in text


BAD = {
    "a window beyond the test": (
        ["--test", "tg4", "--window", "2,3"],
        "window 2,3 does not lie in",
    ),
    "a window that is none": (["--window", "all"], "--window 'all' holds no step"),
    "a test that does not exist": (["--test", "gen8"], "test 'gen8' does not exist"),
    "rows of nothing": (["--by", "layer"], "--by 'layer' does not exist"),
    "a collector that does not exist": (["--collector", "eyes"], "--collector 'eyes'"),
    "no repetitions": (["-r", "0"], "-r"),
    "a folder that is not there": (["-o", "/no/such/t.json"], "/no/such/t.json cannot be written"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_done_is_refused_before_the_model_is_opened(call, what):
    arguments, says = BAD[what]
    status, out, err = call("-m", "/no/such.gguf", *arguments)
    (line,) = err.splitlines()
    assert status == 2 and out == "" and says in line


def test_kernels_by_name_are_refused_where_nobody_names_them(call, model):
    status, _, err = call("-m", model, "--device", "embedded", "--test", "tg2", "-r", 1,
                          "--by", "kernel")  # fmt: skip
    assert status == 2 and "only CUPTI does; use by=op" in err


@pytest.fixture(scope="module")
def engine(model):
    with Engine.load(model, device="embedded", n_ctx=64, n_ubatch=16, threads=2) as made:
        yield made


def test_untraced_steps_are_stamped_by_the_device(engine, monkeypatch):
    monkeypatch.setattr(profiling, "read_bandwidth", lambda engine: Bandwidth(None, "not measured"))
    found = profile_test(engine, parse("pp20+tg3@d4"), (1, 2), repetitions=2)
    assert engine.recorder is None and found.stamped
    steps = found.steps
    assert list(steps["n_tokens"]) == [16, 4, 1, 1, 1] * 2
    assert steps["gap_us"].isna().sum() == 2, "the first step of a repetition has none before it"
    assert found.phases["n_tokens"].tolist() == [16, 4, 1, 1, 1]
    spent = found.phases[profiling.PHASES]
    assert (spent >= 0).all(axis=None) and (spent[["batch", "issue", "wait"]] > 0).all(axis=None)
    later = steps.dropna()
    assert (later["gap_us"] > 0).all() and (later["kernels_us"] > 0).all()
    assert (later["gap_us"] + later["kernels_us"] - later["step_us"]).abs().max() < 1e-3
    assert (steps["kernels_us"] < steps["host_us"]).all(), "every step ends with a wait"
    traced = found.trace.to_frame().query("category == 'step'")
    assert list(traced["n_tokens"]) == [4, 1]
    assert found.trace.slowdown is not None and found.trace.slowdown.n_untraced >= 2
    kernels = next(t for title, t in profiles.lines(found) if title.startswith("Kernels"))
    assert set(kernels["traced % read"]) == {""}, "without a bandwidth there is no share of it"


def test_a_step_that_waited_for_a_line_to_be_written_has_no_gap(engine, monkeypatch):
    class Told(Bar):
        due_ns = property(lambda self: 0, lambda self, ns: None)  # always due

    told: list[float] = []
    monkeypatch.setattr(Told, "update", lambda self, n=1: told.append(n))
    monkeypatch.setattr(profiling, "bar", lambda *_: nullcontext(Told("x", 1, "tokens", None)))
    drawn = draw_tokens(parse("tg10"), engine.model.n_vocab, 0)
    steps = profiling.stamped_steps(engine, [drawn])
    assert told == [4, 4, 2]
    assert steps.index[steps["gap_us"].isna()].tolist() == [0, 4, 8]
    assert steps["kernels_us"].notna().all()


def test_the_default_window_is_the_last_eight_steps():
    assert profiling.window_of(parse("tg128"), 512) == (120, 8)
    assert profiling.window_of(parse("tg5"), 512) == (0, 5)
    assert profiling.window_of(parse("pp1024+tg2"), EngineConfig().n_ubatch) == (0, 4)
    with pytest.raises(UsageError, match="which has 1 steps here"):
        profiling.window_of(parse("pp512"), 512, (1, 1))


def test_the_read_bandwidth_is_measured_or_it_says_why_not(engine, monkeypatch):
    class Rig:
        def __init__(self, fails: bool):
            self.fails = fails

        def read_rates(self) -> dict[str, float]:
            if self.fails:
                raise DeviceError("no 4 GiB are free")
            return {"max": 9.0, "sum": 12.5}

        def void(self, gbps: float) -> str:
            return "void: slow card" if gbps < 20 else ""

    monkeypatch.setattr(profiling, "rig_of", lambda backend, quick: Rig(False))
    assert profiling.read_bandwidth(engine) == (
        12.5, "read bandwidth 12.5 GB/s (sum, the best of 2 ways); void: slow card",
    )  # fmt: skip
    monkeypatch.setattr(profiling, "rig_of", lambda backend, quick: Rig(True))
    assert profiling.read_bandwidth(engine) == (None, "no read bandwidth: no 4 GiB are free")
