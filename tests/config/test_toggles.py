"""Toggles and EngineConfig: everything off by default, and refusals that say what to do."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.config import (
    EXACT,
    ROUNDING,
    EngineConfig,
    TogglePreset,
    Toggles,
    asked_toggles,
    folded,
    parse_changes,
)
from workbench.config.toggles import names_that_differ
from workbench.engine.load import config_of

FUSIONS = Toggles.members("fuse")
# the baseline, and whether a toggle may change the last bits: scheduling is exact; what another
# kernel computes may round differently
BASELINE_EXACT = """
    sync=per_copy copy_stream=auto host_source=pinned n_copies=1 input_order=graph step_wait=every
    results=copy graph_reuse=rebuild redo_build=off redo_split=off redo_layout=off redo_lower=off
    redo_bind=off skip_masked_kv=off skip_gate=reference sampling=host pdl=off plans=off
    plan_scope=split plan_warmup=auto plan_evict=auto plan_batch=any launch_ahead=off plan_end=event
    streams=1 fork=qkv lifetimes=visibility validate=off"""
BASELINE_ROUNDING = """
    kv_growth=step kv_cache=unified slot_choice=longest_prefix defrag=off batch_sizes=exact
    attn_kernel=auto kv_parts=off activations=q8 defer_norm=off branch_fusion=auto
    fuse_norm_mul=off fuse_norm_quantize=off fuse_add_norm=off fuse_bias=off fuse_qkv=off
    fuse_rope_store=off fuse_glu=off fuse_epilogue_quantize=off fuse_product_norm=off"""


def test_the_baseline_and_what_may_change_the_last_bits():
    for kind, listed in ((EXACT, BASELINE_EXACT), (ROUNDING, BASELINE_ROUNDING)):
        found = {n: v for n, v in Toggles().to_dict().items() if Toggles.answer_class(n) == kind}
        assert found == dict(pair.split("=") for pair in listed.split())
    assert Toggles.answer_class("fuse") == ROUNDING
    assert Toggles.preset("baseline") == Toggles()


@pytest.mark.parametrize(("made", "fields", "says"), [
    (Toggles, {"sync": "sometimes"}, "sync='sometimes' does not exist; choose one of per_copy"),
    (Toggles, {"graph_reuse": ""}, "graph_reuse='' does not exist"),
    (Toggles, {"sync": "event_guarded", "copy_stream": "compute"},
     "sync=event_guarded and copy_stream=compute clash"),
    (Toggles, {"redo_lower": "on"}, "graph_reuse=rebuild and redo_lower=on clash: every step does "
     "all of it; use graph_reuse=set_rows"),
    (Toggles, {"redo_bind": "on"}, "graph_reuse=rebuild and redo_bind=on clash"),
    (Toggles, {"fuse": "maybe"}, "toggle fuse='maybe' does not exist; choose one of off, on"),
    (Toggles, {"pdl": 3}, "pdl=3 does not exist; choose one of off, on"),
    (Toggles, {"streams": True}, "streams=True does not exist; choose one of 1, 2"),
    (Toggles, {"snc": "auto"}, "toggle 'snc' does not exist; did you mean sync?"),
    (Toggles, {"n_ubatch": 8}, "n_ubatch is a setting and no toggle; give it beside the toggles"),
    (Toggles, {"preset": "best"}, "preset is no toggle; give its name alone, as background='best'"),
    (Toggles, {"sync": "packed pdl=on"}, "toggle sync has 'pdl=on' among its values; one toggle"),
    (Toggles, {"sync": "copyboundary"}, "does not exist; did you mean copy_boundary? choose one"),
    (Toggles, {"best": "on"}, "but a preset of this name does: Toggles.preset('best')"),
    (EngineConfig, {"devise": "host"}, "setting 'devise' does not exist; did you mean device?"),
    (EngineConfig, {"device": "hots"}, "device 'hots' does not exist; did you mean host?"),
    (Toggles.preset, {"name": "bset"}, "preset 'bset' does not exist; did you mean best?"),
    (Toggles.preset, {"name": "sync"}, "a toggle is written sync=auto"),
    (config_of, {"fields": {"n_ctxx": 1}}, "setting 'n_ctxx' does not exist; did you mean n_ctx?"),
    (config_of, {"fields": {"toggle": 1}}, "setting 'toggle' does not exist; did you mean toggles"),
    (config_of, {"fields": {"sync": "auto"}}, "sync is a toggle and no setting; give toggles={'sy"),
    (asked_toggles, {"given": 3, "start": Toggles()}, "toggles 3 are none; give Toggles("),
    (asked_toggles, {"given": "sync", "start": Toggles()}, "toggle sync has no value; write sync="),
    *((EngineConfig, {name: value}, name) for name, value in {
        "device": "tpu", "n_ctx": -1, "n_ubatch": -1, "n_kv_pad": 0, "threads": -2,
        "cache_type_k": "q4_0", "cache_type_v": "q4_0"}.items()),
])  # fmt: skip
def test_what_is_impossible_is_refused_in_one_line(made, fields, says):
    with pytest.raises(UsageError) as refused:
        made(**fields)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("given", "written"), [
    ("sync=packed", "Toggles(sync='packed')"),
    ("sync=packed, pdl=on", "Toggles(sync='packed', pdl='on')"),
    ({"sync": "packed"}, "Toggles(**{'sync': 'packed'})"),
    ("best", "Toggles.preset('best')"),
])  # fmt: skip
def test_toggles_without_keywords_say_what_to_write(given, written):
    with pytest.raises(UsageError) as refused:
        Toggles(given)
    assert str(refused.value) == f"Toggles takes keywords; write {written}"


def test_an_unknown_toggle_is_a_short_line_without_every_name():
    for name, guess in {"snc": "did you mean sync? ", "ub": ""}.items():
        with pytest.raises(UsageError) as refused:
            Toggles(**{name: 1})
        line = f"toggle {name!r} does not exist; {guess}`workbench toggles` lists all"
        assert str(refused.value) == line


def test_numbers_and_booleans_are_the_toggles_words():
    assert Toggles(streams=3, pdl=True, n_copies=4) == Toggles(streams="3", pdl="on", n_copies="4")
    assert Toggles(fuse=True, plans=False) == Toggles(fuse="on")
    assert Toggles.preset("best", streams=3) == Toggles.preset("best", streams="3")
    assert Toggles().switched("streams", 3).to_dict()["streams"] == "3"


@pytest.mark.parametrize(("given", "made"), [
    (None, "baseline plans=ours"), ("best", "best"), ("best sync=packed", "best sync=packed"),
    ("sync=packed", "baseline plans=ours sync=packed"),
    ({"sync": "packed", "streams": 3}, "baseline plans=ours sync=packed streams=3"),
    ("sync=packed, fuse=on", "baseline plans=ours sync=packed fuse=on"),
])  # fmt: skip
def test_toggles_may_be_asked_for_in_words(given, made):
    """Changes are of where one starts; a preset named before them is where they start."""
    name, *changes = made.split()
    expected = TogglePreset(name, parse_changes(changes))
    assert asked_toggles(given, TogglePreset("baseline", {"plans": "ours"})) == expected
    if name == "baseline":
        assert asked_toggles(given, Toggles(plans="ours")) == expected.toggles()
    assert asked_toggles(expected, Toggles()) == expected


# families -----------------------------------------------------------------------------------------


def test_a_family_stands_for_its_toggles_and_is_folded_for_reading():
    assert [name for name in Toggles.names() if name.startswith("fuse_")] == FUSIONS
    assert Toggles.members("fuse_qkv") == ["fuse_qkv"] and Toggles.values("fuse") == ["off", "on"]
    every = Toggles(fuse="on")
    assert every == Toggles().switched("fuse", "on") and every.switched("fuse", "off") == Toggles()
    found = every.fuse, Toggles(fuse_glu="on").value_of("fuse"), Toggles().fuse
    assert found == ("on", "mixed", "off")
    shown = folded(every.to_dict())
    assert shown["fuse"] == "on" and not any(n.startswith("fuse_") for n in shown)
    assert shown["sync"] == "per_copy" and len(shown) == len(Toggles.names()) - 8 - 4
    mixed = Toggles(fuse_bias="on").to_dict()
    assert folded(mixed) == {n: v for n, v in mixed.items() if n[:5] != "redo_"} | {"redo": "off"}
    assert folded({"fuse_glu": "on"}) == {"fuse_glu": "on"}, "a part is not the family"
    assert str(every) == "fuse=on" and str(Toggles()) == "everything off"
    best = Toggles.preset("best")
    assert repr(best) == "Toggles.preset('best')" and best == TogglePreset("best")


@given(
    family=st.sampled_from(["off", "on", None]),
    own=st.dictionaries(st.sampled_from(FUSIONS), st.sampled_from(["off", "on"])),
    before=st.dictionaries(st.sampled_from(FUSIONS), st.sampled_from(["off", "on"])),
)
@settings(max_examples=examples(100))
def test_any_mix_of_a_family_and_its_members(family, own, before):
    """What is given itself wins over its family. And toggles are plain and can be kept."""
    start = Toggles(**before)
    wanted = start.to_dict() | (dict.fromkeys(FUSIONS, family) if family else {}) | own
    changed = own | ({"fuse": family} if family else {})
    made = dataclasses.replace(start, **changed)
    assert made.to_dict() == wanted and {type(v) for v in wanted.values()} == {str}
    assert Toggles.preset("baseline", **changed) == dataclasses.replace(Toggles(), **changed)
    kept = pickle.loads(pickle.dumps(made)), Toggles(**json.loads(json.dumps(wanted)))
    for again in (*kept, eval(repr(made))):
        assert again == made and hash(again) == hash(made)


def test_a_family_is_named_once_only_where_its_members_agree_on_each_side():
    off, on = Toggles(fuse="off"), Toggles(fuse="on")
    first, *others = members = Toggles.members("fuse")
    assert names_that_differ(off, on) == ["fuse"]
    mixed, turned = off.changed_by({first: "on"}), on.changed_by({first: "off"})
    assert sorted(names_that_differ(mixed, turned)) == sorted(members)
    assert sorted(names_that_differ(mixed, on)) == sorted(others)
