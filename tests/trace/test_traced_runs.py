"""Traces of real runs: spans are the program's commands, with parts of plans and branches, and so
are tables, patterns and files; and when kernels ran, by the device's marks, untraced."""

from __future__ import annotations

import gc
import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

import workbench as wb
from tests.oracles.trace_pattern import HIDDEN, trace_pattern
from tests.orderings import PLACED
from tests.profiles import share
from tests.trace import decoded
from workbench.benchmarks.times.overlap import WARM_UP, measure_overlap
from workbench.common import checkout
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.look.kernel_spans import kernel_spans, number_of
from workbench.graph.ops import touched_bytes
from workbench.program.commands import Copy, Launch, Program, Replay, Sync, Wait
from workbench.program.side_by_side import regions
from workbench.trace import analysis
from workbench.trace.lanes import ABOUT
from workbench.trace.profile import Profile, profile, profile_each
from workbench.trace.spans import HOST_LANE, Span, now_ns

STEP = {"plans": "ours", "plan_scope": "step"}
ONE = {"sync": "implicit", "copy_stream": "compute"}
RING = {"host_source": "pinned_ring_2", "step_wait": "outputs"}
WAYS: dict[str, dict[str, str]] = {
    "every wait": {"graph_reuse": "rebuild"},
    "two streams, an event": {"sync": "event_guarded"},
    "a ring of staging": ONE | RING,
    "branches": {"streams": "3"},
    "plans of splits": {"plans": "ours"},
    "a plan of the step": STEP | ONE,
    "a plan of two streams": STEP | {"sync": "event_guarded", "copy_stream": "own"},
    "branches in plans": {"plans": "ours", "streams": "3"},
    "branches in a plan": STEP | ONE | {"streams": "8", "fork": "any"},
}
STEPS, PROMPT = 3, [1, 2, 3, 4]


class Traced(NamedTuple):
    """A trace of three tokens behind a prompt, and the program of each, by its step."""

    toggles: Toggles
    prof: Profile
    programs: dict[int, Program]


def toggles_of(way: dict[str, str]) -> Toggles:
    return Toggles(**{"graph_reuse": "set_rows"} | way)


@pytest.fixture(scope="module", params=WAYS)
def traced(request, loaded) -> Traced:
    toggles = toggles_of(WAYS[request.param])
    with loaded.variant(toggles) as engine:
        engine.prefill(PROMPT[:-1])
        engine.step(PROMPT[-1:])
        programs = {
            engine.n_steps + i: engine.program(n_past=engine.n_past + i) for i in range(STEPS)
        }
        with profile(engine, nvtx=False) as prof:
            for token in range(STEPS):
                engine.step([5 + token])
        assert engine.recorder is None
    return Traced(toggles, prof, programs)


def key(span: Span) -> tuple[int, int]:
    return span.args["index"], span.args.get("part", 0)


def test_host_spans_are_commands_and_device_spans_their_work(traced):
    for n_past, (step, program) in enumerate(traced.programs.items(), len(PROMPT)):
        every = [s for s in traced.prof.recorder.spans if s.args.get("step") == step]
        host = [s for s in every if s.lane == HOST_LANE and "index" in s.args]
        assert [(s.category, s.args["index"], s.args["split"]) for s in host] == [
            (c.kind, i, c.split) for i, c in enumerate(program.commands)
        ]
        assert [s.start_ns for s in host] == sorted(s.start_ns for s in host)
        (whole,) = [s for s in every if s.category == "step"]
        assert whole.args == {"step": step, "n_tokens": 1, "n_past": n_past}
        assert sum(s.category == "split" for s in every) == len(program.splits)
        for s in every:
            within = whole.start_ns <= s.start_ns <= s.end_ns <= whole.end_ns
            assert within or s.lane != HOST_LANE, s
        device = {key(s): s for s in every if s.category == "device"}
        told = {k: (s.name, s.args["kind"], s.args["split"], s.lane) for k, s in device.items()}
        assert told == {
            (at.index, at.part or 0): (c.label, c.kind, c.split, f"embedded stream {c.stream.id}")
            for at in program.located()
            if isinstance(c := at.command, Copy | Launch) and c.stream.backend
        }
        assert sum(s.category == "device" for s in every) == len(device)
        assert all(host[index].start_ns <= s.end_ns for (index, _), s in device.items())
        for lane in {s.lane for s in device.values()}:
            ordered = sorted((s for s in device.values() if s.lane == lane), key=lambda s: s[3:])
            assert all(a.end_ns <= b.start_ns for a, b in pairwise(ordered)), "a stream is a queue"
            assert [*map(key, ordered)] == sorted(map(key, ordered))
        lanes = {s.lane for s in device.values() if s.name in ("Qcur-0", "Kcur-0", "Vcur-0")}
        assert len(lanes) == (1 if traced.toggles.streams == "1" else 3)


