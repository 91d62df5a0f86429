"""The written Perfetto file, decoded: tracks, slices, times, nesting, args and flows."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from perfetto_decode import decode

from workbench.common.errors import UsageError
from workbench.trace import perfetto
from workbench.trace.lanes import process_and_track
from workbench.trace.spans import HOST_LANE, Recorder, Span


def token(step: int, at: int, n_launches: int = 4) -> list[Span]:
    """The spans of one token: a host split, a copy, a device split, as the engine records them."""
    spans = [
        Span("inp", "write", HOST_LANE, at + 10, at + 20, {"index": 0, "step": step, "split": -1}),
        Span("embd", "launch", HOST_LANE, at + 30, at + 90, {"index": 1, "step": step, "split": 0}),
        Span("split 0", "split", HOST_LANE, at + 30, at + 100, {"split": 0, "backend": "host"}),
    ]
    copy = {"index": 2, "step": step, "split": 1, "stream": 1, "bytes": 4096}
    spans.append(Span("embd", "copy", HOST_LANE, at + 100, at + 110, copy))
    device = [
        Span("embd", "device", "embedded stream 1", at + 111, at + 140, copy | {"kind": "copy"})
    ]
    for i in range(n_launches):
        args = {"index": 3 + i, "step": step, "split": 1, "stream": 0, "op": "mul_mat"}
        start = at + 110 + 10 * i
        spans.append(Span(f"node-{i}", "launch", HOST_LANE, start, start + 10, args))
        start = at + 150 + 50 * i
        kind = args | {"kind": "launch"}
        device.append(Span(f"node-{i}", "device", "embedded stream 0", start, start + 50, kind))
    start_sync, end = spans[-1].end_ns + 10, device[-1].end_ns
    spans += [
        Span("split 1", "split", HOST_LANE, at + 100, at + 110 + 10 * n_launches, {"split": 1}),
        Span("logits", "sync", HOST_LANE, start_sync, end + 5, {"index": 99, "step": step}),
        Span("step", "step", HOST_LANE, at, end + 10, {"step": step, "n_tokens": 1}),
    ]
    return spans + device


def as_set(spans: list[Span]) -> list[Any]:
    key = [(process_and_track(s.lane), *s[:2], *s[3:5]) for s in spans]
    return sorted(key, key=str)


@pytest.mark.parametrize("name", ["t.pftrace", "t.pftrace.gz"])
def test_file_holds_every_span(tmp_path: Path, name: str) -> None:
    spans = token(7, 10**15) + token(8, 10**15 + 10_000, 30)
    size = perfetto.write(spans, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert size == len(data) and [p.name for p in tmp_path.iterdir()] == [name]
    decoded = decode(gzip.decompress(data) if name.endswith("gz") else data)

    assert list(decoded.processes.values()) == ["host", "embedded"]
    assert sorted(decoded.tracks.values()) == [
        ("embedded", "stream 0"), ("embedded", "stream 1"), ("host", "host"),
    ]  # fmt: skip
    found = [
        (decoded.tracks[s.track], s.name, s.category, s.start_ns, s.end_ns) for s in decoded.slices
    ]
    assert sorted(found, key=str) == as_set(spans)
    depths = {s.category: s.depth for s in decoded.slices if decoded.tracks[s.track][0] == "host"}
    assert depths == {"step": 0, "split": 1, "write": 1, "copy": 2, "launch": 2, "sync": 1}
    copied = next(s for s in decoded.slices if s.category == "copy")
    assert copied.args == {"index": 2, "step": 7, "split": 1, "stream": 1, "bytes": 4096}


def test_flows_lead_from_the_issue_to_the_device() -> None:
    decoded = decode(perfetto.encode(token(0, 0) + token(1, 5000)))
    starts = {flow: s for s in decoded.slices for flow in s.starts}
    ends = {flow: s for s in decoded.slices for flow in s.ends}
    assert len(starts) == len(ends) == 10  # per token a copy and four launches
    for flow, issued in starts.items():
        ran = ends[flow]
        assert (issued.name, issued.args["step"]) == (ran.name, ran.args["step"])
        assert issued.category in ("copy", "launch") and ran.category == "device"
        assert issued.start_ns < ran.end_ns
    # the host's own launch ran in the call: no device span, no flow
    assert not any(s.starts for s in decoded.slices if s.args.get("split") == 0)


def test_a_command_recorded_twice_keeps_its_pairs() -> None:
    decoded = decode(perfetto.encode(token(0, 0) + token(0, 5000)))
    starts = {flow: s.start_ns for s in decoded.slices for flow in s.starts}
    ends = {flow: s.start_ns for s in decoded.slices for flow in s.ends}
    assert {flow for flow, at in starts.items() if at < 5000} == {
        flow for flow, at in ends.items() if at < 5000
    }
    assert len(ends) == 10


def test_empty_touching_and_overlapping_spans() -> None:
    spans = [
        Span("step", "step", HOST_LANE, 0, 100, {}),
        Span("a", "launch", HOST_LANE, 10, 50, {}),
        Span("b", "launch", HOST_LANE, 50, 50, {}),  # touches a, has no length
        Span("c", "launch", HOST_LANE, 50, 100, {}),
        Span("d", "read", HOST_LANE, 100, 100, {}),  # at the end of the step, inside it
        Span("x", "device", "cuda stream 0", 10, 40, {}),
        Span("y", "device", "cuda stream 0", 30, 60, {}),  # overlaps x: a track of its own
    ]
    decoded = decode(perfetto.encode(spans))
    slices = {s.name: s for s in decoded.slices}
    assert {n: s.depth for n, s in slices.items() if n in "abcd"} == dict.fromkeys("abcd", 1)
    assert {s.name: (s.start_ns, s.end_ns) for s in decoded.slices} == {
        s.name: (s.start_ns, s.end_ns) for s in spans
    }
    assert slices["x"].track != slices["y"].track
    assert sorted(decoded.tracks.values()) == [("cuda", "stream 0")] * 2 + [("host", "host")]


def test_a_recorders_spans(tmp_path: Path) -> None:
    recorder = Recorder(nvtx=False)
    with recorder.span("step", "step", step=0), recorder.span("split 0", "split", split=0):
        for i in range(500):
            with recorder.span(f"node-{i}", "launch", index=i, step=0, fused=False, us=0.5):
                pass
    perfetto.write(recorder.spans, tmp_path / "t.pftrace")
    decoded = decode((tmp_path / "t.pftrace").read_bytes())
    assert len(decoded.slices) == len(recorder.spans) == 502
    assert {s.depth for s in decoded.slices if s.category == "launch"} == {2}
    assert decoded.slices[0].args == {"index": 0, "step": 0, "fused": False, "us": 0.5}
    # interned names: a span costs well under 100 bytes
    assert (tmp_path / "t.pftrace").stat().st_size < 100 * 502


def test_nothing_recorded(tmp_path: Path) -> None:
    assert perfetto.write([], tmp_path / "t.pftrace") > 0
    assert decode((tmp_path / "t.pftrace").read_bytes()).slices == []


@pytest.mark.parametrize("name", ["t.pftrace", "t.pftrace.gz"])
def test_a_trace_goes_through_a_link_and_never_over_a_device(tmp_path: Path, name: str):
    (tmp_path / name).symlink_to("real")
    size = perfetto.write(token(0, 0), tmp_path / name)
    assert (tmp_path / name).is_symlink() and (tmp_path / "real").stat().st_size == size
    full = tmp_path / f"full-{name}"
    full.symlink_to("/dev/full")
    with pytest.raises(UsageError, match="no space is left"):
        perfetto.write(token(0, 0), full)
    assert Path("/dev/full").is_char_device() and full.is_symlink()
    assert len(list(tmp_path.iterdir())) == 3
