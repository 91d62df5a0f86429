"""Notes of kernels that note when they ran, on a driver that logs what it is asked."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.backend.cuda.fake_cuda import fake_backend
from tests.backend.cuda.fake_graphs import Call
from workbench.backend.base import DeviceClock
from workbench.backend.clock.launch_notes import (
    CELL_WORDS,
    CELLS,
    NOTE_BYTES,
    LaunchNotes,
    NotedSpan,
    times_of,
)
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels.noting import NOTING
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError, UsageError
from workbench.config import Toggles
from workbench.engine.look.kernel_spans import kernel_spans
from workbench.engine.programs import Key
from workbench.program.commands import Launch, Replay

KEPT = {"graph_reuse": "set_rows", "sync": "packed_implicit"}
PLAN = {"plans": "ours", "plan_scope": "step", "copy_stream": "compute"}
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "no plans, one stream": {"streams": "1"},
    "a plan": PLAN,
    "a plan of each split": {"plans": "ours", "plan_scope": "split"},
    "dependent launch": {"pdl": "on"},
    "dependent launch in a plan": PLAN | {"pdl": "on"},
    "fused inside branches": PLAN | {"fuse": "on", "branch_fusion": "inside"},
    "stores by pointer": PLAN | {"graph_reuse": "patch_pointers"},
}
FAR = 1 << 40  # addresses are no part of what a call does


@pytest.fixture
def engine(monkeypatch, tiny_model) -> Iterator[wb.Engine]:
    fake_backend(monkeypatch)
    monkeypatch.setattr(CudaBackend, "clock", lambda backend: DeviceClock(0, 0, 32))
    with wb.Engine.load(
        tiny_model("tiny-llama", "F16"), device="cuda", n_ctx=512, toggles=Toggles(**KEPT)
    ) as made:
        yield made


def log_of(used: wb.Engine) -> list[Call]:
    found: list[Call] = used.backend._driver.api.log  # type: ignore[attr-defined]
    return found


def launches(calls: list[Call]) -> list[Call]:
    """Of kernels and products. Before its first capture a product runs once, to be loaded."""
    return [c for c in calls if c.function.startswith(("cuLaunch", "cublasGemm"))]


def split_off(call: Call) -> tuple[tuple[Any, ...], int]:
    """What a noting launch does besides, and its note. A function here says its file and macros."""
    function, *rest = call.args
    name, module = function.split(" of ")
    file, defines = ast.literal_eval(module)
    assert defines[-1] == NOTING
    kernel = f"{name} of {(file, defines[:-1])!r}"
    return (call.function, kernel, *(a for a in rest[:-1] if near(a))), rest[-1]


def near(argument: Any) -> bool:
    return not isinstance(argument, int) or argument < FAR


def plain(call: Call) -> tuple[Any, ...]:
    return call.function, *(a for a in call.args if near(a))


def decode(used: wb.Engine, n: int = 5) -> list[list[Call]]:
    """What the launches of each step are."""
    found = []
    for token in range(n):
        log_of(used).clear()
        used.step([token])
        found.append(launches(log_of(used)))
    return found


@pytest.fixture
def no_reading(monkeypatch):
    """Nothing computes here, so nothing is noted: kernel i ran from 10 i to 10 i + 5."""

    def read(notes: LaunchNotes) -> list[NotedSpan]:
        kernels = enumerate(notes.kernels)
        return [NotedSpan(kernel, 10 * i, 10 * i + 5) for i, kernel in kernels]

    monkeypatch.setattr(LaunchNotes, "read", read)


@pytest.mark.parametrize("way", WAYS)
def test_a_noting_step_launches_the_same_with_a_note_for_each(engine, no_reading, way):
    """Outside and inside plans: as many nodes and calls, in the same order, each with one argument
    more. So a kernel computes what it computed."""
    with engine.variant(Toggles(**KEPT | {"streams": "3"} | WAYS[way])) as used:
        wanted = decode(used)
        counts = used.counters
        used.reset()
        with kernel_spans(used) as found:
            noting = decode(used)
        assert len(found.steps) == len(noting) == len(wanted)
        for step, own, spans in zip(noting, wanted, found.steps, strict=True):
            pairs = [split_off(call) for call in step]
            assert [one for one, _ in pairs] == [plain(call) for call in own]
            notes = sorted(note for _, note in pairs)
            assert [b - a for a, b in itertools.pairwise(notes)] == [NOTE_BYTES] * (len(notes) - 1)
            assert len(notes) == len(spans) and len({s.args["index"] for s in spans}) >= 1
        if "plans" in WAYS[way]:
            assert used.counters["plans_replayed"] > counts["plans_replayed"] > 0
        used.reset()
        assert [[plain(c) for c in step] for step in decode(used)] == [
            [plain(c) for c in step] for step in wanted
        ], "plain again, and nothing is captured anew"


def test_a_step_waits_is_read_and_its_notes_are_emptied_before_the_next(
    engine, monkeypatch, no_reading
):
    done: list[str] = []
    for name in ("read", "reset"):
        own = getattr(LaunchNotes, name)

        def noted(notes: LaunchNotes, own: Any = own, name: str = name) -> Any:
            done.append(name)
            return own(notes)

        monkeypatch.setattr(LaunchNotes, name, noted)
    with engine.variant(Toggles(**KEPT | PLAN)) as used:
        with kernel_spans(used) as found:
            used.step([1])
            done.append("step")
            used.step([2])
        assert done == ["reset", "read", "reset", "step", "read", "reset"]
        assert [spans[0].args["step"] for spans in found.steps] == [0, 1]


def test_what_a_failed_step_noted_is_no_step_s(engine, monkeypatch, no_reading):
    """Its notes are emptied before they are used again, and after a reading that failed."""
    done: list[str] = []
    own = LaunchNotes.reset

    def reset(notes: LaunchNotes) -> None:
        done.append("reset")
        own(notes)

    monkeypatch.setattr(LaunchNotes, "reset", reset)
    with engine.variant(Toggles(**KEPT)) as used, kernel_spans(used) as found:
        used.step([1])
        watch, done[:] = used.untraced, []
        prepared = watch.of(used.steps.programs.get(Key(used.program().shape, 0)))
        next(iter(watch.head(prepared)))  # and then an error: nobody says that the step ends
        assert not done
        next(iter(watch.head(prepared)))
        assert done == ["reset"]

        def failing(notes: LaunchNotes) -> list[NotedSpan]:
            raise DeviceError("noted no time")

        monkeypatch.setattr(LaunchNotes, "read", failing)
        with pytest.raises(DeviceError, match="noted no time"):
            watch.end(True)
        assert done == ["reset"] * 2 and len(found.steps) == 1


def notes_of(used: wb.Engine) -> LaunchNotes:
    return LaunchNotes(used.program(), used._open.backends)


def fill(notes: LaunchNotes, times: dict[int, tuple[int, int]], seed: int = 0) -> None:
    """Writes begin and end of notes as kernels do, with what is later and earlier beside it."""
    rng = np.random.default_rng(seed)
    ((_, memory),) = notes._host.items()
    assert memory.array is not None
    words = memory.array.view(np.uint64).reshape(-1, CELLS, CELL_WORDS)
    words[:] = ~np.uint64(0)
    for note, (begin, end) in times.items():
        for cell in rng.choice(CELLS, 4, replace=False):
            words[note, cell] = begin + 3, ~np.uint64(end - 3)
        words[note, rng.integers(CELLS), 0] = begin
        words[note, rng.integers(CELLS), 1] = ~np.uint64(end)


def test_every_kernel_has_a_note_in_the_order_of_launches(engine):
    for more in ({}, PLAN):
        with engine.variant(Toggles(**KEPT | {"streams": "3"} | more)) as used:
            program = used.program()
            notes = LaunchNotes(program, used._open.backends)
            assert [k.note for k in notes.kernels] == list(range(len(notes.kernels)))
            wanted = []
            for number, command in enumerate(program.commands):
                inside = isinstance(command, Replay)
                for part, one in enumerate(command.parts if inside else [command]):
                    if isinstance(one, Launch) and not one.by_host:
                        names = [k.function for k in used.backend.kernels_of(one.node) or ()]
                        wanted += [(number, part if inside else None, one, n) for n in names if n]
            assert [tuple(k[:4]) for k in notes.kernels] == wanted
            notes.free()


def test_a_note_s_times_are_the_earliest_begin_and_the_latest_end(engine):
    with engine.variant(Toggles(**KEPT | {"streams": "3"})) as used:
        notes = notes_of(used)
        times = {i: (10_000 + 100 * i, 10_060 + 100 * i) for i in range(len(notes.kernels))}
        fill(notes, times)
        found = {span.kernel.note: (span.begin_ns, span.end_ns) for span in notes.read()}
        assert found == times


def test_no_kernel_begins_before_the_one_in_front_on_its_stream_has_ended(engine):
    """A dependent launch begins early and waits; two streams may run at once."""
    with engine.variant(Toggles(**KEPT | {"streams": "3", "pdl": "on"})) as used:
        notes = notes_of(used)
        times = {i: (10_000 + 50 * i, 10_100 + 50 * i) for i in range(len(notes.kernels))}
        fill(notes, times)
        ends: dict[int, int] = {}
        beside = 0
        for span in notes.read():
            stream, (begin, end) = span.kernel.command.stream.id, times[span.kernel.note]
            assert span.begin_ns == max(begin, ends.get(stream, 0)) and span.end_ns == end
            beside += any(span.begin_ns < e for s, e in ends.items() if s != stream)
            ends[stream] = end
        assert beside > 0


def test_a_kernel_that_noted_nothing_is_said(engine):
    notes = notes_of(engine)
    times = dict.fromkeys(range(len(notes.kernels)), (100, 200))
    last = notes.kernels[-1]
    fill(notes, {i: t for i, t in times.items() if i != last.note})
    with pytest.raises(DeviceError, match=f"kernel {last.function} of .* noted no time"):
        notes.read()


def test_products_of_a_library_are_counted_as_silent(engine):
    program = engine.program(n_tokens=500)
    nodes = [c.node for c in program.singly() if isinstance(c, Launch) and not c.by_host]
    names = [k.function for node in nodes for k in engine.backend.kernels_of(node) or ()]
    notes = LaunchNotes(program, engine._open.backends)
    assert notes.n_silent == names.count(None) > 0
    assert len(notes.kernels) == len(names) - notes.n_silent


def test_a_program_without_kernels_that_note_needs_no_memory(engine):
    notes = LaunchNotes(engine.program(), [open_backend() for _ in engine._open.backends])
    assert not notes.kernels and notes.n_silent == 0 and not notes._device
    notes.reset()
    assert notes.read() == []


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1, max_size=5))
def test_times_of_notes_are_as_written(times):
    words = np.full((len(times), CELLS, CELL_WORDS), ~np.uint64(0))
    for i, (begin, end) in enumerate(times):
        words[i, i % CELLS, 0] = begin
        words[i, -1, 1] = ~np.uint64(end)
    found = times_of(words.reshape(-1).view(np.uint8))
    assert found.tolist() == [list(pair) for pair in times]


def test_a_note_that_nobody_wrote_begins_behind_its_end():
    ((begin, end),) = times_of(np.full(NOTE_BYTES, 0xFF, np.uint8)).tolist()
    assert begin > end


def test_where_steps_are_launched_ahead_nothing_is_noted(engine):
    ahead = KEPT | PLAN | {"launch_ahead": "on", "results": "direct"}
    refused = pytest.raises(UsageError, match="use launch_ahead=off plan_end=event")
    with engine.variant(Toggles(**ahead)) as used, refused, kernel_spans(used):
        raise AssertionError("refused beforehand")


def test_a_device_whose_kernels_note_nothing_says_so():
    backend = open_backend()
    with pytest.raises(DeviceError, match="kernels of the null device note nothing; use marks"):
        backend.launch_noted(None, lambda t: 0, 0, 0)  # type: ignore[arg-type]
