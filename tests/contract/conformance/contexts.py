"""Devices with contexts, as GPUs have them, made of the embedded device.

A thread has one current device, which `attach` chooses. A handle (a stream, an event, a kernel, a
recorded plan) belongs to the device that is current when the handle is made. A stream or a kernel
is made when it is first named, as the cuda backend makes them. A handle is good on its own device
alone, while that device is current. CUDA answers any other use with CUDA_ERROR_INVALID_HANDLE, and
so does this device, at every call. A kernel that is given the memory of another device raises, too.

As in the cuda backend, these attach by themselves: `allocate`, `load_weight`, `capture`, `clock`,
`close`, and what a recorded plan can do.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from workbench.backend.base import Captured, Issue
from workbench.backend.cpu.device.embedded import DeviceMemory, EmbeddedDevice, Event, Point
from workbench.backend.issue.args import AddressOf
from workbench.backend.issue.issued import Issued, Plannable
from workbench.common.errors import DeviceError
from workbench.graph.ir import Node
from workbench.program.commands import Space

NAME = "contexts"
NOBODY = -1


class _Thread(threading.local):
    device = NOBODY  # before it has attached to one


_thread = _Thread()


class ContextEvent(Event):
    """device: the number of the device it belongs to."""

    __slots__ = ("device",)

    def __init__(self) -> None:
        super().__init__()
        self.device = _thread.device


class Checked:
    """A call that is refused where a handle that it takes is another device's."""

    __slots__ = ("call", "check")

    def __init__(self, check: Issue, call: Issue):
        self.check, self.call = check, call

    def __call__(self) -> None:
        self.check()
        self.call()


def attached(name: str) -> Any:
    """A method of the embedded device, which attaches first."""

    def method(self: ContextDevice, *args: Any) -> Any:
        self.attach()
        return getattr(EmbeddedDevice, name)(self, *args)

    return method


class ContextDevice(EmbeddedDevice):
    """See the module. device: its number. checks: how many calls were checked."""

    name = NAME
    # address -> bytes, device: of every such device
    _memory: ClassVar[dict[int, tuple[int, int]]] = {}

    def __init__(self, threads: int = 0, device: int = 0):
        self.number, self.checks = device, 0
        self._homes: dict[Hashable, int] = {}  # handle -> the device that it belongs to
        super().__init__(threads)
        self.attach()

    def attach(self) -> None:
        _thread.device = self.number

    load_weight, clock, close = map(attached, ("load_weight", "clock", "close"))

    def _handles(self, what: str, *handles: Hashable) -> Issue:
        """What refuses a call that takes `handles`. They are made now, where they are new."""
        for handle in handles:
            self._homes.setdefault(handle, _thread.device)

        def check() -> None:
            self.checks += 1
            if _thread.device != self.number:
                raise DeviceError(f"{what}: INVALID_HANDLE, device {_thread.device} is current")
            for handle in handles:
                if (home := self._homes[handle]) != self.number:
                    raise DeviceError(f"{what}: INVALID_HANDLE, {handle} of device {home}")

        return check

    def _checked(self, issued: Issued, what: str, stream: int, *handles: Hashable) -> Issued:
        check = self._handles(f"{what} on device {self.number}", ("stream", stream), *handles)
        return replace(issued, call=Checked(check, issued.call))

    # memory ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, space: Space) -> DeviceMemory:
        self.attach()
        memory = super().allocate(nbytes, space)
        if space == Space.DEVICE:
            self._memory[memory.address] = memory.nbytes, self.number
        return memory

    def _retire(self, address: int, block: Any) -> None:
        self._memory.pop(address, None)
        super()._retire(address, block)

    def _own(self, address: int) -> int:
        for start, (nbytes, device) in list(self._memory.items()):
            if start <= address < start + nbytes and device != self.number:
                raise DeviceError(f"device {self.number}: ILLEGAL_ADDRESS, of device {device}")
        return address

    # commands ----------------------------------------------------------------------------------

    def launch_op(self, node: Node, address_of: AddressOf, scratch: int, stream: int) -> Issued:
        issued = super().launch_op(node, lambda t: self._own(address_of(t)), scratch, stream)
        return self._checked(issued, f"launch {node.op}", stream, ("kernel", node.op))

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        issued = super().copy(dst, src, nbytes, stream, to_host)
        return self._checked(issued, "copy", stream)

    def gate_copy(self, *args: Any) -> Issued:
        return self._checked(super().gate_copy(*args), "gate copy", args[-1], ("kernel", "copy"))

    def gate_end(self, counter: int, word: int, stream: int, programmatic: bool) -> Issued:
        issued = super().gate_end(counter, word, stream, programmatic)
        return self._checked(issued, "gate end", stream, ("kernel", "gate end"))

    def stamp(self, counter: int, ring: int, n_pairs: int, is_end: bool, stream: int) -> Issued:
        issued = super().stamp(self._own(counter), ring, n_pairs, is_end, stream)
        return self._checked(issued, "stamp", stream, ("kernel", "stamp"))

    def event(self) -> ContextEvent:
        return ContextEvent()

    def record(self, event: Event, stream: int) -> Issued:
        """An event is recorded by streams of its own device alone."""
        assert isinstance(event, ContextEvent)
        self._homes[event] = event.device
        return self._checked(super().record(event, stream), "record", stream, event)

    def wait(self, event: Event, stream: int) -> Issued:
        """A stream waits for events of any device."""
        return self._checked(super().wait(event, stream), "wait", stream)

    def sync_stream(self, stream: int) -> Issue:
        check = self._handles(f"sync on device {self.number}", ("stream", stream))
        return Checked(check, super().sync_stream(stream))

    def sync_event(self, event: Event) -> Issue:
        def check() -> None:
            if _thread.device == NOBODY:
                raise DeviceError("sync of an event: INVALID_CONTEXT, no device is current")

        return Checked(check, super().sync_event(event))

    def mark(self, stream: int) -> Point:
        """Its event is made on the device itself; the stream is whose it is."""
        home = self._homes.setdefault(("stream", stream), _thread.device)
        if home != self.number:
            raise DeviceError(f"mark: INVALID_HANDLE, stream {stream} is device {home}'s")
        return super().mark(stream)

    def capture(self, work: Plannable) -> Captured:
        self.attach()
        return ContextPlan(self, work, super().capture(work))


class ContextPlan(Captured):
    """What a device with contexts has recorded; each command is checked as it is recorded."""

    def __init__(self, device: ContextDevice, work: Plannable, captured: Captured):
        self._device, self._captured = device, captured
        self._take_in(work)

    def _take_in(self, work: Plannable) -> None:
        _check(work.recorded)
        of = self._captured
        self.nodes, self.launches = of.nodes, of.launches
        self.capture_ns, self.instantiate_ns = of.capture_ns, of.instantiate_ns

    def launch(self) -> None:
        self._device.attach()
        self._device.checks += 1
        self._captured.launch()
        self.launches = self._captured.launches

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        self._device.attach()
        done = self._captured.update(work, changed)
        self._take_in(work)
        return done

    def twin(self, work: Plannable, changed: Sequence[int]) -> ContextPlan | None:
        self._device.attach()
        made = self._captured.twin(work, changed)
        return None if made is None else ContextPlan(self._device, work, made)

    def spans(self, launch: int | None = None) -> Any:
        return self._captured.spans(launch)

    def destroy(self) -> None:
        self._device.attach()
        self._captured.destroy()


def _check(parts: Sequence[Issued]) -> None:
    for part in parts:
        if isinstance(part.call, Checked):
            part.call.check()
        _check(part.parts)


open_backend = ContextDevice
