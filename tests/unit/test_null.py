"""The null backend logs commands in order, and can claim any capabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.backend import null as null_backend
from workbench.backend.issue.bind import plannable
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import Space


def open_backend(**capabilities) -> Any:
    return null_backend.open_backend(**capabilities)


def test_log_has_each_command_prepared_and_issued():
    null = open_backend()
    a, b = (Tensor(n, F32, (2, 4)) for n in "ab")
    node = make("add", "sum", a, b)
    event = null.event()
    launch = null.launch(node, lambda t: 0, 0, 1)
    commands = [
        launch, null.copy(1, 2, 3, 0, True), null.record(event, 0), null.wait(event, 1),
        null.sync_event(event), null.sync_stream(1), launch,
    ]  # fmt: skip
    details = [
        ("launch", "add", "sum", 1), ("copy", 1, 2, 3, 0, True), ("record", 0, 0), ("wait", 0, 1),
        ("sync_event", 0), ("sync_stream", 1),
    ]  # fmt: skip
    assert null.log == [("prepare", *d) for d in details]
    null.log.clear()
    for command in commands:
        command()
    null.synchronize()
    null.close()
    assert null.log == [("issue", *d) for d in (*details, details[0])] + [
        ("synchronize",), ("close",)
    ]  # fmt: skip
    assert null.event() == 1


def test_a_tensor_without_a_range_is_seen():
    node = make("add", "sum", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))
    with pytest.raises(KeyError):
        open_backend().launch(node, {}.__getitem__, 0, 0)


def test_memory_is_real_and_lazy():
    null = open_backend()
    host, device = null.allocate(100, Space.PINNED), null.allocate(1 << 30, Space.DEVICE)
    assert host.array.nbytes == 100 and host.address % 256 == 0 and not host.array.any()
    assert device.array is None and device.nbytes == 1 << 30
    device.free()
    device.free()
    weight = null.load_weight(Tensor("w", F32, (8,), Kind.WEIGHT), np.zeros(32, np.uint8))
    assert weight.nbytes == 32
    assert null.log[-1] == ("load_weight", "w")
    with pytest.raises(DeviceError, match="address space"):
        null.allocate(1 << 62, Space.HOST)


def test_capabilities_are_as_asked():
    assert not open_backend().capabilities.synchronous
    null = open_backend(
        name="slow", asynchronous_copies=False, events=False, one_order=False, n_streams=0
    )
    assert null.name == "slow" and null.capabilities.synchronous
    assert not any(
        (null.capabilities.events, null.capabilities.one_order, null.capabilities.capture)
    )
    assert null.resolve(null.mark(0), null.mark(0)) == (0, 0)


def test_a_plan_is_logged_when_it_is_captured_launched_updated_and_destroyed():
    null = open_backend(capture=True)
    event = null.event()
    parts = [null.copy(1, 2, 3, 1, False), null.record(event, 1), null.wait(event, 0),
             null.copy(4, 5, 6, 0, True)]  # fmt: skip
    work = plannable(null, parts, 0, (1, 1, 0, 0))
    null.log.clear()
    plan = null.capture(work)
    assert plan.nodes == (0, 3) and plan.spans() == ()
    plan.launch()
    assert null.log == [("prepare", "replay", 0, 4), ("issue", "replay", 0, 4)]
    other = plannable(null, parts[:2], 0, (1, 1))
    null.log.clear()
    assert plan.update(work, None) and not plan.update(other, None)
    plan.launch()
    assert plan.launches == 2
    plan.destroy()
    plan.destroy()
    with pytest.raises(DeviceError, match="this plan is destroyed; capture its commands again"):
        plan.launch()
    assert null.log == [("update",), ("issue", "replay", 0, 4), ("destroy",)]
    with pytest.raises(DeviceError, match="cannot capture plans; use plans=off"):
        open_backend().capture(work)
