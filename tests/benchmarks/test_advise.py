"""An advice: between what each switch is read, what the readings say, and what is recommended."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from workbench.benchmarks import workload
from workbench.benchmarks.advise import record
from workbench.benchmarks.advise.advice import NOT_REACHED, Advice, Effect, Reason
from workbench.benchmarks.advise.candidates import Candidate, alone, candidates, with_the_rest
from workbench.benchmarks.advise.chunks import ALONE, MOST_ARMS, THE_REST, chunked
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import Band, Ratio
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError
from workbench.common.tables import markdown
from workbench.config import Toggles
from workbench.config.presets import best_sets
from workbench.config.table import ROWS, Want, facts_of

OFF = Toggles()
BESTS = {f"{kind} {of}": Toggles(**found.values) for kind, of, found in best_sets()}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


# between what is read -----------------------------------------------------------------------------


def unmet(toggles: Toggles) -> list[str]:
    """Which toggles need another that they do not have; said once more than the package does."""
    have = toggles.to_dict()
    found = []
    for name, value in have.items():
        row = ROWS[name]
        if value != row.off and row.refines and have[row.refines] == ROWS[row.refines].off:
            found.append(name)
        for want in facts_of(name, value, Want):
            counts = not want.beside or have[want.beside] != ROWS[want.beside].off
            if counts and have[want.toggle] not in (*want.values, "auto"):
                found.append(name)
    return found


@pytest.mark.parametrize("best", BESTS.values(), ids=BESTS)
def test_both_sides_of_a_reading_have_what_they_need(best):
    """And they differ by the candidate, by what it needs, and by what cannot stay; by no more."""
    refused = set()
    for one in candidates(OFF):
        own = set(Toggles.members(one.name))
        for read in (alone, with_the_rest):
            try:
                reading = read(one, OFF, best)
            except UsageError as error:
                refused.add(one.name)
                assert "changes nothing while" in str(error) or "clash" in str(error)
                continue
            assert not unmet(reading.before) and not unmet(reading.after), (one, reading.words)
            a, b = reading.before.to_dict(), reading.after.to_dict()
            differ = {name for name in a if a[name] != b[name]}
            assert differ - own == {*reading.added, *reading.gone} - own
            assert reading.before != reading.after
            if read is alone:
                assert reading.after.value_of(one.name) == one.value and not reading.gone
                assert reading.before == OFF.changed_by(reading.beside)
            elif best.value_of(one.name) == one.value:
                assert reading.after == best and not reading.added
            else:
                assert reading.before == best and reading.after.value_of(one.name) == one.value
    assert refused <= {"fork", "sync", "graph_reuse", "kv_cache", "batch_sizes", "copy_stream"}


def test_groups_that_need_each_other_are_said():
    best = BESTS["cuda one"]
    read = {str(one): one for one in candidates(OFF)}
    ahead = alone(read["launch_ahead=on"], OFF, best)
    assert ahead.beside.keys() >= {"plans", "plan_scope", "sync", "graph_reuse"}
    assert "plans=ours plan_scope=step" in ahead.words and ahead.words.endswith("on both sides")
    without = with_the_rest(read["plans=ours"], OFF, best)
    assert without.gone == ("plan_scope", "launch_ahead", "plan_end")
    assert without.words == "plan_scope, launch_ahead, plan_end are off where it changes"
    embedded = with_the_rest(read["plan_scope=step"], OFF, BESTS["embedded one"])
    assert embedded.added == {"plans": "ours", "sync": "packed_implicit"}
    assert embedded.words == "together with plans=ours sync=packed_implicit"


def test_what_is_asked_about():
    names = {one.name for one in candidates(OFF)}
    assert {"sync", "plans", "fuse", "streams"} <= names
    assert not names & {"redo", "validate", "lifetimes", "activations", "fuse_qkv"}
    assert {str(one) for one in candidates(OFF, ["redo", "fuse_qkv"])} == {"redo=on", "fuse_qkv=on"}
    with pytest.raises(UsageError, match="toggle 'synk' does not exist; did you mean sync"):
        candidates(OFF, ["synk"])


@given(data=st.data(), most=st.integers(3, 9))
@settings(max_examples=examples(100))
def test_every_reading_is_in_one_comparison(data, most):
    best = data.draw(st.sampled_from([*BESTS.values()]))
    readings = {}
    for one in data.draw(st.lists(st.sampled_from(candidates(OFF)), unique=True)):
        for kind, read in ((THE_REST, with_the_rest), (ALONE, alone)):
            try:
                readings[one, kind] = read(one, OFF, best)
            except UsageError:
                continue
    chunks = chunked(readings, {ALONE: OFF, THE_REST: best}, most)
    assert sorted(map(str, [a for chunk in chunks for a in chunk.readings])) == sorted(
        map(str, readings)
    )
    for chunk in chunks:
        spec = chunk.spec(workload.parse("tg4"))
        arms = spec.arms
        assert len({arm.name for arm in arms}) == len(arms) and arms[-1].is_control
        assert arms[0].toggles == arms[-1].toggles == chunk.base
        own = {arm.toggles for arm in arms}
        assert all({r.before, r.after} <= own for r in chunk.readings.values())
        assert len(arms) <= most or len(chunk.readings) == 1


# what is measured ---------------------------------------------------------------------------------


def lasting(sample: workload.Sample, ns: float) -> workload.Sample:
    """The sample, as if it had taken so long, ns."""
    each = int(ns) // len(sample.token_ns)
    token_ns = np.full(len(sample.token_ns), each, np.int64)
    return sample._replace(ns_total=int(token_ns.sum()), token_ns=token_ns)


@pytest.fixture
def timed(monkeypatch):
    """Repetitions of the real engine take as long as told: {toggle=value: times as fast}."""
    factors, rng, take = {}, np.random.default_rng(0), workload.take_sample

    def told(engine, test, *given, **named):
        sample = take(engine, test, *given, **named)
        have = engine.toggles.to_dict()
        speed = np.prod([by for name, by in factors.items() if f"{name[0]}={have[name[0]]}" ==
                         "=".join(name)])  # fmt: skip
        return lasting(sample, 1e9 / speed * (1 + 0.001 * rng.random()))

    monkeypatch.setattr(workload, "take_sample", told)
    return lambda **by: factors.update({tuple(k.rsplit("__", 1)): v for k, v in by.items()})


@pytest.mark.long
def test_what_helps_is_ranked_and_recommended(call, model, timed, tmp_path):
    """On a clock that is told: packed is faster than what best has; set_rows, of best, is slower
    than nothing; plans are not worth a word."""
    timed(sync__packed=1.5, sync__copy_boundary=1.2, graph_reuse__set_rows=0.8,
          graph_reuse__patch_pointers=0.7, graph_reuse__pointer_table=0.7)  # fmt: skip
    made = wb.advise(
        model, "tg1", toggles="sync,graph_reuse,pdl,plan_evict,slot_choice,plans", at_most_s=600,
        until="5%", out=tmp_path / "a", device="embedded", n_ctx=256, n_ubatch=16,
    )  # fmt: skip
    frame = made.to_frame().set_index(["toggle", "value", "reading"]).sort_index()
    packed = frame.loc["sync", "packed"]
    assert packed["speedup"].tolist() == pytest.approx([1.5, 1.5], rel=0.01)
    assert packed["verdict"].tolist() == ["faster", "faster"] and not packed["in_best"].any()
    assert (packed["n"] >= 10).all() and (packed["low"] <= packed["speedup"]).all()
    assert frame.loc[("graph_reuse", "set_rows", "the rest"), "verdict"] == "slower"
    assert frame.loc[("graph_reuse", "set_rows", "the rest"), "in_best"]
    assert frame.loc[("plans", "ours", "alone"), "verdict"] == "no difference"
    cells = made.table().set_index("switch").loc["graph_reuse=set_rows*"]
    assert cells["with the rest"].startswith("0.80 0.") and cells["alone"].endswith(" slower")
    shown = markdown(made.table(), 80).splitlines()
    assert "with the rest" in shown[0] and "alone" in shown[0] and max(map(len, shown)) <= 80
    # refused, idle and equal values are named, and not measured
    assert "cannot honour pdl=on" in frame.loc[("pdl", "on", "alone"), "reason"]
    assert "where requests are served" in frame.loc[
        ("slot_choice", "lowest_free", "the rest"), "reason"]  # fmt: skip
    same = frame.loc[("sync", "implicit"), "reason"].tolist()
    assert same == ["stands for sync=auto here", "sync=auto and sync=implicit stand for the same "
                    "here"]  # fmt: skip
    assert frame.loc[("plan_evict", "never", "alone"), "beside"] == "plans=ours on both sides"
    # ranked: what helps first, what could not be told, what harms
    order = [str(one) for one in made.ranked()]
    assert order[:2] == ["sync=packed", "sync=copy_boundary"]
    assert order.index("plans=ours") < order.index("graph_reuse=set_rows") < order.index("pdl=on")
    assert made.changes == {"sync": "packed", "graph_reuse": "rebuild"}
    assert made.flags == "--preset best --sync packed --graph-reuse rebuild"
    assert "sync='packed', graph_reuse='rebuild')" in made.python
    engine = eval(made.python, {"wb": wb})
    with engine:
        assert engine.toggles.sync == "packed" and engine.toggles.graph_reuse == "rebuild"
    lines = made.summary.splitlines()
    assert any(line.startswith("preset best beside everything off: slower, 0.80") for line in lines)
    assert any(line.startswith("with the changes beside best: faster, 1.87") for line in lines)
    (told,) = (line for line in lines if line.startswith("could not be told, within the noise"))
    bands = frame[frame["verdict"] == "no difference"].sort_values("band_high")
    ends = [stats.interval(row.band_low, row.band_high) for row in bands.iloc[[0, -1]].itertuples()]
    assert f"within the noise, A/A bands {' to '.join(ends)}: " in told
    # a line for each kind of reason, whole with `details`
    short = [line for line in lines if line.startswith("not measured, ")]
    assert len(short) == 3 and any("refused here" in line and "pdl=on" in line for line in short)
    assert "cannot honour pdl=on" not in made.summary and "cannot honour pdl=on" in made.details
    assert made.start == OFF and "building the graph" not in made.summary
    assert lines[-2:] == [f"flags: {made.flags}", f"python: {made.python}"]
    # each comparison is a run folder with its A/A control
    runs = results.runs(tmp_path / "a")
    assert len(runs) >= 3 and set(runs["kind"]) == {"ab"}
    every = [AB.load(folder) for folder in runs["folder"]]
    assert all(ab.interleaved and len(ab.run["arms"]) <= MOST_ARMS for ab in every)
    rows = (
        row
        for ab in every
        for row in ab.summary().itertuples()
        if row.arm == "sync=packed" and ab.run["arms"][0]["toggles"]["sync"] == "per_copy"
    )
    row = next(rows)
    assert row.speedup == packed.loc["alone", "speedup"]
    # the folder gives it again, as it was
    again = wb.load(tmp_path / "a")
    pd.testing.assert_frame_equal(again.to_frame(), made.to_frame())
    assert repr(again).replace(str(model.name), str(model)) == repr(made)
    assert again.details.splitlines()[:-1] == made.details.splitlines()[:-1]
    status, out, _ = call("runs", "show", tmp_path / "a")
    assert status == 0 and f"flags: {made.flags}" in out and "| sync=packed" in out
    status, out, _ = call("runs", "ls", tmp_path)
    assert status == 0 and f"advise ({len(runs)} runs)" in out and out.count("\n") == 3
    assert call("runs", "ls", tmp_path / "a")[1].count("\n") == 2 + len(runs)


@pytest.mark.long
def test_a_rebuilt_graph_hides_nothing_alone(model, timed, tmp_path):
    """Where a rebuilt graph takes many times a token, values are read alone with the graph kept,
    graph_reuse from everything off. Best beside everything off is the first comparison."""
    timed(sync__packed=1.5, graph_reuse__set_rows=12, graph_reuse__patch_pointers=12,
          graph_reuse__pointer_table=12)  # fmt: skip
    made = wb.advise(model, "tg1", toggles="sync,graph_reuse", at_most_s=600, until=0.05,
                     out=tmp_path / "a", device="embedded", n_ctx=256, n_ubatch=16)  # fmt: skip
    kept = OFF.changed_by({"graph_reuse": "set_rows"})
    assert made.start == kept and made.rebuilding == pytest.approx(12, rel=0.01)
    for (one, kind), reading in made.readings.items():
        if kind == ALONE:
            assert reading.before == (OFF if one.name == "graph_reuse" else kept)
    assert (
        "alone: beside graph_reuse=set_rows, because building the graph takes 12 times a token; "
        "graph_reuse itself: from everything off"
    ) in made.summary
    frame = made.to_frame().set_index(["toggle", "value", "reading"]).sort_index()
    packed = frame.loc[("sync", "packed", "alone")]
    assert packed["speedup"] == pytest.approx(1.5, rel=0.01)
    assert packed["beside"] == "graph_reuse=set_rows on both sides"
    rows = frame.loc[("graph_reuse", "set_rows", "alone")]
    assert rows["speedup"] == pytest.approx(12, rel=0.01) and rows["beside"] == ""
    # what tells most comes first; each comparison has a single kind of slow arm
    runs = [AB.load(folder).run for folder in sorted((tmp_path / "a").glob("0*"))]
    arms = [[arm["toggles"] for arm in run["arms"]] for run in runs]
    best = made.best.to_dict()
    assert arms[0] == [best, OFF.to_dict(), best]
    slow = [sum(one["graph_reuse"] == "rebuild" for one in own) for own in arms]
    assert slow[0] == 1 and max(slow) == 1
    bases = [own[0] for own in arms]
    assert bases.index(kept.to_dict()) > 1 and slow[bases.index(kept.to_dict())] == 0


@pytest.mark.long
def test_a_value_is_no_change_for_what_comes_with_it(model, timed, tmp_path):
    """plan_evict=never with the rest brings plans=ours along, and gains nothing beside it."""
    timed(plans__ours=1.4)
    made = wb.advise(model, "tg1", toggles="plans,plan_evict", at_most_s=600, until=0.05,
                     out=tmp_path / "a", device="embedded", n_ctx=256, n_ubatch=16)  # fmt: skip
    frame = made.to_frame().set_index(["toggle", "value", "reading"])
    assert frame.loc[("plan_evict", "never", "the rest"), "verdict"] == "faster"
    assert made.changes == {"plans": "ours"}


@pytest.mark.long
def test_changes_that_gain_nothing_together_are_not_recommended(model, tmp_path, monkeypatch):
    """Each of two changes of best is 1.5 times as fast; together they are as fast as best."""
    take, rng = workload.take_sample, np.random.default_rng(0)

    def told(engine, test, *given, **named):
        changed = (engine.toggles.sync == "packed") != (engine.toggles.graph_reuse == "rebuild")
        ns = 1e9 / (1.5 if changed else 1) * (1 + 0.001 * rng.random())
        return lasting(take(engine, test, *given, **named), ns)

    monkeypatch.setattr(workload, "take_sample", told)
    made = wb.advise(model, "tg1", toggles="sync,graph_reuse", at_most_s=600, until=0.05,
                     out=tmp_path / "a", device="embedded", n_ctx=256, n_ubatch=16)  # fmt: skip
    assert made.changes == {} and made.flags == "--preset best"
    assert "with the changes beside best: no difference" in made.summary
    assert "did not hold, measured again and all together: keep best" in made.summary


@pytest.mark.long
def test_a_faster_value_with_a_wrong_answer_is_not_recommended(model, timed, tmp_path, monkeypatch):
    """And does not spoil the change beside it, which is right."""
    timed(sync__packed=1.5, graph_reuse__set_rows=0.8, graph_reuse__patch_pointers=0.7,
          graph_reuse__pointer_table=0.7)  # fmt: skip
    told = workload.take_sample

    def wrong(engine, *given, **named):
        sample = told(engine, *given, **named)
        return sample._replace(last_logits=sample.last_logits + (engine.toggles.sync == "packed"))

    monkeypatch.setattr(workload, "take_sample", wrong)
    made = wb.advise(model, "tg1", toggles="sync,graph_reuse", at_most_s=600, until=0.05,
                     out=tmp_path / "a", device="embedded", n_ctx=256, n_ubatch=16)  # fmt: skip
    assert made.changes == {"graph_reuse": "rebuild"}
    assert "never recommended, since answers differ: sync=packed " in made.summary


@pytest.mark.long
def test_the_budget_ends_the_measuring(model, tmp_path, monkeypatch):
    """No comparison is begun that its least rounds would not fit into the time."""
    now, take = [0.0], workload.take_sample

    def told(engine, test, *given, **named):
        sample = take(engine, test, *given, **named)
        now[0] += 0.1
        token_ns = np.full(len(sample.token_ns), int(1e8) // len(sample.token_ns), np.int64)
        return sample._replace(ns_total=int(1e8), token_ns=token_ns)

    monkeypatch.setattr(workload, "take_sample", told)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made = wb.advise(model, "tg2", at_most_s=60, out=tmp_path / "a", device="embedded",
                     toggles="sync,graph_reuse,host_source,n_copies,fuse,results")  # fmt: skip
    assert made.effects and 40 < made.seconds <= 62


@pytest.mark.long
def test_a_budget_that_ends_says_what_it_did_not_reach(model, timed, tmp_path):
    timed(sync__packed=1.5)
    made = wb.advise(
        model, "tg2", toggles=["sync", "results"], at_most_s=1e-3, out=tmp_path / "a",
        device="embedded",
    )  # fmt: skip
    assert not made.effects and set(made.to_frame()["reason"]) == {"not reached in the time"}
    assert "not reached in the time" in made.summary
    assert "no comparison was measured" in made.summary
    assert "flags:" not in made.summary, "nothing is advised"
    assert made.table().empty and "| switch" not in repr(made)


@pytest.mark.long
def test_ctrl_c_keeps_what_is_finished(model, timed, tmp_path, monkeypatch):
    timed(sync__packed=1.5)
    left = [60]  # repetitions
    told = workload.take_sample

    def interrupted(*given, **named):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return told(*given, **named)

    monkeypatch.setattr(workload, "take_sample", interrupted)
    made = wb.advise(model, "tg2", toggles="sync", at_most_s=600, until=0.05, out=tmp_path / "a",
                     device="embedded")  # fmt: skip
    assert made.interrupted and "interrupted: what was finished is above" in made.summary
    assert 0 < len(made.effects) < len(made.readings)
    assert (made.to_frame()["reason"] == "not reached in the time").any()
    assert results.runs(tmp_path / "a")["status"].tolist().count("interrupted") == 1
    assert repr(wb.load(tmp_path / "a")).splitlines()[:-1] == repr(made).splitlines()[:-1]


@pytest.mark.long
def test_an_advice_that_is_killed_is_read_as_interrupted(model, timed, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    timed(sync__packed=1.5)
    measured, told = [0], record.write

    def written(advice):
        told(advice)
        measured[0] += 1
        if measured[0] == 2:
            raise Killed

    monkeypatch.setattr(record, "write", written)
    with pytest.raises(Killed):
        wb.advise(model, "tg2", toggles="sync", at_most_s=600, until=0.05, out=tmp_path / "a",
                  device="embedded")  # fmt: skip
    found = wb.load(tmp_path / "a" / "advice.json")
    assert found.interrupted and found.effects
    assert set(found.to_frame()["reason"]) > {"", "not reached in the time"}
    assert len(results.runs(tmp_path / "a")) == 2


@pytest.mark.parametrize(("content", "says"), [
    ("{", "cannot be read: "), ("[]", "schema None of advice.json is not 1"),
    ('{"schema": 2}', "schema 2 of advice.json is newer than 1, the newest that this version"),
    ('{"schema": 1}', "advice.json has no valid 'model'"),
])  # fmt: skip
def test_an_advice_that_cannot_be_read_is_one_line(tmp_path, content, says):
    (tmp_path / "advice.json").write_text(content)
    with pytest.raises(UsageError, match=says) as error:
        wb.load(tmp_path)
    assert "\n" not in str(error.value)


TOLD = Effect(Ratio(1.0, 0.99, 1.01, 6), Band(0.99, 1.01), stats.SAME, "", True)
FEW = TOLD._replace(verdict=stats.TOO_FEW)


@pytest.mark.parametrize(("effects", "late", "interrupted", "says"), [
    ([TOLD], 0, False, "no change of best was faster, so there is none to make"),
    ([TOLD], 1, False, "of the 1 value measured to an end no change of best was faster; 1 was not"),
    ([TOLD, FEW], 1, True, "was faster; 2 were not measured to an end"),
    ([FEW], 1, False, "no change of best was measured to an end, so none is recommended"),
    ([], 1, True, "no comparison was measured: interrupted"),
    ([], 1, False, "no comparison was measured: the time did not suffice"),
])  # fmt: skip
def test_what_was_not_measured_is_not_said_to_be_no_faster(
    tmp_path, effects, late, interrupted, says
):
    every = [Candidate("sync", value) for value in ("packed", "implicit", "copy_boundary")]
    asked = every[: len(effects) + late]
    made = Advice(
        model="m.gguf", device="embedded", test="tg2", best=OFF, asked=asked, changes={},
        effects={(one, THE_REST): each for one, each in zip(asked, effects, strict=False)},
        readings={}, left_alone={}, folder=tmp_path, interrupted=interrupted, seconds=1.0,
        reasons={(one, THE_REST): NOT_REACHED for one in asked[len(effects) :]}, at_most_s=2.0,
        start=OFF, rebuilding=1.0,
    )  # fmt: skip
    assert says in made.summary
    assert ("interrupted: what was finished is above" in made.summary) == (
        interrupted and bool(effects)
    )
    assert ("not reached before the interruption" in made.details) == interrupted


def test_numbers_that_are_missing_and_odd_toggles_come_back(tmp_path):
    """Intervals without bounds are NaN again. A toggle that does not exist is one line."""
    nan = float("nan")
    one, best = Candidate("sync", "packed"), Toggles(sync="packed", fuse="on")
    advice = Advice(
        model="m.gguf", device="embedded", test="tg2", best=best, asked=[one], changes={},
        effects={
            (one, ALONE): Effect(Ratio(1.5, nan, nan, 1), Band(nan, nan), stats.TOO_FEW, "", True),
        },
        readings={(one, ALONE): alone(one, OFF, best)}, left_alone={"redo": "why"},
        reasons={(one, THE_REST): Reason("kind", "why")}, folder=tmp_path, interrupted=False,
        seconds=1.0, at_most_s=2.0, start=OFF, rebuilding=1.0,
    )  # fmt: skip
    record.write(advice)
    again = wb.load(tmp_path)
    pd.testing.assert_frame_equal(again.to_frame(), advice.to_frame())
    assert again.best == best and again.details == advice.details
    text = (tmp_path / "advice.json").read_text()
    (tmp_path / "advice.json").write_text(text.replace('"sync": "packed"', '"synk": "packed"'))
    with pytest.raises(UsageError, match=r"advice\.json: toggle 'synk' does not exist"):
        wb.load(tmp_path)
    (tmp_path / "advice.json").write_text(text.replace("too few repetitions", "sideways"))
    with pytest.raises(UsageError, match=r"advice\.json has no valid 'sideways'"):
        wb.load(tmp_path)


@pytest.mark.parametrize(("asked", "said"), [
    ({"test": "tg2,pp4"}, "an advice is for one test, not 2"),
    ({"at_most_s": 0}, "at_most_s=0 must be above 0 seconds"),
    ({"until": 2}, "until=2 is no share"), ({"toggles": ""}, "no toggle is named; name toggles"),
    ({"toggles": ["", " , "]}, "no toggle is named; name toggles"),
    ({"toggles": "synk"}, "toggle 'synk' does not exist"),
    ({"toggles": "sync=packed"}, "an advice asks about every value of a toggle; write sync"),
    ({"test": "tg99999", "at_most_s": 1.0, "toggles": "sync"},
     "a repetition of tg99999 takes about .*, and an advice of 1 s needs many; give it more time"),
    ({"test": "tg0"}, "test 'tg0' does not exist"), ({"n_ctxx": 3}, "did you mean n_ctx"),
])  # fmt: skip
def test_a_wrong_request_is_one_line(model, tmp_path, asked, said):
    with pytest.raises(UsageError, match=said) as error:
        wb.advise(model, **({"out": tmp_path / "a"} | asked))
    assert "\n" not in str(error.value) and not (tmp_path / "a").exists()


def test_a_command_that_asks_wrongly_loads_no_model(call, model, tmp_path):
    (tmp_path / "there").mkdir()
    for words in (("--test", "tg8,pp8"), ("--toggle", "snyc"), ("--out", tmp_path / "there")):
        status, out, err = call("advise", "-m", model, *words)
        assert (status, out, err.count("\n")) == (2, "", 1), err


@pytest.mark.long
def test_the_command(call, model, tmp_path):
    ask = ("advise", "-m", model, "--device", "embedded", "--test", "tg1", "--at-most", "8s")
    status, out, err = call(*ask, "--toggle", "graph_reuse,fork", "--out", tmp_path / "a")
    assert status == 0 and "flags: --preset best" in out and "device: embedded" in err
    assert "1 speedup measured, " in err and "1 speedups" not in err, "best beside everything off"
    assert "refused here: 2 with the rest and 2 alone (fork=three_way, fork=any)" in " ".join(
        out.split()
    )
    assert "fork changes nothing while" not in out
    assert "python: wb.Engine.load(" in " ".join(out.strip().splitlines()[-2:])
    status, out, _ = call(*ask, "--toggle", "fork", "--all", "--out", tmp_path / "d")
    assert "fork=three_way, fork=any: fork changes nothing while streams=1" in out
    status, out, _ = call(*ask, "--toggle", "graph_reuse", "--out", tmp_path / "b", "-o", "csv")
    assert status == 0 and out.startswith("model,device,test,toggle,value,in_best,reading,speedup")
    for wrong in (
        ("--at-most", "soon"),
        ("--until", "2"),
        ("--toggle", "x"),
        ("--test", "tg0"),
    ):
        status, out, err = call(*ask[:5], *wrong, "--out", tmp_path / "c")
        assert status == 2 and out == "" and err.splitlines()[-1].startswith("error: ")
        assert not (tmp_path / "c").exists()
    assert stats.MIN_REPETITIONS == 5, "LEAST_ROUNDS of an advice is for this"
