"""Engines with plans on a driver that notes what it is asked, and the GPU's clock."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

import workbench as wb
from tests.backend.cuda import fake_cuda
from tests.backend.cuda.fake_cuda import COPIES, SPARE, FakeApi, fake_backend, kernel_params
from workbench.backend.cuda.device import timer
from workbench.common.errors import DeviceError, UsageError
from workbench.config import Toggles

FORKED = {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"}
KEPT = {"graph_reuse": "set_rows"}


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[wb.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        fake_backend(patch)
        path = tiny_model("tiny-llama", "F16")
        with wb.Engine.load(path, device="cuda", n_ctx=2048, toggles=Toggles(**KEPT)) as made:
            yield made


def step(used: wb.Engine, n: int, outputs: Any = "last") -> list[str]:
    """What a step queues, without the addresses: variants have memory of their own."""
    log, found = used.backend._driver.api.log, []  # type: ignore[attr-defined]
    log.clear()
    used.step([1] * n, outputs=outputs)
    for i, call in enumerate(log):
        is_product = call.function == "cublasGemmEx"
        # a product is two nodes of a graph; before its first capture it runs to be loaded
        if is_product and (call == log[i - 1] or SPARE in call.args):
            continue
        if is_product or call.kind in ("kernel", *COPIES):
            near = [a for a in call.args if not isinstance(a, int) or a < 1 << 40]
            found.append(str((call.function, *near)))
    return sorted(found)


@pytest.mark.parametrize("more", [{}, {"fuse": "on", "pdl": "on"}], ids=["plain", "fused"])
@pytest.mark.parametrize("scope", [{}, FORKED], ids=["split", "forked"])
def test_a_replayed_step_queues_what_an_eager_one_does(engine, scope, more):
    eager = KEPT | more | {k: v for k, v in scope.items() if k != "plan_scope"}
    kinds = [(1, "last")] * 3 + [(8, "all")] * 3 + [(500, "last")] * 3 + [(1, "last")] * 6
    with engine.variant(Toggles(**eager)) as used:
        wanted = [step(used, *kind) for kind in kinds]
    for rule in ("ours", "today", "pr"):
        with engine.variant(Toggles(**eager | scope | {"plans": rule})) as used:
            assert [step(used, *kind) for kind in kinds] == wanted, rule
            assert used.counters["plans_replayed"] >= 5
            plans: Any = used.issuer.plans
            made = [plan.captured for plan in plans if plan.captured is not None]
            assert (max(graph.edges()[1] for graph in made) > 10) == bool(more)
        api = engine.backend._driver.api
        assert not api.alive and not api.captures, "closed with its engine"


@pytest.mark.parametrize("sync", [m for m in Toggles.values("sync") if m != "auto"])
def test_every_ordering_has_plans_that_a_capture_bears(engine, sync):
    """No part waits for an event of another capture, and none of the host's waits is a part."""
    n = 0
    for copy_stream, n_copies, scope in product(("own", "compute"), ("1", "4"), ("split", "step")):
        fields = {"sync": sync, "copy_stream": copy_stream, "n_copies": n_copies}
        try:
            used = engine.variant(Toggles(**KEPT, plans="ours", plan_scope=scope, **fields))
        except UsageError:  # a race, a clash, or the host waits amid a step
            continue
        n += 1
        with used:
            for tokens in (1, 1, 30, 1, 1, 1):
                used.step([1] * tokens)
            assert used.counters["plans_replayed"] >= 6, fields
    assert n >= 1


class Answering(FakeApi):
    """Runs the kernel of `kernels/stamp.cu` that answers. Its clock says AHEAD less."""

    AHEAD, TICK = 1 << 40, 32
    answers = True

    def cuLaunchKernel(self, function: str, *args: Any) -> tuple[int]:
        if function.startswith("answer of") and self.answers:
            threading.Thread(target=self._answer, args=kernel_params(args[8])).start()
        return super().cuLaunchKernel(function, *args)

    def _answer(self, address: int, n: int, limit_ns: int) -> None:
        words = (ctypes.c_int64 * (timer.NBYTES // 8)).from_address(address)
        words[timer.TICK] = self.TICK
        for number in range(n):
            while words[timer.ASKED] <= number:
                time.sleep(0)
            now = time.perf_counter_ns() - self.AHEAD
            words[timer.ANSWERS + number] = now - now % self.TICK


def test_the_gpu_s_clock_is_set_to_the_host_s(monkeypatch):
    monkeypatch.setattr(fake_cuda, "FakeApi", Answering)
    backend, _ = fake_backend(monkeypatch)
    clock = backend.clock()
    assert clock is not None and clock.tick_ns == Answering.TICK
    assert abs(clock.ahead_ns - Answering.AHEAD) <= clock.error_ns < 1_000_000_000
    monkeypatch.setattr(Answering, "answers", False)
    monkeypatch.setattr(timer, "LIMIT_NS", 1_000_000)
    with pytest.raises(DeviceError, match="does not answer"):
        backend.clock()
    begin, end = (backend.stamp(1 << 50, 1 << 51, 8, is_end, 0) for is_end in (False, True))
    assert list(begin.block) == [1 << 50, 1 << 51, 8, 0] and list(end.block)[-1] == 1
    assert begin.addresses == end.addresses == (1 << 50, 1 << 51) and begin.key != end.key
