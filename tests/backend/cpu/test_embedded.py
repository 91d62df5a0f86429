"""The embedded device and the host backend, as far as they alone are: rings, threads of nine
streams, clean ends. The clauses that every device keeps are in tests/contract."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import (
    Log,
    address,
    append,
    count_parts,
    open_backend,
    spin,
    spins,
)
from tests.gates import hold
from workbench.backend.cpu.device import host, loops
from workbench.backend.cpu.device.embedded import SHARE
from workbench.backend.cpu.device.loops import MAX_ARGS, RING_SIZE
from workbench.backend.plan.gate import COUNTS, Gate
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Kind, Tensor
from workbench.program.commands import COPY_STREAM, Space

SIDE = range(2, 9)  # the compute streams beside the first


def n_threads() -> int:
    return sum(t.name.startswith("embedded stream") for t in threading.enumerate())


@pytest.mark.parametrize("before", [0, 1])
def test_a_ring_that_empties_while_the_host_looks_has_room(two, monkeypatch, before):
    """The host may be put aside between any two looks. It waits for no kernel that nobody queued:
    `completed` here opens the gate and comes back when the ring is empty, after some looks."""
    ring, log = two.streams[0], Log(two, RING_SIZE + 100)
    completed, waited, looks = type(ring).completed.fget, [], []

    def drained(ring):
        looks.append(completed(ring))
        if len(looks) <= before:
            return looks[-1]
        gate.open()
        while completed(ring) < ring.issued:
            time.sleep(0.001)
        return completed(ring)

    with hold(two, 0) as gate:
        one = log.part(0)[0]
        while ring.words[loops.FILLED // 8] - ring.words[loops.OVER // 8] < RING_SIZE:
            one()
        with monkeypatch.context() as patch:
            patch.setattr(type(ring), "completed", property(drained))
            patch.setattr(type(ring), "wait", lambda ring, number: waited.append(number))
            ring.await_room()
    assert max(waited, default=0) <= ring.issued == ring.completed


def test_a_full_ring_takes_no_entry_more(two):
    """It would overwrite the oldest entry, which is not over."""
    ring, log = two.streams[0], Log(two, RING_SIZE + 100)
    one, _ = log.part(0)
    with hold(two, 0):
        while ring.words[loops.FILLED // 8] - ring.words[loops.OVER // 8] < RING_SIZE:
            assert loops.push(ring.address, one.block.address) == loops.PUSHED
        issued = ring.issued
        assert loops.push(ring.address, one.block.address) == loops.FULL
        assert ring.issued == issued
    two.synchronize()
    assert len(log.values) == ring.issued - 1 == issued - 1, "all but the gate"


def test_a_cancelled_gate_copies_nothing_though_a_later_one_is_open(two):
    """The device may come to the first gate after the host has opened the second."""
    gate = Gate(two, dict.fromkeys(COUNTS, 0), limit_ns=10**10)
    source, first, second = (two.allocate(8, Space.PINNED) for _ in range(3))
    for memory, filled in ((source, 7), (first, 0), (second, 0)):
        memory.array.view(np.uint8)[:] = filled
    with hold(two, 0):
        gate.arm(object(), gate.copy((first.address, source.address), 8, 0))
        gate.cancel()
        assert gate.launch(gate.copy((second.address, source.address), 8, 0)) == 2
    two.synchronize()
    assert not first.array.any() and second.array.all()
    assert not gate.has_read(1) and gate.has_read(2)
    gate.free()


def test_what_the_device_cannot_do_is_refused(two):
    weight = Tensor("w", F32, (4, 4), Kind.WEIGHT)
    for says, ask in {
        "arguments": lambda: two.streams[0].prepare(append.address, 1, [0] * (MAX_ARGS + 1)),
        "threads": lambda: open_backend(threads=100_000),
        "snapshot": lambda: open_backend(threads=1, pageable="sometimes"),
        "wants": lambda: two.load_weight(weight, np.zeros(60, np.uint8)),
        "no memory": lambda: two.allocate(1 << 60, Space.DEVICE),
    }.items():
        with pytest.raises(DeviceError, match=says):
            ask()
    begin = two.mark(0)
    with hold(two, 0), pytest.raises(DeviceError, match="no stamp"):
        two.resolve(begin, two.mark(0))  # of the gate, which is not complete


def test_workers_share_a_copy_of_any_length(device):
    n = (1 << 20) + 77
    source, result = device.allocate(n + 64, Space.PINNED), device.allocate(n + 64, Space.PINNED)
    source.array[:] = np.random.default_rng(0).integers(0, 256, n + 64, np.uint8)
    for n in (63, (1 << 19) + 1, (3 << 18) + 1, (1 << 20) + 77):
        result.array[:] = 0
        device.copy(result.address + 3, source.address + 1, n, 0, to_host=True)()
        device.sync_stream(0)()
        np.testing.assert_array_equal(result.array[3 : 3 + n], source.array[1 : 1 + n])
        assert not result.array[:3].any() and not result.array[3 + n :].any()


@pytest.mark.parametrize("stream", [COPY_STREAM, SIDE[0], SIDE[-1]])
def test_memory_freed_too_early_stays_until_a_stream_is_done(two, stream):
    source, result = (two.allocate(400_000, Space.PINNED) for _ in range(2))
    source.array[:] = 3
    with hold(two, stream):
        two.copy(result.address, source.address, source.nbytes, stream, to_host=True)()
        source.free()
        two.allocate(8, Space.HOST).free()  # looks what is over
        np.zeros(400_000, np.uint8)[:] = 5  # would take the freed block
        assert len(two._retired) == 2
    two.sync_stream(stream)()
    assert (result.array == 3).all()
    two._keep(None)
    assert not two._retired


def test_a_wait_issued_again_waits_for_the_latest_record(two):
    event, side = two.event(), SIDE[0]
    record, wait = two.record(event, 0), two.wait(event, side)
    source, result = (two.allocate(64, Space.PINNED) for _ in range(2))
    source.array[:], result.array[:] = 3, 0
    spins(two, 0, 0)[0]()
    record(), wait()
    two.sync_stream(side)()
    with hold(two, 0):
        record(), wait()
        two.copy(result.address, source.address, 64, side, to_host=True)()
        time.sleep(0.05)  # a copy that waits for nothing would be over
        assert not result.array.any()
    two.sync_stream(side)()
    assert (result.array == 3).all()


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_nobody_pays_for_a_stream_that_no_program_uses(workers):
    others = n_threads()
    device, share = open_backend(threads=workers), max(1, workers // SHARE)
    before = workers + 1
    assert n_threads() - others == before
    event = device.event()
    device.record(event, SIDE[0])()
    device.sync_stream(SIDE[1])()
    device.sync_event(event)()
    assert n_threads() - others == before, "nothing is to be done on them"
    for n, stream in enumerate(SIDE, start=1):
        for _ in range(2):
            spins(device, 0, stream)[0]()
        assert n_threads() - others == before + n * share
    device.close()
    assert n_threads() == others


@pytest.mark.parametrize("workers", [1, 2])
def test_the_device_runs_while_python_has_the_gil(request, workers):
    """5 ms of kernels are queued; the host then does nothing but Python and never gives the GIL up.
    A worker that needs the GIL would not run one kernel."""
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1000)
    backend = open_backend(threads=workers)
    ring = backend.streams[0]
    call = ring.prepare(spin.address, 4 * workers, (12_000,))
    start = time.perf_counter_ns()
    for _ in range(100):
        call()
    while ring.completed < ring.issued and time.perf_counter_ns() < start + 5_000_000_000:
        pass
    assert ring.completed == ring.issued == 100
    assert start <= ring.stamp(0)[0] < ring.stamp(99)[1] <= time.perf_counter_ns()
    backend.close()


def test_ctrl_c_interrupts_a_wait(two):
    with hold(two, 0):
        two.streams[0].push(spin.address, 1, (0,))
        threading.Timer(0.05, _thread.interrupt_main).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            two.synchronize()
        assert time.perf_counter() - start < 2
    two.synchronize()  # and the device is none the worse


def test_an_interrupted_close_ends_every_stream(two):
    """The gate stays shut: only its stream's end lets the kernel there go."""
    close, log, others, event = two.close, Log(two), n_threads() - 3, two.event()
    hold(two, SIDE[2])
    two.record(event, SIDE[2])()
    for stream in (0, COPY_STREAM, SIDE[0], SIDE[6]):
        two.wait(event, stream)()
        log(stream, stream)
    threading.Timer(0.1, _thread.interrupt_main).start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        close()
    assert time.perf_counter() - start < 5 and log.values == [] and n_threads() == others
    close()


