"""The races of record: races that were found in llama.cpp's scheduler, before and after their fix.

Each race is a small run of a few steps, with the names that its thread uses. The checker
(`workbench/program/check/hazards.py`) finds the racing pair before the fix, and no race after it.
`models` says what of the thread a case models, and what the case leaves out. Some threads establish
which wait was missing, but not which two accesses raced. There the pair is ours, and the case is
marked reconstructed.

llama.cpp is getting a checker of its own, not merged as this was written: the scheduler sanitizer
of
#26167 (`GGML_SCHED_SANITIZE=1`). It also keeps vector clocks, one for each backend. It follows the
computation as it runs, checks the accesses of this one run, and aborts at the first race (a variant
in #27311 can go on). It found the race of #26040. Our checker needs no run, no device and no model:
it reads the program, and so answers for every timing. It reads consecutive steps. All of these
races except one lie between steps: the host or a copy of a later ubatch overtakes the work of an
earlier ubatch. It reports every race with both commands, the bytes, and the missing order. It also
says which waits are superfluous, which a sanitizer cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.graph import ops
from workbench.graph.ir import F32, I32, DType, Kind, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program.check import hazards
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

BY_HAND = "by hand"  # sync mode and copy stream of such programs
SHAPE = StepShape(1, 1, 0)  # one token, one row of logits, no cache


class _Step(NamedTuple):
    commands: list[Command]
    splits: list[int]


class Script:
    """A run of programs that is written by hand, command by command, as its timeline is read.

    Memory is named as ggml names it, `backend#tensor#copy` (`CUDA0#inp_pos#2`: the third of the
    copies a pipeline keeps of `inp_pos` on CUDA0). The same name is the same memory in every step;
    the same event name is the same event.

        s = Script("CPU", "CUDA0")  # the backends in index order, the host's first
        s.step()
        s.write("CPU#inp_pos#0", I32, (1,))
        s.split("CUDA0")
        s.blocking_copy("CUDA0#inp_pos#0", "CPU#inp_pos#0")
        s.launch("CUDA0#Qcur-0#0", make("rope", "Qcur-0", x, s.tensor("CUDA0#inp_pos#0"), **rope))
        run = s.run()

    Commands go to the step and the split begun last. Input writes, and the commands that `result`
    adds, belong to no split. Every Launch is on its backend's compute stream.
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
        device the source's. The source then records an event after the copy, and the destination
        waits for it.
        """
        there, here = self._owner(to), self._owner(source)
        rides = there if here == HOST else here
        self._copy(to, source, Stream(rides, COMPUTE_STREAM))
        if rides != there:
            event = f"{self.backends[here]}.copied"
            self.record(event, self.backends[here])
            self.wait(event, self.backends[there])

    def blocking_copy(self, to: str, source: str) -> None:
        """A copy and the wait for it, on a stream of its own: nothing orders it after launches.

        `ggml_backend_tensor_copy` does this on CUDA: on `cudaStreamPerThread`, while compute
        streams are non-blocking.
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
        """Ends the step: its result is copied to the host, waited for, and read."""
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


N_COPIES = 4  # of every split input in a pipeline: llama.cpp's GGML_SCHED_MAX_COPIES
COLS = 64
ROPE: dict[str, Any] = {"n_rot": COLS, "neox": False, "theta_base": 1e4, "freq_scale": 1.0}
ROW, ONE = (1, COLS), (1,)


class Named(NamedTuple):
    """A command as threads name it: its kind and tensor, in a split of a step (RESULT: in none)."""

    step: int
    split: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} (step {self.step}, split {self.split})"


class Case(NamedTuple):
    """One race.

    models: what of the thread the case models, and what it leaves out.
    reconstructed: the threads do not establish the pair.
    before, after: the runs without and with the fix, each a list of steps.
    expected: the pair that races in `before`, in host order.
    """

    name: str
    thread: str
    title: str
    models: str
    reconstructed: bool
    before: list[Program]
    after: list[Program]
    expected: tuple[Named, Named]


