"""Presets: what they are made of, how they are resolved, and that what is given beside one wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import workbench as wb
from data.measure.matrix import SETS
from data.measure.readme import best
from data.measure.recorded import Recorded
from tests.clashes import clashing, spread
from tests.profiles import examples
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError, UsageError
from workbench.config import FAMILIES, TogglePreset, Toggles, parse_changes
from workbench.config.presets import best_set, best_sets, fixed_presets, preset_names, preset_words
from workbench.engine.choose import resolve
from workbench.program.capabilities import Capabilities

GPU = Capabilities(True, True, True, True, 8, programmatic=True)


def on(device: str, n_seqs: int = 1, **able: Any) -> Any:
    """What `resolve` asks: a device of a kind with capabilities."""
    backend = open_backend()
    backend.capabilities = dataclasses.replace(GPU, **able)
    opened = type("Opened", (), {"config": wb.EngineConfig(n_seqs=n_seqs), "device": device})()
    opened.backend, opened.backends = backend, [open_backend(), backend]
    return opened


def test_every_fixed_preset_is_legal_and_history_is_in_order():
    assert preset_names()[:2] == ["baseline", "best"]
    at = {}
    for name, values in fixed_presets().items():
        toggles = at[name.partition("@")[2]] = Toggles.preset(name)
        assert values.about
        assert toggles.changed().items() >= {k: v for k, v in values.items() if k != "fuse"}.items()
    at = {date: toggles for date, toggles in at.items() if date}
    assert list(at) == sorted(at) and at["2024-06"].graph_reuse == "rebuild"
    assert all(t.graph_reuse == "set_rows" for date, t in at.items() if date > "2025")
    assert [d for d, t in at.items() if t.sync == "copy_boundary"] == ["2026-06"]
    assert [t.fuse_glu for t in at.values()] == ["off", "off", "on", "on", "on"]


def test_what_is_wrong_with_a_preset_is_told(monkeypatch):
    for ask in (Toggles.preset, TogglePreset):
        with pytest.raises(UsageError, match="preset 'llama' does not exist; choose one of base"):
            ask("llama")
    made = Toggles.preset("llama.cpp@2026-06", fuse_glu="off")
    assert made.to_dict() == Toggles.preset("llama.cpp@2026-06").to_dict() | {"fuse_glu": "off"}
    monkeypatch.setitem(fixed_presets()["llama.cpp@2026-06"], "copy_stream", "compute")
    whose = r"toggles sync=event_guarded and copy_stream=compute \(of preset llama.cpp@2026-06\)"
    with pytest.raises(UsageError, match=f"^{whose} clash: "):
        Toggles.preset("llama.cpp@2026-06", sync="event_guarded")


# best ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_seqs", "wanted"), [(1, "one"), (2, "several"), (128, "several")])
def test_best_is_the_set_for_as_many_sequences(n_seqs, wanted):
    assert resolve("best", on("cuda", n_seqs)) == Toggles(**best_set("cuda", wanted).values)
    for n, of in ((1, "one"), (8, "several")):
        sized = TogglePreset("best").for_sequences(n)
        assert resolve(sized, on("cuda", n_seqs)) == Toggles(**best_set("cuda", of).values)
    assert sized != TogglePreset("best") and str(sized) == "best"
    assert sized.switched("sync", "per_copy").n_seqs == 8
    for kind, size, found in best_sets():
        words = [w for w in preset_words() if w.startswith(f"best for {size} sequence")]
        (line,) = [w for w in words if f" on {kind}: " in w]
        assert all(f"{name}={value}" in line for name, value in found.values.items())


def test_best_leaves_out_what_a_device_cannot():
    whole = Toggles(**best_set("cuda", "one").values)
    assert resolve(None, on("cuda")) == resolve(Toggles.preset("best"), on("cuda")) == whole
    old = resolve("best", on("cuda", programmatic=False))
    assert old == dataclasses.replace(whole, pdl="off")
    plain = on("cuda", asynchronous_copies=False, events=False)
    assert resolve("best", plain).sync == "per_copy"
    assert resolve("best", on("null")) == Toggles()  # nothing is known to win there


@given(changes=st.fixed_dictionaries(
    {}, optional={n: st.sampled_from(Toggles.values(n)) for n in (*FAMILIES, *Toggles.names())}
))  # fmt: skip
@example(changes={"plans": "off", "launch_ahead": "off"})
@settings(max_examples=examples(100))
def test_what_is_given_beside_best_stays(changes):
    """Even where it is the baseline's. What won together goes as a whole where a change rules it
    out. Without a launch ahead there is no word of its end; without plans they have no scope."""
    alone = best_set("cuda", "one").alone
    clash = clashing(alone, changes)
    try:
        found = resolve(Toggles.preset("best", **changes), on("cuda"))
    except UsageError:
        assert clash
        return
    whole, rest = resolve("best", on("cuda")), Toggles(**alone)
    if changes.get("launch_ahead") == "off":
        whole = dataclasses.replace(whole, launch_ahead="off", plan_end="event")
    if changes.get("plans") == "off":
        whole = dataclasses.replace(whole, plan_scope="split")
    assert found.to_dict() in [made.to_dict() | spread(changes) for made in (whole, rest)]
    assert not clash


def test_an_engine_has_best_unless_told_otherwise(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="embedded", n_ctx=64) as engine:
        assert engine.preset == "best for one sequence"
        assert engine.toggles == Toggles(**best_set("embedded", "one").values)
        assert engine.chosen.startswith("best for one sequence on embedded: sync=")
        for asked, preset, chosen in (
            ("baseline", "baseline", "baseline on embedded: everything off"),
            (Toggles.preset("best", sync="per_copy"), "best for one sequence with sync=per_copy",
             "best for one sequence with sync=per_copy on embedded: "),
            (Toggles(pdl="off"), "as given", ""),
        ):  # fmt: skip
            with engine.variant(asked) as one:
                assert one.preset == preset and one.chosen.startswith(chosen)
                assert one.sync_mode == "per_copy"
        with pytest.raises(DeviceError, match=r"use pdl=off; pdl=on is of preset llama\.cpp"):
            engine.variant("llama.cpp@2026-07")
    with wb.Engine.load(path, device="embedded", n_ctx=64, n_seqs=2) as two:
        assert two.preset == "best for several sequences"
        assert two.toggles == Toggles(**best_set("embedded", "several").values)


# what won together: a device has it as a whole, or not at all -------------------------------------

WHOLE = parse_changes(SETS["embedded"][1])
ALONE = {"sync": "auto", "graph_reuse": "set_rows"}


@pytest.fixture
def won(monkeypatch):
    """A table in which a set has won on every kind of device."""

    def row(value: str, **more: Any) -> dict[str, Any]:
        return {"value": value, "by": "made up", "runs": []} | more

    rows = {name: row(value) for name, value in ALONE.items()}
    rows |= {name: row(value, alone=row(ALONE[name]) if name in ALONE else None)
             for name, value in WHOLE.items()}  # fmt: skip
    table = {kind: {"one": rows, "several": {}} for kind in ("cuda", "embedded", "host")}
    for module in ("workbench.config.presets", "data.measure.readme"):
        monkeypatch.setattr(f"{module}.best_rows", lambda: table)


def test_what_won_together_is_had_as_a_whole_or_not(tiny_model, won):
    """What is changed can rule the whole out. Then all of it goes, and what won one by one stands
    with the change."""
    path = tiny_model("tiny-llama", "Q8_0")
    for cannot in ({"device": "host"}, {"device": "embedded", "n_devices": 2}):
        with wb.Engine.load(path, **cannot) as engine:
            assert engine.toggles == Toggles(**ALONE)
    with wb.Engine.load(path, device="embedded") as engine:
        assert engine.toggles.changed() == {"graph_reuse": "set_rows"} | WHOLE
        for name, value, kept in (
            ("plans", "off", {}), ("sync", "per_copy", {}), ("n_copies", "4", {}),
            ("graph_reuse", "rebuild", {}), ("launch_ahead", "off", WHOLE),
            ("results", "copy", WHOLE), ("fuse", "on", WHOLE),
        ):  # fmt: skip
            asked = Toggles.preset("best", **{name: value})
            assert engine.resolve(asked) == Toggles(**ALONE | kept | {name: value})
        with pytest.raises(UsageError, match="plan_end=word and launch_ahead=off clash"):
            engine.variant(Toggles.preset("best", launch_ahead="off", plan_end="word"))


def test_the_page_says_what_stands_for_each_value_alone(won):
    found = {line.values["toggle"]: line.values for line in best(Recorded(Path("nowhere")))}
    assert found["`sync=packed_implicit`"]["alone"] == "`sync=auto`"
    assert found["`plans=ours`"]["alone"] == "`plans=off`"
    assert found["`graph_reuse=set_rows`"]["alone"] == ""
    assert best_set("cuda", "one").together == WHOLE
