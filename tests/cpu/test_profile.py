"""Tracing a real engine: spans are the program's commands, and the answer is the same."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.program.commands import Copy, Launch
from workbench.trace.profile import profile, profile_each
from workbench.trace.spans import HOST_LANE

UNIT = Path(__file__).resolve().parents[1] / "unit"
sys.path.insert(0, str(UNIT))
from perfetto_decode import decode  # noqa: E402

PROMPT = [1, 17, 300, 4]
MODES = [
    Toggles(),
    Toggles(sync="copy_boundary", graph_reuse="set_rows"),
    Toggles(sync="implicit", copy_stream="compute"),
]


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=256, toggles=Toggles()
    ) as e:
        yield e


@pytest.fixture(params=MODES, ids=lambda t: f"{t.sync}-{t.copy_stream}")
def engine(request, loaded):
    with loaded.variant(request.param) as e:
        e.prefill(PROMPT)
        yield e


def test_host_spans_are_the_commands_one_to_one(engine):
    program = engine.program(n_past=engine.n_past)
    step = engine.n_steps
    with profile(engine, nvtx=False) as prof:
        engine.step([5])
    spans = [s for s in prof.recorder.spans if s.lane == HOST_LANE]
    commands = [s for s in spans if s.category not in ("step", "split", "build")]
    assert [(s.category, s.args["index"], s.args["split"]) for s in commands] == [
        (c.kind, i, c.split) for i, c in enumerate(program.commands)
    ]
    assert [s.start_ns for s in commands] == sorted(s.start_ns for s in commands)
    whole, *others = [s for s in spans if s.category == "step"]
    assert not others and whole.args == {"step": step, "n_tokens": 1, "n_past": len(PROMPT)}
    assert all(whole.start_ns <= s.start_ns <= s.end_ns <= whole.end_ns for s in spans)
    assert sum(s.category == "split" for s in spans) == len(program.splits)


def test_device_spans_are_the_asynchronous_commands(engine):
    program = engine.program(n_past=engine.n_past)
    with profile(engine, nvtx=False) as prof:
        engine.step([5])
    issued = {s.args["index"]: s for s in prof.recorder.spans if s.lane == HOST_LANE
              and s.category in ("copy", "launch")}  # fmt: skip
    device = [s for s in prof.recorder.spans if s.lane != HOST_LANE]
    expected = [
        (i, c.kind, f"{program.backends[c.stream.backend]} stream {c.stream.id}")
        for i, c in enumerate(program.commands)
        if isinstance(c, Copy | Launch) and program.backends[c.stream.backend] != "host"
    ]
    assert sorted((s.args["index"], s.args["kind"], s.lane) for s in device) == expected
    for span in device:
        host = issued[span.args["index"]]
        assert (span.name, span.args["step"]) == (host.name, host.args["step"])
        assert host.start_ns <= span.end_ns, "nothing runs to its end before it is issued"
    for lane in {s.lane for s in device}:
        ends = [(s.start_ns, s.end_ns) for s in device if s.lane == lane]
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "a stream is a queue"


def test_summary_counts_what_the_program_counts(engine):
    counts = engine.program(n_past=engine.n_past).counts()
    with profile(engine, window=(1, 2), nvtx=False) as prof:
        for token in (5, 6, 7, 8):
            engine.step([token])
    table = prof.summary()
    assert list(table["n_past"]) == [len(PROMPT) + 1, len(PROMPT) + 2]
    for name in ("waits", "copies", "launches", "copied_bytes"):
        assert (table[name] == counts[name]).all(), name
    assert (table["device_us"] > 0).all() and (table["idle_us"] >= 0).all()
    assert (table[["build_us", "host_us", "wait_us"]].sum(axis=1) <= table["step_us"]).all()
    built = engine.toggles.graph_reuse == "rebuild"
    names = set(prof.to_frame().query("category == 'build'")["name"])
    assert names == (
        {"batch", "graph", "fuse", "split", "layout", "lower", "prepare"}
        if built
        else {"batch", "reuse"}
    )
    begins = {s.args["step"]: s.start_ns for s in prof.timeline.spans if s.category == "step"}
    host = [s for s in prof.timeline.spans if s.lane == HOST_LANE and "step" in s.args]
    assert all(s.start_ns >= begins[s.args["step"]] for s in host), "time of another step"


def test_traced_and_untraced_give_the_same_answer(engine):
    def logits():
        engine.reset()
        return np.concatenate([engine.prefill(PROMPT, outputs="all"), engine.step([9])])

    plain = logits()
    with profile(engine, nvtx=True) as prof:
        traced = logits()
    assert engine.recorder is None and len(prof.timeline) > 0
    assert np.array_equal(plain, traced)
    assert np.array_equal(plain, logits())


def test_the_perfetto_file_holds_the_run(engine, tmp_path):
    with profile(engine, nvtx=False) as prof:
        engine.generate(tokens=[9], max_tokens=4)
    prof.save(tmp_path / "t.pftrace")
    decoded = decode((tmp_path / "t.pftrace").read_bytes())
    spans = prof.recorder.spans
    assert len(decoded.slices) == len(spans)
    assert len(decoded.tracks) == len({s.lane for s in spans})
    assert set(decoded.processes.values()) == {"host", "embedded"}
    issued = [s for s in decoded.slices if s.starts and s.category in ("copy", "launch")]
    assert len(issued) == sum(s.category == "device" for s in spans)


def test_variants_are_traced_by_name(tiny_model):
    arms = {"every wait": Toggles(), "packed": Toggles(sync="packed")}
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, threads=2, toggles=Toggles()
    ) as engine:
        found = profile_each(engine, arms, n_tokens=10)
    assert list(found) == list(arms)
    waits = {name: int(trace.summary()["waits"].iloc[0]) for name, trace in found.items()}
    assert waits == {"every wait": 13, "packed": 3}
    assert all(len(trace.summary()) == 8 for trace in found.values())
