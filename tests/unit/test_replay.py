"""What a replay asks of the driver, in which order, and that nothing stays behind: a faked one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workbench.backend.cuda.device.replay import READ_GRIDS, READ_WORDS, TimedReplay, read_rates
from workbench.common.errors import DeviceError, UsageError


class FakeApi:
    """Only what the replay names of cuda.bindings.driver; graphs are numbers, counted."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)

    def __init__(self):
        self.log: list[str] = []
        self.capturing = 0
        self.alive: set[str] = set()
        self.fail = ""

    def cuStreamIsCapturing(self, stream):
        return 0, self.capturing

    def cuStreamBeginCapture(self, stream, mode):
        assert mode == "relaxed"
        self.capturing = 1
        self.log.append("begin")
        return (0,)

    def cuStreamEndCapture(self, stream):
        self.capturing = 0
        self.log.append("end")
        self.alive.add("7")
        return 0, 7

    def cuGraphInstantiate(self, graph, flags):
        if self.fail == "cuGraphInstantiate":
            return 1, None
        self.alive.add("executable")
        return 0, "executable"

    def cuGraphUpload(self, executable, stream):
        return (0,)

    def cuGraphLaunch(self, executable, stream):
        assert executable in self.alive
        self.log.append("launch")
        return (0,)

    def cuEventRecord(self, event, stream):
        self.log.append(f"record {event}")
        return (0,)

    def cuEventElapsedTime(self, begin, end):
        return 0, 0.25 * (end - begin)

    def cuStreamSynchronize(self, stream):
        assert not self.capturing
        self.log.append("wait")
        return (0,)

    def cuGraphExecDestroy(self, executable):
        self.alive.remove(executable)
        return (0,)

    def cuGraphDestroy(self, graph):
        self.alive.remove(str(graph))
        return (0,)


class FakeBackend:
    """A backend with the fake driver, and memory for at most `room` bytes at a time."""

    def __init__(self, room: int = 1 << 40):
        self.api, self.room = FakeApi(), room
        self.held: list[int] = []
        self.kernels: list = []
        self._driver = SimpleNamespace(
            api=self.api,
            call=self._call,
            event=self._event,
            properties={"l2CacheSize": 1 << 20, "multiProcessorCount": 10},
        )
        self.n_events = 0

    def _call(self, function, what, *args):
        error, *values = getattr(self.api, function)(*args)
        if error:
            raise DeviceError(f"{function} failed at {what}")
        return values[0] if values else None

    def _event(self, timing):
        assert timing
        self.n_events += 1
        return SimpleNamespace(handle=self.n_events - 1)

    def _stream(self, number):
        return number

    def _prepare(self, kernel, stream, what):
        self.kernels.append(kernel)
        return lambda: self.api.log.append(kernel.function)

    def synchronize(self):
        pass

    def allocate(self, nbytes, space):
        if nbytes > self.room:
            raise DeviceError("cannot allocate")
        self.held.append(nbytes)
        return SimpleNamespace(address=4096, nbytes=nbytes, free=lambda: self.held.remove(nbytes))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def test_every_kernel_runs_once_before_it_is_captured(backend):
    def a():
        backend.api.log.append("a")

    def b():
        backend.api.log.append("b")

    with TimedReplay(backend, [a, b, a, b]):
        assert backend.api.log == ["a", "b", "wait", "begin", "a", "b", "a", "b", "end"]
    assert not backend.api.alive


def test_times_lie_between_events_behind_an_untimed_replay(backend):
    with TimedReplay(backend, [lambda: None]) as replay:
        backend.api.log.clear()
        assert replay.time_us(2) == [250.0, 250.0]
        assert backend.api.log == [
            "launch", "record 0", "launch", "record 1", "launch", "record 2", "wait",
        ]  # fmt: skip
        replay.time_us(2)
        assert backend.n_events == 3  # used again
    replay.close()
    with pytest.raises(UsageError, match="replay of 1 launches is closed; capture again"):
        replay.run()


def test_a_capture_within_a_capture_is_refused_and_ends_both(backend):
    def captures_too():
        if backend.api.capturing:
            TimedReplay(backend, [lambda: None])

    with pytest.raises(UsageError, match="stream 0 is being captured already; end that"):
        TimedReplay(backend, [captures_too])
    assert not backend.api.capturing and not backend.api.alive


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt])
def test_a_failure_while_capturing_leaves_nothing(backend, stop):
    def fails():
        if backend.api.capturing:
            raise stop

    with pytest.raises(stop):
        TimedReplay(backend, [fails])
    assert not backend.api.capturing and not backend.api.alive


def test_a_graph_that_cannot_be_instantiated_is_destroyed(backend):
    backend.api.fail = "cuGraphInstantiate"
    with pytest.raises(DeviceError, match="cuGraphInstantiate failed at replay of 1 launches"):
        TimedReplay(backend, [lambda: None])
    assert not backend.api.alive
    with pytest.raises(UsageError, match="no launches"):
        TimedReplay(backend, [])


def test_reading_is_tried_with_every_kernel_and_grid(backend):
    rates = read_rates(backend, 1 << 26, 3)
    assert len(rates) == len(READ_WORDS) * len(READ_GRIDS) == len(backend.kernels)
    assert all(rate == pytest.approx((1 << 26) / 250 / 1e3) for rate in rates.values())
    tiles = (1 << 26) // 16 // (256 * 8)
    grids = [k.grid[0] for k in backend.kernels if k.function == "read_8"]
    assert grids == [40, 80, 160, 320, tiles]
    assert not backend.held and not backend.api.alive


def test_a_small_device_reads_a_small_buffer_often():
    backend = FakeBackend(room=20 << 20)
    rates = read_rates(backend, 64 << 20, 1)
    assert backend.kernels[0].args[1] == (16 << 20) // 16  # words
    assert rates["read_4 x4"] == pytest.approx((64 << 20) / 250 / 1e3)
    with pytest.raises(DeviceError, match="cannot allocate"):
        read_rates(FakeBackend(room=7 << 20), 64 << 20, 1)