def named(step: int, command: Command) -> Named:
    """The name of `command` of step number `step` in a case."""
    return Named(step, command.split, command.kind, command.label)


def _event(backend: str, copy: int) -> str:
    return f"{backend}[{copy}]"  # as in ggml: sched->events[backend][copy]


def _embed(s: Script) -> None:
    """The CPU's split: it looks the token up, into memory that a pipeline keeps no copies of."""
    s.resident("CPU#token_embd.weight#0", F32, (8, COLS))
    s.write("CPU#inp_tokens#0", I32, ONE)
    _look_up(s, "CPU#inp_embd#0", "CPU#token_embd.weight#0", "CPU#inp_tokens#0")


def _look_up(s: Script, out: str, table: str, ids: str) -> None:
    s.launch(out, make("get_rows", out.split("#")[1], s.tensor(table), s.tensor(ids)))


def _layers(s: Script, out: str, x: str, positions: str) -> None:
    """A device's layers, as one launch that reads an activation and the positions."""
    rows: Tensor = s.tensor(x).view(1, 1, COLS)
    s.launch(out, make("rope", out.split("#")[1], rows, s.tensor(positions), **ROPE))


def _asynchronous_copies(fixed: bool) -> list[Program]:
    s = Script("CPU", "CUDA0", "CUDA1")
    stages = (
        ("CUDA0", "inp_embd", "CPU#inp_embd#0", "CUDA0#l_out-0#0"),
        ("CUDA1", "l_out-0", "CUDA0#l_out-0#0", "CUDA1#result_output#0"),
    )
    for c in range(N_COPIES):
        s.step()
        s.split("CPU")
        s.write(f"CPU#inp_pos#{c}", I32, ONE)
        _embed(s)
        for device, name, source, out in stages:
            x, positions, done = f"{device}#{name}#{c}", f"{device}#inp_pos#{c}", _event(device, c)
            s.split(device)
            if fixed:
                s.sync(device)
                s.copy(x, source)
                s.copy(positions, f"CPU#inp_pos#{c}")
                s.sync(device)
                _layers(s, out, x, positions)
            else:
                s.wait(done, device)
                s.copy(x, source)
                s.sync_event(done)
                s.copy(positions, f"CPU#inp_pos#{c}")
                _layers(s, out, x, positions)
                s.record(done, device)
    s.result("CUDA1#result_output#0")
    return s.run()


def _split_without_inputs(fixed: bool) -> list[Program]:
    s = Script("CPU", "Vulkan0")
    for memory in ("CPU#model.input_embed#0", "CPU#conv_states-0#0"):
        s.lay(memory, inside="Vulkan_Host", nbytes=4 * COLS)
    s.resident("CPU#token_embd.weight#0", F32, (8, COLS))
    s.resident("CPU#cache_r_l0#0", F32, (8, COLS))
    for _ in range(2):
        s.step()
        for name in ("inp_tokens", "inp_s_copy", "inp_pos"):
            s.write(f"CPU#{name}#0", I32, ONE)
        s.split("CPU")
        _look_up(s, "CPU#model.input_embed#0", "CPU#token_embd.weight#0", "CPU#inp_tokens#0")
        s.split("Vulkan0")
        s.sync("Vulkan0")
        s.copy("Vulkan0#model.input_embed#0", "CPU#model.input_embed#0")
        s.copy("Vulkan0#inp_pos#0", "CPU#inp_pos#0")
        _layers(s, "Vulkan0#z-0#0", "Vulkan0#model.input_embed#0", "Vulkan0#inp_pos#0")
        s.split("CPU")
        if fixed:
            s.sync("Vulkan0")
        _look_up(s, "CPU#conv_states-0#0", "CPU#cache_r_l0#0", "CPU#inp_s_copy#0")
        s.split("Vulkan0")
        s.sync("Vulkan0")
        s.copy("Vulkan0#conv_states-0#0", "CPU#conv_states-0#0")
        _layers(s, "Vulkan0#result_output#0", "Vulkan0#conv_states-0#0", "Vulkan0#inp_pos#0")
        s.result("Vulkan0#result_output#0")
    return s.run()


