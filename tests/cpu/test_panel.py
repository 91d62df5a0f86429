"""A run of the panel is in a thread of its own: it can be stopped, and keeps others out."""

from __future__ import annotations

import signal
import sys
import threading
import types

import pytest
from matplotlib.figure import Figure

import workbench as wb
from workbench.benchmarks import workload
from workbench.benchmarks.compare.stats import TOO_FEW
from workbench.benchmarks.workload import take_sample
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.config.presets import preset_names
from workbench.engine import exclusive
from workbench.jupyter import interrupts, pair, widgets
from workbench.report import plots
from workbench.report.timelines import LOOKS

ON_THIS = "the panel is measuring on this engine; press Stop or wait"


class Gate:
    """Holds the panel's thread before its n-th repetition, until it is let go."""

    def __init__(self, monkeypatch, nth: int):
        self.reached, self.go = threading.Event(), threading.Event()
        left = iter(range(nth - 1, -1, -1))

        def held(engine, test, tokens, left_bar, warming=False):
            if not warming and next(left, -1) == 0:
                self.reached.set()
                assert self.go.wait(60)
            return take_sample(engine, test, tokens, left_bar, warming)

        monkeypatch.setattr(workload, "take_sample", held)

    def wait(self):
        assert self.reached.wait(60)


@pytest.fixture
def held(engine, monkeypatch):
    """A panel whose run stands before its third round, and its gate."""

    def make(rounds=9, nth=7, **arguments):
        gate = Gate(monkeypatch, nth)
        panel = wb.lab.panel(engine, "tg4", rounds=rounds, **arguments)
        panel.form.choices["sync"].value = "packed"
        panel.button.click()
        gate.wait()
        made.append((panel, gate))
        return panel, gate

    made: list = []
    yield make
    for panel, gate in made:
        panel.stop()
        gate.go.set()
        panel.wait()
    assert exclusive.STATE.measurement is None


def test_stop_keeps_the_finished_rounds_and_gives_no_verdict_on_few(held):
    panel, gate = held()
    assert panel.running and panel.button.disabled and not panel.stop_button.disabled
    panel.stop_button.click()
    gate.go.set()
    panel.wait()
    found = panel.result
    assert found.speedup.n == 2 and found.verdict == TOO_FEW and found.traces is None
    assert found.line.startswith(
        "tg4: sync=per_copy -> sync=packed: stopped after 2 of 9 rounds: too few repetitions, "
    )
    assert "stopped after 2 of 9 rounds" in panel.speedup.value
    assert panel.message.value == "stopped after 2 of 9 rounds"
    assert panel.picture.layout.display == "none"
    assert not panel.running and not panel.button.disabled and panel.stop_button.disabled


def test_a_run_stopped_after_five_rounds_has_a_verdict(held):
    panel, gate = held(nth=16)
    panel.stop()
    gate.go.set()
    panel.wait()
    assert panel.result.speedup.n == 5 and panel.result.verdict != TOO_FEW
    assert "stopped after 5 of 9 rounds" in panel.result.line


def test_a_run_stopped_before_its_first_round_leaves_the_last_result(held):
    panel, gate = held(nth=2)
    panel.stop()
    gate.go.set()
    panel.wait()
    assert panel.result is None and "nothing was measured" in panel.message.value
    panel.button.click()
    panel.wait()
    assert panel.result is not None and panel.message.value == ""


def test_a_run_stopped_while_it_traces_has_its_speedup(engine, monkeypatch):
    panel = wb.lab.panel(engine, "tg4", rounds=5)
    trace = pair.trace_last

    def stopped(*args):
        panel.stop()
        return trace(*args)

    monkeypatch.setattr(pair, "trace_last", stopped)
    panel.button.click()
    panel.wait()
    assert panel.result.speedup.n == 5 and panel.result.traces is None


