"""What Jupyter sees, without a browser: the magic runs in an IPython shell, the panel's widgets are
driven by their values and clicks."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from enum import StrEnum
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import workbench as wb
from workbench import lab
from workbench.bench.stats import TOO_FEW
from workbench.config import EXACT, FAMILIES, ROUNDING, Toggles, _toggle
from workbench.engine.engine import Engine
from workbench.errors import UsageError
from workbench.lab import pair, widgets
from workbench.lab.magics import MOST_DRAWN, CellTrace

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128) as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    loaded.reset()
    yield loaded
    assert loaded.recorder is None, "whatever happened, tracing has ended"


@pytest.fixture
def shell(engine, monkeypatch, tmp_path):
    """An IPython shell as a kernel has one, with the extension loaded and `eng` in it."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell replaces it
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    made.run_line_magic("colors", "nocolor")
    made.extension_manager.load_extension("workbench")
    made.user_ns["eng"] = engine
    yield made
    made.extension_manager.unload_extension("workbench")
    made.reset(new_session=False)
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, cell: str) -> SimpleNamespace:
    """Runs a cell; error: what it raised or None; pictures: PNGs shown; out, err: text."""
    with capture_output() as captured:
        result = shell.run_cell(cell, store_history=False)
    return SimpleNamespace(
        error=result.error_before_exec or result.error_in_exec,
        value=result.result,
        pictures=[o.data["image/png"] for o in captured.outputs if "image/png" in o.data],
        out=captured.stdout,
        err=captured.stderr,
    )


def numbers(trace: CellTrace) -> list[int]:
    return list(trace.summary().index)


# the magic ---------------------------------------------------------------------------------------


def test_the_extension_adds_the_magic_and_takes_it_away(shell):
    assert "wb_profile" in shell.magics_manager.magics["cell"]
    shell.extension_manager.unload_extension("workbench")
    assert "wb_profile" not in shell.magics_manager.magics["cell"]
    shell.extension_manager.load_extension("workbench")
    assert "wb_profile" in shell.magics_manager.magics["cell"]


@pytest.mark.parametrize("statement", ["import workbench", "import workbench as w; w.lab"])
def test_the_package_loads_nothing_of_jupyter_until_it_is_asked_to(statement):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"IPython", "ipywidgets", "pandas", "matplotlib", "scipy", "numba", "cupy"}
    assert not heavy & {name.split(".")[0] for name in loaded.stdout.split()}


def test_a_cell_is_traced_drawn_bound_and_written(shell, engine, tmp_path):
    out = tmp_path / "t.pftrace.gz"
    first = engine.n_steps
    shown = run(
        shell,
        f"%%wb_profile eng --as trace --out {out}\n"
        "for token in (1, 2):\n    logits = eng.step([token])",
    )
    trace = shell.user_ns["trace"]
    assert shown.error is None and [p[:4] for p in shown.pictures] == [PNG]
    assert trace.engines == {"eng": [first, first + 1]} and numbers(trace) == trace.engines["eng"]
    counts = engine.program(n_past=1).counts()
    for name in ("waits", "copies", "launches"):
        assert (trace.summary()[name] == counts[name]).all(), name
    assert out.stat().st_size > 0 and f"wrote {out}" in shown.out
    assert "2 steps of eng" in shown.out and "not for throughput" in shown.out
    assert shell.user_ns["logits"].shape == (1, engine.model.n_vocab)


def test_a_cell_does_what_it_does_without_the_magic(shell):
    with_magic, without = run(shell, "%%wb_profile\n6 * 7"), run(shell, "6 * 7")
    assert with_magic.value == without.value == 42
    assert run(shell, "%%wb_profile\n6 * 7;").value is None
    assert run(shell, "%%wb_profile\nx = 5\nnames = %who_ls").error is None
    assert shell.user_ns["x"] == 5 and "x" in shell.user_ns["names"], "magics within are magics"
    nothing = run(shell, "%%wb_profile --as trace\npass")
    assert "no engine that was traced made a step" in nothing.out and not nothing.pictures
    assert len(shell.user_ns["trace"].timeline) == 0
    assert isinstance(run(shell, "%%wb_profile\nx = = 5").error, SyntaxError)


