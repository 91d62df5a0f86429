"""The measuring step `counters` without a GPU: what ncu is asked, what becomes of what it writes,
and the launches of the child."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.measure import __main__ as measure
from data.measure import counters, nsight
from data.measure.binds import READ
from data.measure.counters import COUNTERS, LAUNCHES, STALL, Counted, NoCounters
from workbench.backend.base import open_backend

US, DRAM = COUNTERS["us"][0], COUNTERS["dram_bytes"][0]
MEMORY, ISSUE = COUNTERS["memory_pct"][0], COUNTERS["issue_pct"][0]
WAIT, MEMORY_WAIT, BARRIER, DRAIN = (
    STALL.format(r) for r in ("wait", "long_scoreboard", "barrier", "drain")
)
LOG = f"""==PROF== Connected to process 17 (/usr/bin/python3)
==PROF== Profiling "product_plain": 0%....50%....100% - 9 passes
"ID","Kernel Name","{US}","{DRAM}","{MEMORY}","{WAIT}","{MEMORY_WAIT}","{BARRIER}","{DRAIN}"
"","","ns","byte","%","inst","inst","inst","inst"
"0","product_plain","13,000","33,030,144","76.5","1.5","4.25","n/a","0.1"
"1","product_plain(const void *, int)","14,000","33,030,146","77.5","1.5","4.75","0.5","0.1"
==PROF== Disconnected from process 17
"""
READING = Counted(READ, "read_8 x16", 1, 33_030_144, "read_8")
GATE = Counted("Q4_0", "8b.gate", 1, 33_030_144, "product_plain")


def test_a_table_is_read_with_its_units():
    first, second = nsight.launches_counted(LOG)
    assert first["ID"] == ("0", "") and first[US] == ("13,000", "ns")
    assert counters.figures(first) == {
        "us": 13.0, "dram_bytes": 33_030_144.0, "memory_pct": 76.5,
        "stalls": {"wait": 1.5, "long_scoreboard": 4.25, "drain": 0.1},
    }  # fmt: skip
    assert counters.figures(second)["stalls"]["barrier"] == 0.5


@pytest.mark.parametrize("log", ["", "==ERROR== no\n", '"ID","a"\n', '"ID","a"\n"","%"\n'])
def test_where_there_is_no_table_there_are_no_launches(log):
    assert nsight.launches_counted(log) == []


def test_units_of_other_versions_are_the_same_figures():
    launch = {US: ("0.013", "msecond"), DRAM: ("33.5", "Mbyte")}
    assert counters.figures(launch) == {"us": 13.0, "dram_bytes": 33.5e6, "stalls": {}}


def test_medians_and_the_longest_stalls_are_kept():
    each = [counters.figures(launch) for launch in nsight.launches_counted(LOG)]
    assert counters.summary(each) == {
        "launches": 2, "us": 13.5, "dram_bytes": 33_030_145.0, "memory_pct": 77.0,
        "stalls": {"long_scoreboard": 4.5, "wait": 1.5, "barrier": 0.25},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "found"), [("1,234.5", 1234.5), ("0", 0.0), ("n/a", None), ("nan", None), ("", None)]
)
def test_numbers(value, found):
    assert nsight.number(value) == found


def test_metrics_that_ncu_does_not_know_are_found_by_their_whole_names():
    log = f"==ERROR== Failed to find metric {ISSUE}.\n==PROF== {US}\n"
    assert nsight.unknown(log, [US, ISSUE, ISSUE.removesuffix("_elapsed")]) == [ISSUE]


def test_ncu_says_why_and_else_the_child_does():
    denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    assert nsight.refusal(denied, "").startswith("ERR_NVGPUCTRPERM")
    failed = "==ERROR== The application returned an error code (1)."
    assert nsight.refusal(failed, "Traceback\nDeviceError: no GPU\n") == "DeviceError: no GPU"
    assert nsight.refusal(failed, "") == "The application returned an error code (1)."
    assert nsight.refusal("", "") == "ncu gave no reason"


def test_each_counter_has_one_metric_and_every_stall_its_own():
    every = counters.all_metrics()
    chosen = counters.chosen_of(every)
    assert [m for m in chosen if m in {names[0] for names in COUNTERS.values()}] == chosen[
        : len(COUNTERS)
    ]
    without = [m for m in every if m != COUNTERS["issue_pct"][0]]
    assert COUNTERS["issue_pct"][1] in counters.chosen_of(without)
    assert len(set(every)) == len(every)


def test_products_are_the_kernels_that_are_counted():
    found = {(one.type, one.shape, one.batch): one for one in counters.products(False)}
    assert found["Q4_0", "8b.gate", 1] == GATE
    assert found["MXFP4", "8b.o", 1].bytes == 4096 * 4096 // 32 * 17
    assert {found[t, "8b.down", n].kernel for t in ("Q4_0", "Q8_0") for n in (16, 64, 128)} == {
        "tensor_product"
    }


def test_one_launch_goes_before_those_that_are_counted(monkeypatch):
    backend: Any = open_backend("embedded")
    said: list[str] = []
    backend._driver = SimpleNamespace(call=lambda name, what: said.append(name))
    launch = backend.launch

    def told(*args):
        issue = launch(*args)

        def issue_and_say():
            said.append(args[0].op)
            issue()

        return issue_and_say

    monkeypatch.setattr(backend, "launch", told)
    try:
        counters.launch_all(backend, counters.products(True))
    finally:
        backend.close()
    each = ["mul_mat", "cuProfilerStart", *["mul_mat"] * LAUNCHES, "cuProfilerStop"]
    assert said == each * 2


# a tool that does as ncu would: it refuses a metric, then counts what it was asked for
FAKE = """#!{python}
import json, sys
args = sys.argv
value = lambda name: args[args.index(name) + 1]
log, metrics = open(value("--log-file"), "w"), value("--metrics").split(",")
if {refused!r} in metrics:
    log.write("==ERROR== Failed to find metric {refused}\\n")
    sys.exit(1)