def test_while_a_run_is_on_no_other_thread_uses_an_engine(held, engine, tiny_model):
    sibling = engine.variant(Toggles())
    model = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(model, device="host", n_ctx=64) as other:
        panel, gate = held()
        calls = {
            "step": lambda e: e.step([1]),
            "prefill": lambda e: e.prefill([1, 2]),
            "generate": lambda e: e.generate(tokens=[1], max_tokens=1),
            "variant": lambda e: e.variant(Toggles()),
            "profile": lambda e: wb.profile(e).__enter__(),
            "ab": lambda e: wb.ab(e, "sync=per_copy,packed"),
        }
        for name, use in calls.items():
            for used in (engine, sibling):
                with pytest.raises(UsageError) as refused:
                    use(used)
                assert str(refused.value) == ON_THIS, name
            with pytest.raises(
                UsageError, match=r"another engine.*would spoil.*press Stop or wait"
            ):
                use(other)
        with pytest.raises(UsageError, match="another engine"):
            wb.Engine.load(model, device="host")
        for end in (engine.close, engine.synchronize, sibling.close):
            with pytest.raises(UsageError, match="on this engine"):
                end()
        second = wb.lab.panel(engine, "tg4")
        second.button.click()
        second.wait()
        assert ON_THIS in second.message.value and second.result is None
        assert engine.n_steps == other.n_steps == sibling.n_steps == 0
        panel.stop()
        gate.go.set()
        panel.wait()
        assert panel.result.speedup.n == 2, "and the run was not disturbed"
        for name in ("step", "generate"):
            calls[name](engine)
            calls[name](other)
    sibling.close()


def test_a_run_does_not_begin_while_a_cell_uses_an_engine(engine, held):
    inside, go = threading.Event(), threading.Event()

    def cell():
        engine.generate(tokens=[1], max_tokens=2, on_text=lambda _: inside.set() or go.wait(60))

    thread = threading.Thread(target=cell)
    thread.start()
    try:
        assert inside.wait(60)
        panel = wb.lab.panel(engine, "tg4", rounds=1)
        panel.button.click()
        panel.wait()
    finally:
        go.set()
        thread.join()
    assert "while a cell is in Engine.generate" in panel.message.value and panel.result is None
    panel.button.click()
    panel.wait()
    assert panel.result is not None


def test_a_second_panel_stops_the_run_of_one_that_the_page_has_lost(held, engine):
    lost, gate = held()
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    panel.button.click()
    panel.wait()
    assert ON_THIS in panel.message.value and not panel.stop_button.disabled
    panel.stop_button.click()
    gate.go.set()
    lost.wait()
    assert lost.result.stopped and panel.stop_button.disabled
    panel.button.click()
    panel.wait()
    assert panel.result is not None and not panel.result.stopped


def test_an_interrupt_of_whoever_waits_ends_the_run_and_keeps_it(held):
    panel, gate = held()
    main = threading.main_thread().ident
    threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
    threading.Timer(0.3, gate.go.set).start()
    panel.wait()
    assert panel.result.speedup.n == 2 and panel.result.stopped


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
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    with interrupts.heeded(lambda: heard.append(2)):
        assert signal.getsignal(signal.SIGINT) is before


def test_an_unforeseen_error_is_not_hidden_and_leaves_the_panel_usable(engine, monkeypatch):
    panel = wb.lab.panel(engine, "tg4")
    monkeypatch.setattr(pair, "compare", lambda *_, **__: 1 / 0)
    panel.button.click()
    with pytest.raises(ZeroDivisionError):
        panel.wait()
    assert "ZeroDivisionError: division by zero" in panel.message.value
    assert not panel.button.disabled and exclusive.STATE.measurement is None


# the baseline, and whose results are shown -------------------------------------------------------