def test_a_window_bounds_what_is_kept(shell, engine):
    first = engine.n_steps
    run(
        shell,
        "%%wb_profile --window 2,3 --as t\nlogits = [eng.step([i]) for i in range(1, 8)]",
    )
    assert numbers(shell.user_ns["t"]) == [first + 2, first + 3, first + 4]


def test_many_steps_are_drawn_by_a_typical_one(shell):
    run(shell, "%%wb_profile --as t\nlogits = [eng.step([i]) for i in range(1, 20)]")
    trace = shell.user_ns["t"]
    times = trace.summary()["step_us"]
    [drawn] = trace._drawn(trace.to_frame(), trace.engines["eng"])
    assert len(times) == 19 > MOST_DRAWN
    nearest = (times - times.median()).abs().min()
    assert abs(times[drawn] - times.median()) == pytest.approx(nearest)


def test_without_names_every_engine_is_traced_also_those_made_in_the_cell(shell, engine):
    shown = run(
        shell,
        "%%wb_profile --as t\n"
        "kept = [eng.variant(eng.toggles.switched('graph_reuse', 'set_rows'))]\n"
        "with eng.variant(eng.toggles.switched('sync', 'copy_boundary')) as boundary:\n"
        "    for token in (1, 2):\n"
        "        for e in (eng, boundary, kept[0]):\n"
        "            logits = e.step([token])\n"
        "del e",
    )
    shell.user_ns["kept"][0].close()
    trace = shell.user_ns["t"]
    unnamed = next(name for name in trace.engines if name not in ("eng", "boundary"))
    assert trace.engines == {"eng": [0, 3], "boundary": [1, 4], unnamed: [2, 5]}
    assert shown.error is None and len(shown.pictures) == 3
    steps = trace.to_frame().query("category == 'step'")
    order = ["eng", "boundary", unnamed] * 2
    assert list(steps["name"]) == [f"{name}: step {n}" for n, name in enumerate(order)]
    assert numbers(trace) == list(range(6))
    waits = trace.summary()["waits"]
    assert waits[0] == waits[2] > waits[1], "each step kept its own engine's commands"
    # the next variant is made as ever: the constructor's wrapper is gone
    with engine.variant(engine.toggles) as other:
        assert other.recorder is None


def test_named_engines_alone_are_traced(shell, engine):
    cell = "%%wb_profile eng --as t\nlogits = eng.step([1]); logits = other.step([1])"
    with engine.variant(engine.toggles) as other:
        shell.user_ns["other"] = other
        run(shell, cell)
        assert list(shell.user_ns["t"].engines) == ["eng"]
        shown = run(shell, cell.replace("eng --as", "eng other --as"))
        assert list(shell.user_ns["t"].engines) == ["eng", "other"]
        assert len(shown.pictures) == 1, "two are drawn as a pair, on one time axis"


def test_a_failing_cell_keeps_its_trace_and_its_exception(shell, tmp_path):
    out = tmp_path / "t.pftrace"
    shown = run(
        shell,
        f"%%wb_profile --as t --out {out}\nlogits = eng.step([1])\nlogits = eng.step([10**6])\n",
    )
    assert isinstance(shown.error, UsageError)
    # the traceback names the cell's line, and none of the magic's own frames
    assert "eng.step([10**6])" in shown.out and "magics.py" not in shown.out
    assert shown.out.count("Cell In[1], line") == 2, "the magic's line, and the cell's"
    trace = shell.user_ns["t"]
    assert trace.failed and len(trace.engines["eng"]) == 2, "the step that failed is there, too"
    assert len(trace.to_frame().query("lane != 'host'")) > 0
    assert shown.pictures and out.stat().st_size > 0 and "the cell failed after" in shown.out


