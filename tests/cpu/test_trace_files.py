"""What a written trace holds: the same in both formats, arrows whose ends exist, bytes that add up,
and of what model, toggles and commit it is."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest

from tests.unit import chrome_decode, perfetto_decode
from workbench.common import checkout
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ops import touched_bytes
from workbench.program.commands import Launch, Sync, Wait
from workbench.trace.lanes import ABOUT
from workbench.trace.profile import Profile, profile
from workbench.trace.spans import HOST_LANE

MODES = {
    "every wait": Toggles(),
    "two streams, an event": Toggles(sync="event_guarded", graph_reuse="set_rows"),
    "a ring of staging": Toggles(
        sync="implicit", copy_stream="compute", host_source="pinned_ring_2", step_wait="outputs"
    ),
    "branches": Toggles(streams="3", graph_reuse="set_rows"),
}


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, threads=2
    ) as made:
        yield made


@pytest.fixture(scope="module", params=MODES)
def traced(request, loaded):
    """The toggles, the trace of three tokens behind a prompt, and the programs they issued."""
    with loaded.variant(MODES[request.param]) as engine:
        engine.prefill([1, 2, 3])
        programs = {engine.n_steps + i: engine.program(n_past=engine.n_past + i) for i in range(3)}
        with profile(engine, nvtx=False) as prof:
            for token in (5, 6, 7):
                engine.step([token])
    return MODES[request.param], prof, programs


@pytest.fixture
def files(traced, tmp_path):
    """Both formats of the trace, read back."""
    _, prof, _ = traced
    for name in ("t.pftrace.gz", "t.json"):
        assert prof.save(tmp_path / name) == (tmp_path / name).stat().st_size
    packed = gzip.decompress((tmp_path / "t.pftrace.gz").read_bytes())
    plain = (tmp_path / "t.json").read_bytes()
    return perfetto_decode.decode(packed), chrome_decode.decode(plain)


def arrows(found: perfetto_decode.Decoded) -> list[tuple[str, str, str, str]]:
    """(category, name) of either end of each flow."""
    starts = {n: s for s in found.slices for n in s.starts}
    ends = {n: s for s in found.slices for n in s.ends}
    assert starts.keys() == ends.keys() == found.flows.keys(), "both ends of a flow exist"
    return [(starts[n].category, starts[n].name, ends[n].category, ends[n].name) for n in starts]


def test_both_formats_hold_the_same(traced, files):
    _, prof, _ = traced
    packed, plain = files
    spans, origin = prof.timeline.spans, min(s.start_ns for s in prof.timeline.spans)
    wanted = Counter((s.name, s.category, s.start_ns, s.end_ns) for s in spans)
    assert Counter((s.name, s.category, s.start_ns, s.end_ns) for s in packed.slices) == wanted
    assert plain.other["origin_ns"] == origin
    moved = ((s.name, s.category, s.start_ns + origin, s.end_ns + origin) for s in plain.slices)
    assert Counter(moved) == wanted
    assert {(s.process, s.thread) for s in plain.slices} == set(packed.tracks.values())
    mine = [(a.source.category, a.source.name, a.sink.category, a.sink.name) for a in plain.arrows]
    assert Counter(mine) == Counter(arrows(packed))
    args = {json.dumps(s.args, sort_keys=True) for s in packed.slices}
    assert {json.dumps(s.args, sort_keys=True) for s in plain.slices} == args


def test_flows_lead_from_calls_to_the_device_from_records_to_waits_and_back_to_the_host(
    traced, files
):
    _, prof, programs = traced
    packed, plain = files
    found = Counter((source, sink) for source, _, sink, _ in arrows(packed))
    commands = [c for p in programs.values() for c in p.commands]
    device = sum(s.category == "device" for s in prof.timeline.spans)
    assert found["launch", "device"] + found["copy", "device"] == device
    waits = [c for c in commands if isinstance(c, Wait)]
    assert found["record", "wait"] == len(waits), "each stream's wait is for a record in its step"
    # what the first steps wait for may have been issued before the trace, and has no span then
    n_syncs, n_all = found["device", "sync"], sum(isinstance(c, Sync) for c in commands)
    assert n_all - n_all // len(programs) <= n_syncs <= n_all and n_syncs >= len(programs)
    assert len({id(a.sink) for a in plain.arrows if a.kind == "wait"}) == n_syncs, "one each"
    assert sum(found.values()) == device + len(waits) + n_syncs
    for times in packed.flows.values():
        (begin, is_end), (end, ends) = sorted(times, key=lambda t: t[1])
        assert begin <= end and not is_end and ends, "flows run forwards"
    logits = [a for a in plain.arrows if a.sink.name == "wait logits"]
    assert {a.kind for a in logits} == {"wait"} and len(logits) == len(programs)
    assert all(a.source.end_ns <= a.sink.end_ns for a in logits)


def test_an_event_leads_from_its_record_to_the_stream_s_wait(traced, files):
    toggles, _, programs = traced
    packed, plain = files
    found = [a for a in plain.arrows if a.kind == "event"]
    waits = [c.event for p in programs.values() for c in p.commands if isinstance(c, Wait)]
    assert Counter(a.sink.args["event"] for a in found) == Counter(waits)
    a_step = 1 if toggles.sync == "event_guarded" else 8 if toggles.streams == "3" else 0
    assert len(found) == 3 * a_step, "of branches: two forked and joined in each of two layers"
    if not found:
        return
    for arrow in found:
        assert arrow.source.args["event"] == arrow.sink.args["event"]
        assert arrow.source.args["on"] != arrow.sink.args["on"], "it orders two streams"
    assert ("record", "record", "wait", "wait") in arrows(packed)


def test_time_in_a_lane_runs_forwards(files):
    for decoded in files:
        lanes = {}
        for s in decoded.slices:
            track = getattr(s, "track", None) or (s.process, s.thread)
            lanes.setdefault(track, []).append(s)
        for own in lanes.values():
            if {s.category for s in own} == {"device"}:
                ordered = sorted(own, key=lambda s: s.start_ns)
                assert all(a.end_ns <= b.start_ns for a, b in pairwise(ordered))


def test_bytes_of_kernels_are_those_of_the_op_table(traced, files):
    _, _, programs = traced
    wanted = {
        (step, index): touched_bytes(command.node)
        for step, program in programs.items()
        for index, command in enumerate(program.commands)
        if isinstance(command, Launch)
    }
    for decoded in files:
        host = [s for s in decoded.slices if s.category == "launch"]
        assert {(s.args["step"], s.args["index"]): s.args["bytes"] for s in host} == wanted
        device = [s for s in decoded.slices if s.args.get("kind") == "launch"]
        for s in device:
            assert s.args["bytes"] == wanted[s.args["step"], s.args["index"]]
        on_device = {(s.args["step"], s.args["index"]) for s in device}
        own = {p: n for p, n in wanted.items() if p in on_device}
        assert sum(s.args["bytes"] for s in device) == sum(own.values()), "each launch once"


def test_the_trace_says_of_what_it_is(traced, files, tiny_model):
    toggles, prof, _ = traced
    packed, plain = files
    for about in (packed.instants[ABOUT], plain.instants[ABOUT]):
        assert about["model.name"].startswith("tiny-llama") and about["model.quant"] == "Q8_0"
        assert {n: about[f"toggles.{n}"] for n in Toggles.names()} == toggles.to_dict()
        assert about["commit"].split()[0] == checkout.commit()["hash"]
        assert about["traced"].startswith("traced, not for throughput")
        assert about["config.threads"] == 2 and "embedded device" in about["device"]
    assert plain.other["toggles"] == toggles.to_dict()
    assert isinstance(prof, Profile) and prof.timeline.spans[0].lane == HOST_LANE
