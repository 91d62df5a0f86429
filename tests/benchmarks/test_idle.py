"""A comparison whose arms do the same work is refused, and no other is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import workbench as wb
from tests.contract.toggle_cases import cases
from tests.profiles import share
from workbench.answers.conclusions import effects
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.arms import IdleToggles, check_acting, make_arms
from workbench.benchmarks.compare.idle import why_same
from workbench.benchmarks.workload import Workload, acts, parse
from workbench.common.errors import DeviceError, WorkbenchError
from workbench.config import Toggles
from workbench.config.table import ROWS, Acts
from workbench.program.as_json import program_as_json
from workbench.program.commands import Launch

TESTS = [parse(name) for name in ("tg3", "pp24", "pp20+tg2@b3")]


SIZES = {"n_ctx": 768, "n_ubatch": 8, "n_seqs": 3, "n_kv_pad": 32, "unsafe": True}


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    """A device that honours most, and computes nothing."""
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="null", toggles="baseline", **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def able(tiny_model) -> Iterator[wb.Engine]:
    """A device that captures plans and launches ahead."""
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", toggles="baseline", **SIZES) as engine:
        yield engine


def issued(engine: wb.Engine, test: Workload) -> list:
    """The shapes of the steps of the test, and all that their programs say."""
    shapes = engine.rehearsal.from_empty(acts(test, engine.config.n_ubatch))
    programs = [p for shape in shapes for p in engine.programs_of([shape])]
    nodes = [c.node for p in programs for c in p.singly() if isinstance(c, Launch)]
    return [*shapes, *map(program_as_json, programs), *(repr(node.params) for node in nodes)]


def counted(engine: wb.Engine, test: Workload) -> dict[str, int]:
    """The counters of the test, but for times."""
    for _ in range(2):
        engine.reset()
        for act in acts(test, engine.config.n_ubatch):
            act(engine.cache) if callable(act) else engine.submit(act).wait()
    engine.synchronize()
    return {name: n for name, n in engine.counters.items() if not name.endswith("_ns")}


ONE_BY_ONE = [
    (name, str(value), str(test))
    for name, row in ROWS.items()
    for value in row.values
    for test in TESTS
    if value != row.off
]


@pytest.mark.parametrize(("name", "value", "test"), share(ONE_BY_ONE, every=4))
def test_what_is_refused_as_idle_is_the_same_and_what_is_not_differs(base, name, value, test):
    """With everything else off; a value that clashes with that, or that the device lacks, has no
    engine to look at."""
    test = parse(test)
    try:
        with base.variant({name: value}) as side:
            why = why_same(base, side, test)
            same = issued(base, test) == issued(side, test)
            if why:
                assert same
                with base.variant("baseline") as plain, base.variant({name: value}) as fresh:
                    assert counted(plain, test) == counted(fresh, test)
            else:
                outside = ROWS[name].acts
                assert not same or outside not in (Acts.PROGRAM, Acts.REQUESTS)
    except WorkbenchError as refusal:
        assert name in str(refusal)


def test_what_acts_in_larger_steps_is_idle_in_a_test_of_single_tokens(able):
    plans = Toggles(graph_reuse="set_rows", sync="packed_implicit", plans="ours")
    with able.variant(plans) as before, able.variant(plans.switched("plan_batch", "one")) as after:
        why = why_same(before, after, parse("tg3"))
        assert why.endswith("equal programs; plan_batch acts in steps of more than one token")
        assert not why_same(before, after, parse("pp24"))


# what does nothing in these tests, though all that it needs is there, and the reason
IDLE_HERE = {
    **dict.fromkeys(("copy_stream=own", "plan_warmup=0", "plan_evict=lru"),
                    "stand for the same here"),
    "fuse_bias=on": "fuse_bias needs a product with a bias in the model",
    "fork=three_way": "fork needs a step that forks elsewhere",
    "skip_gate=never": "skip_gate needs a step that one gate lets skip and the other does not",
    "branch_fusion=joined": "stand for the same here",
}  # fmt: skip


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_value_beside_what_it_needs_is_compared(able, case):
    """Each value of each toggle acts in some test, but for those that act on requests; so nothing
    real is refused."""
    tests = [*TESTS, parse("tg2@d150")]
    try:
        with able.variant(case.without) as before, able.variant(case.toggles) as after:
            reasons = [why_same(before, after, test) for test in tests]
    except DeviceError:  # no dependent launch, no matrix units
        assert case.name in ("pdl", "attn_kernel", "sync", "copy_stream")
        return
    if ROWS[case.name].acts == Acts.REQUESTS:
        assert all("acts where requests are served" in why for why in reasons)
        return
    expected = IDLE_HERE.get(str(case), "")
    assert all(reasons) == bool(expected) and expected in reasons[0], reasons


SAID = {
    "plan_scope=split,step": "plan_scope=step does what plan_scope=split does, so there is nothing "
    "to measure: plan_scope changes nothing while plans=off; give plans another value",
    "skip_gate=reference,always": "skip_gate changes nothing while skip_masked_kv=off",
    "fork=qkv,any": "fork changes nothing while streams=1",
    "lifetimes=visibility,serial,interleaved": "lifetimes=serial and lifetimes=interleaved do what",
    "validate=off,all": "validate changes nothing while streams=1",
    "plan_evict=auto,lru": "plan_evict changes nothing while plans=off",
    "plan_end=event,word": "plan_end changes nothing while launch_ahead=off",
    "slot_choice=longest_prefix,lowest_free": "slot_choice acts where requests are served",
    "defrag=off,cells": "use wb.serve_bench", "sampling=host,device": "use wb.serve_bench",
    "fuse_bias=off,on": "the steps of tg3 have equal programs; fuse_bias needs a product with a b",
    "kv_growth=step,geometric": "kv_growth needs a step whose cells are rounded up differently",
    "batch_sizes=exact,padded": "batch_sizes needs a step whose size is rounded up",
    "skip_masked_kv=off,tail": "skip_masked_kv needs a step that skip_gate lets skip",
    "step_wait=every,outputs": "step_wait needs a step that returns no logits",
    "fork=qkv | fork=any lifetimes=serial": "fork changes nothing while streams=1; give streams "
    "another value; lifetimes changes nothing while streams=1",
}  # fmt: skip


@pytest.mark.parametrize("spec", SAID)
def test_the_refusal_says_why_and_comes_before_the_measuring(base, spec, tmp_path, monkeypatch):
    steps = base.n_steps
    with pytest.raises(IdleToggles) as refused:
        wb.ab(base, spec, tests="tg3", out=tmp_path / "run")
    assert SAID[spec] in str(refused.value) and "\n" not in str(refused.value)
    assert base.n_steps == steps and not (tmp_path / "run").exists()


def test_what_the_table_knows_is_refused_without_an_engine(call, tmp_path):
    with pytest.raises(IdleToggles, match="while plans=off"):
        check_acting("plan_scope", make_arms("plan_scope", ["split", "step"], Toggles()))
    status, out, err = call("ab", "-m", tmp_path / "none.gguf", "--toggle", "plan_scope=split,step")
    assert status == 2 and "plan_scope changes nothing while plans=off" in err and not out


def test_the_command_refuses_as_the_function_does(call, tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    status, out, err = call("ab", "-m", path, "--toggle", "fuse_bias=off,on", "--device", "host")
    assert status == 2 and "fuse_bias needs a product with a bias in the model" in err and not out


def test_a_test_in_which_an_arm_is_idle_is_measured_and_said(engine):
    """A control: the same comparison acts in another test. An arm that is idle beside one that acts
    is measured, too."""
    how = {"rounds": 1, "smoke": True, "background": {"graph_reuse": "set_rows"}}
    found = wb.ab(engine, "streams=1,3", tests="tg2,pp4", **how)
    said = [line for line in found.verdict.splitlines() if line.startswith("pp4: 3 does what")]
    assert len(said) == 1 and "streams needs a step that forks" in said[0]
    assert "tg2: 3 does what" not in found.verdict and len(found.to_frame()) == 4
    verdicts = found.to_frame().set_index(["test", "label"])["verdict"]
    assert verdicts["pp4", "3"] == stats.SAME_WORK != verdicts["tg2", "3"]
    assert "pp4: streams 1 -> 3: same work" in found.verdict
    assert any("same work as streams=1: 3" in sentence for sentence in effects(found))
    plain = wb.ab(engine, "sync=per_copy,packed", tests="tg2", **how)
    assert "does what the baseline does" not in plain.verdict