def test_an_interrupted_cell_keeps_its_trace_and_the_engine_goes_on(shell, engine, monkeypatch):
    right = engine.step([1]).copy()
    engine.reset()
    look_ahead = engine._batches.look_ahead
    calls = iter(range(100))

    def pressed(outputs):  # Ctrl-C while the third step is under way on the device
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        look_ahead(outputs)

    monkeypatch.setattr(engine._batches, "look_ahead", pressed)
    shown = run(shell, "%%wb_profile --as t\nfor i in range(1, 50):\n    logits = eng.step([i])")
    assert isinstance(shown.error, KeyboardInterrupt)
    assert len(shell.user_ns["t"].engines["eng"]) == 3 and shown.pictures
    engine.reset()
    assert np.array_equal(engine.step([1]), right)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nobody", "nobody is no engine; there is eng"),
        ("--window 3", "--window '3' holds no step"),
        ("--window 0,0", "--window '0,0' holds no step"),
        ("--window -1,2", "expected one argument"),
        ("--as 3x", "--as '3x' cannot be bound"),
        ("--as class", "--as 'class' cannot be bound"),
        ("--out nowhere/t.pftrace", "has no directory nowhere"),
        ("--out /tmp", "--out /tmp is a directory"),
        ("--collector nsys", "invalid choice: 'nsys'"),
        ("--slow", "unrecognized arguments: --slow"),
    ],
)
def test_a_wrong_line_is_refused_in_one_line_before_the_cell_runs(shell, line, says):
    shown = run(shell, f"%%wb_profile {line}\nran = True")
    assert shown.error is not None and "ran" not in shell.user_ns
    said = (shown.err + shown.out).strip()
    assert says in said and "Traceback" not in said


def test_a_closed_engine_is_refused_by_name_and_else_passed_over(shell, engine):
    shell.user_ns["gone"] = gone = engine.variant(engine.toggles)
    gone.close()
    shown = run(shell, "%%wb_profile gone\nran = True")
    assert "gone is closed; there is eng" in shown.err and "ran" not in shell.user_ns
    assert run(shell, "%%wb_profile --as t\nlogits = eng.step([1])").error is None
    assert list(shell.user_ns["t"].engines) == ["eng"]


def test_a_collector_that_cannot_be_used_is_named_with_what_stands_in_for_it(shell):
    shown = run(shell, "%%wb_profile --collector cupti --as t\nlogits = eng.step([1])")
    trace = shell.user_ns["t"]
    assert shown.error is None and trace.note in shown.out
    assert trace.profiles["eng"].collector == "events"
    assert trace.profiles["eng"].fallback and trace.profiles["eng"].fallback in trace.note
    page = trace._repr_html_()
    assert "<table>" in page and "1 step of eng" in page and "device spans from events" in page


