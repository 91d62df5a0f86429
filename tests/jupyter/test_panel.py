"""The panel without a browser: its widgets, driven by their values and clicks. A run is in a thread
of its own: it can be stopped, and keeps others out."""

from __future__ import annotations

import signal
import sys
import threading
import types

import numpy as np
import pytest
from ipywidgets import Box

import workbench as wb
from workbench.benchmarks import workload
from workbench.benchmarks.compare.stats import TOO_FEW, Band, Ratio
from workbench.benchmarks.workload import take_sample
from workbench.common.errors import UsageError
from workbench.config import EXACT, FAMILIES, Toggles
from workbench.config.presets import preset_names
from workbench.config.table import PLANS, REUSED, THREADS, WAITS, thread_of
from workbench.engine import exclusive
from workbench.engine.engine import OPENED, Engine
from workbench.engine.slots import slots
from workbench.jupyter import interrupts, pair, widgets

ON_THIS = "the panel is measuring on this engine; press Stop or wait"


@pytest.fixture
def variants():
    """Every engine made while the test runs."""
    made: list[Engine] = []
    with OPENED.told(made.append):
        yield made


@pytest.fixture
def panel(engine):
    """`panel(rounds=1)`: one of four generated tokens."""
    return lambda test="tg4", **given: wb.lab.panel(engine, test, **({"rounds": 1} | given))


def chosen(panel: widgets.Panel, **values: str) -> widgets.Panel:
    """The panel once each of these is chosen; families by their names."""
    known = panel.form.families | panel.form.choices
    for name, value in values.items():
        known[name].value = value
    return panel


def clicked(panel: widgets.Panel) -> widgets.Panel:
    """The panel after a run."""
    panel.button.click()
    panel.wait()
    return panel


def is_closed(engine: Engine) -> bool:
    return "closed" in repr(engine)


def test_a_choice_for_every_toggle_and_family(engine, panel):
    form, fuse = panel().form, Toggles.members("fuse")
    assert list(form.choices) == Toggles.names() and list(form.families) == list(FAMILIES)
    for name, choice in form.choices.items():
        assert list(choice.options) == Toggles.values(name) and choice.description == name
    assert form.toggles() == engine.toggles
    family = form.families["fuse"]
    family.value = "on"
    assert form.toggles() == Toggles().switched("fuse", "on")
    form.choices[fuse[0]].value = "off"
    assert family.value == "mixed" == form.toggles().value_of("fuse")
    assert eval(widgets.as_python(form.toggles())) == form.toggles()
    family.value = "off"
    family.value = "mixed"
    assert family.value == "off" and form.toggles() == Toggles(), "mixed cannot be chosen"


@pytest.mark.parametrize(("refused", "said", "mended"), [
    ({"sync": "event_guarded", "copy_stream": "compute"},
     "toggles sync=event_guarded and copy_stream=compute clash", {"copy_stream": "own"}),
    ({"sync": "implicit", "copy_stream": "own"},
     "sync=implicit and copy_stream=own race", {"copy_stream": "auto"}),
    ({"pdl": "on"}, "pdl=on", {"pdl": "off"}),
])  # fmt: skip
def test_what_cannot_be_is_said_when_it_is_chosen(panel, variants, refused, said, mended):
    one = chosen(panel(), **refused)
    assert said in one.code.value and "color" in one.code.value and one.button.disabled
    assert "`" not in one.code.value and "\n" not in one.code.value
    clicked(one)
    assert one.result is None and said in one.code.value and all(map(is_closed, variants))
    chosen(one, **mended)
    assert "wb.Toggles(" in one.code.value and not one.button.disabled


