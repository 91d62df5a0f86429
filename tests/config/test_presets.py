"""Presets: what they are made of, how they are resolved, and that what is given beside one wins."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.clashes import clashing, spread
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError, UsageError
from workbench.config import FAMILIES, TogglePreset, Toggles
from workbench.config.presets import best_set, best_sets, fixed_presets, preset_names, preset_words
from workbench.engine.choose import resolve
from workbench.program.capabilities import Capabilities

FUSIONS = Toggles.members("fuse")
QUICK = settings(max_examples=40, deadline=None)


# a family as a field ------------------------------------------------------------------------------


def test_a_family_can_be_given_like_a_toggle():
    assert wb.Toggles(fuse="on") == Toggles().switched("fuse", "on")
    assert wb.Toggles(fuse="on").fuse == "on" and wb.Toggles().fuse == "off"
    assert wb.Toggles(fuse_qkv="on").fuse == "mixed"
    with pytest.raises(UsageError, match="toggle fuse='maybe' does not exist; choose one of off"):
        Toggles(fuse="maybe")


def test_what_is_given_itself_wins_over_its_family_in_replace_too():
    but_one = Toggles().switched("fuse", "on").switched("fuse_qkv", "off")
    assert Toggles(fuse="on", fuse_qkv="off") == but_one
    assert dataclasses.replace(Toggles(), fuse="on", fuse_qkv="off") == but_one
    assert dataclasses.replace(but_one, fuse="on") == Toggles(fuse="on")
    assert dataclasses.replace(but_one, pdl="on").fuse_qkv == "off"
    assert dataclasses.replace(Toggles(fuse="on"), fuse="off", fuse_glu="on") == Toggles(
        fuse_glu="on"
    )


@given(
    family=st.sampled_from(["off", "on", None]),
    own=st.dictionaries(st.sampled_from(FUSIONS), st.sampled_from(["off", "on"])),
    before=st.dictionaries(st.sampled_from(FUSIONS), st.sampled_from(["off", "on"])),
)
@QUICK
def test_any_mix_of_a_family_and_its_members(family, own, before):
    start = Toggles(**before)
    wanted = start.to_dict() | (dict.fromkeys(FUSIONS, family) if family else {}) | own
    changed = own | ({"fuse": family} if family else {})
    assert dataclasses.replace(start, **changed).to_dict() == wanted
    assert Toggles.preset("baseline", **changed) == dataclasses.replace(Toggles(), **changed)


def test_toggles_are_plain_and_can_be_kept():
    toggles = Toggles(fuse="on")
    assert {type(v) for v in toggles.to_dict().values()} == {str}
    assert json.loads(json.dumps(toggles.to_dict())) == toggles.to_dict()
    assert pickle.loads(pickle.dumps(toggles)) == toggles
    assert Toggles(**toggles.to_dict()) == toggles and hash(toggles) == hash(Toggles(fuse="on"))
    assert str(toggles) == "fuse=on" and str(Toggles()) == "everything off"
    assert repr(Toggles(sync="packed", fuse="on")) == "Toggles(sync='packed', fuse='on')"
    mixed = Toggles(fuse="on", fuse_glu="off", pdl="on")
    assert eval(repr(mixed)) == mixed and repr(Toggles()) == "Toggles()"


# presets ------------------------------------------------------------------------------------------


def test_the_baseline_is_everything_off_and_every_fixed_preset_is_legal():
    assert Toggles.preset("baseline") == Toggles()
    assert preset_names()[:2] == ["baseline", "best"]
    for name, values in fixed_presets().items():
        toggles = Toggles.preset(name)
        assert isinstance(toggles, Toggles) and values.about
        assert toggles.changed().items() >= {k: v for k, v in values.items() if k != "fuse"}.items()


def test_llama_cpp_s_history_is_in_order():
    at = {name.partition("@")[2]: Toggles.preset(name) for name in preset_names() if "@" in name}
    assert list(at) == sorted(at) and at["2024-06"].graph_reuse == "rebuild"
    assert all(t.graph_reuse == "set_rows" for date, t in at.items() if date > "2025")
    assert {d: t.sync for d, t in at.items() if t.sync != "per_copy"} == {
        "2026-06": "copy_boundary"
    }
    assert [t.fuse_glu for d, t in at.items()] == ["off", "off", "on", "on", "on"]
    assert all(t.step_wait == "outputs" for t in at.values())


def test_an_unknown_preset_is_refused_with_the_names():
    for ask in (Toggles.preset, TogglePreset):
        with pytest.raises(UsageError, match="preset 'llama' does not exist; choose one of base"):
            ask("llama")


def test_a_change_beside_a_preset_changes_that_toggle_only():
    made = Toggles.preset("llama.cpp@2026-06", fuse_glu="off")
    assert isinstance(made, Toggles)
    same = Toggles.preset("llama.cpp@2026-06").to_dict()
    assert made.to_dict() == same | {"fuse_glu": "off"}


def test_a_clash_names_both_and_whose_they_are(monkeypatch):
    monkeypatch.setitem(fixed_presets()["llama.cpp@2026-06"], "copy_stream", "compute")
    with pytest.raises(UsageError) as refused:
        Toggles.preset("llama.cpp@2026-06", sync="event_guarded")
    assert str(refused.value).startswith(
        "toggles sync=event_guarded and copy_stream=compute (of preset llama.cpp@2026-06) clash: "
    )


# best ---------------------------------------------------------------------------------------------


class Opened:
    """What `resolve` asks: a device of a kind with capabilities."""

    def __init__(self, device: str, able: Capabilities, n_seqs: int = 1):
        self.config = wb.EngineConfig(n_seqs=n_seqs)
        self.device, self.backend = device, open_backend()
        self.backend.capabilities = able
        self.backends = [open_backend(), self.backend]


GPU = Capabilities(
    asynchronous_copies=True, events=True, one_order=True, capture=True, n_streams=8,
    programmatic=True,
)  # fmt: skip


@pytest.mark.parametrize(("n_seqs", "wanted"), [(1, "one"), (2, "several"), (128, "several")])
def test_best_is_the_set_for_as_many_sequences_as_an_engine_has(n_seqs, wanted):
    opened = Opened("cuda", GPU, n_seqs)
    assert resolve("best", opened) == Toggles(**best_set("cuda", wanted).values)
    for n, of in ((1, "one"), (8, "several")):
        sized = TogglePreset("best").for_sequences(n)
        assert resolve(sized, opened) == Toggles(**best_set("cuda", of).values)
    assert sized != TogglePreset("best") and str(sized) == "best"
    assert sized.switched("sync", "per_copy").n_seqs == 8


def test_the_words_of_presets_name_every_set():
    words = preset_words()
    for kind, wanted, found in best_sets():
        (line,) = [w for w in words if w.startswith(f"best for {wanted} sequence") and
                   f" on {kind}: " in w]  # fmt: skip
        assert all(f"{name}={value}" in line for name, value in found.values.items())


def test_best_is_what_won_there_and_leaves_out_what_a_device_cannot():
    best = Toggles.preset("best")
    assert repr(best) == "Toggles.preset('best')" and best == TogglePreset("best")
    whole = resolve(best, Opened("cuda", GPU))
    assert whole == resolve(None, Opened("cuda", GPU)) == resolve("best", Opened("cuda", GPU))
    assert whole == Toggles(**best_set("cuda", "one").values)
    old = resolve(best, Opened("cuda", dataclasses.replace(GPU, programmatic=False)))
    assert old == dataclasses.replace(whole, pdl="off")
    plain = dataclasses.replace(GPU, asynchronous_copies=False, events=False)
    assert resolve(best, Opened("cuda", plain)).sync == "per_copy"
    assert resolve(best, Opened("null", GPU)) == Toggles()  # nothing is known to win there


@given(changes=st.fixed_dictionaries(
    {}, optional={n: st.sampled_from(Toggles.values(n)) for n in (*FAMILIES, *Toggles.names())}
))  # fmt: skip
@QUICK
def test_what_is_given_beside_best_stays_even_where_it_is_the_baseline_s(changes):
    """What won together goes as a whole where a change rules it out. Without a launch ahead there
    is no word of its end."""
    alone = best_set("cuda", "one").alone
    clash = clashing(alone, changes)
    try:
        found = resolve(Toggles.preset("best", **changes), Opened("cuda", GPU))
    except UsageError:
        assert clash
        return
    whole, rest = resolve("best", Opened("cuda", GPU)), Toggles(**alone)
    if changes.get("launch_ahead") == "off":
        whole = dataclasses.replace(whole, launch_ahead="off", plan_end="event")
    assert found.to_dict() in [made.to_dict() | spread(changes) for made in (whole, rest)]
    assert not clash


# an engine ----------------------------------------------------------------------------------------


def test_an_engine_has_best_unless_told_otherwise(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", n_ctx=64) as engine:
        assert engine.preset == "best for one sequence"
        assert engine.toggles == Toggles(**best_set("embedded", "one").values)
        assert engine.chosen.startswith("best for one sequence on embedded: sync=")
        with engine.variant("baseline") as plain:
            assert plain.toggles == Toggles() and plain.preset == "baseline"
            assert plain.chosen == "baseline on embedded: everything off"
        with engine.variant(Toggles.preset("best", sync="per_copy")) as one:
            assert one.sync_mode == "per_copy" and one.toggles.graph_reuse == "set_rows"
            assert one.chosen.startswith("best for one sequence with sync=per_copy on embedded: ")
        with wb.Engine.load(path, device="embedded", n_ctx=64, n_seqs=2) as two:
            assert two.preset == "best for several sequences"
            assert two.toggles == Toggles(**best_set("embedded", "several").values)
        with engine.variant(Toggles(pdl="off")) as given_:
            assert given_.preset == "as given"
        with pytest.raises(DeviceError, match=r"use pdl=off; pdl=on is of preset llama\.cpp"):
            engine.variant("llama.cpp@2026-07")