def test_a_result_is_marked_once_a_toggle_or_the_baseline_moves(engine):
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    panel.button.click()
    panel.wait()
    line = panel.speedup.value
    assert widgets.OF_OLDER not in line
    panel.form.choices["sync"].value = "packed"
    assert panel.speedup.value.startswith(f"<b>{widgets.OF_OLDER}:</b>")
    panel.form.choices["sync"].value = "per_copy"
    assert panel.speedup.value == line, "they are what was measured again"
    panel.form.choices["sync"].value = "event_guarded"
    panel.form.choices["copy_stream"].value = "compute"
    assert widgets.OF_OLDER in panel.speedup.value
    panel.form.choices["copy_stream"].value = "auto"
    panel.form.choices["sync"].value = "packed"
    panel.baseline.pin.click()
    panel.form.choices["sync"].value = "per_copy"
    assert widgets.OF_OLDER in panel.speedup.value, "the baseline is another"
    panel.baseline.choice.value = "baseline"
    assert panel.speedup.value == line


def test_toggles_that_move_during_a_run_mark_its_result(held):
    panel, gate = held()
    panel.form.choices["sync"].value = "per_copy"
    assert panel.button.disabled, "the run is still on"
    panel.stop()
    gate.go.set()
    panel.wait()
    assert panel.result.toggled == Toggles(sync="packed")
    assert widgets.OF_OLDER in panel.speedup.value


def test_this_one_pins_the_toggles_as_the_baseline(engine):
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    baseline = panel.baseline
    assert baseline.toggles() == Toggles() and baseline.about.value == "everything off"
    panel.form.choices["sync"].value = "packed"
    baseline.pin.click()
    assert baseline.choice.value == "pinned" and baseline.about.value == "sync=packed"
    panel.form.families["fuse"].value = "on"
    panel.button.click()
    panel.wait()
    assert panel.result.baseline == Toggles(sync="packed")
    assert panel.result.labels == ("fuse=off", "fuse=on")
    baseline.pin.click()
    assert baseline.toggles() == Toggles(sync="packed").switched("fuse", "on")
    panel.form.choices["sync"].value = "event_guarded"
    panel.form.choices["copy_stream"].value = "compute"
    baseline.pin.click()
    assert baseline.toggles().sync == "packed", "toggles that clash are no baseline"


def test_every_preset_can_be_the_baseline_and_best_is_this_devices(engine):
    panel = wb.lab.panel(engine, "tg4", rounds=1, baseline="llama.cpp@2025-09")
    choice = panel.baseline.choice
    assert list(choice.options) == preset_names() and choice.value == "llama.cpp@2025-09"
    assert panel.baseline.toggles() == Toggles.preset("llama.cpp@2025-09")
    choice.value = "best"
    with engine.variant("best") as best:
        assert panel.baseline.toggles() == best.toggles
    assert panel.baseline.about.value == str(best.toggles)
    choice.value = "llama.cpp@2026-06"  # has what this device has not
    assert "pdl=on" in panel.code.value and panel.button.disabled
    choice.value = "best"
    panel.button.click()
    panel.wait()
    assert panel.result.baseline == best.toggles
    with pytest.raises(UsageError, match="preset 'beast' does not exist; choose one of baseline"):
        wb.lab.panel(engine, "tg4", baseline="beast")


def test_a_baseline_that_was_given_is_the_first_choice(engine):
    given = Toggles(sync="packed")
    panel = wb.lab.panel(engine, "tg4", baseline=given)
    assert panel.baseline.choice.value == "as given" and panel.baseline.toggles() == given
    panel.baseline.choice.value = "baseline"
    assert panel.baseline.toggles() == Toggles()


