"""Launches ahead on the GPU: a gate copies what a copy does, holds its stream no longer than its
limit, and engines give the bits of engines without it, however late the host is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu import test_cuda_toggles as toggles
from tests.gpu.harness import tokens_for
from tests.gpu.test_cuda_toggles import feed
from tests.late_host import never_passed  # noqa: F401 - of every test
from workbench.backend.plan import gate
from workbench.config import Toggles
from workbench.program.commands import COMPUTE_STREAM, Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

OURS: dict[str, Any] = {"graph_reuse": "set_rows"} | toggles.OURS


class Rig:
    """A gate's control block, and memory on both sides of its copy."""

    def __init__(self, backend: Any, nbytes: int, limit_ns: int):
        room = -(-nbytes // 16) * 16
        pinned = [backend.allocate(n, Space.PINNED) for n in (gate.CONTROL_BYTES, room, room)]
        self.memory = [*pinned, backend.allocate(room, Space.DEVICE)]
        control, source, back, there = (memory.address for memory in self.memory)
        self.words = pinned[0].array.view(np.int64)
        self.source, self.back = (memory.array[:nbytes] for memory in pinned[1:])
        stream = COMPUTE_STREAM
        self.copy = backend.gate_copy(there, source, nbytes, control, limit_ns, stream)
        self.bring = backend.copy(back, there, nbytes, stream, to_host=True)
        self.sync = backend.sync_stream(stream)

    def open(self, number: int) -> None:
        self.words[gate.OPENED // 8] = number

    def cancel(self, number: int) -> None:
        self.words[gate.CANCELLED // 8] |= 1 << number % gate.N_CANCELLED

    def came(self, number: int) -> tuple[int, np.ndarray]:
        """How gate `number`, the last, went, and what has been copied."""
        self.bring()
        self.sync()
        assert self.words[gate.RAN // 8] == number
        return int(self.words[gate.WENT // 8 + number % gate.N_WENT]), self.back


@pytest.fixture
def rig(backend) -> Iterator[Callable[[int, int], Rig]]:
    made: list[Rig] = []

    def make(nbytes: int, limit_ns: int = 1_000_000_000) -> Rig:
        made.append(Rig(backend, nbytes, limit_ns))
        return made[-1]

    yield make
    for memory in (memory for one in made for memory in one.memory):
        memory.free()


@pytest.mark.parametrize("nbytes", [1, 16, 100, 4096, 65536 - 16, 65536 + 20, gate.MOST_BYTES])
def test_a_gate_copies_what_is_there_when_it_opens(rig, nbytes):
    """Every byte, of what was written before or while the gate was closed."""
    one = rig(nbytes)
    for number in range(1, 20):
        wanted = np.random.default_rng(number).integers(0, 256, nbytes).astype(np.uint8)
        late = number % 2
        if late:
            one.copy()
            time.sleep(random.Random(number).random() / 1000)
        one.source[:] = wanted
        one.open(number)
        if not late:
            one.copy()
        went, found = one.came(number)
        assert went == number and np.array_equal(found, wanted)


def test_a_closed_gate_copies_nothing(rig):
    """At its limit, or cancelled, before or after it is reached."""
    one = rig(256, 20_000_000)
    for number, content, opened, found in (
        (1, 1, 1, 1), (2, 2, 1, 1), (3, 2, 1, 1), (4, 2, 4, 2), (5, 3, 6, 2), (6, 3, 6, 3),
    ):  # fmt: skip
        one.source[:] = content
        if number == 5:  # the host has gone on: the fifth stays cancelled
            one.cancel(5)
        one.open(opened)
        one.copy()
        if number == 3:
            one.cancel(3)
        went, there = one.came(number)
        assert (there == found).all(), number
        assert went == (-number if number in (2, 3, 5) else number)


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
    tokens, shared = tokens_for(preset, 150), engine(preset, quant)
    with shared.variant(Toggles(**OURS | more | {"plan_end": "event"})) as plain:
        wanted = feed(plain, tokens)
    with shared.variant(Toggles(**OURS | more, launch_ahead="on")) as ahead:
        for late in (0.0, 0.3):
            assert np.array_equal(feed(ahead, tokens, late=late), wanted), late
        counters = ahead.counters
        assert counters["plans_ahead"] > 60 and counters["plans_ahead_missed"] > 0, counters
