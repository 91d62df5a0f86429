"""Traces come in: what was saved is read back without loss, files of other tools become the same
table, and a file that is cut, foreign or of another version is refused in one line."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples, long
from tests.trace.test_trace_files import STREAMS, step
from workbench.common.errors import UsageError
from workbench.trace import chrome, perfetto
from workbench.trace.imports import foreign, kineto
from workbench.trace.imports.files import is_trace
from workbench.trace.imports.foreign import Call, Range, Work, short_name
from workbench.trace.lanes import nesting_order
from workbench.trace.profile import COLUMNS, profile
from workbench.trace.spans import HOST_LANE, Recorded, Slowdown, Span, Window

FILES = Path(__file__).with_name("files")
FORMATS = ("t.pftrace", "t.pftrace.gz", "t.json", "t.json.gz")


def told(span: Span) -> Span:
    """A span as a file has it: an arg that is None is no arg."""
    return span._replace(args={k: v for k, v in span.args.items() if v is not None})


def same(loaded: wb.Profile, made: wb.Profile) -> None:
    """Asserts that nothing was lost."""
    pd.testing.assert_frame_equal(loaded.to_frame(), made.to_frame())
    assert loaded.to_frame().attrs == made.to_frame().attrs
    spans = sorted(made.timeline.spans, key=nesting_order)
    assert loaded.timeline.spans == [told(s) for s in spans]
    for name in ("note", "collector", "fallback", "windows", "complete", "missing", "slowdown"):
        assert getattr(loaded, name) == getattr(made, name), name
    assert made.about.items() <= loaded.about.items()


# what was saved -----------------------------------------------------------------------------------

LANES = st.sampled_from([HOST_LANE, *STREAMS, "cuda 1 stream 2", "embedded stream 12"])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
ARGS = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 5), "step": st.integers(0, 2), "split": st.integers(-1, 2),
        "part": st.integers(0, 3), "bytes": st.integers(0, 2**40), "op": st.text(max_size=5),
        "kind": st.sampled_from(["copy", "launch", "memset", "replay"]), "kernel": st.text(),
        "on": st.sampled_from([None, *STREAMS, "host stream 0"]), "event": st.sampled_from("ef"),
        "stream": st.integers(0, 9), "correlation": st.integers(1, 9), "device": st.integers(0, 3),
        "External id": st.integers(0, 9), "n_tokens": st.integers(1, 9), "more": VALUES,
    },
)  # fmt: skip
KINDS = st.sampled_from([
    "step", "build", "split", "write", "copy", "launch", "replay", "record", "wait", "sync",
    "read", "call", "device", "op", "range", "python",
])  # fmt: skip
DAY_NS = 86_400 * 10**9


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, 30)) + draw(st.sampled_from([0, DAY_NS]))
    lane = draw(LANES)
    kind = draw(KINDS)
    args = draw(ARGS)
    took = draw(st.integers(0, 10))
    return Span(draw(st.text(max_size=6)), kind, lane, start, start + took, args)


WINDOWS = st.lists(
    st.builds(Window, st.tuples(st.integers(0, 3)), st.text(max_size=4), st.integers(0, 99),
              st.integers(0, 99), st.integers(0, 3)),
    max_size=2,
)  # fmt: skip


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(spans(), max_size=12), st.sampled_from(["events", "cupti"]), WINDOWS,
    st.none() | st.just(Slowdown(1, 2.5, 3, 1.25, 4)), st.sampled_from(FORMATS),
)  # fmt: skip
def test_what_was_saved_comes_back_without_loss(
    tmp_path: Path, made: list[Span], collector: str, windows: list[Window], slowdown: Any, name
) -> None:
    about = {"model": {"name": "m", "n_layer": 2, "file": None}, "toggles": {"sync": "packed"}}
    recorded = Recorded(made, collector, "why", tuple(windows), slowdown, "the note")
    prof = wb.Profile(recorded, about=about)
    prof.save(tmp_path / name)
    loaded = wb.Profile.load(tmp_path / name)
    same(loaded, prof)
    loaded.save(tmp_path / f"again-{name}")
    same(wb.Profile.load(tmp_path / f"again-{name}"), prof)


def test_an_extension_of_no_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"t\.foo has an unknown extension; the file can be \.pf"):
        wb.Profile(Recorded([], "events")).save(tmp_path / "t.foo")
    with pytest.raises(UsageError, match=r"t has no extension; the file can be \.pftrace\.gz"):
        wb.Profile(Recorded([], "events")).save(tmp_path / "t")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FORMATS[1:3])
def test_a_run_comes_back_with_its_tables(engine: Any, tmp_path: Path, name: str) -> None:
    with profile(engine, window=(1, 3), nvtx=False) as prof:
        for token in range(5):
            engine.step([token])
    prof.save(tmp_path / name)
    loaded = wb.Profile.load(str(tmp_path / name))
    same(loaded, prof)
    assert loaded.about["commit"] and loaded.slowdown is not None
    for table in ("summary", "kernels", "phases", "gaps", "critical_path"):
        pd.testing.assert_frame_equal(getattr(loaded, table)(), getattr(prof, table)())


def test_a_file_without_a_recording_says_what_it_can(tmp_path: Path) -> None:
    """As a cell's trace of several engines is saved."""
    for name in FORMATS[1:3]:
        about = {"workbench": "0.1.0", "traced": "two engines", "arm": {"device": "embedded"}}
        perfetto.write(step(0, 0), tmp_path / name, about)
        loaded = wb.Profile.load(tmp_path / name)
        assert (loaded.collector, loaded.note) == ("unknown", "two engines")
        assert loaded.about["arm"] == {"device": "embedded"} and loaded.complete is None
        assert loaded.timeline.spans == sorted(step(0, 0), key=nesting_order)


