"""Programs written by hand: a run told command by command, as its timeline is read.

Memory is named as ggml names it, `backend#tensor#copy` (`CUDA0#inp_pos#2`: the third of the copies
a pipeline keeps of `inp_pos` on CUDA0). A name is the same memory in every step, as a name of an
event is the same event.

    s = Script("CPU", "CUDA0")
    s.step()
    s.write("CPU#inp_pos#0", I32, (1,))
    s.split("CUDA0")
    s.blocking_copy("CUDA0#inp_pos#0", "CPU#inp_pos#0")
    s.launch("CUDA0#Qcur-0#0", make("rope", "Qcur-0", x, s.tensor("CUDA0#inp_pos#0"), **rope))
    run = s.run()
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.common.errors import UsageError
from workbench.graph import ops
from workbench.graph.ir import DType, Kind, Node, StepShape, Tensor
from workbench.program.commands import (
    COMPUTE_STREAM,
    COPY_STREAM,
    HOST,
    RESULT,
    Buffer,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)

BY_HAND = "by hand"  # what such programs give as their sync mode and copy stream
SHAPE = StepShape(1, 1, 0)  # one token, one row of logits, no cache


class _Step(NamedTuple):
    commands: list[Command]
    splits: list[int]


class Script:
    """A run being written. backends: their names in index order, the host's first.

    Commands go to the step and the split begun last; input writes and what `result` adds belong to
    no split. Every Launch is on its backend's compute stream.
    """

    def __init__(self, *backends: str):
        self.backends = backends
        self._steps: list[_Step] = []
        self._split = RESULT
        self._buffers: dict[str, Buffer] = {}
        self._ranges: dict[str, Range] = {}
        self._tensors: dict[str, Tensor] = {}
        self._layout: list[dict[Tensor, Range]] = [{} for _ in backends]

    def step(self) -> None:
        """Begins the next step."""
        self._steps.append(_Step([], []))
        self._split = RESULT

    def split(self, backend: str) -> None:
        """Begins the step's next split, on `backend`."""
        splits = self._steps[-1].splits
        self._split = len(splits)
        splits.append(self._index(backend))

    def tensor(self, memory: str) -> Tensor:
        """What lies in `memory`. Raises UsageError before anything was put there."""
        if memory not in self._tensors:
            raise UsageError(f"{memory} is read before anything is put there; write or copy to it")
        return self._tensors[memory]

    def lay(self, memory: str, inside: str, nbytes: int) -> None:
        """From now on `memory` is the first bytes of the block named `inside`, of `nbytes`.

        Two tensors placed in one block share its bytes, as an allocator makes them do.
        """
        self._ranges[memory] = Range(self._buffer(inside, nbytes, self._owner(memory)), 0, nbytes)

    def resident(self, memory: str, dtype: DType, shape: tuple[int, ...]) -> None:
        """Weights or a cache: there before the run begins."""
        self._put(memory, Tensor(_name(memory), dtype, shape, Kind.WEIGHT))

    def write(self, memory: str, dtype: DType, shape: tuple[int, ...]) -> None:
        """The host puts an input into its own memory."""
        tensor = Tensor(_name(memory), dtype, shape, Kind.INPUT)
        self._emit(Write(self._put(memory, tensor), tensor.name))

    def launch(self, memory: str, node: Node) -> None:
        """`node` computed into `memory`, on the backend that `memory` belongs to.

        The node's sources are what `tensor` returns, or views of it; they need not lie on the
        same backend (a device may read host memory).
        """
        self._put(memory, node.output)
        everywhere = {t: r for on_backend in self._layout for t, r in on_backend.items()}
        reads, writes = (
            tuple([_part(everywhere[t], at, n) for t, at, n in accesses(node)])
            for accesses in (ops.reads, ops.writes)
        )
        stream = Stream(self._owner(memory), COMPUTE_STREAM)
        self._emit(Launch(node, stream, reads, writes, None, self._split))

    def copy(self, to: str, source: str) -> None:
        """An asynchronous copy, as `ggml_backend_cuda_cpy_tensor_async` issues it.

        From host memory it rides the destination's compute stream (since #17795), from another
        device the source's; that records an event behind it, for which the destination waits.
        """
        there, here = self._owner(to), self._owner(source)
        rides = there if here == HOST else here
        self._copy(to, source, Stream(rides, COMPUTE_STREAM))
        if rides != there:
            event = f"{self.backends[here]}.copied"
            self.record(event, self.backends[here])
            self.wait(event, self.backends[there])

    def blocking_copy(self, to: str, source: str) -> None:
        """A copy and the wait for it, on a stream of its own: nothing orders it behind launches.

        `ggml_backend_tensor_copy` does this on CUDA: on `cudaStreamPerThread`, while compute
        streams are non-blocking ones.
        """
        stream = Stream(self._owner(to), COPY_STREAM)
        copy = self._copy(to, source, stream)
        self._emit(Sync(self._split, stream=stream, blocks=copy))

    def record(self, event: str, backend: str) -> None:
        """`event` becomes the point that `backend`'s compute stream has reached."""
        self._emit(Record(event, self._stream(backend), self._split))

    def wait(self, event: str, backend: str) -> None:
        """Later work of `backend`'s compute stream waits for `event`; the host does not."""
        self._emit(Wait(event, self._stream(backend), self._split))

    def sync(self, backend: str) -> None:
        """The host waits for everything on `backend`'s compute stream."""
        self._emit(Sync(self._split, stream=self._stream(backend)))

    def sync_event(self, event: str) -> None:
        """The host waits for `event`."""
        self._emit(Sync(self._split, event=event))

    def result(self, memory: str) -> None:
        """The step ends: copied to the host, waited for, read."""
        self._split = RESULT
        backend, landing = (
            self.backends[self._owner(memory)],
            f"{self.backends[HOST]}#{_name(memory)}#0",
        )
        self._copy(landing, memory, self._stream(backend))
        self.record("logits", backend)
        self.sync_event("logits")
        self._emit(Read(self._ranges[landing], _name(memory)))

    def run(self) -> list[Program]:
        """The steps so far."""
        return [
            Program(
                step.commands, list(self._buffers.values()), self._layout, step.splits,
                self.backends, SHAPE, BY_HAND, BY_HAND,
            )
            for step in self._steps
        ]  # fmt: skip

    def _emit(self, command: Command) -> None:
        self._steps[-1].commands.append(command)

    def _copy(self, to: str, source: str, stream: Stream) -> Copy:
        tensor = self.tensor(source)
        there = self._put(to, Tensor(tensor.name, tensor.dtype, tensor.shape))
        copy = Copy(there, self._ranges[source], stream, tensor.name, self._split)
        self._emit(copy)
        return copy

    def _put(self, memory: str, tensor: Tensor) -> Range:
        owner = self._owner(memory)
        if memory not in self._ranges:
            block = self._buffer(memory, tensor.nbytes, owner)
            self._ranges[memory] = Range(block, 0, tensor.nbytes)
        self._tensors[memory] = tensor
        self._layout[owner][tensor] = self._ranges[memory]
        return self._ranges[memory]

    def _buffer(self, name: str, nbytes: int, owner: int) -> Buffer:
        if name not in self._buffers:
            space = Space.PINNED if owner == HOST else Space.DEVICE
            self._buffers[name] = Buffer(name, space, nbytes, owner)
        return self._buffers[name]

    def _owner(self, memory: str) -> int:
        return self._index(memory.partition("#")[0])

    def _index(self, backend: str) -> int:
        if backend not in self.backends:
            raise UsageError(f"no backend {backend!r}; there are {', '.join(self.backends)}")
        return self.backends.index(backend)

    def _stream(self, backend: str) -> Stream:
        return Stream(self._index(backend), COMPUTE_STREAM)


def _name(memory: str) -> str:
    return memory.split("#")[1]


def _part(base: Range, offset: int, nbytes: int) -> Range:
    return Range(base.buffer, base.offset + offset, nbytes)
