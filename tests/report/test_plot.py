"""`wb.plot`: each result has its picture, and what has none says what has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.benchmarks.made_runs import comparison, write
from tests.report.test_plots import texts, timeline
from workbench.benchmarks.llama.bench import Bench
from workbench.common.errors import UsageError
from workbench.report.plot import OF_FRAME, OF_RESULT, OF_SEVERAL
from workbench.trace.profile import Timeline

PACKAGE = Path(wb.__file__).parent
RESULTS = PACKAGE.parent / "data" / "results"


def rows_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench.load(write(tmp_path, "b", {"tg8": 100.0, "pp64": 2000.0}))


def recorded(kind: str) -> Any:
    """A recorded run of this kind."""
    for path in sorted(RESULTS.glob("**/run.json")):
        if f'"kind": "{kind}"' in path.read_text():
            return wb.load(path.parent)
    raise AssertionError(f"no run of kind {kind} is recorded")


@pytest.mark.long
def test_comparisons_are_drawn_alone_together_and_by_their_frames():
    one, other = comparison(), comparison(device="cuda", model="other")
    alone = rows_of(wb.plot(one))
    assert alone == rows_of(one.plot()) == rows_of(wb.plot(one.to_frame())) and len(alone) == 8
    both = rows_of(wb.plot(one, other))
    assert both == rows_of(wb.plot([one, other])) and len(both) == 16 == len(set(both))
    frames = pd.concat([one.to_frame(), other.to_frame()], ignore_index=True)
    assert rows_of(wb.plot(frames)) == both


def test_a_bench_shows_each_repetition_and_the_medians(bench):
    figure = wb.plot(bench)
    (ax,) = figure.axes
    assert rows_of(figure) == ["tg8", "pp64"] == rows_of(bench.plot())
    medians = bench.to_frame()["tps"]
    shown = [text.get_text() for text in ax.texts]
    assert shown == [f"{tps:,.1f} t/s (n=8)" for tps in medians]
    dots = [len(line.get_xdata()) for line in ax.lines if line.get_marker() == "o"]
    assert dots == [8, 8] and ax.get_xscale() == "log"
    assert rows_of(wb.plot({"a": bench, "b": bench})) == [
        "tg8  run a", "tg8  run b", "pp64  run a", "pp64  run b",
    ]  # fmt: skip


@pytest.mark.long
def test_a_trace_shows_a_typical_step_and_two_stand_below_each_other(engine):
    with wb.profile(engine) as trace:
        engine.generate(tokens=[1, 2, 3], max_tokens=6)
    assert len({text for text in texts(trace.plot()) if text.startswith("step ")}) == 1
    assert len(wb.plot(trace, steps=[engine.n_steps - 1]).axes) == 1
    assert len(wb.plot({"one": trace, "other": trace}).axes) == 2
    assert len(wb.plot(trace, trace).axes) == 2
    parts = wb.plot(trace.gaps())
    assert parts.axes[0].get_xlabel().startswith("us without a kernel")
    assert rows_of(parts)[0].startswith("step ")
    assert len(wb.plot(timeline(2)).axes) == 1 and trace.to_frame().attrs["collector"]


def test_gaps_kernels_and_runs_are_drawn():
    gaps = recorded("gaps")
    table = gaps.table()
    assert rows_of(wb.plot(gaps)) == table["arm"].tolist() == rows_of(wb.plot(table))
    assert wb.plot(recorded("kernels")).axes


def test_a_pair_and_a_load_are_drawn(engine):
    step = timeline(1)
    pair = SimpleNamespace(traces=(step, step), labels=("off", "on"), test="tg8", stopped="")
    assert len(OF_RESULT["Pair"](pair).axes) == 2
    stopped = SimpleNamespace(traces=None, test="tg8", stopped="stopped after 3 of 10 rounds")
    with pytest.raises(UsageError, match="tg8 was stopped after 3 of 10 rounds, so there are no"):
        OF_RESULT["Pair"](stopped)
    load = wb.serve_bench(
        engine, slots=1, concurrency="1", n_prompt="4", n_gen="3", n_requests=3, n_warm_up=1
    )
    figure = wb.plot(load)
    assert figure.axes[0].get_ylabel() == "output tokens/s" and len(wb.plot(load, load).axes) == 1


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: wb.plot(3), "int has no picture; give what wb.ab, wb.bench, wb.profile, "),
    "toggles": (lambda: wb.plot(wb.Toggles()), "Toggles has no picture; give what wb.ab"),
    "a frame": (lambda: wb.plot(pd.DataFrame({"x": [1]})), "with the columns x has no picture"),
    "nothing": (lambda: wb.plot([]), "several results (none) have no common picture"),
    "two kinds": (lambda: wb.plot(comparison(), timeline()), "(AB, Timeline) have no common"),
    "no span": (lambda: wb.plot(Timeline([])), "no span, so there is nothing to draw"),
    "no step": (lambda: wb.plot(timeline(), steps=99), "steps [99] are not in this timeline"),
    "a misspelt keyword": (lambda: wb.plot(timeline(), window=9),
                           "'window' does not exist for this picture; did you mean window_us?"),
    "a window that ends first": (lambda: wb.plot(timeline(), window_us=(5, 1)),
                                 "window_us=(5, 1) is no part of the time; give (from, to) in us"),
    "half a window": (lambda: wb.plot(timeline(), window_us=[5]), "window_us=[5] is no part"),
    "an array that is no window": (lambda: wb.plot(timeline(), window_us=np.array([[0, 5]])),
                                   "window_us=[[0, 5]] is no part of the time"),
    "another window": (lambda: wb.plot(timeline(), window_us="input"),
                       "window_us='input' does not exist; give (from, to) in us, or 'inputs'"),
    "a keyword of none": (lambda: comparison().plot(z=1),
                          "keyword 'z' does not exist for this picture; it takes none"),
    "a keyword of several": (lambda: wb.plot({"a": timeline(), "b": timeline()}, steps=[0]),
                             "keyword 'steps' does not exist for this picture; did you mean step?"),
    "no gap": (lambda: wb.plot(pd.DataFrame(columns=["between", "traced_us", "host_us", "device_us",
                                                     "step"])), "there is no gap to draw"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_picture_says_what_has(what):
    ask, says = REFUSED[what]
    with pytest.raises(UsageError) as refused:
        ask()
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_tables_name_classes_that_exist_once():
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in {*OF_RESULT, *OF_SEVERAL}:
        assert source.count(f"\nclass {name}(") + source.count(f"\nclass {name}:") == 1, name
    assert all(map(callable, [*OF_RESULT.values(), *OF_FRAME.values(), *OF_SEVERAL.values()]))


@pytest.mark.long
def test_a_result_loads_no_picture_until_it_is_drawn():
    code = (
        "import sys, workbench as wb; wb.AB, wb.Profile, wb.bench, wb.check, wb.load;"
        "print('matplotlib' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
