"""`%%wb_profile` as Jupyter runs it, in an IPython shell without a browser."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from workbench.common.errors import UsageError
from workbench.jupyter.magics import MOST_DRAWN, CellTrace

PNG = b"\x89PNG"


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


def test_the_extension_adds_the_magic_and_takes_it_away(shell):
    assert "wb_profile" in shell.magics_manager.magics["cell"]
    shell.extension_manager.unload_extension("workbench")
    assert "wb_profile" not in shell.magics_manager.magics["cell"]
    shell.extension_manager.load_extension("workbench")
    assert "wb_profile" in shell.magics_manager.magics["cell"]


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
    for bad in ("x = = 5", "import asyncio\nawait asyncio.sleep(0)"):
        assert isinstance(run(shell, f"%%wb_profile\n{bad}").error, SyntaxError)


def test_a_cell_has_its_own_number_whatever_comes_after_it(shell):
    with capture_output() as captured:
        for cell in ("1 + 1", "%%wb_profile\n6 * 7", "%%wb_profile\n1 / 0", "7"):
            result = shell.run_cell(cell, store_history=True)
    assert result.execution_count == 4 and shell.user_ns["Out"] == {1: 2, 2: 42, 4: 7}
    assert "Out[2]: 42" in captured.stdout and "Cell In[3], line 1" in captured.stdout
    with pytest.raises(ZeroDivisionError), capture_output():
        shell.run_cell_magic("wb_profile", "", "1 / 0")


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
    # the next variant is made as ever: nobody is told of it any more
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


def test_the_traceback_of_a_cell_names_its_line_and_no_frame_of_the_magic(shell):
    shown = run(shell, "%%wb_profile\nlogits = eng.step([1])\n1 / len(logits[1:])\n")
    assert isinstance(shown.error, ZeroDivisionError)
    assert "1 / len(logits[1:])" in shown.out and "magics.py" not in shown.out
    assert shown.out.count("Cell In[1], line") == 1, "the cell's alone"


def test_a_failing_cell_keeps_its_trace_and_its_exception(shell, tmp_path):
    out = tmp_path / "t.pftrace"
    shown = run(
        shell,
        f"%%wb_profile --as t --out {out}\nlogits = eng.step([1])\nlogits = eng.step([10**6])\n",
    )
    assert isinstance(shown.error, UsageError)
    assert "in line 2: logits = eng.step([10**6])" in shown.out and "magics.py" not in shown.out
    trace = shell.user_ns["t"]
    assert trace.failed and len(trace.engines["eng"]) == 2, "the step that failed is there, too"
    assert len(trace.to_frame().query("lane != 'host'")) > 0
    assert shown.pictures and out.stat().st_size > 0 and "the cell failed after" in shown.out


def test_an_interrupted_cell_keeps_its_trace_and_the_engine_goes_on(shell, engine, monkeypatch):
    right = engine.step([1]).copy()
    engine.reset()
    look_ahead = engine.steps.batches.look_ahead
    calls = iter(range(100))

    def pressed(work, draws):  # Ctrl-C while the third step is under way on the device
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return look_ahead(work, draws)

    monkeypatch.setattr(engine.steps.batches, "look_ahead", pressed)
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
        ("--out nowhere/t.pftrace", "nowhere does not exist; make it first"),
        ("--out /tmp", "--out /tmp cannot be written: it is a folder"),
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
    out = tmp_path / "t.pftrace"
    out.symlink_to("/dev/full")
    shown = run(shell, f"%%wb_profile --as t --out {out}\nlogits = eng.step([1])")
    assert shown.error is not None and f"--out {out} cannot be written" in shown.err
    assert shown.pictures and len(shell.user_ns["t"].engines["eng"]) == 1, "all else is there"
    failing = run(shell, f"%%wb_profile --as t --out {out}\nlogits = eng.step([1])\n1 / 0")
    assert isinstance(failing.error, ZeroDivisionError) and "cannot be written" in failing.err


def test_a_traced_engine_is_not_timed(shell):
    shown = run(shell, "%%wb_profile\nimport workbench as wb\nwb.ab(eng, 'sync', ['packed'])")
    assert isinstance(shown.error, UsageError) and "recorder" in str(shown.error)