if {denied!r}:
    log.write("==ERROR== {denied}\\n")
    sys.exit(1)
cases = json.load(open(args[-1]))
rows = [["ID", "Kernel Name", *metrics], ["", "", *["%"] * len(metrics)]]
rows += [[str(i), case[-1], *["50"] * len(metrics)] for i, case in enumerate(cases * {launches})]
log.write("".join(",".join('"' + v + '"' for v in row) + "\\n" for row in rows))
"""


def fake(tmp_path: Path, refused: str = "", denied: str = "", launches: int = LAUNCHES) -> Path:
    tool = tmp_path / "ncu"
    tool.write_text(
        FAKE.format(python=sys.executable, refused=refused, denied=denied, launches=launches)
    )
    tool.chmod(0o755)
    return tool


def test_launches_are_counted_without_what_is_not_known(tmp_path):
    refused = COUNTERS["issue_pct"][0]
    tool = fake(tmp_path, refused)
    metrics = counters.available(tool, [GATE])
    assert refused not in metrics and COUNTERS["issue_pct"][1] in metrics
    (case,) = counters.count(tool, metrics, [GATE])
    assert case.items() >= GATE._asdict().items() and case["issue_pct"] == 50.0
    assert case["launches"] == LAUNCHES and len(case["stalls"]) == counters.KEPT_STALLS
    json.dumps(case)


def test_why_nothing_is_counted_is_one_line(tmp_path):
    denied = fake(tmp_path, denied="ERR_NVGPUCTRPERM - no permission")
    with pytest.raises(NoCounters, match=r"^ncu counts nothing: ERR_NVGPUCTRPERM - no permission$"):
        counters.available(denied, [READING])


def test_launches_that_are_missing_or_of_another_kernel_count_for_nothing(tmp_path):
    with pytest.raises(NoCounters, match="counted 1 launches of 2"):
        counters.count(fake(tmp_path, launches=1), [US], [READING])
    with pytest.raises(NoCounters, match="in place of"):  # the fake's order is another
        counters.count(fake(tmp_path), [US], [READING, GATE])


def test_without_a_gpu_the_step_is_left_out(tmp_path, capsys):
    measure.measure("counters", out=tmp_path, models=tmp_path, device="embedded", quick=True)
    assert "counters: a GPU alone has them; left out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