def _inputs_read_in_place(fixed: bool) -> list[Program]:
    s = Script("CPU", "GPU0")
    for _ in range(3):
        s.step()
        s.split("GPU0")
        if fixed:
            s.sync("GPU0")
        s.write("CPU#inp_embd#0", F32, ROW)
        s.write("CPU#inp_pos#0", I32, ONE)
        _layers(s, "GPU0#result_output#0", "CPU#inp_embd#0", "CPU#inp_pos#0")
    s.result("GPU0#result_output#0")
    return s.run()


def two_devices(n_steps: int, n_copies: int, drained: bool) -> list[Program]:
    """A train of ubatches over two devices, as llama.cpp issues it with blocking copies of inputs.

    n_copies: copies of every split input, used in turn. A reused graph has 1, because the copy
        index moves on only when a graph is allocated.
    drained: the host waits for both devices before it writes inputs, as in #20927.
    """
    s = Script("CPU", "CUDA0", "CUDA1")
    for n in range(n_steps):
        c = n % n_copies
        s.step()
        s.split("CPU")
        if drained:
            s.sync("CUDA0")
            s.sync("CUDA1")
        s.write(f"CPU#inp_pos#{c}", I32, ONE)
        _embed(s)

        s.split("CUDA0")
        s.wait(_event("CUDA0", c), "CUDA0")
        for name, source in (("inp_embd", "CPU#inp_embd#0"), ("inp_pos", f"CPU#inp_pos#{c}")):
            s.sync_event(_event("CUDA0", c))
            s.blocking_copy(f"CUDA0#{name}#{c}", source)
        _layers(s, "CUDA0#l_out-0#0", f"CUDA0#inp_embd#{c}", f"CUDA0#inp_pos#{c}")
        s.record(_event("CUDA0", c), "CUDA0")

        s.split("CUDA1")
        s.wait(_event("CUDA1", c), "CUDA1")
        s.copy(f"CUDA1#l_out-0#{c}", "CUDA0#l_out-0#0")
        s.sync_event(_event("CUDA1", c))
        s.blocking_copy(f"CUDA1#inp_pos#{c}", f"CPU#inp_pos#{c}")
        _layers(s, "CUDA1#result_output#0", f"CUDA1#l_out-0#{c}", f"CUDA1#inp_pos#{c}")
        s.record(_event("CUDA1", c), "CUDA1")
    s.result("CUDA1#result_output#0")
    return s.run()


def _bumped_copy_index(fixed: bool) -> list[Program]:
    s = Script("CPU", "CUDA0")
    for n in range(N_COPIES + 1):
        c = 0 if fixed else n % N_COPIES
        s.step()
        s.write("CPU#inp_embd#0", F32, ROW)
        s.write("CPU#inp_pos#0", I32, ONE)
        s.split("CUDA0")
        for name in ("inp_embd", "inp_pos"):
            s.sync_event(_event("CUDA0", c))
            s.blocking_copy(f"CUDA0#{name}#{c}", f"CPU#{name}#0")
        _layers(s, "CUDA0#result_output#0", "CUDA0#inp_embd#0", "CUDA0#inp_pos#0")
        s.record(_event("CUDA0", c), "CUDA0")
    s.result("CUDA0#result_output#0")
    return s.run()