def test_toggles_stand_by_thread_and_what_differs_is_marked(panel):
    """Under the thread of their room; the controls stand above the box that scrolls."""
    one = panel(baseline=Toggles(sync="packed"))
    form, headings = one.form, one.form.headings
    assert [*headings] == [*THREADS, ""] and "#17795" in headings[WAITS].value
    assert {thread_of(n) for n in ("sync", "results", "plans", "fuse_glu", "pdl", "redo_bind")} == {
        WAITS, PLANS, "", REUSED,
    }  # fmt: skip
    order = form.children
    place = {c: i for i, row in enumerate(order) if isinstance(row, Box) for c in row.children}
    for name in ("sync", "plans", "streams", "skip_masked_kv", "graph_reuse"):
        before = [h for h in headings.values() if order.index(h) < place[form.choices[name]]]
        assert before[-1] is headings[thread_of(name)]
    assert "sync=per_copy" in headings[WAITS].value and marked(form) == {"sync"}
    chosen(one, sync="packed", fuse="on")
    assert marked(form) == {"fuse", *Toggles.members("fuse")} and "=" not in headings[WAITS].value
    assert "fuse_glu=on" in headings[""].value
    chosen(one, fuse="off")
    one.baseline.choice.value = "baseline"
    assert marked(form) == {"sync"}, "another baseline"
    rows = [*one.children]
    assert rows.index(form) > max(rows.index(row) for row in (one.test, one.baseline))
    (buttons,) = (r for r in rows if isinstance(r, Box) and one.stop_button in r.children)
    assert rows.index(form) > rows.index(buttons)
    assert form.layout.overflow == "auto" and form.layout.max_height


def marked(form: widgets.ToggleForm) -> set[str]:
    """The drop-downs that are shown as different from the baseline."""
    every = form.choices | form.families
    return {name for name, choice in every.items() if widgets.DIFFERS in choice._dom_classes}


def test_the_test_is_a_field(panel):
    one = panel("tg4")
    for bad, says in (("fast", "does not exist"), ("tg9999", "n_ctx")):
        one.test.value = bad
        assert says in one.code.value and one.button.disabled
    one.test.value = "pp4"
    assert not one.button.disabled
    assert clicked(one).result.test == "pp4" and widgets.OF_OLDER not in one.speedup.value
    one.test.value = "tg4"
    assert widgets.OF_OLDER in one.speedup.value


