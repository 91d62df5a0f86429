"""Launches ahead on the GPU: a gate copies what a copy does, holds its stream no longer than its
limit, and engines give the bits of engines without it, however late the host is."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.cpu.test_logits import engine, tokens_for  # noqa: F401 - a fixture
from tests.late_host import never_passed  # noqa: F401 - of every test
from workbench.backend.plan.gate import (
    CANCELLED,
    CONTROL_BYTES,
    LIMIT_NS,
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
LATE = 4 * LIMIT_NS / 1e9


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

    def free(self) -> None:
        for memory in (self.control, self.source, self.there, self.back):
            memory.free()


@pytest.mark.parametrize("nbytes", [1, 16, 100, 4096, 65536 - 16, 65536 + 20, MOST_BYTES])
def test_an_open_gate_copies_every_byte(backend, nbytes):
    rig = Rig(backend, nbytes, SECOND)
    try:
        for number in range(1, 12):
            wanted = np.random.default_rng(number).integers(0, 256, nbytes).astype(np.uint8)
            rig.source.array[:nbytes] = wanted
            rig.words[OPENED // 8] = number
            rig.copy()
            assert np.array_equal(rig.found(), wanted)
            assert rig.went(number) == number
    finally:
        rig.free()


def test_a_gate_copies_what_was_written_while_it_was_closed(backend):
    rig = Rig(backend, 5000, SECOND)
    try:
        for number in range(1, 40):
            rig.source.array[:] = 0
            rig.copy()
            time.sleep(random.Random(number).random() / 1000)
            rig.source.array[:] = number
            rig.words[OPENED // 8] = number
            assert (rig.found() == number).all()
            assert rig.went(number) == number
    finally:
        rig.free()


def test_a_closed_gate_copies_nothing(backend):
    """Cancelled, or at its limit."""
    rig = Rig(backend, 256, 20_000_000)
    try:
        rig.source.array[:] = 1
        rig.words[OPENED // 8] = 1
        rig.copy()
        assert (rig.found() == 1).all()
        rig.source.array[:] = 2
        start = time.perf_counter()
        rig.copy()
        assert (rig.found() == 1).all() and rig.went(2) == -2
        assert time.perf_counter() - start < 5  # the limit, far from a hang
        rig.copy()
        rig.words[CANCELLED // 8] = 1 << 3 % N_CANCELLED
        assert (rig.found() == 1).all() and rig.went(3) == -3
        rig.words[OPENED // 8] = 4
        rig.copy()
        assert (rig.found() == 2).all() and rig.went(4) == 4
        rig.source.array[:] = 3
        rig.words[CANCELLED // 8] |= 1 << 5 % N_CANCELLED
        rig.words[OPENED // 8] = 6  # the host has gone on: the fifth stays cancelled
        rig.copy()
        assert (rig.found() == 2).all() and rig.went(5) == -5
        rig.copy()
        assert (rig.found() == 3).all() and rig.went(6) == 6
    finally:
        rig.free()


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
        ("tiny-llama", "Q8_0", {"fuse": "on", "results": "direct"}),
        ("tiny-qwen3", "Q4_K", {"fuse": "on", "results": "direct", "pdl": "on"}),
        ("tiny-llama", "Q4_0", {"host_source": "pinned_ring_2", "step_wait": "outputs"}),
        ("tiny-llama", "Q4_0", {"graph_reuse": "pointer_table"}),
        ("tiny-llama", "Q4_0", {"plans": "today"}),
        ("tiny-llama", "Q4_0", {"plan_end": "word"}),
        ("tiny-llama", "Q8_0", {"plan_end": "word", "results": "direct", "fuse": "on"}),
        (
            "tiny-qwen3",
            "Q4_K",
            {"plan_end": "word", "results": "direct", "fuse": "on", "pdl": "on"},
        ),
    ],
)
def test_steps_launched_ahead_give_the_same_bits(engine, backend, preset, quant, more):  # noqa: F811
    if "pdl" in more and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")
    tokens = tokens_for(preset, 100)
    shared = engine(preset, quant, "cuda")
    toggles = STEP | more
    with shared.variant(Toggles(**toggles | {"plan_end": "event"})) as plain:
        wanted = feed(plain, tokens)
    with shared.variant(Toggles(**toggles, launch_ahead="on")) as ahead:
        for late in (0.0, 0.3):
            assert np.array_equal(feed(ahead, tokens, late), wanted), late
            counters = ahead.counters
            print(f"late {late}: {counters['plans_ahead']} ahead, "
                  f"{counters['plans_ahead_missed']} missed")  # fmt: skip
        assert counters["plans_ahead"] > 60, counters
        assert counters["plans_ahead_missed"] > 0, counters


def test_sequences_shifts_and_another_engine_in_between(tiny_model):
    """What else is queued on the device runs when the gate gives way, and nothing changes."""
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
        with plain.variant(Toggles(**STEP, launch_ahead="on")) as ahead:
            assert np.array_equal(rows(ahead, other), wanted)
            assert ahead.counters["plans_ahead"] > 10, ahead.counters


def test_an_engine_with_a_plan_at_its_gate_is_closed(engine):  # noqa: F811
    shared = engine("tiny-llama", "Q4_0", "cuda")
    for _ in range(3):
        with shared.variant(Toggles(**STEP, launch_ahead="on")) as ahead:
            for token in range(1, 12):
                ahead.step([token])
            assert ahead.counters["plans_ahead"] + ahead.counters["plans_ahead_missed"] > 3
    assert shared.step([1]).shape[0] == 1