def test_closing_runs_nothing_twice():
    """Idle workers are woken by the close itself; the ring still holds the old entries then."""
    for n in range(60):
        words, backend = np.zeros(8, np.int64), open_backend(threads=3)
        for _ in range(n % 4 + 1):
            backend.streams[0].push(count_parts.address, 8, (address(words),))
        backend.close()
        np.testing.assert_array_equal(words, n % 4 + 1)


APART = """
import os, signal
from tests.gates import hold
from workbench.backend.cpu.device.embedded import open_backend
from workbench.common.errors import DeviceError
from workbench.program.commands import Space
device = open_backend(threads=1)
"""
LEAK = """
m = device.allocate(1 << 20, Space.PINNED)
gate = hold(device, 0)
for _ in range(100):
    device.copy(m.address, m.address + 64, 1000, 0, False)()
"""
FORKED = """
device.synchronize()
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    signal.alarm(20)
    for stream in (0, 3):  # one that was used before, one that was not
        try:
            hold(device, stream)
            device.sync_stream(stream)()
        except DeviceError as error:
            print(error, flush=True)
    os._exit(7)
"""
LOST = "embedded stream {} has lost its threads; open the backend after a fork, not before"


@pytest.mark.long
@pytest.mark.parametrize(("code", "said", "status"), [
    (LEAK, [], 0), (LEAK + "device.not_there", [], 1),
    (FORKED, [LOST.format(0), LOST.format(3), "7"], 0),
], ids=["left open", "left by an error", "forked"])  # fmt: skip
def test_a_process_ends_whatever_its_device_does(code, said, status):
    command = [sys.executable, "-W", "ignore", "-c", APART + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == said and done.returncode == status, done.stderr


# the host backend ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_host_backend_is_done_when_a_launch_returns(threads):
    backend, words = host.open_backend(threads=threads), np.zeros(8, np.int64)
    call = backend.run_kernel(count_parts.address, 8, [address(words)])
    for n in range(1, 1001):
        call()
        assert words[n % 8] == n  # at once
    others = [threading.Thread(target=lambda: [call() for _ in range(250)]) for _ in range(4)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(20)
    np.testing.assert_array_equal(words, 2000)
    backend.close()
    with pytest.raises(DeviceError, match="closed"):
        call()
    assert not any(t.name.startswith("the host backend") for t in threading.enumerate())
