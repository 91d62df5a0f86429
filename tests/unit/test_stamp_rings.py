"""Stamps without a device that computes: how pairs are numbered and kept, what a CUDA capture has
of them, and how the GPU's clock is set to the host's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.backend.cuda import fake_cuda
from tests.backend.cuda.fake_cuda import FakeApi, fake_backend
from tests.backend.cuda.fake_graphs import kernel_params
from workbench.backend.clock.stamps import PAIR_BYTES, PAIRS, WRITTEN, StampRing
from workbench.backend.cuda.device import timer
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.program.commands import Space

N_PAIRS = 8


class Device:
    """Writes the stamps of its launches, when it is told to or waited for."""

    def __init__(self) -> None:
        self.queued = self.ran = 0

    def allocate(self, nbytes: int, space: Space) -> Any:
        made = open_backend().allocate(nbytes, space)
        if space == Space.PINNED:
            self.words = made.array.view(np.int64)
        return made

    def queue(self) -> None:
        self.queued += 1

    def run(self) -> None:
        at = (PAIRS + self.ran % N_PAIRS * PAIR_BYTES) // 8
        self.words[at : at + 2] = 10 * self.ran, 10 * self.ran + 5
        self.ran += 1
        self.queued -= 1
        self.words[WRITTEN // 8] = self.ran

    def synchronize(self) -> None:
        while self.queued:
            self.run()


@given(does=st.lists(st.sampled_from(["launch", "launch", "run", "fails", "forget"]), max_size=80),
       runs=st.booleans())  # fmt: skip
def test_every_pair_is_found_by_its_number(does, runs):
    device: Any = Device()
    ring = StampRing(device, 0, N_PAIRS)
    numbers: list[int] = []

    def fails() -> None:
        if runs:
            device.queue()
        raise KeyboardInterrupt

    for what in does:
        match what:
            case "launch":
                before = device.ran + device.queued
                ring.ends(device.queue)
                numbers.append(ring.launched - 1)
                assert numbers[-1] == before
            case "run" if device.queued:
                device.run()
            case "fails":
                with pytest.raises(KeyboardInterrupt):
                    ring.ends(fails)
            case "forget":
                device.synchronize()
                ring.forget()
                numbers.clear()
    device.synchronize()
    assert [ring.pair(n) for n in numbers] == [(10 * n, 10 * n + 5) for n in numbers]
    assert len(ring._aside) * N_PAIRS // 2 <= max(0, device.ran - N_PAIRS // 2)
    ring.free()


def test_a_device_without_stamps_says_so():
    backend = open_backend()
    assert backend.clock() is None
    with pytest.raises(DeviceError, match="has no stamps"):
        StampRing(backend, 0).stamp(is_end=True)


# the cuda backend ---------------------------------------------------------------------------------


class Answering(FakeApi):
    """Runs the kernels of `kernels/stamp.cu`. Its clock is AHEAD behind the host's."""

    AHEAD, TICK = 1 << 40, 32
    answers = True

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[int, int] = {}
        self.pairs: list[list[int]] = []  # begin, or begin and end, of each

    def cuLaunchKernel(self, function: str, *args: Any) -> tuple[int]:  # type: ignore[override]
        capturing = self.capture_of(args[7]) is not None
        if not capturing:
            self._run(function, kernel_params(args[8]))
        return super().cuLaunchKernel(function, *args)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[int]:
        for call in executable.calls:
            if call.function == "cuLaunchKernel":
                self._run(call.args[0], call.args[5:])
        return super().cuGraphLaunch(executable, stream)

    def _run(self, function: str, args: Any) -> None:
        if function.startswith("stamp of"):
            self._stamp(*args)
        elif function.startswith("answer of") and self.answers:
            threading.Thread(target=self._answer, args=args).start()

    def _now(self) -> int:
        now = time.perf_counter_ns() - self.AHEAD
        return now - now % self.TICK

    def _stamp(self, counter: int, ring: int, n_pairs: int, is_end: int) -> None:
        number = self.counters.get(counter, 0)
        words = _words(ring, PAIRS // 8 + 2 * n_pairs)
        words[PAIRS // 8 + 2 * (number & n_pairs - 1) + is_end] = now = self._now()
        self.pairs[number:] = [[*self.pairs[number], now] if is_end else [now]]
        if is_end:
            self.counters[counter] = words[WRITTEN // 8] = number + 1

    def _answer(self, address: int, n: int, limit_ns: int) -> None:
        words = _words(address, timer.NBYTES // 8)
        words[timer.TICK] = self.TICK
        for number in range(n):
            while words[timer.ASKED] <= number:
                time.sleep(0)
            words[timer.ANSWERS + number] = self._now()


def _words(address: int, n: int) -> Any:
    import ctypes

    return (ctypes.c_int64 * n).from_address(address)


@pytest.fixture
def api(monkeypatch) -> type[Answering]:
    monkeypatch.setattr(fake_cuda, "FakeApi", Answering)
    return Answering


def test_the_gpu_s_clock_is_set_to_the_host_s(api, monkeypatch):
    backend, _ = fake_backend(monkeypatch)
    clock = backend.clock()
    assert clock.tick_ns == api.TICK
    assert abs(clock.ahead_ns - api.AHEAD) <= clock.error_ns < 1_000_000_000
    monkeypatch.setattr(api, "answers", False)
    monkeypatch.setattr(timer, "LIMIT_NS", 1_000_000)
    with pytest.raises(DeviceError, match="does not answer"):
        backend.clock()


def test_a_stamp_s_block_has_its_arguments(api, monkeypatch):
    backend, _ = fake_backend(monkeypatch)
    memory = backend.allocate(PAIRS + 8 * PAIR_BYTES, Space.PINNED)
    begin, end = (backend.stamp(1 << 50, memory.address, 8, is_end, 0) for is_end in (False, True))
    assert list(begin.block) == [1 << 50, memory.address, 8, 0] and list(end.block)[3] == 1
    assert begin.addresses == end.addresses == (1 << 50, memory.address)
    assert begin.key != end.key


STEP = {"plan_scope": "step", "sync": "packed_implicit"}
ENGINES: dict[str, dict[str, str]] = {
    "split": {},
    "step": STEP,
    "forked": {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
    "direct": STEP | {"results": "direct"},
    "patched": STEP | {"graph_reuse": "patch_pointers"},
    "pr": STEP | {"plans": "pr"},
    "today": STEP | {"plans": "today"},
}


@pytest.fixture
def engine(api, monkeypatch, tiny_model) -> Iterator[wb.Engine]:
    fake_backend(monkeypatch)
    kept = Toggles(graph_reuse="set_rows")
    with wb.Engine.load(
        tiny_model("tiny-llama", "F16"), device="cuda", n_ctx=2048, toggles=kept
    ) as made:
        yield made


@pytest.mark.parametrize("fused", [{}, {"fuse": "on", "pdl": "on"}], ids=["plain", "fused"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_stamped_plan_is_the_plain_one_with_two_nodes_more(engine, name, fused):
    values = {"graph_reuse": "set_rows", "plans": "ours"} | ENGINES[name] | fused
    api = engine.backend._driver.api  # type: ignore[attr-defined]
    with engine.variant(Toggles(**values)) as used:
        for token in range(1, 5):
            used.step([token])
        with used.stamped() as stamps:
            for token in range(1, 12):
                used.step([token])
        ahead = {x - there for pair, pair_there in zip(stamps, api.pairs, strict=True)
                 for x, there in zip(pair, pair_there, strict=True)}  # fmt: skip
        assert len(ahead) == 1, "every step has its own pair"
        counts = used.counters
        used.step([3])
        for what in ("captured", "reinstantiated"):
            assert used.counters[f"plans_{what}"] == counts[f"plans_{what}"]
        captured = [plan.captured for plan in used.issuer.plans if plan.captured is not None]
        plain, graph = sorted(captured, key=lambda made: len(made.nodes))[:: len(captured) - 1]
        assert len(graph.nodes) == len(plain.nodes) + 2 and set(graph.nodes) == set(plain.nodes)
        (edges, early), (plain_edges, plain_early) = graph.edges(), plain.edges()
        # in front of the first launch and behind the last, the edges at the stamps are others
        assert edges == plain_edges + 2 and plain_early <= early <= plain_early + 1
        assert (early > 10) == bool(fused)
        functions = [node.call.args[0] for node in graph.template.graph.nodes
                     if node.call.function.startswith("cuLaunch")]  # fmt: skip
        stamps_at = [i for i, f in enumerate(functions) if f.startswith("stamp of")]
        assert stamps_at == [0, len(functions) - 1]
        if name == "patched":
            assert graph.nodes_set > 3 and not graph.recaptured
    assert not api.alive, "closed with its engine"