def test_tables_and_patterns_are_those_of_the_program(traced):
    """Bytes are those of the op table, in plans or not."""
    table, program = traced.prof.summary(), next(iter(traced.programs.values()))
    assert list(table["n_past"]) == [len(PROMPT) + i for i in range(STEPS)]
    counts = program.counts()
    for name in ("waits", "copies", "launches", "copied_bytes", "replays"):
        if name in table or name in counts:
            assert (table[name] == counts[name]).all(), name
    found = trace_pattern(traced.prof)  # a busy machine holds a call, too, and that looks alike
    assert found.replace(HIDDEN, "") == program.pattern()
    built = traced.toggles.graph_reuse == "rebuild"
    every = {"batch", "graph", "fuse", "split", "layout", "lower", "prepare"}
    names = set(traced.prof.to_frame().query("category == 'build'")["name"])
    assert names == (every if built else {"batch", "reuse"})
    launches: dict[str, list[int]] = defaultdict(list)
    for command in program.singly():
        if isinstance(command, Launch):
            launches[command.node.op].append(touched_bytes(command.node))
    table = traced.prof.kernels().groupby("op")[["calls", "bytes"]].sum()
    assert {op: (row.calls, row.bytes) for op, row in table.iterrows()} == {
        op: (STEPS * len(of), STEPS * sum(of)) for op, of in launches.items()
    }
    has_plans = traced.toggles.plans != "off"
    assert ("replay" in set(traced.prof.phases()["part"])) == has_plans
    gaps = traced.prof.gaps()
    assert set(gaps["after"]) <= set(table.index) | {"replay"}
    told, kinds = len(analysis.GAPS), {*traced.prof.to_frame()["category"]}
    assert list(gaps)[:told] == analysis.GAPS and {*list(gaps)[told:-2]} <= kinds
    assert list(gaps)[-2:] == [analysis.PYTHON, analysis.OUTSIDE]
    parts = gaps[list(gaps)[told:]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(gaps["traced_us"].to_numpy(), abs=0.01)


@pytest.fixture
def files(traced, tmp_path) -> list[decoded.Decoded]:
    """Both formats of the trace, read back."""
    found = []
    for name, decode in (("t.pftrace.gz", decoded.perfetto), ("t.json.gz", decoded.chrome)):
        assert traced.prof.save(tmp_path / name) == (tmp_path / name).stat().st_size
        found.append(decode(gzip.decompress((tmp_path / name).read_bytes())))
    return found


def ends(a: decoded.Arrow) -> tuple[str, str, str, str]:
    return a.source.category, a.source.name, a.sink.category, a.sink.name


def test_both_formats_hold_the_same(traced, files):
    packed, plain = files
    spans = traced.prof.timeline.spans
    origin = min(s.start_ns for s in spans)
    assert plain.other["origin_ns"] == origin
    wanted = Counter(
        (*(s.lane.split(" ", 1) if " " in s.lane else (s.lane, s.lane)), s.name, s.category,
         s.start_ns, s.end_ns)
        for s in spans
    )  # fmt: skip
    for read, begin in ((packed, 0), (plain, origin)):
        assert wanted == Counter(
            (s.process, s.thread, s.name, s.category, s.start_ns + begin, s.end_ns + begin)
            for s in read.slices
        )
    assert Counter(map(ends, plain.arrows)) == Counter(map(ends, packed.arrows))
    args = [{json.dumps(s.args, sort_keys=True) for s in read.slices} for read in files]
    assert args[0] == args[1]
    for about in (packed.instants[ABOUT], plain.instants[ABOUT]):
        assert {n: about[f"toggles.{n}"] for n in Toggles.names()} == traced.toggles.to_dict()
        assert about["model.quant"] == "Q8_0"
        assert about["commit"].split()[0] == checkout.commit()["hash"]


def test_arrows_lead_to_the_device_to_waits_and_back(traced, files):
    packed, plain = files
    found = Counter((a.source.category, a.sink.category) for a in packed.arrows)
    every = [c for p in traced.programs.values() for c in p.commands]
    device = sum(s.category == "device" and "part" not in s.args
                 for s in traced.prof.timeline.spans)  # fmt: skip
    assert found["launch", "device"] + found["copy", "device"] == device
    replays = sum(isinstance(c, Replay) for c in every)
    assert found["replay", "device"] == replays, "into its first part"
    waits = Counter(c.event for c in every if isinstance(c, Wait))
    events = [a for a in plain.arrows if a.kind == "event"]
    assert Counter(a.sink.args["event"] for a in events) == waits
    for arrow in events:
        assert arrow.source.category == "record" and arrow.sink.category == "wait"
        assert arrow.source.args["event"] == arrow.sink.args["event"]
        assert arrow.source.args["on"] != arrow.sink.args["on"], "it orders two streams"
    # what the first steps wait for may have been issued before the trace, and has no span then
    n_syncs, n_all = found["device", "sync"], sum(isinstance(c, Sync) for c in every)
    assert n_all - n_all // STEPS <= n_syncs <= n_all and n_syncs >= STEPS
    assert sum(found.values()) == device + replays + waits.total() + n_syncs
    logits = [a for a in plain.arrows if a.sink.name == "wait logits"]
    assert {(a.kind, a.source.name) for a in logits} == {("wait", "result_output")}
    assert len(logits) == STEPS and all(a.source.end_ns <= a.sink.end_ns for a in logits)


@pytest.fixture(scope="module", params=PLACED)
def placed(request, tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, n_ubatch=8, threads=2,
        toggles=Toggles(), **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("way", share(WAYS, every=5))
def test_runs_on_every_placement_are_as_programmed(placed, way):
    """Step by step: a prompt of three ubatches, then tokens. Whether a copy was held takes many
    steps alike to tell, which a prompt has not: hidden waits have tests of their own."""
    with placed.variant(toggles_of(WAYS[way])) as engine:
        programs = engine.programs(24, 3)
        with profile(engine, nvtx=False) as prof:
            engine.prefill(list(range(3, 27)))
            for token in range(5, 8):
                engine.step([token])
        found = [trace_pattern(prof, step=n).replace(HIDDEN, "") for n in range(len(programs))]
    assert found == [p.pattern() for p in programs]


def test_a_plan_issued_part_by_part_is_one_span_and_no_ops(loaded):
    way = {"plans": "ours", "plan_batch": "one", "plan_warmup": "2", "plan_evict": "never"}
    with loaded.variant(toggles_of(way)) as engine:
        engine.prefill(PROMPT)
        with profile(engine, nvtx=False) as made:
            for token in range(STEPS):
                engine.step([token])
    frame = made.to_frame()
    assert len(frame[(frame["category"] == "device") & (frame["kind"] == "replay")]) == 1
    by_op = made.kernels().set_index("op")
    assert by_op.loc["replay", "calls"] == 1 and by_op["bytes"].isna()["replay"]


def test_variants_are_traced_by_name(engine):
    arms = {"every wait": Toggles(), "packed": Toggles(sync="packed")}
    found = profile_each(engine, arms, n_tokens=4)
    waits = {name: int(trace.summary()["waits"].iloc[0]) for name, trace in found.items()}
    assert waits == {"every wait": 13, "packed": 3}


PACKED = STEP | ONE | {"sync": "packed_implicit"}
MARKED = {"no plans": {}, "a plan of the step": PACKED, "plans of splits": {"plans": "ours"}}
TOKENS = [5, 900, 17]


def launched(program: Program) -> list[Launch]:
    return [c for c in program.singly() if isinstance(c, Launch) and not c.by_host]


@pytest.mark.parametrize("streams", ["1", "3"])
@pytest.mark.parametrize("way", MARKED)
def test_every_launch_of_a_step_has_its_span_in_it(loaded, way, streams):
    with loaded.variant(toggles_of(MARKED[way] | {"streams": streams})) as used:
        wanted, around, rows = [used.step([token]).copy() for token in TOKENS], [], []
        used.reset()
        with kernel_spans(used) as found:
            for token in TOKENS:
                begin = now_ns()
                rows.append(used.step([token]).copy())
                around.append((begin, now_ns()))
        np.testing.assert_array_equal(rows, wanted)
        assert used.recorder is None and found.n_silent == [0] * len(TOKENS)
        for number, (spans, (called, returned)) in enumerate(zip(found.steps, around, strict=True)):
            assert {s.args["step"] for s in spans} == {spans[0].args["step"]}
            assert [number_of(s) for s in spans] == sorted(number_of(s) for s in spans)
            assert all(called <= s.start_ns <= s.end_ns <= returned for s in spans)
            launches = launched(used.program(n_past=number))
            assert [s.name for s in spans] == [c.node.name for c in launches]
            assert [s.args["stream"] for s in spans] == [c.stream.id for c in launches]


@pytest.mark.parametrize("way", MARKED)
def test_an_overlap_is_told_with_its_branches_and_tick(loaded, way):
    with loaded.variant(toggles_of(MARKED[way] | {"streams": "3"})) as used:
        found, own = measure_overlap(used, 4), regions(used.program(n_past=WARM_UP))
        launches = launched(used.program(n_past=3))
    assert found.tick_ns == loaded.backend.clock().tick_ns >= 1
    assert len(found.tokens) == 4 and (found.tokens["n_kernels"] == len(launches)).all()
    assert (found.tokens["beside_us"] <= found.tokens["total_us"]).all()
    assert [len(branches) for branches in own] == [3, 3], "Q, K and V in each of two layers"
    shown = found.by_branch[["region", "stream", "first", "n"]].itertuples(index=False)
    assert [tuple(row) for row in shown] == [
        (region, b.stream.id, b.launches[0].node.name, len(b.launches))
        for region, branches in enumerate(own)
        for b in branches
    ]
    assert found.by_branch["resolved"].all() and found.traced.collector == "events"
    assert found.traced.slowdown > 0 and 0 <= found.traced.overlap <= 1
    with loaded.variant(toggles_of(MARKED[way])) as used:
        alone = measure_overlap(used, 3, collector=None)
    assert alone.tokens["overlap"].tolist() == [0.0] * 3 and alone.branches.empty


def test_what_cannot_be_measured_is_refused(engine, tiny_model):
    """And an error in the body ends the looking, which the fixture asserts."""
    with pytest.raises(OSError), kernel_spans(engine):
        raise OSError
    with (
        engine.variant(toggles_of(PACKED | {"launch_ahead": "on"})) as used,
        pytest.raises(UsageError, match="launch_ahead=on queues the next"),
    ):
        measure_overlap(used, 2)
    with (
        wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="host", n_ctx=64) as host,
        pytest.raises(UsageError, match="the host device has no kernels of its own"),
    ):
        measure_overlap(host, 2)


def test_no_traced_step_holds_a_collection_of_garbage(engine):
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), profile(engine):
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_what_is_no_open_engine_is_not_traced():
    for given, said in (("auto", "'auto'"), (None, "NoneType")):
        with pytest.raises(UsageError, match=f"^{said} is no open engine; give"), profile(given):
            pass


def test_a_window_that_no_step_reaches_is_said(loaded):
    with profile(loaded, window=(100, 1), nvtx=False) as prof:
        loaded.prefill(PROMPT)
    said = "no step was traced: 1 was made, and the window begins with step 100, counted from 0"
    assert prof.note == said and said in repr(prof) and prof.gaps().empty
    for window in (3, (1,), (0, 0), ("0", "1")):
        with pytest.raises(UsageError, match="holds no step"), profile(loaded, window=window):
            pass