def saved(path: Path) -> wb.Profile:
    prof = wb.Profile(Recorded([*step(0, 0), *step(1, 120)], "events", source="a note"))
    prof.save(path)
    return prof


# what is cut, foreign, or of another version ------------------------------------------------------


def refused(path: Path, words: str, **how: Any) -> None:
    with pytest.raises(UsageError, match=words) as error:
        wb.Profile.load(path, **how)
    assert "\n" not in str(error.value) and path.name in str(error.value)


CUT = [*FORMATS, "kineto-graph.json.gz", "nsys-torch.sqlite", "nsys-torch.sqlite.gz"]


@pytest.mark.parametrize("name", [long(name) if name == "t.pftrace" else name for name in CUT])
def test_a_cut_file_is_refused_wherever_it_was_cut(tmp_path: Path, name: str) -> None:
    """Cut at many places; Perfetto's format, whose every packet could be the last, at all."""
    path = tmp_path / name
    if name in FORMATS:
        saved(path)
    elif name.endswith("sqlite"):
        path.write_bytes(gzip.decompress((FILES / f"{name}.gz").read_bytes()))
    else:
        path.write_bytes((FILES / name).read_bytes())
    data = path.read_bytes()
    wb.Profile.load(path)
    every = range(len(data)) if name == "t.pftrace" else range(0, len(data), len(data) // 40)
    for n in every:
        path.write_bytes(data[:n])
        refused(path, "is cut|is empty|no whole JSON|no trace that this program can read")


@pytest.mark.long
def test_a_cut_perfetto_trace_is_called_cut(tmp_path: Path) -> None:
    """Not unknown, wherever a packet was cut; and another text with that name is foreign."""
    path = tmp_path / "t.pftrace"
    saved(path)
    data = path.read_bytes()
    said = Counter[bool]()
    for n in range(1, len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(UsageError) as error:
            wb.Profile.load(path)
        said["is cut or damaged: " in str(error.value)] += 1
    assert said[False] <= 5, "only where the trace ends with a packet before what it is about"
    path.write_bytes(data[: len(data) - 1])
    refused(path, f"no whole packet after byte .* of {len(data) - 1}; copy it again, whole")
    path.write_bytes(gzip.compress(data[: len(data) // 2]))
    refused(path, "is cut or damaged: it has no whole packet after")
    path.rename(tmp_path / "t.bin")
    refused(tmp_path / "t.bin", "is cut or damaged: it has no whole packet after")


def test_what_no_reader_knows_is_refused_in_a_line(tmp_path: Path) -> None:
    def file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    refused(tmp_path / "no.json", "cannot be read: No such file")
    refused(tmp_path, "cannot be read: Is a directory")
    refused(file("a.txt", "not a trace"), "no trace that this program can read")
    refused(file("a.json", '{"runs": []}'), "JSON without a list `traceEvents`")
    refused(file("b.json", "[1, 2]"), "JSON without a list `traceEvents`")
    foreign = '{"traceEvents": [{"ph": "X", "name": "a", "cat": "blink", "ts": 0, "dur": 1}]}'
    refused(file("c.json", foreign), "no event has a category of Kineto")
    later = '{"schemaVersion": 2, "traceEvents": []}'
    refused(file("d.json", later), "schemaVersion 2, and this program reads 1")
    odd = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": "x", "dur": 1}
    refused(file("e.json", json.dumps({"traceEvents": [odd]})), "event 0 .'k'. is not as Kineto")
    of_a_list = odd | {"cat": "cpu_op", "ts": 1, "tid": [7]}
    text = json.dumps({"traceEvents": [of_a_list]})
    refused(file("g.json", text), "event 0 .'k'. is not as Kineto")
    refused(file("t.nsys-rep", "QDREP"), "nsys export --type sqlite")
    other = {"otherData": {"workbench": "1", "origin_ns": 0}, "traceEvents": [{"ph": "X"}]}
    refused(file("f.json", json.dumps(other)), "not as this program writes")


@pytest.mark.parametrize("version", [0, 2, 999, "1", None])
def test_an_own_trace_of_another_version_is_refused(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "t.json"
    saved(path)
    assert len(wb.Profile.load(path).to_frame())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schemaVersion": version}))
    refused(path, f"schemaVersion {version!r}, and this program reads 1")


def changed(tmp_path: Path, *commands: str, name: str = "nsys-torch") -> Path:
    """A real export with some commands of SQL applied."""
    path = tmp_path / "changed.sqlite"
    path.write_bytes(gzip.decompress((FILES / f"{name}.sqlite.gz").read_bytes()))
    with closing(sqlite3.connect(path)) as database:
        for command in commands:
            database.execute(command)
        database.commit()
    return path


@pytest.mark.parametrize("odd", [
    "CUPTI_ACTIVITY_KIND_RUNTIME SET nameId = -1", "CUPTI_ACTIVITY_KIND_RUNTIME SET start = 'x'",
    "CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 'x'", "CUPTI_ACTIVITY_KIND_KERNEL SET end = 'x'",
])  # fmt: skip
def test_an_export_with_values_that_nsys_does_not_write_is_one_line(
    tmp_path: Path, odd: str
) -> None:
    refused(changed(tmp_path, f"UPDATE {odd}"), "is cut or damaged .a value is not nsys's: ")


def test_any_file_that_a_profile_is_read_from_is_loaded() -> None:
    for name in ("nsys-torch.sqlite.gz", "kineto-cpu.json.gz", "ours-plan.pftrace.gz"):
        assert isinstance(wb.load(FILES / name), wb.Profile)


def test_an_export_of_another_schema_says_its_version(tmp_path: Path) -> None:
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    renamed = f"ALTER TABLE {kernels} RENAME COLUMN shortName TO newName"
    refused(changed(tmp_path, renamed), f"{kernels} has no column shortName .nsys 2025.3.2.0, sche")
    refused(changed(tmp_path, f"DROP TABLE {kernels}", "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY"),
            "no work of a GPU .nsys 2025")  # fmt: skip
    refused(changed(tmp_path, "DROP TABLE StringIds"), "that nsys did not write")
    # another major version is read where the columns are there, and the note says so
    for major in (2, 4):
        values = [
            f"UPDATE META_DATA_EXPORT SET value = '{value}' WHERE name = 'EXPORT_SCHEMA_{name}'"
            for name, value in (("VERSION", f"{major}.1.0"), ("VERSION_MAJOR", major))
        ]
        other = changed(tmp_path, *values)
        note = wb.Profile.load(other).note
        assert f"schema {major}.1.0, read as schema 3;" in note
        refused(changed(tmp_path, *values, renamed), f"schema {major}.*reads exports of schema 3")
    for name, value in (("VERSION", "abc"), ("VERSION_MAJOR", "abc"), ("VERSION", "")):
        name = f"EXPORT_SCHEMA_{name}"
        odd = f"UPDATE META_DATA_EXPORT SET value = '{value}' WHERE name = '{name}'"
        refused(changed(tmp_path, odd), f"{name} in table .* is '{value}', which is no version")
    assert "read as" not in wb.Profile.load(FILES / "nsys-torch.sqlite.gz").note
    # an older schema has no such tables and columns; all else is read
    older = changed(
        tmp_path, "DROP TABLE META_DATA_EXPORT", "DROP TABLE NVTX_EVENTS",
        "DROP TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        f"ALTER TABLE {kernels} DROP COLUMN globalPid",
    )  # fmt: skip
    whole, read = (wb.Profile.load(p).to_frame() for p in (FILES / "nsys-torch.sqlite.gz", older))
    assert "of an unknown version, read as schema 3" in wb.Profile.load(older).note
    for kind in ("launch", "sync"):
        count = (whole["category"] == kind).sum()
        assert count > 0 and (read["category"] == kind).sum() == count
    device = [f[f["category"] == "device"].reset_index(drop=True) for f in (whole, read)]
    pd.testing.assert_series_equal(device[0]["dur_us"], device[1]["dur_us"])
    assert device[1]["index"].notna().all(), "calls are still found by their correlation"


# real files of other tools ------------------------------------------------------------------------


def kernels_of(name: str) -> Counter[tuple[str, int]]:
    """Name and ns of each kernel, read without the package."""
    data = gzip.decompress((FILES / name).read_bytes())
    if ".json" in name:
        events = json.loads(data)["traceEvents"]
        return Counter(
            (e["name"], round(1000 * e["dur"])) for e in events if e.get("cat") == "kernel"
        )
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(data)
        return Counter(
            database.execute(
                "SELECT s.value, k.end - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k "
                "JOIN StringIds s ON s.id = k.demangledName"
            ).fetchall()
        )


REAL = {  # file -> steps, and the name that makes a step where the file does not say
    "nsys-llama-node.sqlite.gz": (5, "cudaGraphLaunch"),
    "nsys-llama-graph.sqlite.gz": (5, "cudaGraphLaunch"),
    "nsys-ours-node.sqlite.gz": (12, None),
    "nsys-torch.sqlite.gz": (3, None),
    "kineto-eager.json.gz": (2, None),
    "kineto-graph.json.gz": (4, None),
    "kineto-cpu.json.gz": (3, None),
}
OWN = ("ours-eager.pftrace.gz", "ours-plan.pftrace.gz")  # steps cut from files that profile wrote


@pytest.mark.parametrize("name", REAL)
def test_a_real_file_becomes_the_same_table(name: str) -> None:
    n_steps, pattern = REAL[name]
    prof = wb.Profile.load(FILES / name, step=pattern)
    table = prof.to_frame()
    assert {c: str(t) for c, t in table.dtypes.items()} == COLUMNS
    device = table[table["category"] == "device"]
    launches = device[device["kind"] == "launch"]
    ns = (1000 * launches["dur_us"]).round().astype(int)
    assert Counter(zip(launches["kernel"], ns, strict=True)) == kernels_of(name)
    assert (table["dur_us"] >= 0).all() and table["start_us"].min() == 0
    assert (table["category"] == "step").sum() == n_steps
    assert f"{n_steps} steps" in prof.note and name in prof.note
    assert prof.collector == name.split("-")[0]
    host = table[table["lane"] == HOST_LANE]
    calls = host[host["index"].notna()].set_index("index")
    assert calls.index.is_unique
    started = device[device["index"].notna()]
    assert len(started) == len(device), "each work has its call"
    begun = started["index"].map(calls["start_us"])
    assert (started["start_us"] >= begun).all(), "work begins after its call"
    kinds = dict(zip(started["kind"], started["index"].map(calls["category"]), strict=True))
    assert set(kinds) <= {"launch", "copy", "memset", "replay"}
    assert started["step"].notna().sum() >= 2 * n_steps or name == "kineto-cpu.json.gz"


@pytest.mark.parametrize("name", [long(name) if "-node" in name else name for name in REAL])
def test_tables_of_a_real_file_fit_its_steps_and_it_can_be_saved(tmp_path: Path, name: str) -> None:
    prof = wb.Profile.load(FILES / name, step=REAL[name][1])
    steps = prof.summary()
    assert (steps["host_us"] + steps["wait_us"] + steps["build_us"] <= steps["step_us"]).all()
    table = prof.to_frame()
    launches = table[(table["category"] == "device") & (table["kind"] != "copy")]
    if len(launches):
        inside = launches[launches["kind"].isin(["launch", "replay"])]
        assert prof.kernels()["calls"].sum() == len(inside)
        assert (prof.gaps()["traced_us"] > 0).all()
        shares = prof.phases()["traced_share"].sum()
        assert shares == pytest.approx(1, abs=0.01)
    for format in FORMATS[1:3]:
        prof.save(tmp_path / format)
        same(wb.Profile.load(tmp_path / format), prof)
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    host = [e for e in events if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset")]
    told = [e["args"]["correlation"] for e in host if "correlation" in e.get("args", ())]
    calls = Counter(told)
    assert set(calls.values()) <= {1}, "a call is one event, or its work would count twice"
    assert len(calls) == table[table["category"] == "device"]["index"].nunique()


def test_threads_processes_and_devices_have_lanes_of_their_own() -> None:
    """And a call inside another call is the other's own."""
    main, other, child = (1, 10), (1, 11), (2, 20)
    trace = foreign.Trace(
        works=[
            Work("launch", "k<1>()", 20, 30, 1, 0, 7, 1),
            Work("launch", "k<2>()", 30, 40, 1, 1, 7, 2),
            Work("copy", "Memcpy HtoD", 25, 35, 2, 0, 7, 1, nbytes=8),
        ],
        calls=[
            Call("cudaLaunchKernel", 10, 15, main, 1), Call("cuLaunchKernel", 11, 14, main, 1),
            Call("cudaLaunchKernel", 16, 18, main, 2), Call("cudaEventRecord", 19, 20, main, 3),
            Call("cudaStreamWaitEvent", 21, 22, main, 4), Call("cudaMemcpyAsync", 10, 12, child, 1),
            Call("cudaMalloc", 5, 9, other, 5),
        ],
        ranges=[Range("op", "outer", 0, 18, main), Range("op", "inner", 15, 18, main)],
        event_of={(1, 3): "9", (1, 4): "9"}, stream_of={(1, 3): (0, 7), (1, 4): (1, 7)},
    )  # fmt: skip
    made = wb.Profile(foreign.recorded(Path("t"), "nsys", [], trace, None)).to_frame()
    device = made[made["category"] == "device"].set_index("lane")
    assert set(device.index) == {
        "cuda 0.1 stream 7", "cuda 1.1 stream 7", "cuda 0.2 stream 7",
    }  # fmt: skip
    assert device.loc["cuda 1.1 stream 7", "op"] == "inner"
    assert device.loc["cuda 0.1 stream 7", "op"] == "outer"
    assert device.loc["cuda 0.1 stream 7", "kernel"] == "k<1>()"
    assert device.loc["cuda 0.2 stream 7", "bytes"] == 8
    assert device["index"].is_unique, "a correlation is of its process"
    host = made[made["category"] != "device"].set_index("name")
    assert host.loc["cuLaunchKernel", "category"] == "call"
    assert pd.isna(host.loc["cuLaunchKernel", "index"])
    assert host.loc["cudaMalloc", "lane"] == "host thread 1.11"
    assert host.loc["cudaMemcpyAsync", "lane"] == "host thread 2.20"
    waits = host.loc[["cudaEventRecord", "cudaStreamWaitEvent"], ["category", "on"]]
    assert waits.to_numpy().tolist() == [
        ["record", "cuda 0.1 stream 7"], ["wait", "cuda 1.1 stream 7"],
    ]  # fmt: skip


def test_kineto_s_synchronizations_say_for_which_event(tmp_path: Path) -> None:
    """As torch.profiler writes with `enable_cuda_sync_events`; and vLLM's steps say their size."""

    def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        here = {"pid": 0, "tid": 7} if category in ("kernel", "cuda_sync") else {"pid": 5, "tid": 5}
        return here | {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        event("user_annotation", "execute_context_1(5)_generation_2(2)", 0, 50),
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
        event("cuda_runtime", "cudaEventRecord", 2, 1, correlation=2),
        event("cuda_runtime", "cudaStreamWaitEvent", 3, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 4, 1, correlation=4),
        event("cuda_runtime", "cudaDeviceSynchronize", 5, 40, correlation=5),
        event("kernel", "a", 3, 20, device=0, stream=7, correlation=1),
        event("kernel", "b", 24, 16, device=0, stream=8, correlation=4),
        event("cuda_sync", "Stream Wait Event", 3, 1, device=0, stream=8, correlation=3,
              wait_on_stream=7, wait_on_cuda_event_record_corr_id=2, wait_on_cuda_event_id=4),
    ]  # fmt: skip
    for e in events[6:8]:
        e["tid"] = e["args"]["stream"]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    prof = wb.Profile.load(path)
    assert prof.summary()["n_tokens"].tolist() == [7]
    assert {s.args.get("event") for s in prof.timeline.spans if s.category == "wait"} == {"4"}
    found = prof.critical_path()
    assert found[["what", "bound", "dur_us"]].to_numpy().tolist()[-5:] == [
        ["a", "kernel", 20], ["b", "launch", 1], ["b", "kernel", 16],
        ["cudaDeviceSynchronize", "wait", 5], ["python", "host", 5],
    ]  # fmt: skip


def test_a_graph_is_its_kernels_or_one_span_as_it_was_traced() -> None:
    whole = wb.Profile.load(FILES / "nsys-llama-graph.sqlite.gz", step="cudaGraphLaunch")
    nodes = wb.Profile.load(FILES / "nsys-llama-node.sqlite.gz", step="cudaGraphLaunch")
    device = whole.to_frame().query("category == 'device' and kind == 'replay'")
    assert len(device) == 5 and set(device["name"]) == {"graph 1"}
    parts = nodes.to_frame().query("category == 'device' and part.notna()")
    assert parts.groupby("step").size().tolist() == [310] * 5
    assert parts["part"].max() == 309, "as many as the tokens before the graph launched one by one"
    by_op = whole.kernels().set_index("op")
    assert by_op.loc["replay", "calls"] == 5
    assert nodes.kernels(by="kernel")["calls"].sum() > 5 * 310


def test_a_range_inside_a_step_is_no_step_and_late_work_is_of_its_calls_step() -> None:
    main = (1, 10)
    trace = foreign.Trace(
        works=[Work("launch", "k", 25, 30, 1, 0, 7, 1), Work("launch", "k", 35, 38, 1, 0, 7, 2)],
        calls=[Call("cudaLaunchKernel", 15, 16, main, 1),
               Call("cudaLaunchKernel", 31, 32, main, 2)],
        ranges=[Range("range", "step", begin, end, main)
                for begin, end in ((0, 20), (5, 10), (20, 40))],
        event_of={}, stream_of={},
    )  # fmt: skip
    made = wb.Profile(foreign.recorded(Path("t"), "nsys", [], trace, "step")).to_frame()
    steps = made[made["category"] == "step"]
    assert steps[["start_us", "dur_us"]].to_numpy().tolist() == [[0, 0.02], [0.02, 0.02]]
    assert made[made["category"] == "device"]["step"].tolist() == steps["step"].tolist()


def test_ranges_of_nvtx_are_steps_phases_and_waits() -> None:
    table = wb.Profile.load(FILES / "nsys-ours-node.sqlite.gz").to_frame()
    waits = table[(table["name"] == "wait logits") & (table["category"] == "sync")]
    assert len(waits) == 12 and waits["index"].notna().all()
    assert {"batch", "graph", "lower"} <= set(table[table["category"] == "build"]["name"])
    assert (table["category"] == "split").sum() == 24
    records = table[table["category"] == "record"]
    assert records["on"].notna().all(), "events say on which stream they were recorded"


def test_an_operator_is_the_op_of_its_kernels() -> None:
    table = wb.Profile.load(FILES / "kineto-eager.json.gz").kernels()
    by_op = table.set_index("op")
    assert by_op.loc["aten::mm", "calls"] > 0 and by_op.loc["aten::bmm", "calls"] > 0
    assert not [op for op in by_op.index if not op.startswith("aten::")]


def test_steps_are_what_the_caller_names(tmp_path: Path) -> None:
    path = FILES / "nsys-llama-node.sqlite.gz"
    assert (wb.Profile.load(path).to_frame()["category"] != "step").all()
    table = wb.Profile.load(path, step="cuda(Graph)Launch").to_frame()
    steps = table[table["category"] == "step"]
    begins = table[table["category"] == "replay"]["start_us"]
    assert steps["start_us"].tolist() == begins.tolist()
    ends = (steps["start_us"] + steps["dur_us"]).iloc[:-1]
    assert ends.tolist() == pytest.approx(begins.iloc[1:].tolist()), "each lasts to the next"
    refused(path, "no range or call whose whole name matches step='decode'; the most frequent are "
                  "cudaLaunchKernelExC .556.", step="decode")  # fmt: skip
    with pytest.raises(UsageError, match="is no regular expression: missing"):
        wb.Profile.load(path, step="(")
    own = tmp_path / "t.json"
    saved(own)
    assert len(wb.Profile.load(own, step="decode").summary()) == 2, "it says its steps itself"


def test_short_names() -> None:
    assert short_name("void at::native::gemv<float, 4>(int, char*)") == "at::native::gemv"
    assert short_name("void (anonymous namespace)::softmax<a<b>>(x)") == "softmax"
    assert short_name("mul_mat_vec_q") == "mul_mat_vec_q"


# our own Chrome JSON, by Kineto's conventions -----------------------------------------------------


def kineto_view(path: Path, made: list[Span]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The spans' JSON, read as torch.profiler's."""
    content = json.loads(chrome.encode(made))
    del content["otherData"]
    recorded, _ = kineto.read(path, content, content["traceEvents"], None)
    return wb.Profile(recorded).to_frame(), content


@pytest.mark.parametrize("toggles", [{}, {"plans": "ours"}, {"streams": "3"}])
def test_our_json_reads_as_kineto_s(loaded: Any, tmp_path: Path, toggles: dict[str, str]) -> None:
    with loaded.variant(wb.Toggles(**toggles)) as engine:
        engine.prefill([1, 2, 3])
        with profile(engine, nvtx=False) as prof:
            for token in range(3):
                engine.step([token])
    made = prof.to_frame()
    table, content = kineto_view(tmp_path / "t.json", prof.timeline.spans)
    own, read = (f[f["category"] == "device"].reset_index(drop=True) for f in (made, table))
    for column in ("start_us", "dur_us", "step"):
        pd.testing.assert_series_equal(own[column], read[column])
    host = read["index"].map(table[table["index"].notna() & (table["category"] != "device")]
                             .set_index("index")["start_us"])  # fmt: skip
    called = made[(made["lane"] == HOST_LANE) & made["category"].isin(["launch", "copy", "replay"])]
    begins = own.merge(called, on=["step", "index"])["start_us_y"]
    assert host.tolist() == pytest.approx(begins.tolist()), "correlation leads to the same call"
    assert content["schemaVersion"] == 1 and content["deviceProperties"][0]["name"] == "embedded"
    assert content["baseTimeNanoseconds"] == made.attrs["origin_ns"]
    kinds = {e["cat"] for e in content["traceEvents"] if e["ph"] == "X"}
    assert {"user_annotation", "cpu_op", "cuda_runtime", "kernel", "gpu_memcpy"} == kinds
    work = [e for e in content["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    calls = {e["args"]["correlation"]: e for e in content["traceEvents"]
             if e.get("cat") == "cuda_runtime" and "correlation" in e["args"]}  # fmt: skip
    assert all(e["args"]["correlation"] in calls for e in work)
    assert all(e["args"]["stream"] > 0 and e["args"]["device"] == 0 for e in work)
    on_host = [e for e in content["traceEvents"] if e.get("cat") in ("cpu_op", "cuda_runtime")]
    assert on_host and not any("stream" in e["args"] for e in on_host)
    arrows = {e["name"] for e in content["traceEvents"] if e["ph"] in "sf"}
    assert "ac2g" in arrows and "issue" not in arrows


def test_calls_of_the_driver_are_kineto_s_too() -> None:
    """As CUPTI records them inside a command: only the command's own event has the correlation."""
    launch = {"index": 3, "step": 0, "on": STREAMS[0], "op": "mul_mat"}
    call = {"step": 0, "command": 3}
    made = [
        Span("q", "launch", HOST_LANE, 0, 9, launch),
        Span("cuLaunchKernelEx", "call", HOST_LANE, 1, 5, call | {"api": "driver"}),
        Span("cudaGetDevice", "call", HOST_LANE, 5, 6, call | {"api": "runtime"}),
        Span("stream synchronize", "call", HOST_LANE, 6, 8, call | {"api": "sync"}),
        Span("q", "device", STREAMS[0], 10, 20, launch | {"kind": "launch", "kernel": "mmvq"}),
        Span("x", "launch", HOST_LANE, 20, 30, {"index": 4, "step": 0, "on": "host stream 0"}),
    ]
    events = [e for e in json.loads(chrome.encode(made))["traceEvents"] if e["ph"] == "X"]
    assert [(e["cat"], e["name"], e["args"].get("correlation")) for e in events] == [
        ("cpu_op", "q", None), ("cuda_runtime", "cudaLaunchKernel", chrome.FIRST_CORRELATION),
        ("cuda_driver", "cuLaunchKernelEx", None), ("cuda_runtime", "cudaGetDevice", None),
        ("cuda_sync", "stream synchronize", None), ("cpu_op", "x", None),
        ("kernel", "mmvq", chrome.FIRST_CORRELATION),
    ]  # fmt: skip


def test_what_looks_like_a_trace(tmp_path: Path) -> None:
    assert all(is_trace(FILES / name) for name in (*REAL, *OWN))
    saved(tmp_path / "t.pftrace.gz")
    saved(tmp_path / "t.json")
    (tmp_path / "runs.json").write_text('[{"build_commit": "0c1e570", "n_prompt": 512}]')
    with closing(sqlite3.connect(tmp_path / "bench.sqlite")) as database:
        database.execute("CREATE TABLE test (build_commit TEXT)")
    assert is_trace(tmp_path / "t.pftrace.gz") and is_trace(tmp_path / "t.json")
    for name in ("runs.json", "bench.sqlite", "missing", "."):
        assert not is_trace(tmp_path / name), name