def _copy_from_the_host(blocking: bool, guarded: bool) -> list[Program]:
    s = Script("CPU", "CUDA0")
    s.resident("CUDA0#inp_pos#0", I32, ONE)
    for n in range(N_COPIES + 1):
        c = n % N_COPIES
        copy: Callable[[str, str], None] = s.blocking_copy if blocking else s.copy
        s.step()
        s.split("CPU")
        _embed(s)
        s.split("CUDA0")
        s.wait(_event("CUDA0", c), "CUDA0")
        if guarded:
            s.sync_event(_event("CUDA0", c))
        copy(f"CUDA0#inp_embd#{c}", "CPU#inp_embd#0")
        _layers(s, "CUDA0#result_output#0", f"CUDA0#inp_embd#{c}", "CUDA0#inp_pos#0")
        s.record(_event("CUDA0", c), "CUDA0")
    s.result("CUDA0#result_output#0")
    return s.run()


CASES = (
    Case(
        name="asynchronous_copies",
        thread="#20463",
        title="wrong perplexity with two devices and pipelining, after the first merge of #17795",
        models=(
            "#17795 made the copies of a split's inputs asynchronous, with one wait before them "
            "and one behind; a pipeline, whose splits are guarded by events, had its events alone. "
            "ggerganov found a perplexity of 2382 in a pipeline and rolled it back. That was with "
            "graph reuse too, a second defect (the case reused_copy): mending either alone did not "
            "help. Without reuse blocking copies cure it, aendk found, and #20793 gave pipelines "
            "the same two waits (the pattern saaasg; the events, which then do nothing, are left "
            "out). No thread names the two accesses, and the case does not tell why two ubatches "
            "with outputs were wanted. Modelled is what the missing wait leaves in the four "
            "ubatches of the reproduction, each with a copy index of its own: the CPU's split of "
            "the next ubatch overwrites inp_embd, which has one place on the host, before the copy "
            "of it has run."
        ),
        reconstructed=True,
        before=_asynchronous_copies(fixed=False),
        after=_asynchronous_copies(fixed=True),
        expected=(Named(0, 1, "copy", "inp_embd"), Named(1, 0, "launch", "inp_embd")),
    ),
    Case(
        name="split_without_inputs",
        thread="#26040",
        title="a split with no inputs does not wait for the one before it",
        models=(
            "0cc4m: with -nkvo a Vulkan split has model.input_embed as its input, and the CPU's "
            "split behind it has none, so nothing made it wait; the allocator had given it the "
            "same host memory, which it overwrote before the Vulkan split had read it. The "
            "sanitizer of #26167 names the pair: the copy of model.input_embed, and conv_states-0. "
            "The fix waits for the backend of the split before (or its event) where a split has no "
            "inputs and another backend. One GPU, so no events; each split is one launch."
        ),
        reconstructed=False,
        before=_split_without_inputs(fixed=False),
        after=_split_without_inputs(fixed=True),
        expected=(
            Named(0, 1, "copy", "model.input_embed"), Named(0, 2, "launch", "conv_states-0")
        ),
    ),
    Case(
        name="reused_inputs",
        thread="#20927",
        title="inputs rewritten under a running pipeline when the graph is reused",
        models=(
            "The fix waits for all backends before the inputs of a reused graph are written; for, "
            "as its comment says, the computation before may still be reading them. It does not "
            "say by which command. Modelled to the letter: kernels that read the host's memory "
            "itself, as integrated GPUs do. #27572 and #27311 find this very race on those, which "
            "the fix, made for pipelines alone, does not reach. Where inputs are copied and the "
            "copies block, as on discrete GPUs then, nothing reads the host's memory late; see "
            "the case reused_copy. The second device is left out."
        ),
        reconstructed=True,
        before=_inputs_read_in_place(fixed=False),
        after=_inputs_read_in_place(fixed=True),
        expected=(Named(0, 0, "launch", "result_output"), Named(1, RESULT, "write", "inp_pos")),
    ),
    Case(
        name="reused_copy",
        thread="#20927",
        title="a reused graph copies one device's output over the copy that the other still reads",
        models=(
            "In #20463 blocking copies alone did not bring the perplexity back; graph reuse had to "
            "go too, and came back with the wait of #20927. ggerganov suspected the copy index, "
            "which a reused graph does not move on. Modelled is what the code then does: a copy "
            "between CUDA devices rides the source's stream, but the scheduler puts the wait for "
            "the copy's last reader on the destination's, which orders nothing. So the output of "
            "device 0 lands on the copy that device 1 reads for the ubatch before, if device 1 is "
            "slower: where it computes logits, as in the reproduction. A stale copy index would "
            "explain the perplexity as well, without a race. No thread says which, and "
            "aendk takes the copy between devices for watertight (#20793). A ring of four copies "
            "puts four ubatches between the two and orders them no better."
        ),
        reconstructed=True,
        before=two_devices(n_steps=3, n_copies=1, drained=False),
        after=two_devices(n_steps=3, n_copies=1, drained=True),
        expected=(Named(0, 2, "launch", "result_output"), Named(1, 2, "copy", "l_out-0")),
    ),
    Case(
        name="bumped_copy_index",
        thread="#14855",
        title="the pipeline's ring evaluated again with a bumped copy index",
        models=(
            "slaren: computing a graph moved the copy index on, so that a graph evaluated again "
            "used the wrong copy. Inputs went to copies 1, 2, 3 while the graph read copy 0, with "
            "which it was allocated. That is a stale read, in perfect order, and no race. The race "
            "is ours: it follows when the index comes round, for the wait for the event of copy 0 "
            "is one for the first evaluation, and copy 0 is overwritten under the fourth. The fix "
            "moves the index on where a graph is allocated. The second device is left out."
        ),
        reconstructed=True,
        before=_bumped_copy_index(fixed=False),
        after=_bumped_copy_index(fixed=True),
        expected=(Named(3, 0, "launch", "result_output"), Named(4, 0, "copy", "inp_pos")),
    ),
    Case(
        name="host_source",
        thread="#8897",
        title="a copy from the host backend whose source the next batch overwrites",
        models=(
            "slaren: some copies from the CPU backend were not synchronized, and the next batch "
            "could overwrite the data before they had run (#8685). What the CPU had computed was "
            "copied asynchronously on the device's stream, behind a wait of that stream alone. "
            "The fix waits on the host for the event of the copy's last reader and blocks. The "
            "second device is left out."
        ),
        reconstructed=False,
        before=_copy_from_the_host(blocking=False, guarded=False),
        after=_copy_from_the_host(blocking=True, guarded=True),
        expected=(Named(0, 1, "copy", "inp_embd"), Named(1, 0, "launch", "inp_embd")),
    ),
    Case(
        name="unguarded_copy",
        thread="#8897",
        title="the fix as first proposed: the copy blocks, and nothing guards what it overwrites",
        models=(
            "JohannesGaessler asked in review why the destination is not synchronized in the "
            "scheduler too; slaren: events do that, but one wait of the host for an event was "
            "missing here. The pair is ours: a blocking copy is on a stream of its own, so the "
            "device stream's wait does not order it behind the layers that read the copy four "
            "batches ago."
        ),
        reconstructed=True,
        before=_copy_from_the_host(blocking=True, guarded=False),
        after=_copy_from_the_host(blocking=True, guarded=True),
        expected=(Named(0, 1, "launch", "result_output"), Named(4, 1, "copy", "inp_embd")),
    ),
)  # fmt: skip


def record_rows() -> list[dict[str, Any]]:
    """A row for each case: what the thread found, and how many races the checker finds before and
    after the fix. It also says whether the thread names the racing pair or we reconstructed it."""
    return [
        {
            "thread": case.thread,
            "what": case.title,
            "pair": "reconstructed" if case.reconstructed else "of the thread",
            "first": str(case.expected[0]),
            "and": str(case.expected[1]),
            "before": len(hazards.races(case.before)),
            "after": len(hazards.races(case.after)),
        }
        for case in CASES
    ]
