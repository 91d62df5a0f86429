"""`%%wb_profile` as Jupyter runs it, in an IPython shell without a browser; and what is shown."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import workbench as wb
from workbench.common.errors import UsageError
from workbench.jupyter.magics import MOST_DRAWN


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
    assert "wb_profile" not in made.magics_manager.magics["cell"]
    made.reset(new_session=False)
    InteractiveShell.clear_instance()


@pytest.fixture
def profiled(shell):
    """`profiled(line, cell)`: what the cell's trace, t, is; what it raised, showed and printed."""

    def run(line: str, cell: str, magic: str = "%%wb_profile") -> SimpleNamespace:
        shell.user_ns.pop("t", None)
        with capture_output() as shown:
            result = shell.run_cell(f"{magic} {line}\n{cell}", store_history=False)
        pictures = [o.data["image/png"] for o in shown.outputs if "image/png" in o.data]
        error, trace = result.error_before_exec or result.error_in_exec, shell.user_ns.get("t")
        return SimpleNamespace(
            trace=trace, error=error, value=result.result, pictures=pictures,
            out=shown.stdout, err=shown.stderr,
        )  # fmt: skip

    return run


def test_a_cell_is_traced_drawn_bound_and_written(profiled, shell, engine, tmp_path):
    out, first = tmp_path / "t.pftrace.gz", engine.n_steps
    found = profiled(f"eng --as t --out {out}", "for token in (1, 2):\n    x = eng.step([token])")
    assert found.error is None and [p[:4] for p in found.pictures] == [b"\x89PNG"]
    steps = found.trace.summary()
    assert found.trace.engines == {"eng": [first, first + 1]} == {"eng": list(steps.index)}
    counts = engine.program(n_past=1).counts()
    for name in ("waits", "copies", "launches"):
        assert (steps[name] == counts[name]).all(), name
    assert out.stat().st_size > 0 and f"wrote {out}" in found.out
    assert "2 steps of eng" in found.out
    assert shell.user_ns["x"].shape == (1, engine.model.n_vocab)


@pytest.mark.long
def test_what_is_bound_has_the_tables_and_pictures_of_a_profile(profiled, shell, tmp_path):
    """Of one engine those of its profile; of several with a column that names the engine."""
    one = profiled("eng --as t", "for token in (1, 2):\n    x = eng.step([token])").trace
    (own,) = one.profiles.values()
    for name in ("kernels", "gaps", "phases"):
        pd.testing.assert_frame_equal(getattr(one, name)(), getattr(own, name)())
    assert set(one.kernels(by="node")["op"]) == set(own.kernels()["op"])
    assert len(one.plot().axes) == 1 and len(wb.plot(one, one).axes) == 2
    assert list(pd.read_csv(one.to_csv(tmp_path / "t.csv")).columns) == list(one.to_frame().columns)
    cell = "with eng.variant('sync=packed') as packed:\n    x = eng.step([3]), packed.step([3])"
    two = profiled("--as t", cell).trace
    for name in ("kernels", "gaps", "phases"):
        table = getattr(two, name)()
        assert table.columns[0] == "engine" and set(table["engine"]) <= {"eng", "packed"}
        assert list(table.columns[1:]) == list(getattr(own, name)().columns) or name == "gaps"
    assert set(two.kernels()["engine"]) == {"eng", "packed"} and len(two.plot().axes) == 2
    nothing = profiled("--as t", "pass").trace
    for ask in (nothing.kernels, nothing.gaps, nothing.phases, nothing.plot):
        with pytest.raises(UsageError, match=r"no engine that was traced made a step|no span"):
            ask()


def test_what_is_bound_is_compared_and_has_a_critical_path(profiled):
    one = profiled("eng --as t", "for token in (1, 2):\n    x = eng.step([token])").trace
    (own,) = one.profiles.values()
    pd.testing.assert_frame_equal(one.critical_path(), own.critical_path())
    pd.testing.assert_frame_equal(wb.diff(one, own), wb.diff(own, own))
    cell = "with eng.variant('sync=packed') as packed:\n    x = eng.step([3]), packed.step([3])"
    two = profiled("--as t", cell).trace
    for ask in (two.critical_path, lambda: wb.diff(one, two)):
        with pytest.raises(UsageError, match=r"is of eng, packed; .*trace\.profiles\['eng'\]") as e:
            ask()
        assert "\n" not in str(e.value)
    assert len(wb.diff(one, two.profiles["packed"]))
    nothing = profiled("--as t", "pass").trace
    with pytest.raises(UsageError, match="no engine that was traced made a step"):
        wb.diff(one, nothing)
    with pytest.raises(UsageError, match="diff takes profiles or trace files, and no int"):
        wb.diff(one, 3)


