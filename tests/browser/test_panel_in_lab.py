"""The panel as a person meets it: JupyterLab in Chromium, clicked through chromedriver."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

UNDER_WAY = r"^round ([3-9]|\d\d+) of 500"
ENDED = r"^stopped after \d+ of 500 rounds$"
LINE = r"^tg16: .*: stopped after \d+ of 500 rounds: "
REFUSED = "UsageError: the panel is measuring on this engine; press Stop or wait"
THREAD = "import threading; {thread.name for thread in threading.enumerate()}"


def begin(notebook):
    notebook.press("Run")
    notebook.says(UNDER_WAY)


def end(notebook):
    notebook.press("Stop")
    notebook.says(ENDED)


def test_stop_ends_the_first_run_and_the_second_and_keeps_their_rounds(panel, record_property):
    notebook = panel(THREAD)
    notebook.choose("sync", "packed")
    for nth in ("first", "second"):
        begin(notebook)
        begun = time.monotonic()
        end(notebook)
        record_property(f"stop_{nth}_s", round(time.monotonic() - begun, 2))
        assert "sync=per_copy -> sync=packed" in notebook.says(LINE)
        assert not notebook.pictures()
    assert "subshell" in notebook.run(2), "clicks are answered in a thread beside the cells'"


def test_jupyters_own_stop_ends_a_run_and_the_kernel_lives(panel, record_property):
    notebook = panel("eng.generate(tokens=[1], max_tokens=2).tokens")
    for nth in ("first", "second"):
        begin(notebook)
        begun = time.monotonic()
        notebook.interrupt()
        notebook.says(ENDED)
        record_property(f"interrupt_{nth}_s", round(time.monotonic() - begun, 2))
        notebook.says(LINE)
    assert notebook.run(2).startswith("["), "and the engine can be used again"
    notebook.interrupt()  # of an idle kernel: nothing is to happen
    assert notebook.run(2).startswith("[")


def test_other_cells_are_kept_out_in_one_line_and_the_run_goes_on(panel):
    cells = (
        "eng.generate(tokens=[1], max_tokens=2)", "wb.ab(eng, 'sync=per_copy,packed')",
        "with wb.profile(eng): eng.step([1])", "1 + 1",
    )  # fmt: skip
    notebook = panel(*cells)
    begin(notebook)
    for cell in (2, 3, 4):
        assert notebook.run(cell) == REFUSED
    assert notebook.run(5) == "2", "what uses no engine runs"
    notebook.says(UNDER_WAY)
    end(notebook)


def test_a_cell_that_is_run_again_during_a_run_has_a_panel_that_stops_it(panel):
    notebook = panel()
    begin(notebook)
    notebook.run(1)
    notebook.press("Run")
    notebook.says("^the panel is measuring on this engine; press Stop or wait$")
    notebook.press("Stop")
    time.sleep(2)  # the run that ends is of the panel that is gone, and nothing here shows it
    begin(notebook)
    end(notebook)


def test_a_run_does_not_begin_while_a_cell_uses_the_engine(panel):
    notebook = panel(
        "while not eng.generate(tokens=[1], max_tokens=200).interrupted:\n    eng.reset()"
    )
    begin(notebook)  # a button's first click waits for the cell's end, the next one does not
    end(notebook)
    notebook.start(2)
    notebook.press("Run")
    notebook.says("the panel cannot measure while a cell is in Engine")
    notebook.interrupt_cell(2)
    begin(notebook)
    end(notebook)


def test_a_whole_run_draws_both_sides_and_is_marked_once_a_toggle_moves(panel):
    notebook = panel(test="tg8", rounds=5)
    notebook.choose("fuse", "on")
    notebook.press("Run")
    line = notebook.says(r"^tg8: fuse=off -> fuse=on: (faster|slower|no difference)")
    (picture,) = notebook.pictures()
    assert picture.size["width"] > 600
    notebook.choose("graph_reuse", "set_rows")
    assert notebook.says("^of an older choice: tg8: fuse=off -> fuse=on")
    notebook.choose("graph_reuse", "rebuild")
    assert notebook.says(r"^tg8: fuse=off -> fuse=on") == line


def test_baselines_are_presets_or_this_one(panel):
    notebook = panel(test="tg8", rounds=5)
    notebook.choose("baseline", "llama.cpp@2025-09")
    notebook.says("^graph_reuse=set_rows|graph_reuse=set_rows, ")
    notebook.choose("baseline", "best")
    notebook.choose("sync", "packed")
    notebook.press("This one")
    notebook.says("^sync=packed$")
    notebook.choose("step_wait", "outputs")
    notebook.press("Run")
    assert notebook.says("^tg8: step_wait=every -> step_wait=outputs: ")


def test_a_clash_is_shown_when_it_is_chosen_and_names_both(panel):
    notebook = panel()
    notebook.choose("sync", "event_guarded")
    notebook.choose("copy_stream", "compute")
    notebook.says("^toggles sync=event_guarded and copy_stream=compute clash: ")
    assert not notebook.button("Run").is_enabled()
    notebook.choose("copy_stream", "own")
    notebook.says(r"^wb.Toggles\(sync=.event_guarded., copy_stream=.own.\)$")
    assert notebook.button("Run").is_enabled()
    notebook.choose("sync", "implicit")
    notebook.says("^toggles sync=implicit and copy_stream=own race ")


def test_run_and_stop_stay_in_view_and_the_test_is_a_field(panel):
    """The drop-downs scroll in a box of their own, under the controls; what differs is named."""
    notebook = panel(test="tg8", rounds=5)
    notebook.choose("validate", "all")  # the last of its thread, far below
    notebook.says(r"^#16991: concurrent streams: validate=all$")
    for name in ("Run", "Stop"):
        assert notebook.in_view(notebook.button(name)), name
    notebook.type("test", "pp16")
    notebook.press("Run")
    assert notebook.says("^pp16: validate=off -> validate=all: ")


def test_progress_leaves_no_strip_in_a_cell(panel):
    notebook = panel(
        "import time\nfrom workbench.common import progress\nprogress.SHOWN_AFTER_S = 0.0\n"
        "with progress.bar('work', 40, 'steps') as left:\n    for _ in range(40):\n"
        "        left.update()\n        time.sleep(0.1)"
    )
    notebook.start(2)
    notebook.shows(2, r"^work: \d+ of 40 steps")
    assert notebook.output(2) == ""
    assert notebook.heights(2) == [], "nothing of it is left"
