"""The null backend: it logs every call and computes nothing. Tests of scheduling run on it.

`log` holds one tuple per call, in order: `("prepare", kind, *details)` when a command is prepared,
and `("issue", kind, *details)` each time it is issued, with the addresses that its block has then.
Details by kind:

    launch        op, name of the node, stream
    copy          dst, src, bytes, stream, to_host
    copy_to_peer  dst, src, bytes, stream
    record, wait  event, stream
    sync_stream   stream
    sync_event    event

    gate_copy     dst, src, bytes, stream
    replay        stream, what is recorded: of each part its key and its addresses

and `("allocate", space, bytes)`, `("load_weight", name)`, `("synchronize",)`, `("close",)`. A plan
logs `("capture",)`, `("update", changed)`, `("twin", changed)` and `("destroy",)`. Its replays log
what a device would have recorded: an update or a twin that names parts takes only their addresses.

Tests say what the device declines (`declined`) and what fails on it (`failing`): "capture",
"update", "twin". A queued gate is in `gates` until `run_gate` runs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Captured, Issue
from workbench.backend.issue.args import VIEW, AddressOf, view_address
from workbench.backend.issue.issued import Issued, Plannable, Words
from workbench.backend.plan import gate
from workbench.common.errors import DeviceError
from workbench.common.progress import Bar
from workbench.graph.ir import Node, Tensor
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Space
from workbench.program.first_cell import CELL, is_view


class NullMemory:
    """Real addresses over zeroed pages, which take no memory until they are used."""

    def __init__(self, nbytes: int, space: Space):
        try:
            block = np.zeros(nbytes + 256, np.uint8)
        except (MemoryError, ValueError) as error:
            raise DeviceError(f"no address space for {nbytes} bytes; ask for less") from error
        start = -block.ctypes.data % 256
        self._block: np.ndarray | None = block[start : start + nbytes]
        self.address = int(self._block.ctypes.data)
        self.nbytes = nbytes
        self.array = None if space == Space.DEVICE else self._block

    def free(self) -> None:
        self._block = self.array = None


class NullCaptured(Captured):
    """A plan that logs. Its nodes are the parts that are no Records and no Waits. recorded: what a
    device would have recorded, as above."""

    capture_ns = instantiate_ns = 1

    def __init__(self, backend: NullBackend, work: Plannable):
        self._backend, self._log, self._destroyed = backend, backend.log, False
        self._topology, self._gate = _topology(work), work.gate
        kinds = [part.same[0] for part in work.parts]
        self.nodes = tuple([i for i, kind in enumerate(kinds) if kind not in ("record", "wait")])
        self.recorded = taken(work)
        self.launch = self._launch

    def _launch(self) -> None:
        self._check()
        self._log.append(("issue", "replay", self._topology[0], self.recorded))
        if self._gate is not None:
            self._gate()
        self.launches += 1

    def _check(self) -> None:
        if self._destroyed:
            raise DeviceError("this plan is destroyed; capture its commands again")

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        self._check()
        if self._backend.declines("update") or _topology(work) != self._topology:
            return False
        self._log.append(("update", changed))
        self.recorded = _moved(self.recorded, work, changed)
        return True

    def twin(self, work: Plannable, changed: Sequence[int]) -> NullCaptured | None:
        self._check()
        self._log.append(("twin", changed))
        if self._backend.declines("twin") or _topology(work) != self._topology:
            return None
        made = NullCaptured(self._backend, work)
        made.capture_ns, made.recorded = 0, _moved(self.recorded, work, changed)
        return made

    def destroy(self) -> None:
        if not self._destroyed:
            self._destroyed = True
            self._log.append(("destroy",))


Recorded = tuple[tuple[Any, tuple[int, ...]], ...]


def taken(work: Plannable) -> Recorded:
    """What a recording of `work` would fix now: the key and the addresses of each part."""
    return tuple([(part.key, part.addresses) for part in work.recorded])


def _moved(recorded: Recorded, work: Plannable, changed: Sequence[int] | None) -> Recorded:
    """`recorded`, with the addresses of `work` at the parts that changed; None: all of `work`."""
    pairs = enumerate(zip(recorded, taken(work), strict=True))
    return tuple([
        now if changed is None else (was[0], now[1]) if i in changed else was
        for i, (was, now) in pairs
    ])  # fmt: skip


def _topology(work: Plannable) -> tuple[Any, ...]:
    return work.stream, work.streams, [part.same[0] for part in work.parts]


class NullBackend(Backend):
    """A backend with any capabilities. Events are numbered from 0."""

    def __init__(self, name: str, capabilities: Capabilities):
        self.name = name
        self.description = f"{name} (computes nothing)"
        self.waiting = "never"
        self.capabilities = capabilities
        self.log: list[tuple[Any, ...]] = []
        self.declined, self.failing = set[str](), set[str]()
        self.gates: list[int] = []  # the control blocks of gates that are queued
        self._n_events = 0

    def declines(self, what: str) -> bool:
        """Whether the device declines `what`. Raises DeviceError where `what` fails on it."""
        if what in self.failing:
            raise DeviceError(f"the {self.name} device fails at a {what}; use plans=off")
        return what in self.declined

    def _prepare(self, kind: str, addresses: list[int], *work: Any) -> Issued:
        log = self.log
        log.append(("prepare", kind, *addresses, *work))

        def issue() -> None:
            log.append(("issue", kind, *addresses, *work))

        return Issued(issue, (kind, *work), _block(addresses))

    def allocate(self, nbytes: int, space: Space) -> NullMemory:
        self.log.append(("allocate", space, nbytes))
        return NullMemory(nbytes, space)

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> NullMemory:
        self.log.append(("load_weight", tensor.name))
        return NullMemory(tensor.nbytes, Space.DEVICE)

    def scratch_bytes(self, node: Node) -> int:
        return 0

    def begins_early(self, node: Node) -> bool:
        return self.capabilities.programmatic

    def make_ready(self, nodes: Sequence[Node], left: Bar, noted: bool = False) -> None:
        """There is nothing to compile."""

    def launch(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
    ) -> Issued:
        """One kernel for any node. Its arguments are the addresses of all tensors and of the
        scratch. As on a real backend, `address_of` raises for a tensor that lies nowhere."""
        tensors = node.inputs if is_view(node) else (*node.inputs, *node.outputs)
        args = [*[address_of(tensor) for tensor in tensors], scratch]
        if is_view(node):
            args[VIEW] = view_address(node.inputs[0], args[VIEW], node.params[CELL])
        call = self._prepare("launch", [], node.op, node.name, stream).call
        return Issued(call, ("launch", *_work(node)), _block(args))

    def copy_to_peer(self, peer: Any, dst: int, src: int, nbytes: int, stream: int) -> Issued:
        return self._prepare("copy_to_peer", [dst, src], nbytes, stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        return self._prepare("copy", [dst, src], nbytes, stream, to_host)

    def capture(self, work: Plannable) -> Captured:
        if not self.capabilities.capture:
            return super().capture(work)
        self.declines("capture")
        self.log.append(("capture",))
        return NullCaptured(self, work)

    def gate_copy(
        self, dst: int, src: int, nbytes: int, control: int, limit_ns: int, stream: int
    ) -> Issued:
        issued = self._prepare("gate_copy", [dst, src], nbytes, stream)
        log = issued.call

        def issue() -> None:
            log()
            self.gates.append(control)

        issued.call = issue
        return issued

    def run_gate(self, limit: bool = False) -> int | None:
        """Runs the gate that was queued first. Returns its number where it is open, the negative
        number where it is cancelled or its limit has passed, and None where it still waits."""
        words = (ctypes.c_int64 * (gate.CONTROL_BYTES // 8)).from_address(self.gates[0])
        number = words[gate.RAN // 8] + 1
        cancelled = words[gate.CANCELLED // 8] >> number % gate.N_CANCELLED & 1
        is_open = words[gate.OPENED // 8] >= number and not cancelled
        if not (is_open or cancelled or limit):
            return None
        self.gates.pop(0)
        words[gate.WENT // 8 + number % gate.N_WENT] = went = number if is_open else -number
        words[gate.RAN // 8] = number
        return went

    def event(self) -> int:
        self._n_events += 1
        return self._n_events - 1

    def record(self, event: int, stream: int) -> Issued:
        return self._prepare("record", [event], stream)

    def wait(self, event: int, stream: int) -> Issued:
        return self._prepare("wait", [event], stream)

    def sync_stream(self, stream: int) -> Issue:
        return self._prepare("sync_stream", [], stream)

    def sync_event(self, event: int) -> Issue:
        return self._prepare("sync_event", [event])

    def synchronize(self) -> None:
        self.log.append(("synchronize",))
        while self.gates:
            self.run_gate(limit=True)

    def close(self) -> None:
        self.log.append(("close",))


def _block(addresses: list[int]) -> Words:
    return Words(addresses, tuple(range(len(addresses))))


def _work(node: Node) -> tuple[Any, ...]:
    """What makes two launches the same work: ops, types, shapes and parameters, without names."""
    shapes = [(t.dtype.name, t.shape) for t in (*node.inputs, *node.outputs)]
    params = sorted(node.params.items())
    return node.op, *shapes, *params, *[_work(part) for part in node.parts]


def open_backend(
    threads: int = 0,
    *,
    name: str = "null",
    asynchronous_copies: bool = True,
    events: bool = True,
    one_order: bool = True,
    capture: bool = False,
    n_streams: int = 9,
    programmatic: bool = False,
) -> NullBackend:
    """A null backend with these capabilities; `threads` changes nothing."""
    return NullBackend(
        name, Capabilities(asynchronous_copies, events, one_order, capture, n_streams, programmatic)
    )
