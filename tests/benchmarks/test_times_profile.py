"""`workbench profile`: untraced times, labelled tables of a trace, and the file."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from tests.trace import chrome_decode
from workbench.benchmarks.times import profiling
from workbench.benchmarks.times.profiling import Bandwidth, profile_test
from workbench.benchmarks.workload import draw_tokens, parse
from workbench.common.errors import DeviceError, UsageError
from workbench.common.progress import Bar
from workbench.config import EngineConfig, Toggles
from workbench.trace.lanes import ABOUT


@pytest.fixture
def call(call, tiny_model, monkeypatch):
    """`workbench profile` on a tiny model: (exit status, stdout, stderr)."""
    monkeypatch.setattr(profiling, "read_bandwidth", lambda engine: Bandwidth(10.0, "read 10 GB/s"))
    monkeypatch.setenv("COLUMNS", "300")  # titles on one line
    ask = ("profile", "-m", tiny_model("tiny-llama", "Q8_0"), "-r", 1, "--device", "embedded")
    return lambda *arguments: call(*ask, *arguments)


def columns(out: str, title: str) -> set[str]:
    """The columns of the table under the line that begins with `title`."""
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(title))
    header = next(line for line in lines[at + 1 :] if line.startswith("|"))
    return {c.strip() for c in header.strip("|").split("|")}


def test_one_command_gives_untraced_times_tables_and_a_trace(call, tmp_path):
    out = tmp_path / "t.json"
    status, text, err = call("--test", "tg6", "--window", "2,3", "-o", out)
    assert status == 0, err
    wanted = {"untraced us", "untraced gap us", "untraced kernels us"}
    assert wanted <= columns(text, "tg6: untraced")
    titles = [line for line in text.splitlines() if "(traced" in line]
    assert [t.split(" (")[0] for t in titles] == ["Kernels", "The host", "No kernel runs"]
    for title in titles:
        assert re.search(r"traced, \d+\.\d\d times as slow as untraced; steps 2 to 4", title)
    assert {"op", "calls", "traced us", "traced %", "traced GB/s", "traced % read",
            "traced launch"} <= columns(text, "Kernels")  # fmt: skip
    assert "read 10 GB/s" in titles[0] and "| mul_mat" in text
    assert {"phase", "untraced us", "traced us"} <= columns(text, "The host")
    assert {"between steps", "between launches"} <= columns(text, "No kernel")
    made = chrome_decode.decode(out.read_bytes())
    steps = [s for s in made.slices if s.category == "step"]
    assert len(steps) == 3 and {s.args["n_tokens"] for s in steps} == {1}
    about = made.instants[ABOUT]
    assert about["test"] == "tg6" and about["window"] == "2,3" and len(about["model.hash"]) == 64
    assert {f"toggles.{n}" for n in Toggles.names()} <= set(about) and about["commit"]
    assert {a.kind for a in made.arrows} >= {"issue", "wait"}


def test_a_prompt_by_node_and_the_other_format(call, tmp_path):
    out = tmp_path / "t.pftrace.gz"
    ask = ("--test", "pp24+tg2", "--n-ubatch", 16, "--by", "node")
    status, text, err = call(*ask, "-o", out)
    assert status == 0, err
    assert {"step", "op", "node"} <= columns(text, "Kernels")
    found = set(re.findall(r"^\| (token|ubatch of \d+) ", text, re.MULTILINE))
    assert found == {"token", "ubatch of 8", "ubatch of 16"}
    assert out.read_bytes()[:2] == b"\x1f\x8b"
    status, _, err = call("--test", "tg2", "--by", "kernel")
    assert status == 2 and "only CUPTI does; use by=op" in err


BAD = {
    "a window beyond the test": (["--test", "tg4", "--window", "2,3"], "2,3 does not lie in"),
    "a window that is none": (["--window", "all"], "--window 'all' holds no step"),
    "several sequences": (["--test", "pp4+tg2@b3"], "has several sequences, and a profile is of"),
    "rows of nothing": (["--by", "layer"], "--by 'layer' does not exist"),
    "a collector that does not exist": (["--collector", "eyes"], "--collector 'eyes'"),
    "a folder that is not there": (["-o", "/no/such/t.json"], "/no/such/t.json cannot be written"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_profiled_is_refused_in_one_line(call, what):
    arguments, says = BAD[what]
    status, out, err = call(*arguments)
    assert status == 2 and out == "" and says in err.splitlines()[-1]


def test_untraced_steps_are_stamped_by_the_device(engine, monkeypatch):
    monkeypatch.setattr(profiling, "read_bandwidth", lambda engine: Bandwidth(None, "not measured"))
    found = profile_test(engine, parse("pp20+tg3@d4"), (1, 2), repetitions=2)
    assert engine.recorder is None and found.stamped
    steps = found.steps
    assert list(steps["n_tokens"]) == [20, 1, 1, 1] * 2
    assert steps["gap_us"].isna().sum() == 2, "the first step of a repetition has none before it"
    assert found.phases["n_tokens"].tolist() == [20, 1, 1, 1]
    spent = found.phases[profiling.PHASES]
    assert (spent >= 0).all(axis=None) and (spent[["batch", "issue", "wait"]] > 0).all(axis=None)
    later = steps.dropna()
    assert (later["gap_us"] > 0).all() and (later["kernels_us"] > 0).all()
    assert (later["gap_us"] + later["kernels_us"] - later["step_us"]).abs().max() < 1e-3
    assert (steps["kernels_us"] < steps["host_us"]).all(), "every step ends with a wait"
    assert list(found.trace.to_frame().query("category == 'step'")["n_tokens"]) == [1, 1]
    assert found.trace.slowdown is not None and found.trace.slowdown.n_untraced >= 2


def test_a_step_that_waited_for_a_written_line_has_no_gap(engine, monkeypatch):
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


def test_the_window_and_the_bandwidth(engine, monkeypatch):
    """The last eight steps are the default; the bandwidth is measured, or it says why not."""
    assert profiling.window_of(parse("tg128"), 512) == (120, 8)
    assert profiling.window_of(parse("tg5"), 512) == (0, 5)
    assert profiling.window_of(parse("pp1024+tg2"), EngineConfig().n_ubatch) == (0, 4)
    with pytest.raises(UsageError, match="which has 1 steps here"):
        profiling.window_of(parse("pp512"), 512, (1, 1))

    class Rig:
        def read_rates(self) -> dict[str, float]:
            return {"max": 9.0, "sum": 12.5}

        def void(self, gbps: float) -> str:
            return "void: slow card" if gbps < 20 else ""

    monkeypatch.setattr(profiling, "rig_of", lambda backend, quick: Rig())
    assert profiling.read_bandwidth(engine) == (
        12.5, "read bandwidth 12.5 GB/s (sum, the best of 2 ways); void: slow card",
    )  # fmt: skip

    def full(self: Rig) -> dict[str, float]:
        raise DeviceError("no 4 GiB are free")

    monkeypatch.setattr(Rig, "read_rates", full)
    assert profiling.read_bandwidth(engine) == (None, "no read bandwidth: no 4 GiB are free")