def test_a_cell_does_what_it_does_without_the_magic(profiled, shell):
    assert profiled("", "6 * 7").value == profiled("", "6 * 7", magic="#").value == 42
    assert profiled("", "6 * 7;").value is None
    assert profiled("", "x = 5\nnames = %who_ls").error is None
    assert shell.user_ns["x"] == 5 and "x" in shell.user_ns["names"], "magics within are magics"
    nothing = profiled("--as t", "pass")
    assert "no engine that was traced made a step" in nothing.out and not nothing.pictures
    assert len(nothing.trace.timeline) == 0
    for bad in ("x = = 5", "import asyncio\nawait asyncio.sleep(0)"):
        assert isinstance(profiled("", bad).error, SyntaxError)
    with capture_output() as captured:
        for cell in ("1 + 1", "%%wb_profile\n6 * 7", "%%wb_profile\n1 / 0", "7"):
            result = shell.run_cell(cell, store_history=True)
    assert result.execution_count == 4 and shell.user_ns["Out"] == {0: 42, 1: 2, 2: 42, 4: 7}
    assert "Out[2]: 42" in captured.stdout and "Cell In[3], line 1" in captured.stdout
    with pytest.raises(ZeroDivisionError), capture_output():
        shell.run_cell_magic("wb_profile", "", "1 / 0")


@pytest.mark.long
def test_a_window_bounds_what_is_kept_and_one_is_drawn(profiled, engine):
    first = engine.n_steps
    steps = "for i in range(1, {n}):\n    eng.step([i])"
    few = profiled("--window 2,3 --as t", steps.format(n=8)).trace
    assert list(few.summary().index) == [first + 2, first + 3, first + 4]
    shown = profiled("--as t", steps.format(n=20))
    assert len(shown.trace.summary()) == 19 > MOST_DRAWN and len(shown.pictures) == 1


@pytest.mark.long
def test_without_names_every_engine_is_traced(profiled, shell, engine):
    """Also those made in the cell, and with events of their own."""
    cell = """\
kept = [eng.variant(eng.toggles.switched('graph_reuse', 'set_rows'))]
with eng.variant(eng.toggles.switched('sync', 'event_guarded')) as guarded:
    for token in (1, 2):
        for e in (eng, guarded, kept[0]):
            logits = e.step([token])
del e"""
    found = profiled("--as t", cell)
    shell.user_ns["kept"][0].close()
    trace = found.trace
    unnamed = next(name for name in trace.engines if name not in ("eng", "guarded"))
    assert trace.engines == {"eng": [0, 3], "guarded": [1, 4], unnamed: [2, 5]}
    assert found.error is None and len(found.pictures) == 3
    steps = trace.to_frame().query("category == 'step'")
    order = ["eng", "guarded", unnamed] * 2
    assert list(steps["name"]) == [f"{name}: step {n}" for n, name in enumerate(order)]
    waits = trace.summary()["waits"]
    assert list(waits.index) == list(range(6))
    assert waits[0] == waits[2] > waits[1], "each step kept its own engine's commands"
    events = {s.args["event"] for s in trace.timeline.spans if s.args.get("event") is not None}
    assert {event.partition(": ")[0] for event in events} == set(trace.engines)
    with engine.variant(engine.toggles) as other:
        assert other.recorder is None, "nobody is told of it any more"


@pytest.mark.long
def test_named_engines_alone_are_traced_and_closed_refused(profiled, shell, engine):
    cell = "logits = eng.step([1]); logits = other.step([1])"
    with engine.variant(engine.toggles) as other:
        shell.user_ns["other"] = other
        assert list(profiled("eng --as t", cell).trace.engines) == ["eng"]
        both = profiled("eng other --as t", cell)
        assert list(both.trace.engines) == ["eng", "other"]
        assert len(both.pictures) == 1, "two are drawn as a pair, on one time axis"
    shown = profiled("other", "ran = True")
    assert "other is closed; there is eng" in shown.err and "ran" not in shell.user_ns
    rest = profiled("--as t", "logits = eng.step([1])")
    assert rest.error is None and list(rest.trace.engines) == ["eng"], "closed ones are passed over"


