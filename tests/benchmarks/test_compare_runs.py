"""Runs measured apart: what matches, what it says, what is history, and the exit status."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.made_runs import gpu, write
from tests.network import network_loads
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.compare import HISTORY, METHOD, compare
from workbench.benchmarks.compare.matching import Repeated, match
from workbench.config import Toggles


@pytest.fixture
def call(call, tmp_path):
    return lambda *arguments: call("compare", "-o", tmp_path / "page.html", *arguments)


def test_a_row_for_each_test(tmp_path, call):
    old = {k: v for k, v in Toggles().to_dict().items() if k != "pdl"}  # it lacks what is off
    a = write(tmp_path, "a", {"tg8": 100.0, "pp16": 900.0, "tg4": 50.0}, toggles=[old])
    b = write(
        tmp_path, "b", {"tg8": 110.0, "pp16": 900.0, "tg4": 40.0}, run_id="<b>&",
        status="interrupted", commit={"hash": "b" * 40, "number": 2, "dirty": True},
        toggles=[{"sync": "packed"}], model={"name": "tiny", "quant": "Q8_0", "hash": "h2"},
    )  # fmt: skip
    found = compare(a, b)
    assert found.rows[0].sides.differ == [("sync", "per_copy", "packed")]
    for words in ("commit aaaaaaaa -> bbbbbbbb with changes", "another hash", "was interrupted"):
        assert words in "\n".join(found.lines)
    s = found.summary().set_index("test")
    assert s["verdict"].to_dict() == {"tg8": "faster", "pp16": "no difference", "tg4": "slower"}
    assert s["speedup"].tolist() == pytest.approx([1.1, 1.0, 0.8], rel=0.02)
    assert (s["low"] < s["speedup"]).all() and (s["speedup"] < s["high"]).all()
    for row in found.rows:
        alone = stats.independent_ratio(row.sides.before.tps, row.sides.after.tps)
        assert row.ratio == alone and row.least == stats.resolution(alone, stats.Band(1.0, 1.0))
    assert set(METHOD) <= set(found.lines)
    status, _, err = call(a, b)
    text = (tmp_path / "page.html").read_text()
    assert status == 0 and f"page: {tmp_path / 'page.html'}" in err
    assert network_loads(text) == [] and "http" not in text
    assert "<title>Is it faster than a? &lt;b&gt;&amp;</title>" in text and "<b>&" not in text


def test_the_band_of_a_control_counts(tmp_path):
    """1.5 % apart with little noise; but the comparison's own A/A control is 10 % wide."""
    modes = [{"sync": "per_copy"}, {"sync": "packed"}]
    how = {"arms": ("per_copy", "packed"), "kind": "ab", "control": True, "toggles": modes, "n": 30}
    wide = write(tmp_path, "wide", {"tg8": [100.0, 120.0]}, noise=0.1, **how)
    quiet = write(tmp_path, "quiet", {"tg8": [103.0, 123.0]}, noise=0.001, **how)
    found = compare(wide, quiet)
    assert all(row.band.high > 1.02 and row.least >= row.band.high - 1 for row in found.rows)
    assert {row.verdict for row in found.rows} == {"no difference"}