def test_a_disk_that_fails_is_said_in_one_line(shell, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.trace.perfetto.write", full)
    out = tmp_path / "t.pftrace"
    shown = run(shell, f"%%wb_profile --as t --out {out}\nlogits = eng.step([1])")
    assert shown.error is not None and f"--out {out} cannot be written" in shown.err
    assert shown.pictures and len(shell.user_ns["t"].engines["eng"]) == 1, "all else is there"
    failing = run(shell, f"%%wb_profile --as t --out {out}\nlogits = eng.step([1])\n1 / 0")
    assert isinstance(failing.error, ZeroDivisionError) and "cannot be written" in failing.err


def test_a_traced_engine_is_not_timed(shell):
    shown = run(shell, "%%wb_profile\nimport workbench as wb\nwb.ab(eng, 'sync', ['packed'])")
    assert isinstance(shown.error, UsageError) and "recorder" in str(shown.error)


# the panel ---------------------------------------------------------------------------------------


@pytest.fixture
def variants(monkeypatch):
    """Every engine made while the test runs."""
    made = []
    make = Engine.__init__

    def remembered(self, *args):
        make(self, *args)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", remembered)
    return made


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


@dataclasses.dataclass(frozen=True)
class More(Toggles):
    warp: str = _toggle(Speed, Speed.SLOW, "nowhere.py", EXACT)
    fuse_all: str = _toggle(wb.config.Switch, wb.config.Switch.OFF, "nowhere.py", ROUNDING)


def test_a_new_toggle_appears_by_itself():
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


def test_run_times_both_sides_and_draws_them(engine, variants):
    engine.prefill([1, 17, 300])
    before = engine.n_steps, engine.n_past
    panel = wb.lab.panel(engine, "tg4", rounds=3)
    panel.form.choices["sync"].value = "copy_boundary"
    assert panel.code.value == "<code>wb.Toggles(sync=&quot;copy_boundary&quot;)</code>"
    assert panel.picture.layout.display == "none"
    panel.button.click()
    assert panel.message.value == "" and panel.picture.value[:4] == PNG
    assert panel.picture.layout.display is None
    found = panel.result
    assert (found.baseline, found.toggled) == (Toggles(), Toggles(sync="copy_boundary"))
    assert found.labels == ("every toggle off", "sync=copy_boundary")
    assert found.speedup.n == 3 and found.verdict == TOO_FEW
    assert found.answer.kind == EXACT and found.answer.holds
    assert found.speedup.value == pytest.approx(found.tps[1] / found.tps[0])
    waits = [trace.summary()["waits"].max() for trace in (found.before, found.after)]
    assert waits[0] > waits[1], "the traces are of either side"
    assert "not of a GPU" in found.line and found.line.split(" ->")[0] in panel.speedup.value
    assert len(variants) == 3 and all(map(is_closed, variants))
    assert not is_closed(engine) and (engine.n_steps, engine.n_past) == before
    first = panel.picture.value
    panel.form.families["fuse"].value = "on"
    panel.button.click()
    assert panel.picture.value != first and panel.result.answer.kind == ROUNDING
    assert (panel.button.disabled, panel.button.description) == (False, "Run")


def test_the_panel_begins_at_the_engines_toggles_and_against_any_baseline(engine):
    with engine.variant(Toggles(graph_reuse="set_rows")) as kept:
        panel = wb.lab.panel(kept, "pp4", rounds=1, baseline=kept.toggles)
        panel.form.choices["step_wait"].value = "outputs"
        panel.button.click()
        assert panel.result.baseline == kept.toggles
        assert panel.result.toggled == Toggles(graph_reuse="set_rows", step_wait="outputs")
        assert panel.result.before.summary()["n_tokens"].tolist() == [4]


def test_toggles_that_clash_are_said_at_once_and_mended_by_the_next_choice(engine, variants):
    panel = wb.lab.panel(engine, "tg4")
    panel.form.choices["sync"].value = "event_guarded"
    panel.form.choices["copy_stream"].value = "compute"
    with pytest.raises(UsageError) as clash:
        Toggles(sync="event_guarded", copy_stream="compute")
    assert str(clash.value) in panel.message.value
    panel.button.click()
    assert str(clash.value) in panel.message.value and panel.result is None and not variants
    panel.form.choices["copy_stream"].value = "own"
    assert panel.message.value == "" and "event_guarded" in panel.code.value


def test_what_the_device_cannot_honour_is_one_line_and_the_last_result_stays(engine, variants):
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    panel.button.click()
    last = panel.result
    assert last is not None
    panel.form.choices["pdl"].value = "on"
    panel.button.click()
    assert "pdl" in panel.message.value and "\n" not in panel.message.value
    assert panel.result is last and not panel.button.disabled
    assert all(map(is_closed, variants)) and not is_closed(engine)


def test_an_interrupt_of_a_run_closes_its_variants(engine, variants, monkeypatch):
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    monkeypatch.setattr(pair, "run", lambda *_: signal.raise_signal(signal.SIGINT))
    panel.button.click()
    assert "interrupted" in panel.message.value and not panel.button.disabled
    assert len(variants) == 3 and all(map(is_closed, variants)) and not is_closed(engine)


def test_an_unforeseen_error_is_not_hidden_and_leaves_the_panel_usable(engine, monkeypatch):
    panel = wb.lab.panel(engine, "tg4")
    monkeypatch.setattr(pair, "compare", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        panel._run(panel.button)
    assert not panel.button.disabled


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
    monkeypatch.delitem(sys.modules, "workbench.lab.widgets")
    with pytest.raises(UsageError, match=r"pip install 'workbench\[lab\]'"):
        wb.lab.panel(engine)


def test_toggles_are_said_by_what_is_not_off():
    assert lab.said(Toggles()) == "every toggle off"
    assert lab.said(Toggles(sync="packed").switched("fuse", "on")) == "sync=packed, fuse=on"
    one = Toggles(fuse_glu="on")
    assert lab.said(one) == "fuse_glu=on"
    for toggles in (Toggles(), one, Toggles(sync="packed", pdl="on").switched("fuse", "on")):
        assert eval(widgets.as_python(toggles)) == toggles


# HTML --------------------------------------------------------------------------------------------


def test_toggles_and_programs_show_themselves(engine):
    page = Toggles(sync="packed")._repr_html_()
    rows = {f"<td>{name}</td>" for name in Toggles.names()}
    assert all(row in page for row in rows) and page.count("<b>") == 1 and "<b>packed</b>" in page
    program = engine.program()
    shown = program._repr_html_()
    assert f"<code>{program.pattern(fold=True)}</code>" in shown and program.sync in shown
    assert all(f"{number} {what}" in shown for what, number in program.counts().items())
