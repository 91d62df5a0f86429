"""`data.measure counters` without a GPU: what ncu is asked, and what becomes of what it writes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.measure import counters, nsight
from data.measure.counters import COUNTERS, LAUNCHES, STALL, Counted, NoCounters
from workbench.backend.base import open_backend

US, MEMORY = COUNTERS["us"][0], COUNTERS["memory_pct"][0]
WAIT, LONG, BARRIER, DRAIN = (
    STALL.format(r) for r in ("wait", "long_scoreboard", "barrier", "drain")
)
LOG = f"""==PROF== Profiling "product_plain": 0%....50%....100% - 9 passes
"ID","Kernel Name","{US}","{MEMORY}","{WAIT}","{LONG}","{BARRIER}","{DRAIN}"
"","","ns","%","inst","inst","inst","inst"
"0","product_plain","13,000","76.5","1.5","4.25","n/a","0.1"
"1","product_plain(const void *, int)","14,000","77.5","1.5","4.75","0.5","0.1"
==PROF== Disconnected from process 17
"""
GATE = Counted("Q4_0", "8b.gate", 1, 33_030_144, "product_plain")


def test_medians_and_the_longest_stalls_are_kept():
    each = [counters.figures(launch) for launch in nsight.launches_counted(LOG)]
    assert counters.summary(each) == {
        "launches": 2, "us": 13.5, "memory_pct": 77.0,
        "stalls": {"long_scoreboard": 4.5, "wait": 1.5, "barrier": 0.25},
    }  # fmt: skip
    other_units = {US: ("0.013", "msecond"), COUNTERS["dram_bytes"][0]: ("33.5", "Mbyte")}
    assert counters.figures(other_units) == {"us": 13.0, "dram_bytes": 33.5e6, "stalls": {}}
    for log in ("", "==ERROR== no\n", '"ID","a"\n"","%"\n'):
        assert nsight.launches_counted(log) == []


def test_one_launch_goes_before_those_that_are_counted(monkeypatch):
    backend: Any = open_backend("embedded")
    said: list[str] = []
    backend._driver = SimpleNamespace(call=lambda name, what: said.append(name))
    launch = backend.launch
    monkeypatch.setattr(
        backend, "launch", lambda *of: lambda: (said.append(of[0].op), launch(*of)())
    )
    try:
        counters.launch_all(backend, counters.products(True))
    finally:
        backend.close()
    each = ["mul_mat", "cuProfilerStart", *["mul_mat"] * LAUNCHES, "cuProfilerStop"]
    assert said == each * 2 and GATE in counters.products(False)


# a tool that does as ncu would: it refuses a metric, then counts what it was asked for
FAKE = """#!{python}
import json, sys
args = sys.argv
value = lambda name: args[args.index(name) + 1]
log, metrics = open(value("--log-file"), "w"), value("--metrics").split(",")
for wrong, said in {wrong!r}.items():
    if not wrong or wrong in metrics:
        log.write("==ERROR== " + said + "\\n")
        sys.exit(1)
cases = json.load(open(args[-1]))
rows = [["ID", "Kernel Name", *metrics], ["", "", *["%"] * len(metrics)]]
rows += [[str(i), case[-1], *["50"] * len(metrics)] for i, case in enumerate(cases * {launches})]
log.write("".join(",".join('"' + v + '"' for v in row) + "\\n" for row in rows))
"""


def fake(tmp_path: Path, launches: int = LAUNCHES, **wrong: str) -> Path:
    tool = tmp_path / "ncu"
    found = {COUNTERS["issue_pct"][0] if k == "metric" else "": said for k, said in wrong.items()}
    tool.write_text(FAKE.format(python=sys.executable, wrong=found, launches=launches))
    tool.chmod(0o755)
    return tool


def test_what_is_not_known_is_left_out(tmp_path):
    refused = COUNTERS["issue_pct"][0]
    tool = fake(tmp_path, metric=f"Failed to find metric {refused}")
    metrics = counters.available(tool, [GATE])
    assert refused not in metrics and COUNTERS["issue_pct"][1] in metrics
    (case,) = counters.count(tool, metrics, [GATE])
    assert case.items() >= GATE._asdict().items() and case["issue_pct"] == 50.0
    assert case["launches"] == LAUNCHES and len(case["stalls"]) == counters.KEPT_STALLS
    denied = fake(tmp_path, all="ERR_NVGPUCTRPERM - no permission")
    with pytest.raises(NoCounters, match=r"^ncu counts nothing: ERR_NVGPUCTRPERM - no permission$"):
        counters.available(denied, [GATE])
    with pytest.raises(NoCounters, match="counted 1 launches of 2"):
        counters.count(fake(tmp_path, launches=1), [US], [GATE])