def test_what_is_not_compared_is_told(tmp_path, call):
    """Other tests, other kinds, too few repetitions; wrong usage is one line."""
    a, b = write(tmp_path, "a", {"tg8": 100.0, "pp16": 9.0}), write(tmp_path, "b", {"tg9": 100.0})
    c = write(tmp_path, "c", kind="perplexity")
    assert [call(*wrong)[0] for wrong in ([a], [a, tmp_path / "none"], [a, c])] == [2, 2, 2]
    assert [row[4] for row in compare(a, b).unmatched().to_numpy()] == ["tg8, pp16", "tg9"]
    status, out, _ = call(a, b, c)
    assert status == 0 and "c is not compared: it is of kind perplexity, and ab and bench " in out
    few, less = write(tmp_path, "few", n=4), write(tmp_path, "less", {"tg8": 50.0}, n=4)
    assert [row.verdict for row in compare(few, less).rows] == [stats.TOO_FEW]
    status, _, err = call(few, less, "--fail-below", 0.9)
    assert status == 1 and "nothing to judge" in err
    near = write(tmp_path, "near", {"tg8": 97.0}), write(tmp_path, "base")
    assert call(*near[::-1], "--fail-below", 0.97)[0] == 0, "its interval is around 0.97"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"card": "NVIDIA H200"}, "another device (NVIDIA H100 (sm_90), and NVIDIA H200 (sm_90))"),
        ({"number": "2222"}, "another card (1111, and 2222)"),
        ({"day": "2026-11-22"}, "another day (2026-11-21, and 2026-11-22)"),
        ({"cpu": "Another CPU"}, "another processor (A CPU, and Another CPU)"),
    ],
)
def test_history_is_shown_without_a_verdict(tmp_path, call, other, why):
    a, b = write(tmp_path, "a", **gpu()), write(tmp_path, "b", {"tg8": 50.0}, **gpu(**other))
    found = compare(a, b)
    assert [row.verdict for row in found.rows] == [HISTORY]
    assert any(line.startswith(f"b is history, and has no verdict: {why}") for line in found.lines)
    assert [row.verdict for row in compare(a, b, across=True).rows] == ["slower"]
    if "card" in other:  # 3 where the whole interval lies below
        status, out, err = call(a, b, "--fail-below", 0.97)
        assert status == 1 and HISTORY in out and "--across judges" in err
        assert call(a, b)[0] == 0 and call(a, b, "--fail-below", 0.97, "--across")[0] == 3


SIDES = st.lists(
    st.builds(
        Repeated,
        st.sampled_from(["tg8", "pp4"]),
        st.sampled_from(["engine", "packed"]),
        st.tuples(st.sampled_from([None, "h1", "h2"]), st.sampled_from(["m", "n"]), st.just("Q")),
        st.fixed_dictionaries({"sync": st.sampled_from(["a", "b", "c"])}),
        st.just(np.ones(1)),
    ),
    max_size=6,
)


@given(SIDES, SIDES)
def test_everything_matches_once_or_is_listed(before, after):
    found = match(before, after)
    for every, sides in (
        (before, [*(m.before for m in found.matched), *found.only_before]),
        (after, [*(m.after for m in found.matched), *found.only_after]),
    ):
        assert sorted(map(id, sides)) == sorted(map(id, every))
    for a, b, differ in found.matched:
        assert a.test == b.test
        assert a.model[1:] == b.model[1:] or (a.model[0] is not None and a.model[0] == b.model[0])
        wanted = {} if a.toggles == b.toggles else {"sync": (a.toggles["sync"], b.toggles["sync"])}
        assert {name: pair for name, *pair in differ} == {n: [*p] for n, p in wanted.items()}
    for a in found.only_before:  # nothing that is equal in all is left on both sides
        for b in found.only_after:
            assert (a.test, a.model[1:], a.toggles) != (b.test, b.model[1:], b.toggles)
            if a.model[0] is not None:
                assert (a.test, a.model[0], a.toggles) != (b.test, b.model[0], b.toggles)
    distinct = list({(s.test, s.model, s.toggles["sync"]): s for s in before}.values())
    itself = match(distinct, distinct)
    assert not itself.only_before and not itself.only_after
    assert all(not m.differ for m in itself.matched)


def test_of_several_arms_nobody_knows_the_counterpart():
    def side(arm: str, sync: str) -> Repeated:
        return Repeated("tg8", arm, ("h", "m", "Q"), {"sync": sync}, np.ones(1))

    several = [side("one", "b"), side("two", "c")]
    assert match([side("engine", "a")], several).matched == []
    assert len(match([side("engine", "a")], several[:1]).matched) == 1