def test_a_panel_that_could_never_run_is_refused(engine, panel, monkeypatch):
    for given, says in (
        ({"test": "tg9999"}, "n_ctx"), ({"test": "fast"}, "does not exist"),
        ({"rounds": 0}, "rounds=0"), ({"seed": -1}, "seed=-1"),
        ({"baseline": "beast"}, "preset 'beast' does not exist; did you mean best"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            panel(**given)
    closed = engine.variant(Toggles())
    closed.close()
    with pytest.raises(UsageError, match="closed"):
        wb.lab.panel(closed, "tg4")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "workbench.jupyter.widgets")
    with pytest.raises(UsageError, match=r"pip install -e '.\[lab\]' in the checkout"):
        wb.lab.panel(engine)


@pytest.mark.long
def test_run_times_both_sides_and_draws_them(engine, panel, variants):
    engine.prefill([1, 17, 300])
    before = engine.n_steps, engine.n_past
    one = clicked(chosen(panel(rounds=3), sync="copy_boundary"))
    assert one.code.value == "<code>wb.Toggles(sync=&quot;copy_boundary&quot;)</code>"
    assert one.message.value == "" and one.picture.value[:4] == b"\x89PNG"
    found, sides = one.result, (Toggles(), Toggles(sync="copy_boundary"))
    assert (found.baseline, found.toggled) == sides
    assert [each.toggles for each in variants] == [*sides, sides[0]], "the last is the control"
    assert found.speedup.n == 3 and found.verdict == TOO_FEW and not found.stopped
    assert found.answer.kind == EXACT and found.answer.holds
    assert found.speedup.value == pytest.approx(found.tps[1] / found.tps[0])
    waits = [trace.summary()["waits"].max() for trace in found.traces]
    assert waits[0] > waits[1], "the traces are of either side"
    assert "not of a GPU" in found.line and found.line.split(" ->")[0] in one.speedup.value
    one.result = found._replace(speedup=Ratio(1.1, 1.08, 1.12, 10), band=Band(0.75, 4 / 3))
    chosen(one, sync="packed")
    # a sentence of its own, or at the end of what a control that happens to exclude 1 has said
    assert "his machine cannot resolve less than 33 % here now" in one.speedup.value
    assert all(map(is_closed, variants))
    assert not is_closed(engine) and (engine.n_steps, engine.n_past) == before
    assert (one.button.disabled, one.button.description) == (False, "Run")


@pytest.mark.long
def test_a_result_is_marked_once_toggles_or_baseline_move(panel):
    one, older = panel(), f"<b>{widgets.OF_OLDER}:</b>"
    baseline = one.baseline
    chosen(one, sync="packed")
    baseline.pin.click()
    assert baseline.choice.value == "pinned" and baseline.about.value == "sync=packed"
    clicked(chosen(one, fuse="on"))
    line = one.speedup.value
    assert one.result.baseline == Toggles(sync="packed")
    assert one.result.labels == ("fuse=off", "fuse=on") and widgets.OF_OLDER not in line
    for move in ({"sync": "per_copy"}, {"sync": "event_guarded", "copy_stream": "compute"}):
        assert chosen(one, **move).speedup.value.startswith(older)
        assert chosen(one, copy_stream="auto", sync="packed").speedup.value == line, "as before"
    baseline.pin.click()
    assert baseline.toggles() == Toggles(sync="packed").switched("fuse", "on")
    assert one.speedup.value.startswith(older), "the baseline is another"
    chosen(one, sync="event_guarded", copy_stream="compute")
    baseline.pin.click()
    assert baseline.toggles().sync == "packed", "toggles that clash are no baseline"


@pytest.mark.long
def test_the_baseline_is_a_preset_or_the_engine_s_own(engine, panel):
    choice = (one := panel(baseline="llama.cpp@2025-09")).baseline.choice
    assert list(choice.options) == preset_names() and choice.value == "llama.cpp@2025-09"
    assert one.baseline.toggles() == Toggles.preset("llama.cpp@2025-09")
    choice.value = "llama.cpp@2026-06"
    assert "pdl=on" in one.code.value and one.button.disabled, "which this device has not"
    choice.value = "best"
    with engine.variant("best") as best:
        assert one.baseline.toggles() == best.toggles, "this device's"
    with engine.variant(Toggles(graph_reuse="set_rows")) as kept:
        one = wb.lab.panel(kept, "pp4", rounds=1, baseline=kept.toggles)
        assert one.baseline.choice.value == "as given"
        found = clicked(chosen(one, redo="on")).result
        assert found.baseline == kept.toggles and found.labels == ("redo=off", "redo=on")
        assert found.traces[0].summary()["n_tokens"].tolist() == [4]


@pytest.fixture
def held(panel, monkeypatch):
    """`held(nth)`: a panel whose run stands before its nth repetition, of 9 rounds of three, and
    what lets it go on to its end."""
    one, reached, go = chosen(panel(rounds=9), sync="packed"), threading.Event(), threading.Event()

    def make(nth=7):
        left = iter(range(nth - 1, -1, -1))

        def take(engine, test, tokens, left_bar, warming=False):
            if not warming and next(left, -1) == 0:
                reached.set()
                assert go.wait(60)
            return take_sample(engine, test, tokens, left_bar, warming)

        monkeypatch.setattr(workload, "take_sample", take)
        one.button.click()
        assert reached.wait(60)
        return one, lambda: go.set() or one.wait()

    yield make
    one.stop()
    go.set()
    one.wait()
    assert exclusive.STATE.measurement is None


def test_stop_keeps_the_finished_rounds(held):
    one, ends = held()
    assert one.running and one.button.disabled and not one.stop_button.disabled
    chosen(one, sync="per_copy")
    assert one.button.disabled, "the run is still on"
    one.stop_button.click()
    ends()
    found, said = one.result, "stopped after 2 of 9 rounds"
    assert found.speedup.n == 2 and found.traces is None and found.verdict == TOO_FEW
    assert said in found.line and said in one.speedup.value and one.message.value == said
    assert found.toggled == Toggles(sync="packed") and widgets.OF_OLDER in one.speedup.value
    assert not one.running and not one.button.disabled and one.stop_button.disabled


@pytest.mark.long
def test_a_stop_at_any_time_leaves_what_there_is(panel, held, monkeypatch):
    one, ends = held(2)
    one.stop()
    ends()
    assert one.result is None and "nothing was measured" in one.message.value
    trace = pair.trace_last
    monkeypatch.setattr(pair, "trace_last", lambda *args: one.stop() or trace(*args))
    assert clicked(one).result.speedup.n == 9 and one.result.traces is None, "it was tracing"
    early = panel()  # between the click and the beginning of its thread
    early.stop_button.observe(lambda change: change["new"] or early.stop(), "disabled")
    assert clicked(early).result is None and "nothing was measured" in early.message.value


def test_while_a_run_is_on_no_other_uses_an_engine(held, engine, tiny_model):
    sibling, model = engine.variant(Toggles()), tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(model, device="host", n_ctx=64) as other:
        before = [each.n_steps for each in (engine, other, sibling)]
        one, ends = held()
        for use in (
            lambda e: e.step([1]),
            lambda e: e.prefill([1, 2]),
            lambda e: e.generate(tokens=[1], max_tokens=1),
            lambda e: e.variant(Toggles()),
            lambda e: wb.profile(e).__enter__(),
            lambda e: wb.ab(e, "sync=per_copy,packed"),
        ):
            for used in (engine, sibling):
                with pytest.raises(UsageError, match=f"^{ON_THIS}$"):
                    use(used)
            with pytest.raises(UsageError, match=r"another engine.*would spoil.*press Stop or"):
                use(other)
        with pytest.raises(UsageError, match="another engine"):
            wb.Engine.load(model, device="host")
        for end in (engine.close, engine.synchronize, sibling.close):
            with pytest.raises(UsageError, match="on this engine"):
                end()
        assert before == [each.n_steps for each in (engine, other, sibling)]
        one.stop()
        ends()
        assert one.result.speedup.n == 2, "and the run was not disturbed"
        engine.step([1])
        other.step([1])
    sibling.close()


@pytest.mark.long
@pytest.mark.parametrize("use", ["Engine.generate", "Slots.step"])
def test_a_run_does_not_begin_while_a_cell_uses_an_engine(engine, panel, monkeypatch, use):
    inside, go = threading.Event(), threading.Event()

    def held(*_) -> None:
        inside.set()
        assert go.wait(60)

    def served() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(slots, "make_way", lambda *_: held() or 0)
            one = slots.Slots(engine, 1)
            one.ask(slots.Ask(1, np.array([1], np.int32), 1))
            one.step()
        one.drop()

    uses = {
        "Engine.generate": lambda: engine.generate(tokens=[1], max_tokens=2, on_text=held),
        "Slots.step": served,
    }
    thread = threading.Thread(target=uses[use])
    thread.start()
    try:
        assert inside.wait(60)
        one = clicked(panel())
    finally:
        go.set()
        thread.join()
    assert f"while a cell is in {use}" in one.message.value and one.result is None
    assert clicked(one).result is not None


def test_an_interrupt_of_the_idle_kernel_stops_the_run(monkeypatch):
    """The kernel's loop runs what it is given in the main thread, between two messages."""
    given = []
    loop = types.SimpleNamespace(add_callback=given.append)
    shell = types.SimpleNamespace(kernel=types.SimpleNamespace(io_loop=loop))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    before, heard = signal.getsignal(signal.SIGINT), []
    with interrupts.heeded(lambda: heard.append(1)):
        given.pop()()
        signal.raise_signal(signal.SIGINT)
    assert heard == [1]
    given.pop()()
    assert signal.getsignal(signal.SIGINT) is before and not given
    shell.kernel = None
    with interrupts.heeded(lambda: heard.append(2)):
        assert signal.getsignal(signal.SIGINT) is before


def test_an_unforeseen_error_leaves_the_panel_usable(panel, monkeypatch):
    one = panel()
    monkeypatch.setattr(pair, "compare", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clicked(one)
    assert "ZeroDivisionError: division by zero" in one.message.value
    assert not one.button.disabled and exclusive.STATE.measurement is None
