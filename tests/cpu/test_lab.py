"""What Jupyter sees, without a browser: the panel's widgets, driven by their values and clicks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from enum import StrEnum

import pytest

import workbench as wb
from workbench import lab
from workbench.benchmarks.compare.stats import TOO_FEW, Band, Ratio
from workbench.common.errors import UsageError
from workbench.config import EXACT, FAMILIES, ROUNDING, Toggles
from workbench.config.table import ROWS
from workbench.engine.engine import OPENED, Engine
from workbench.jupyter import widgets


@pytest.mark.parametrize("statement", ["import workbench", "import workbench as w; w.lab"])
def test_the_package_loads_nothing_of_jupyter_until_it_is_asked_to(statement):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"IPython", "ipywidgets", "pandas", "matplotlib", "scipy", "numba", "cupy"}
    assert not heavy & {name.split(".")[0] for name in loaded.stdout.split()}


# the panel ---------------------------------------------------------------------------------------


@pytest.fixture
def variants():
    """Every engine made while the test runs."""
    made: list[Engine] = []
    with OPENED.told(made.append):
        yield made


def is_closed(engine: Engine) -> bool:
    return engine._loaded is None


def test_the_panel_has_a_choice_for_every_toggle_and_value(engine):
    form = wb.lab.panel(engine, "tg4").form
    assert list(form.choices) == Toggles.names() and list(form.families) == list(FAMILIES)
    for name, choice in form.choices.items():
        assert list(choice.options) == Toggles.values(name) and choice.description == name
        assert Toggles.answer_class(name) in choice.tooltip
    folded = [w for w in form.children if type(w).__name__ == "Accordion"]
    assert [a.selected_index for a in folded] == [None] * len(FAMILIES)
    inside = [c.description for a in folded for c in a.children[0].children]
    assert inside == [n for f in FAMILIES for n in Toggles.members(f)]
    assert form.toggles() == engine.toggles


class Speed(StrEnum):
    SLOW = "slow"
    FAST = "fast"


def test_a_new_toggle_appears_by_itself(monkeypatch):
    """A row of the table, and a field."""
    monkeypatch.setitem(ROWS, "warp", ROWS["plans"]._replace(values=Speed))
    monkeypatch.setitem(ROWS, "fuse_all", ROWS["fuse_qkv"])

    @dataclasses.dataclass(frozen=True)
    class More(Toggles):
        warp: str = "slow"
        fuse_all: str = Toggles.fuse_qkv

    changes = []
    form = widgets.ToggleForm(More(warp="fast"), lambda: changes.append(form.toggles()))
    assert list(form.choices["warp"].options) == ["slow", "fast"]
    form.choices["warp"].value = "slow"
    form.families["fuse"].value = "on"
    assert changes[-1] == More(warp="slow").switched("fuse", "on")
    assert changes[-1].value_of("fuse_all") == "on"


def test_a_family_sets_its_members_and_says_where_they_differ(engine):
    form = wb.lab.panel(engine, "tg4").form
    family, members = form.families["fuse"], Toggles.members("fuse")
    family.value = "on"
    assert form.toggles() == Toggles().switched("fuse", "on")
    form.choices[members[0]].value = "off"
    assert family.value == "mixed" == form.toggles().value_of("fuse")
    family.value = "off"
    assert form.toggles() == Toggles()
    family.value = "mixed"
    assert family.value == "off" and form.toggles() == Toggles(), "mixed cannot be chosen"


def clicked(panel: widgets.Panel) -> widgets.Panel:
    """The panel after a run."""
    panel.button.click()
    panel.wait()
    return panel


def test_run_times_both_sides_and_draws_them(engine, variants):
    engine.prefill([1, 17, 300])
    before = engine.n_steps, engine.n_past
    panel = wb.lab.panel(engine, "tg4", rounds=3)
    panel.form.choices["sync"].value = "copy_boundary"
    assert panel.code.value == "<code>wb.Toggles(sync=&quot;copy_boundary&quot;)</code>"
    assert panel.picture.layout.display == "none"
    clicked(panel)
    assert panel.message.value == "" and panel.picture.value[:4] == b"\x89PNG"
    assert panel.picture.layout.display is None
    found = panel.result
    assert (found.baseline, found.toggled) == (Toggles(), Toggles(sync="copy_boundary"))
    assert found.labels == ("sync=per_copy", "sync=copy_boundary")
    assert found.speedup.n == 3 and found.verdict == TOO_FEW and not found.stopped
    assert found.answer.kind == EXACT and found.answer.holds
    assert found.speedup.value == pytest.approx(found.tps[1] / found.tps[0])
    waits = [trace.summary()["waits"].max() for trace in found.traces]
    assert waits[0] > waits[1], "the traces are of either side"
    assert "not of a GPU" in found.line and found.line.split(" ->")[0] in panel.speedup.value
    noisy = found._replace(speedup=Ratio(1.1, 1.08, 1.12, 10), band=Band(0.75, 4 / 3))
    panel.result = noisy
    panel._mark()
    # a sentence of its own, or behind what a control that happens to exclude 1 has said
    assert "his machine cannot resolve less than 33 % here now" in panel.speedup.value
    assert len(variants) == 3 and all(map(is_closed, variants))
    assert not is_closed(engine) and (engine.n_steps, engine.n_past) == before
    first = panel.picture.value
    panel.form.families["fuse"].value = "on"
    clicked(panel)
    assert panel.picture.value != first and panel.result.answer.kind == ROUNDING
    assert (panel.button.disabled, panel.button.description) == (False, "Run")


def test_the_panel_begins_at_the_engines_toggles_and_against_any_baseline(engine):
    with engine.variant(Toggles(graph_reuse="set_rows")) as kept:
        panel = wb.lab.panel(kept, "pp4", rounds=1, baseline=kept.toggles)
        panel.form.choices["step_wait"].value = "outputs"
        clicked(panel)
        assert panel.result.baseline == kept.toggles
        assert panel.result.toggled == Toggles(graph_reuse="set_rows", step_wait="outputs")
        assert panel.result.traces[0].summary()["n_tokens"].tolist() == [4]


def test_toggles_that_clash_are_said_at_once_and_mended_by_the_next_choice(engine, variants):
    panel = wb.lab.panel(engine, "tg4")
    panel.form.choices["sync"].value = "event_guarded"
    panel.form.choices["copy_stream"].value = "compute"
    with pytest.raises(UsageError, match=r"event_guarded.*compute") as clash:
        Toggles(sync="event_guarded", copy_stream="compute")
    assert str(clash.value) in panel.code.value and panel.button.disabled
    clicked(panel)
    assert str(clash.value) in panel.code.value and panel.result is None and not variants
    panel.form.choices["copy_stream"].value = "own"
    assert "event_guarded" in panel.code.value and not panel.button.disabled


def test_what_races_or_the_device_cannot_honour_is_said_when_it_is_chosen(engine, variants):
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    last = clicked(panel).result
    panel.form.choices["sync"].value = "implicit"
    assert not panel.button.disabled
    panel.form.choices["copy_stream"].value = "own"
    assert "sync=implicit and copy_stream=own race" in panel.code.value and panel.button.disabled
    assert "<code>workbench check</code>" in panel.code.value and "`" not in panel.code.value
    panel.form.choices["copy_stream"].value = "auto"
    panel.form.choices["pdl"].value = "on"
    assert "pdl=on" in panel.code.value and "\n" not in panel.code.value and panel.button.disabled
    clicked(panel)
    assert panel.result is last
    assert all(map(is_closed, variants)) and not is_closed(engine)


def test_a_panel_that_could_never_run_is_refused(engine):
    for arguments, says in (
        ({"workload": "tg9999"}, "n_ctx"),
        ({"workload": "fast"}, "does not exist"),
        ({"rounds": 0}, "rounds=0"),
        ({"seed": -1}, "seed=-1"),
    ):
        with pytest.raises(UsageError, match=says):
            wb.lab.panel(engine, **({"workload": "tg4"} | arguments))
    closed = engine.variant(Toggles())
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        wb.lab.panel(closed, "tg4")


def test_without_ipywidgets_the_panel_says_what_to_install(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "workbench.jupyter.widgets")
    with pytest.raises(UsageError, match=r"pip install -e '.\[lab\]' in the checkout"):
        wb.lab.panel(engine)


def test_titles_name_what_differs_and_a_family_once():
    off, fused = Toggles(), Toggles().switched("fuse", "on")
    assert lab.differing(off, Toggles(sync="packed")) == ("sync=per_copy", "sync=packed")
    both = (fused, dataclasses.replace(fused, sync="packed"))
    assert lab.differing(*both) == ("sync=per_copy", "sync=packed"), "what both have is left out"
    assert lab.differing(off, fused) == ("fuse=off", "fuse=on")
    assert lab.differing(off, Toggles(fuse_glu="on")) == ("fuse_glu=off", "fuse_glu=on")
    assert lab.differing(fused, Toggles(fuse_glu="on"))[1].count("fuse_") == 8
    assert lab.differing(off, off) == ("the same toggles", "the same toggles")


def test_the_python_shown_makes_the_toggles():
    one = Toggles(fuse_glu="on")
    for toggles in (Toggles(), one, Toggles(sync="packed", pdl="on").switched("fuse", "on")):
        assert eval(widgets.as_python(toggles)) == toggles
    assert widgets.as_python(Toggles(sync="packed", fuse="on")) == (
        'wb.Toggles(sync="packed", fuse="on")'
    )
