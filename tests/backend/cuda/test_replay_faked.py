"""What a timed replay asks of the driver, in which order, and that nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backend.cuda.fake_graphs import Result
from tests.backend.cuda.rig import FAR, Rig, norm
from workbench.backend.cuda.device.replay import READ_GRIDS, READ_WORDS, TimedReplay, read_rates
from workbench.common.errors import DeviceError, UsageError


@pytest.fixture
def rig(monkeypatch) -> Rig:
    return Rig.of(monkeypatch)


def test_times_lie_between_events_behind_a_replay(rig):
    """Every kernel has run once before it is captured."""
    a, b = (rig.launch(norm(cols), FAR).call for cols in (256, 512))
    with TimedReplay(rig.backend, [a, b, a, b]) as replay:
        ran = list(rig.api.log)
        assert len(ran) == 2 and ran[0] != ran[1]
        rig.api.log.clear()
        assert replay.time_us(2) == [250.0, 250.0]
        once, record = [*ran, *ran], "cuEventRecord"
        names = [call.function for call in once]
        assert [c.function for c in rig.api.log] == [*names, record] * 3
        assert [c for c in rig.api.log if c.function != record] == once * 3
    assert rig.nothing_left()
    with pytest.raises(UsageError, match="replay of 4 launches is closed; capture again"):
        replay.run()
    with pytest.raises(UsageError, match="no launches"):
        TimedReplay(rig.backend, [])


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, UsageError])
def test_a_failure_while_capturing_leaves_nothing(rig, stop):
    def fails() -> None:
        if rig.api.captures:
            if stop is UsageError:  # a capture within a capture
                TimedReplay(rig.backend, [lambda: None])
            raise stop

    with pytest.raises(stop, match="stream 0 is being captured already; end that" if
                       stop is UsageError else None):  # fmt: skip
        TimedReplay(rig.backend, [fails])
    assert rig.nothing_left()


def test_a_graph_that_cannot_be_instantiated_goes(rig):
    rig.api.refuse["cuGraphInstantiate"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="cuGraphInstantiate failed at replay of 1 launches"):
        TimedReplay(rig.backend, [rig.launch(norm(), FAR).call])
    assert rig.nothing_left()


def rates(rig: Rig, monkeypatch: Any, nbytes: int, n: int, room: int = 1 << 40) -> Any:
    """The rates of reading so much, n times, and the kernels that read. room: of the device."""
    backend, kernels = rig.backend, list[Any]()
    prepare, allocate = backend._prepare, backend.allocate

    def limited(wanted: int, space: Any) -> Any:
        if wanted > room:
            raise DeviceError("cannot allocate")
        return allocate(wanted, space)

    def prepared(kernel: Any, *rest: Any) -> Any:
        kernels.append(kernel)
        return prepare(kernel, *rest)

    backend._driver.properties |= {"l2CacheSize": 1 << 20, "multiProcessorCount": 10}
    monkeypatch.setattr(backend, "allocate", limited)
    monkeypatch.setattr(backend, "_prepare", prepared)
    return read_rates(backend, nbytes, n), kernels


def test_reading_is_tried_with_every_kernel_and_grid(rig, monkeypatch):
    found, kernels = rates(rig, monkeypatch, 1 << 26, 3)
    assert len(found) == len(READ_WORDS) * len(READ_GRIDS) == len(kernels)
    assert all(rate == pytest.approx((1 << 26) / 250 / 1e3) for rate in found.values())
    tiles = (1 << 26) // 16 // (256 * 8)
    grids = [k.grid[0] for k in kernels if k.function == "read_8"]
    assert grids == [40, 80, 160, 320, tiles] and rig.nothing_left()


def test_a_small_device_reads_a_small_buffer_often(rig, monkeypatch):
    found, kernels = rates(rig, monkeypatch, 64 << 20, 1, room=20 << 20)
    assert kernels[0].args[1] == (16 << 20) // 16  # words
    assert found["read_4 x4"] == pytest.approx((64 << 20) / 250 / 1e3)
    with pytest.raises(DeviceError, match="cannot allocate"):
        rates(rig, monkeypatch, 64 << 20, 1, room=7 << 20)