def test_titles_of_the_longest_difference_are_not_cut(engine, monkeypatch):
    drawn: list[Figure] = []
    draw = plots.timeline_pair
    monkeypatch.setattr(plots, "timeline_pair", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    for name in Toggles.members("fuse")[1:]:
        panel.form.choices[name].value = "on"
    panel.form.choices["host_source"].value = "pageable"
    panel.form.choices["sync"].value = "packed"
    panel.form.choices["graph_reuse"].value = "set_rows"
    panel.button.click()
    panel.wait()
    (figure,) = drawn
    figure.canvas.draw()
    page = figure.bbox
    for axes, label in zip(figure.axes, panel.result.labels, strict=True):
        title = axes.title if axes.title.get_text() else axes._left_title
        assert " ".join(title.get_text().split()) == label
        box = title.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1


def test_the_panel_draws_the_replays_of_plans(engine, monkeypatch):
    drawn: list[Figure] = []
    draw = plots.timeline_pair
    monkeypatch.setattr(plots, "timeline_pair", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    panel = wb.lab.panel(engine, "tg4", rounds=1)
    panel.form.choices["plans"].value = "ours"
    panel.button.click()
    panel.wait()
    assert panel.result.labels == ("plans=off", "plans=ours")
    (figure,) = drawn
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert LOOKS["replay"].word in words and LOOKS["launch"].word in words


# graph reuse and plans --------------------------------------------------------------------------


def chosen(panel: widgets.Panel, **values: str) -> widgets.Panel:
    """The panel once each of these is chosen; families by their names."""
    known = panel.form.families | panel.form.choices
    for name, value in values.items():
        known[name].value = value
    return panel


def test_each_way_of_reuse_and_each_rule_of_plans_can_be_chosen(engine):
    form = wb.lab.panel(engine, "tg4").form
    assert list(form.choices["graph_reuse"].options) == [
        "rebuild", "patch_pointers", "pointer_table", "set_rows",
    ]  # fmt: skip
    assert list(form.choices["plans"].options) == ["off", "pr", "today", "ours"]
    assert {"plan_scope", "plan_warmup", "plan_evict", "plan_batch", "results", "kv_growth"} <= set(
        form.choices
    )
    assert list(form.families["redo"].options) == ["off", "on", widgets.MIXED]


@pytest.mark.parametrize(
    ("refused", "said", "mended"),
    [
        (
            {"redo": "on"}, "toggles graph_reuse=rebuild and redo_build=on clash",
            {"graph_reuse": "patch_pointers"},
        ),
        (
            {"redo_bind": "on"}, "toggles graph_reuse=rebuild and redo_bind=on clash",
            {"graph_reuse": "pointer_table"},
        ),
        (
            {"plans": "ours", "plan_scope": "step"},
            "toggles plan_scope=step and sync=per_copy clash", {"sync": "packed_implicit"},
        ),
    ],
)  # fmt: skip
def test_toggles_of_reuse_and_plans_that_clash_are_shown_at_once(engine, refused, said, mended):
    panel = chosen(wb.lab.panel(engine, "tg4"), **refused)
    assert said in panel.code.value and "color" in panel.code.value and panel.button.disabled
    chosen(panel, **mended)
    assert "wb.Toggles(" in panel.code.value and not panel.button.disabled


def test_a_device_that_cannot_capture_says_so_at_once(tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="host", n_ctx=64, toggles="baseline"
    ) as engine:
        panel = chosen(wb.lab.panel(engine, "tg4"), plans="ours")
        assert "the host device cannot capture: plans=ours; use plans=off" in panel.code.value
        assert panel.button.disabled
        assert not chosen(panel, plans="off").button.disabled


def test_a_run_of_plans_and_direct_results_draws_a_replay(engine):
    kept = Toggles(graph_reuse="set_rows", sync="packed_implicit")
    panel = wb.lab.panel(engine, "tg4", rounds=1, baseline=kept)
    chosen(
        panel, graph_reuse="set_rows", sync="packed_implicit", plans="ours", plan_scope="step",
        results="direct",
    )  # fmt: skip
    panel.button.click()
    panel.wait()
    found = panel.result
    assert found.labels[1] == "results=direct, plans=ours, plan_scope=step"
    assert found.answer.holds and panel.picture.layout.display is None
    kinds = [set(trace.to_frame()["category"]) for trace in found.traces]
    assert "replay" not in kinds[0] and "replay" in kinds[1]


def test_layers_that_are_done_again_are_named_as_one_family(engine):
    panel = wb.lab.panel(engine, "tg4", rounds=1, baseline=Toggles(graph_reuse="set_rows"))
    chosen(panel, graph_reuse="set_rows", redo="on")
    assert "redo=&quot;on&quot;" in panel.code.value
    panel.button.click()
    panel.wait()
    assert panel.result.labels == ("redo=off", "redo=on") and panel.result.answer.holds