@pytest.mark.long
def test_a_failing_cell_keeps_its_trace_and_its_exception(profiled, tmp_path):
    shown = profiled("", "logits = eng.step([1])\n1 / len(logits[1:])\n")
    assert isinstance(shown.error, ZeroDivisionError)
    assert "1 / len(logits[1:])" in shown.out and "magics.py" not in shown.out
    assert shown.out.count("Cell In[1], line") == 1, "the cell's alone"
    out = tmp_path / "t.pftrace"
    shown = profiled(f"--as t --out {out}", "x = eng.step([1])\nx = eng.step([10**6])\n")
    assert isinstance(shown.error, UsageError)
    assert "in line 2: x = eng.step([10**6])" in shown.out and "magics.py" not in shown.out
    trace = shown.trace
    assert trace.failed and len(trace.engines["eng"]) == 2, "the step that failed is there, too"
    assert len(trace.to_frame().query("lane != 'host'")) > 0
    assert shown.pictures and out.stat().st_size > 0 and "the cell failed after" in shown.out


def test_an_interrupted_cell_keeps_its_trace(profiled, engine, monkeypatch):
    right = engine.step([1]).copy()
    engine.reset()
    look_ahead, calls = engine.steps.batches.look_ahead, iter(range(100))

    def pressed(work, draws):  # Ctrl-C while the third step is under way on the device
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return look_ahead(work, draws)

    monkeypatch.setattr(engine.steps.batches, "look_ahead", pressed)
    shown = profiled("--as t", "for i in range(1, 50):\n    logits = eng.step([i])")
    assert isinstance(shown.error, KeyboardInterrupt)
    assert len(shown.trace.engines["eng"]) == 3 and shown.pictures
    engine.reset()
    assert np.array_equal(engine.step([1]), right), "and the engine goes on"


def test_a_wrong_line_is_refused_before_the_cell_runs(profiled, shell):
    for line, says in (
        ("nobody", "nobody is no engine; there is eng"),
        ("--window 3", "--window '3' holds no step"),
        ("--window 0,0", "holds no step"),
        ("--window -1,2", "expected one argument"),
        ("--as 3x", "--as '3x' cannot be bound"),
        ("--as class", "--as 'class' cannot be bound"),
        ("--out nowhere/t.pftrace", "nowhere does not exist; make it first"),
        ("--out /tmp", "--out /tmp cannot be written: it is a folder"),
        ("--collector nsys", "invalid choice: 'nsys'"),
    ):
        shown = profiled(line, "ran = True")
        assert shown.error is not None and "ran" not in shell.user_ns
        said = (shown.err + shown.out).strip()
        assert says in said and "Traceback" not in said


def test_a_collector_that_cannot_be_used_is_named(profiled):
    shown = profiled("--collector cupti --as t", "logits = eng.step([1])")
    trace, found = shown.trace, shown.trace.profiles["eng"]
    assert shown.error is None and trace.note in shown.out
    assert found.collector == "events" and found.fallback and found.fallback in trace.note
    assert "device spans from events" in trace._repr_html_()
    timed = profiled("", "import workbench as wb\nwb.ab(eng, 'sync', ['packed'])")
    assert isinstance(timed.error, UsageError) and "recorder" in str(timed.error), "not traced"


@pytest.mark.long
def test_a_disk_that_fails_is_said_in_one_line(profiled, tmp_path):
    out = tmp_path / "t.pftrace"
    out.symlink_to("/dev/full")
    shown = profiled(f"--as t --out {out}", "logits = eng.step([1])")
    assert shown.error is not None and f"--out {out} cannot be written" in shown.err
    assert shown.pictures and len(shown.trace.engines["eng"]) == 1, "all else is there"
    failing = profiled(f"--as t --out {out}", "logits = eng.step([1])\n1 / 0")
    assert isinstance(failing.error, ZeroDivisionError) and "cannot be written" in failing.err


def test_what_a_user_can_mend_is_shown_in_one_line(shell):
    for cell, line in (
        ("eng.step([10**6])", ""),
        ("token = 10**6\neng.step([token])", "  in line 2: eng.step([token])"),
        ("def step(token):\n    return eng.step([token])\n\nstep(10**6)",
         "  in line 2: return eng.step([token])"),
        # raises below a frame of contextlib's
        ("import workbench as wb\nwith wb.profile(eng, window=(0, 0)):\n    pass",
         "  in line 2: with wb.profile(eng, window=(0, 0)):"),
    ):  # fmt: skip
        with capture_output() as shown:
            shell.run_cell(cell)
        first, *more = shown.stdout.splitlines()
        assert first.startswith("UsageError: ") and more == [line] * bool(line)


def test_engines_and_programs_show_themselves(engine):
    program = engine.program(n_tokens=4)
    for shown in (repr(program), program._repr_html_()):
        for what, number in program.counts().items():
            assert f"{number} {what.replace('_', ' ')}" in shown
    for shown in (repr(engine), engine._repr_html_()):
        assert "sync mode per_copy; 0 of 128 cells used" in shown
