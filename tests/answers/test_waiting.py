"""Where the device waits, and for whom: of a timeline made up, and of an engine."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.benchmarks.made_runs import comparison
from workbench.answers import conclusions, waiting
from workbench.answers.waiting import BUILDS, CAUSES, COPIES, ISSUES, LATENCY, OUTSIDE, WAITS, WORKS
from workbench.common.errors import UsageError
from workbench.report import plots
from workbench.trace.profile import Timeline, profile_each
from workbench.trace.spans import HOST_LANE, Span


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", toggles="baseline") as opened:
        yield opened


def host(category: str, start: int, end: int, step: int, **more: object) -> Span:
    args = {"step": step, "split": 1, **more}
    return Span(category, category, HOST_LANE, start * 1000, end * 1000, args)


def device(kind: str, start: int, end: int, step: int, index: int) -> Span:
    args = {"step": step, "kind": kind, "split": 1, "index": index}
    return Span(kind, "device", "cuda stream 0", start * 1000, end * 1000, args)


def made() -> pd.DataFrame:
    """A token of 100 us, from its first kernel at 10 to the next token's at 110."""
    spans = [
        host("step", 0, 60, 0), host("launch", 2, 4, 0, index=1), device("launch", 10, 20, 0, 1),
        host("launch", 23, 26, 0, index=2),  # until 23 the host is between commands: it issues
        device("launch", 30, 40, 0, 2),
        device("copy", 40, 44, 0, 3), host("sync", 26, 50, 0, index=4),
        host("step", 65, 120, 1), host("build", 65, 85, 1), host("write", 85, 90, 1, index=0),
        host("copy", 90, 95, 1, index=0), device("copy", 92, 100, 1, 0),
        host("launch", 101, 103, 1, index=1), device("launch", 110, 115, 1, 1),
    ]  # fmt: skip
    return Timeline(spans).to_frame()


def test_every_moment_of_a_token_has_one_cause():
    (row,) = waiting.causes(made()).to_dict("records")
    assert row == {
        WORKS: 20, BUILDS: 20, WAITS: 6, OUTSIDE: 5, LATENCY: 7 + 9,
        COPIES: 4 + 2 + 8,  # results; the host's call; inputs
        ISSUES: 3 + 10 + 5 + 1,
    }  # fmt: skip
    assert sum(row.values()) == 100
    one = made()
    assert waiting.causes(one[one["step"] == 0]).empty, "the last token has no end"


def test_a_kernel_whose_call_is_unknown_waits_for_no_host():
    frame = made()
    frame = frame[~((frame["lane"] == HOST_LANE) & (frame["category"] == "launch"))]
    row = waiting.causes(frame).iloc[0]
    assert row[[BUILDS, ISSUES, WAITS, OUTSIDE]].eq(0).all() and row.sum() == 100


@pytest.mark.long
def test_for_whom_and_how_long(engine):
    arms = waiting.arms(engine)
    assert arms["baseline"] == engine.toggles and arms["best"].graph_reuse == "set_rows"
    assert waiting.sets(arms) == (
        "baseline: sync=per_copy graph_reuse=rebuild | best: sync=auto graph_reuse=set_rows"
    )
    waits = waiting.whom(profile_each(engine, arms, n_tokens=12))
    assert list(waits.index) == ["baseline", "best"] and (waits[WORKS] > 0).all()
    assert waits.loc["baseline", BUILDS] > 10 * waits.loc["best", BUILDS], "a graph that is kept"
    table = waiting.whom_table(waits).set_index("")
    assert list(table.index) == [WORKS, *CAUSES]
    shares = table["best, of the waiting"].iloc[1:].str.rstrip("%").astype(int)
    assert 97 <= shares.sum() <= 103
    parts = waiting.parts(engine, arms, 5)
    for arm in arms:
        us = waiting.parts_us(parts[arm])
        total = us.pop(waiting.TOKEN)
        assert sum(us.values()) == pytest.approx(total) and us[waiting.RUN] > 0
    shown = waiting.parts_table(parts).set_index("part of a token")
    assert shown.loc[waiting.TOKEN, "baseline, us"] > shown.loc[waiting.TOKEN, "best, us"]
    assert ".." in shown.loc[waiting.TOKEN, "A/A"] and shown.loc[waiting.RUN, "A/A"] == ""
    assert len(plots.shares(waits).axes[0].patches) == 2 * (1 + len(CAUSES))
    compared = comparison(tests=("tg32",))
    said = str(conclusions.waiting(waits, parts, compared)).splitlines()
    assert said[0].startswith("The device waits in ") and "of a token of baseline (" in said[0]
    assert len(said) == 6, "an arm each, and the comparison"
    every = waits[list(CAUSES)].sum(axis=1)
    for share, why in ((9, "most of it while the host builds ("), (0.2, "for no single cause; ")):
        made = waits.assign(**dict.fromkeys(CAUSES, every)) if share < 1 else waits.copy()
        made[BUILDS] = share * every
        assert why in str(conclusions.waiting(made, parts, compared))


def test_the_hosts_part_is_what_a_token_without_stamps_leaves():
    """A stamped token has the making of the stamps in the host's part: here 25 us of it, not 12."""
    one = {"token": [43.0], "device": [10.0], "gap": [33.0], "host": [25.0], "plain": [30.0]}
    us = waiting.parts_us({**one, "run_us": 7.0})
    parts = (waiting.RUN, waiting.BETWEEN, waiting.LOGITS, waiting.HOST, waiting.TOKEN)
    assert [us[part] for part in parts] == [7, 3, 8, 12, 30]
    short = waiting.parts_us({**one, "plain": [15.0], "run_us": 11.0})
    assert [short[part] for part in parts] == [10, 0, 8, 0, 15]


def test_one_switch_against_the_baseline(engine):
    arms = waiting.arms(engine, "graph_reuse=set_rows")
    assert [*arms] == ["baseline", "graph_reuse=set_rows"]
    assert arms["graph_reuse=set_rows"] == engine.toggles.switched("graph_reuse", "set_rows")
    with pytest.raises(UsageError, match="toggle 'reuse' does not exist"):
        waiting.arms(engine, "reuse=set_rows")


def test_shares_have_as_many_looks_as_parts():
    table = pd.DataFrame(np.ones((2, 7)), columns=list("abcdefg"))
    with pytest.raises(ValueError, match="7 parts are more than 6 looks"):
        plots.shares(table)
    ax = plots.shares(table.iloc[:, :2]).axes[0]
    assert {text.get_text() for text in ax.texts} == {"50%", "2"}
