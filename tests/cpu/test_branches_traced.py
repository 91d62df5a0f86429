"""Branches in a trace of a real run: each on its stream's lane, behind its fork, before its join,
with all that reads traces."""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from tests.oracles.trace_pattern import trace_pattern
from tests.unit import chrome_decode, perfetto_decode
from workbench.program.commands import Launch, Program, Record, Stream, Wait
from workbench.report.timelines import timeline
from workbench.trace.profile import Profile, profile
from workbench.trace.spans import Span

STEP = {"plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute"}
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "a plan of each split": {"plans": "ours"},
    "a plan of the step": {"plans": "ours", "results": "direct"} | STEP,
}
STEPS = 3
PRODUCTS = ("Qcur-0", "Kcur-0", "Vcur-0")
Traced = tuple[Profile, dict[int, Program]]


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, threads=2,
        toggles=wb.Toggles(),
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module", params=WAYS)
def traced(request, base) -> Traced:
    """Three tokens on three compute streams, and the program of each, by its step."""
    toggles: Any = {"graph_reuse": "set_rows", "streams": "3"} | WAYS[request.param]
    with base.variant(wb.Toggles(**toggles)) as engine:
        engine.prefill([1, 2, 3])
        programs = {
            engine.n_steps + i: engine.program(n_past=engine.n_past + i) for i in range(STEPS)
        }
        with profile(engine, nvtx=False, collector="events") as made:
            for token in range(STEPS):
                engine.step([5 + token])
    return made, programs


def launches(made: Profile, step: int) -> dict[tuple[int, int], Span]:
    """The device's spans of launches, by the number of the command and of the part of a plan."""
    spans = [s for s in made.timeline.spans if s.category == "device" and s.args["step"] == step]
    own = [s for s in spans if s.args["kind"] == "launch"]
    found = {(s.args["index"], s.args.get("part", 0)): s for s in own}
    assert len(found) == len(own)
    return found


def behind(program: Program) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of launches, the first of which ends before the second begins: of each stream, and
    by each Wait of a fork or a join."""
    last: dict[Stream, set[tuple[int, int]]] = defaultdict(set)
    recorded: dict[str, set[tuple[int, int]]] = {}
    pairs = []
    for at in program.located():
        command, number = at.command, (at.index, at.part or 0)
        match command:
            case Record(forks=True):
                recorded[command.event] = set(last[command.stream])
            case Wait(forks=True):
                last[command.stream] |= recorded[command.event]
            case Launch(by_host=False) if command.stream.backend:
                pairs += [(before, number) for before in sorted(last[command.stream])]
                last[command.stream] = {number}
    return pairs


def test_each_branch_is_on_its_stream_s_lane(traced):
    made, programs = traced
    for step, program in programs.items():
        found = launches(made, step)
        wanted = {
            (at.index, at.part or 0): (at.command.label, f"embedded stream {at.command.stream.id}")
            for at in program.located()
            if isinstance(at.command, Launch) and at.command.stream.backend
        }
        assert {key: (s.name, s.lane) for key, s in found.items()} == wanted
        lanes = {
            s.name: s.lane
            for s in found.values()
            if s.name in PRODUCTS and s.args["op"] == "mul_mat"
        }
        assert len(set(lanes.values())) == len(lanes) == 3, "Q, K and V"


def test_a_branch_lies_between_its_fork_and_its_join(traced):
    """No span begins before what it waits for has ended, on whichever lane that is."""
    made, programs = traced
    for step, program in programs.items():
        found, pairs = launches(made, step), behind(program)
        across = [(a, b) for a, b in pairs if found[a].lane != found[b].lane]
        assert len(across) == 8, "two branches are forked and joined in each of two layers"
        for before, after in pairs:
            assert found[before].end_ns <= found[after].start_ns, (found[before], found[after])


def test_patterns_tables_and_pictures_show_branches(traced):
    made, programs = traced
    (pattern,) = {program.pattern() for program in programs.values()}
    assert trace_pattern(made) == pattern and pattern[-2:] in ("g3", "p3")
    assert len(made.kernels()) and len(made.phases()) and list(made.summary().index) == [*programs]
    gaps = made.gaps()
    kinds = gaps.columns.drop(["step", "between", "before", "after", "traced_us"])
    own = kinds.drop(["host_us", "device_us"])
    assert len(gaps) and (gaps[own].sum(axis=1) - gaps["traced_us"]).abs().max() < 1e-6
    shown = [text.get_text() for text in timeline(made).axes[0].get_yticklabels()]
    assert {f"embedded stream {n}" for n in (0, 2, 3)} <= {*shown}


def test_files_have_a_track_for_each_branch_and_its_spans_on_it(traced, tmp_path):
    made, _ = traced
    for name in ("t.pftrace.gz", "t.json"):
        made.save(tmp_path / name)
    packed = perfetto_decode.decode(gzip.decompress((tmp_path / "t.pftrace.gz").read_bytes()))
    plain = chrome_decode.decode((tmp_path / "t.json").read_bytes())
    wanted = Counter(
        ("embedded", s.lane.removeprefix("embedded "), s.name)
        for s in made.timeline.spans
        if s.category == "device"
    )
    assert {"stream 0", "stream 2", "stream 3"} <= {thread for _, thread, _ in wanted}
    device = [s for s in packed.slices if s.category == "device"]
    assert Counter((*packed.tracks[s.track], s.name) for s in device) == wanted
    also = [s for s in plain.slices if s.category == "device"]
    assert Counter((s.process, s.thread, s.name) for s in also) == wanted
