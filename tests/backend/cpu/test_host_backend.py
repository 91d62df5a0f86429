"""The host backend is synchronous: when a launch returns, its result is there."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import address, count_parts
from workbench.backend.cpu.device.host import open_backend
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Kind, Tensor


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def host(request):
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


def test_weights_are_used_in_place(host):
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = False
    memory = host.load_weight(Tensor("w", F32, (4,), Kind.WEIGHT), data)
    assert memory.address == data.ctypes.data and memory.nbytes == 16
    memory.free()
    memory.free()


def test_shared_launches_run_every_part_once(host):
    words = np.zeros(8, np.int64)
    call = host.run_kernel(count_parts.address, 8, [address(words)])
    for n in range(1, 1001):
        call()
        assert words[n % 8] == n  # at once
    threads = [threading.Thread(target=lambda: [call() for _ in range(250)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    np.testing.assert_array_equal(words, 2000)


def test_close_ends_the_helpers_and_later_launches(host):
    call = host.run_kernel(count_parts.address, 4, [address(np.zeros(8, np.int64))])
    host.close()
    host.close()
    with pytest.raises(DeviceError, match="closed"):
        call()
    assert not any(t.name.startswith("the host backend") for t in threading.enumerate())
    with pytest.raises(DeviceError, match="threads"):
        open_backend(threads=-1)
