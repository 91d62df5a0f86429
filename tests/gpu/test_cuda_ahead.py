"""Launches ahead on the GPU: a gate copies what a copy does, holds its stream no longer than its
limit, and engines give the bits of engines without it, however late the host is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.gpu.harness import tokens_for
from tests.late_host import LATE, never_passed  # noqa: F401 - of every test
from workbench.backend.plan.gate import (
    CANCELLED,
    CONTROL_BYTES,
    MOST_BYTES,
    N_CANCELLED,
    N_WENT,
    OPENED,
    RAN,
    WENT,
)
from workbench.config import Toggles
from workbench.program.commands import COMPUTE_STREAM, Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SECOND = 1_000_000_000
STEP: dict[str, Any] = {
    "graph_reuse": "set_rows", "plans": "ours", "plan_scope": "step", "sync": "packed_implicit",
}  # fmt: skip


class Rig:
    """A gate's control block, and memory on both sides of its copy."""

    def __init__(self, backend: Any, nbytes: int, limit_ns: int):
        self.backend, self.nbytes = backend, nbytes
        room = -(-nbytes // 16) * 16
        self.control = backend.allocate(CONTROL_BYTES, Space.PINNED)
        self.source = backend.allocate(room, Space.PINNED)
        self.there = backend.allocate(room, Space.DEVICE)
        self.back = backend.allocate(room, Space.PINNED)
        self.words = self.control.array.view(np.int64)
        addresses = self.there.address, self.source.address
        self.copy = backend.gate_copy(
            *addresses, nbytes, self.control.address, limit_ns, COMPUTE_STREAM
        )
        self.bring = backend.copy(
            self.back.address, self.there.address, nbytes, COMPUTE_STREAM, to_host=True
        )
        self.sync = backend.sync_stream(COMPUTE_STREAM)

    def went(self, number: int) -> int:
        assert self.words[RAN // 8] == number
        return int(self.words[WENT // 8 + number % N_WENT])

    def found(self) -> np.ndarray:
        self.bring()
        self.sync()
        return self.back.array[: self.nbytes]


@pytest.fixture
def rig(backend) -> Iterator[Callable[[int, int], Rig]]:
    made: list[Rig] = []

    def make(nbytes: int, limit_ns: int = SECOND) -> Rig:
        made.append(Rig(backend, nbytes, limit_ns))
        return made[-1]

    yield make
    for one in made:
        for memory in (one.control, one.source, one.there, one.back):
            memory.free()


@pytest.mark.parametrize("nbytes", [1, 16, 100, 4096, 65536 - 16, 65536 + 20, MOST_BYTES])
def test_a_gate_copies_what_is_there_when_it_opens(rig, nbytes):
    """Every byte, of what was written before or while the gate was closed."""
    one = rig(nbytes)
    for number in range(1, 20):
        wanted = np.random.default_rng(number).integers(0, 256, nbytes).astype(np.uint8)
        late = number % 2
        if late:
            one.copy()
            time.sleep(random.Random(number).random() / 1000)
        one.source.array[:nbytes] = wanted
        one.words[OPENED // 8] = number
        if not late:
            one.copy()
        assert np.array_equal(one.found(), wanted)
        assert one.went(number) == number


def test_a_closed_gate_copies_nothing(rig):
    """Cancelled, or at its limit."""
    one = rig(256, 20_000_000)
    one.source.array[:] = 1
    one.words[OPENED // 8] = 1
    one.copy()
    assert (one.found() == 1).all()
    one.source.array[:] = 2
    one.copy()
    assert (one.found() == 1).all() and one.went(2) == -2
    one.copy()
    one.words[CANCELLED // 8] = 1 << 3 % N_CANCELLED
    assert (one.found() == 1).all() and one.went(3) == -3
    one.words[OPENED // 8] = 4
    one.copy()
    assert (one.found() == 2).all() and one.went(4) == 4
    one.source.array[:] = 3
    one.words[CANCELLED // 8] |= 1 << 5 % N_CANCELLED
    one.words[OPENED // 8] = 6  # the host has gone on: the fifth stays cancelled
    one.copy()
    assert (one.found() == 2).all() and one.went(5) == -5
    one.copy()
    assert (one.found() == 3).all() and one.went(6) == 6


def feed(used: wb.Engine, tokens: list[int], late: float = 0.0) -> np.ndarray:
    """Prompts, single tokens, and resets; `late` is how many of the steps the host is late for."""
    rows, chance = [], random.Random(3)
    for _ in range(2):
        used.reset()
        rows.append(used.prefill(tokens[:40], outputs="all").copy())
        for i, token in enumerate(tokens[40:100]):
            if chance.random() < late:
                time.sleep(LATE * chance.random())
            rows.append(used.step([token]).copy())
            if i == 30:
                used.step([token], outputs="none")
            if i == 40:
                used.cache.remove(0, 60)
                rows.append(used.prefill(tokens[:9]).copy())
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("preset", "quant", "more"),
    [
        ("tiny-llama", "Q4_0", {}),
        ("tiny-qwen3", "F16", {"results": "direct"}),
        ("tiny-llama", "Q4_0", {"graph_reuse": "pointer_table", "plans": "today"}),
        ("tiny-llama", "Q8_0", {"plan_end": "word", "results": "direct", "fuse": "on"}),
    ],
)
def test_a_late_host_changes_no_bit(engine, preset, quant, more):
    tokens = tokens_for(preset, 100)
    shared = engine(preset, quant)
    with shared.variant(Toggles(**STEP | more | {"plan_end": "event"})) as plain:
        wanted = feed(plain, tokens)
    with shared.variant(Toggles(**STEP | more, launch_ahead="on")) as ahead:
        for late in (0.0, 0.3):
            assert np.array_equal(feed(ahead, tokens, late), wanted), late
            counters = ahead.counters
        assert counters["plans_ahead"] > 60, counters
        assert counters["plans_ahead_missed"] > 0, counters


def test_work_in_between_runs_when_the_gate_gives_way(tiny_model):
    """Of sequences and shifts and of another engine, and nothing changes. Then the engine is closed
    with a plan at its gate."""
    tokens = tokens_for("tiny-llama", 60)
    path = tiny_model("tiny-llama", "Q4_0")

    def rows(used: wb.Engine, other: wb.Engine) -> np.ndarray:
        made = [used.prefill(tokens[:20]).copy()]
        other.reset()
        for i, token in enumerate(tokens[20:]):
            work: Any = [(0, [token], "last"), (1, [(token + 1) % 1024], "last")]
            made.append(used.submit(work).wait().copy())
            if i % 7 == 3:
                made.append(other.step([token]).copy())
            if i == 10:
                used.cache.remove(0, 4, 8)
                used.cache.shift(0, -4, 8)
            if i == 20:
                used.synchronize()
            if i == 25:
                used.cache.remove(1)
                used.cache.copy(0, 1)
        return np.concatenate(made)

    with wb.Engine.load(
        path, device="cuda", n_ctx=256, n_seqs=2, toggles=Toggles(**STEP)
    ) as plain, plain.variant(Toggles()) as other:  # fmt: skip
        wanted = rows(plain, other)
        for _ in range(3):
            with plain.variant(Toggles(**STEP, launch_ahead="on")) as ahead:
                assert np.array_equal(rows(ahead, other), wanted)
                assert ahead.counters["plans_ahead"] > 10, ahead.counters
        assert other.step([1]).shape[0] == 1
