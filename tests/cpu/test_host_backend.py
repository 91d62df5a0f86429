"""The host backend is synchronous: when a launch returns, its result is there."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import count_parts
from workbench.backend.cpu.device.host import open_backend
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import Space


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def host(request):
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


def launch(backend, node, values: dict[Tensor, np.ndarray]) -> np.ndarray:
    memory = {t: backend.load_weight(t, v.view(np.uint8).reshape(-1)) for t, v in values.items()}
    memory[node.output] = backend.allocate(node.output.nbytes, Space.HOST)
    scratch = backend.allocate(max(1, backend.scratch_bytes(node)), Space.HOST)
    backend.launch(node, lambda t: memory[t.storage].address, scratch.address, 0)()
    return memory[node.output].array.view(np.float32).reshape(node.output.shape)


@pytest.mark.parametrize("rows", [1, 700])  # inline; shared with helpers
def test_a_launch_has_run_when_it_returns(host, rows):
    rng = np.random.default_rng(rows)
    a, b = (Tensor(n, F32, (rows, 1024), Kind.ACTIVATION) for n in "ab")
    x, y = (rng.standard_normal(a.shape, np.float32) for _ in "ab")
    np.testing.assert_array_equal(launch(host, make("add", "sum", a, b), {a: x, b: y}), x + y)


def test_a_product_with_the_weight_in_place(host):
    rng = np.random.default_rng(1)
    w, x = Tensor("w", F32, (512, 256), Kind.WEIGHT), Tensor("x", F32, (3, 256), Kind.ACTIVATION)
    weight, value = (rng.standard_normal(t.shape, np.float32) for t in (w, x))
    got = launch(host, make("mul_mat", "y", w, x), {w: weight, x: value})
    np.testing.assert_allclose(got, value @ weight.T, rtol=1e-4, atol=1e-4)


def test_weights_are_used_in_place(host):
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = False
    memory = host.load_weight(Tensor("w", F32, (4,), Kind.WEIGHT), data)
    assert memory.address == data.ctypes.data and memory.nbytes == 16
    memory.free()
    memory.free()


def test_shared_launches_run_every_part_once(host):
    words = np.zeros(8, np.int64)
    call = host.run_kernel(count_parts.address, 8, [int(words.ctypes.data)])
    for n in range(1, 2001):
        call()
        assert words[n % 8] == n  # at once
    np.testing.assert_array_equal(words, 2000)


def test_several_python_threads_may_launch(host):
    words = np.zeros(8, np.int64)
    call = host.run_kernel(count_parts.address, 8, [int(words.ctypes.data)])
    threads = [threading.Thread(target=lambda: [call() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    np.testing.assert_array_equal(words, 2000)


def test_copies_and_empty_commands(host):
    source, there = host.allocate(100, Space.HOST), host.allocate(100, Space.PINNED)
    assert source.address % 64 == 0 and not there.array.any()
    source.array[:] = 5
    copy = host.copy(there.address, source.address, 50, 0, to_host=False)
    copy()
    assert (there.array == [5] * 50 + [0] * 50).all()
    event = host.event()
    for command in (
        host.record(event, 0), host.wait(event, 0), host.sync_event(event), host.sync_stream(0),
        host.synchronize,
    ):  # fmt: skip
        assert command() is None
    assert host.resolve(host.mark(0), host.mark(0)) == (0, 0)
    assert host.capabilities.synchronous


def test_close_ends_the_helpers_and_later_launches(host):
    call = host.run_kernel(count_parts.address, 4, [int(np.zeros(8, np.int64).ctypes.data)])
    host.close()
    host.close()
    with pytest.raises(DeviceError, match="closed"):
        call()
    assert not any(t.name.startswith("the host backend") for t in threading.enumerate())


def test_wrong_options():
    with pytest.raises(DeviceError, match="threads"):
        open_backend(threads=-1)
