"""HTA (HolisticTraceAnalysis) runs on our Chrome JSON, and finds the same figures as we do."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

import workbench as wb
from workbench.trace import analysis
from workbench.trace.profile import profile

PAGE = Path(wb.__file__).parent / "trace" / "README.md"
ARMS = {"control": wb.Toggles(), "test": wb.Toggles(sync="packed")}
pytestmark = pytest.mark.long


class Analysed(NamedTuple):
    """A trace as we see it, and HTA's analysis of the file. folder: where the file is."""

    device: pd.DataFrame
    hta: Any
    folder: Path


def traced(loaded: Any, toggles: wb.Toggles, folder: Path, n_tokens: int) -> pd.DataFrame:
    """The frame of a trace of n_tokens tokens behind a prompt, which is written to the folder."""
    with loaded.variant(toggles) as engine:
        engine.prefill([1, 2, 3])
        with profile(engine, nvtx=False) as prof:
            for token in range(n_tokens):
                engine.step([token])
    prof.save(folder / "t.json.gz")
    return prof.to_frame()


@pytest.fixture(scope="module")
def analysed(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Analysed]:
    from hta.trace_analysis import TraceAnalysis

    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HTA_DISABLE_NS_ROUNDING", "1")  # else a kernel of 0.4 us has -1 us
        for name, toggles in ARMS.items():
            folder = tmp_path_factory.mktemp(name)
            frame = traced(loaded, toggles, folder, 4)
            read = TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
            found[name] = Analysed(frame[frame["category"] == "device"], read, folder)
        yield found


def by_kind(device: pd.DataFrame, kind: str) -> pd.DataFrame:
    return device[device["kind"] == kind]


@pytest.mark.parametrize("name", ARMS)
def test_times_are_those_of_our_table(analysed: dict[str, Analysed], name: str) -> None:
    device, hta, _ = analysed[name]
    ends = device["start_us"] + device["dur_us"]
    (row,) = hta.get_temporal_breakdown(visualize=False).to_dict("records")
    assert row["kernel_time(us)"] == pytest.approx(ends.max() - device["start_us"].min(), abs=0.01)
    busy = analysis.busy_us(by_kind(device, "launch"))
    assert row["compute_time(us)"] == pytest.approx(busy, rel=1e-4)
    idle = row["kernel_time(us)"] - analysis.busy_us(device)
    assert row["idle_time(us)"] == pytest.approx(idle, rel=1e-4)

    _, kernels = hta.get_gpu_kernel_breakdown(
        visualize=False, include_memory_kernels=True, duration_ratio=1.0, num_kernels=100
    )
    sums = kernels.set_index("name")["sum (us)"].to_dict()
    wanted = by_kind(device, "launch").groupby("op")["dur_us"].sum().to_dict()
    wanted["Memcpy"] = by_kind(device, "copy")["dur_us"].sum()
    assert sums == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("name", ARMS)
def test_launches_and_waits_are_found_by_correlation(
    analysed: dict[str, Analysed], name: str
) -> None:
    device, hta, _ = analysed[name]
    launches = hta.get_cuda_kernel_launch_stats(visualize=False)[0]
    assert len(launches) == len(device) and launches["correlation"].is_unique
    assert launches["gpu_duration"].sum() == pytest.approx(device["dur_us"].sum(), abs=0.1)
    idle, _ = hta.get_idle_time_breakdown(visualize=False)
    by_stream = idle.groupby("stream")["idle_time"].sum()
    assert len(by_stream) == device["lane"].nunique()
    assert {"host_wait", "kernel_wait"} <= set(idle["idle_category"])
    for stream, (_, lane) in zip(by_stream.index, device.groupby("lane"), strict=True):
        gaps = lane["start_us"].iloc[1:].to_numpy() - (lane["start_us"] + lane["dur_us"])[:-1]
        assert by_stream[stream] == pytest.approx(gaps.sum(), abs=0.1)


def test_two_of_our_traces_have_a_difference(analysed: dict[str, Analysed]) -> None:
    from hta.trace_diff import LabeledTrace, TraceDiff

    control, test = (
        LabeledTrace(label=name, trace_dir=str(arm.folder)) for name, arm in analysed.items()
    )
    assert len(control.iterations()) == len(test.iterations()) == 4
    changed = TraceDiff.ops_diff(control, test)
    assert changed["added"] == ["inputs"], "the one copy of packed inputs"
    assert changed["increased"] == []
    assert {"cudaEventSynchronize", "cudaMemcpyAsync", "Memcpy"} <= set(changed["decreased"])
    assert {"mul_mat", "attention", "Qcur-0", "cudaLaunchKernel"} <= set(changed["unchanged"])


def test_a_trace_of_plans_has_fewer_calls_than_events(loaded: Any, tmp_path: Path) -> None:
    from hta.trace_analysis import TraceAnalysis

    plans = wb.Toggles(
        graph_reuse="set_rows", sync="packed_implicit", plans="ours", plan_scope="step"
    )
    frame = traced(loaded, plans, tmp_path, 6)
    assert len(frame) > 127, "what does not fit the smallest integers"
    read = TraceAnalysis(trace_dir=str(tmp_path), include_last_profiler_step=True)
    (row,) = read.get_temporal_breakdown(visualize=False).to_dict("records")
    device = frame[frame["category"] == "device"]
    ends = device["start_us"] + device["dur_us"]
    assert row["kernel_time(us)"] == pytest.approx(ends.max() - device["start_us"].min(), abs=1)


def test_the_page_says_which_hta_ran() -> None:
    version = importlib.metadata.version("HolisticTraceAnalysis")
    assert f"HolisticTraceAnalysis {version}" in PAGE.read_text()
