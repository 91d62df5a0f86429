"""Where the time of a step goes, for data/results: DEVICE-ablation-MODEL[-N].json.

A step of N tokens (1 where the name has no number) is taken apart, with everything on except plans.
A step with plans has the same launches; only step_us would then be of the plans.

    step_us    as the engine runs it, by the host's clock
    eager_us   its launches on the device alone, issued one after another, waited for at the end
    graph_us   the same launches as one captured graph: no time of the host in it
    apart_us   that graph in an arena where no two tensors share memory
    kinds      for each kind of launch: the graph of apart_us without it (without_us), and what it
               costs by that (us: the difference to apart_us of the same round)
    weight_bytes, product_flops   with read_gbps and product_tflops: what the step cannot do without

A kernel's time can depend on its input: attention takes another path where its sums are not finite.
The engine's arena gives a tensor's bytes to another tensor once they are read for the last time.
So after a launch that is left out, later launches would read whatever lies in those bytes. Here
each tensor, and the scratch of each node, has memory of its own (`apart`). There the result of the
left-out launch still lies from the whole step. All other launches compute on the values of the
whole step, and write them again. At the end a check says whether the arena and the caches are
unchanged (`unchanged`).

The costs of kinds need not add up to the graph. Neighbours overlap where launches begin early. A
product whose weights were requested early waits for less than it reads. The launch after a left-out
launch finds more of its data in the cache, so a kind can cost a little less than nothing. Tensors
apart are cached less than tensors that share memory; the difference is apart_us - graph_us. Where
there are no graphs (CPU devices), launches are called one by one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

import workbench as wb
from data.measure.launches import spread
from data.measure.matrix import Row
from data.measure.session import Session, product_flops
from workbench.backend.base import Issue
from workbench.backend.cuda.kernels.kernel import Kernel, Work
from workbench.backend.issue.issued import Issued
from workbench.backend.issue.prepared import Prepared
from workbench.benchmarks.compare.comparison import order_of
from workbench.benchmarks.kernels.kernel_rigs import Repeats, rig_of
from workbench.benchmarks.runs import provenance
from workbench.common.devices import is_gpu
from workbench.engine.programs import Key
from workbench.graph import arena
from workbench.graph.ir import Kind, Node
from workbench.program.commands import COMPUTE_STREAM, DEVICE, Command, Launch, Replay, Space

ROUNDS, STEPS_A_ROUND, REPLAYS = 7, 8, 4

# The kind of a launch by its kernel (`file.function`). Other kernels have the kind of their node,
KERNEL_KINDS = {
    "dequantise.half": "activations to halves",
    "dequantise.dequantise": "weights to halves",
    "elementwise.quantize": "quantize",
    "elementwise.swiglu": "swiglu",
    "norm.": "norm",
    "rope_store.": "rope_store",
}
# which is the name of a product without its layer, or the op.
PRODUCT_KINDS = {"qkv": "qkv", "attn_out": "attn_out", "ffn_glu": "glu", "ffn_out": "ffn_down"}
OP_KINDS = {"attention_quantize": "attention"}


class Piece(NamedTuple):
    """One launch of a step on the device."""

    kind: str
    issue: Issue


def kind_of(node: Node, work: Work | None = None) -> str:
    """The kind of a launch of `node`. work: the kernel that is launched; None for all of the node's
    kernels."""
    kernel = f"{work.file}.{work.function}" if isinstance(work, Kernel) else ""
    for start, kind in KERNEL_KINDS.items():
        if kernel.startswith(start):
            return kind
    if is_product(node):
        name = re.sub(r"-\d+$", "", node.name)
        return PRODUCT_KINDS.get(name, name)
    return OP_KINDS.get(node.op, node.op)


def is_product(node: Node) -> bool:
    return any(part.op == "mul_mat" for part in (node, *node.parts))


def pieces(prepared: Prepared, backend: Any) -> list[Piece]:
    """The launches of a step on `backend`, in order. On cuda every kernel and every cuBLAS product
    is a launch, elsewhere every node. The launches in a plan are listed one by one."""
    found: list[Piece] = []
    for command, issued in _singly(prepared):
        if not isinstance(command, Launch) or command.stream.backend != DEVICE:
            continue
        if is_gpu(backend.name):
            kinds = [kind_of(command.node, work) for work in backend._works(command.node)]
            found += map(Piece, kinds, issued.parts or (issued,))
        else:
            found.append(Piece(kind_of(command.node), issued))
    return found


def _singly(prepared: Prepared) -> Iterator[tuple[Command, Issued]]:
    """The commands of a step with the calls that issue them; the parts of a plan one by one."""
    for number, issued in prepared.issued.items():
        command = prepared.program.commands[number]
        if isinstance(command, Replay):
            yield from zip(command.parts, issued.parts, strict=True)
        else:
            yield command, issued


def weight_bytes(prepared: Prepared) -> dict[str, int]:
    """Bytes of weights that each kind of product reads, each matrix once."""
    found: dict[str, int] = {}
    for command in prepared.program.singly():
        if isinstance(command, Launch) and is_product(command.node):
            matrices = (t for t in command.node.inputs if t.kind == Kind.WEIGHT and t.rows > 1)
            kind = kind_of(command.node)
            found[kind] = found.get(kind, 0) + sum(t.nbytes for t in matrices)
    return found


class _NeverAgain(arena.FreeList):
    """A free list that never gives bytes out a second time."""

    def give(self, offset: int, nbytes: int, clock: arena.Clock = arena.ALL) -> None:
        """Does nothing: the bytes stay with their tensor."""


@contextmanager
def apart() -> Iterator[None]:
    """In the body, programs are lowered to arenas in which no two tensors share memory, nor the
    scratch of two nodes."""
    before, arena.FreeList = arena.FreeList, _NeverAgain  # type: ignore[misc]
    try:
        yield
    finally:
        arena.FreeList = before  # type: ignore[misc]


def prepared_of(engine: wb.Engine, n_tokens: int) -> Prepared:
    """The program that steps of n_tokens into an empty cache run, kept by `engine`."""
    return engine.steps.programs.get(Key(engine.program(n_tokens).shape, 0))


def content(prepared: Prepared) -> list[np.ndarray]:
    """Bytes of all that a step writes on its device: the arena and the caches, uint8 each."""
    placed = prepared.program.layout[-1].items()
    backend, found = prepared.backends[-1], []
    for buffer in dict.fromkeys(at.buffer for t, at in placed if t.kind != Kind.WEIGHT):
        memory = prepared.binding.memory[buffer]
        if buffer.space != Space.DEVICE:
            assert memory.array is not None
            found.append(memory.array[: buffer.nbytes].copy())
            continue
        there = np.zeros(buffer.nbytes, np.uint8)
        backend.copy(there.ctypes.data, memory.address, buffer.nbytes, COMPUTE_STREAM, True)()
        backend.sync_stream(COMPUTE_STREAM)()
        found.append(there)
    return found


def ablation(session: Session, engine: wb.Engine, rows: list[Row]) -> None:
    """Takes the step of each row apart, and writes its file."""
    rates = session.rates(engine.backend)
    for row in rows:
        with session.variant(engine, row) as side:
            found = take_apart(side, row.sizes[0], session.quick)
        session.write(row, provenance.collect(engine) | rates | found)
        times = {way: found[f"{way}_us"] for way in ("step", "eager", "graph", "apart")}
        costs = {kind: of["us"] for kind, of in found["kinds"].items()}
        both = (", ".join(f"{k} {us['median']:.1f}" for k, us in d.items()) for d in (times, costs))
        said = "us: " + "; without each kind less ".join(both)
        changed = "" if found["unchanged"] else "; VOID: launches left out changed what others read"
        print(f"{row.folder}: {said}{changed}", flush=True)


def take_apart(engine: wb.Engine, n_tokens: int, quick: bool = False) -> dict[str, Any]:
    """The figures of the module's docstring, for steps of n_tokens into an empty cache."""
    rounds, times, steps = (2, 1, 2) if quick else (ROUNDS, REPLAYS, STEPS_A_ROUND)
    stepped, eager = list[float](), list[float]()
    with engine.variant(engine.toggles) as twin, ExitStack() as stack:
        with apart():
            _step_us(twin, n_tokens, 1)
            alone = prepared_of(twin, n_tokens)
        _step_us(engine, n_tokens, 2)  # builds the program, and gives memory finite numbers
        chain = pieces(prepared_of(engine, n_tokens), engine.backend)
        distinct = pieces(alone, engine.backend)
        kinds = list(dict.fromkeys(piece.kind for piece in chain))
        rig = rig_of(engine.backend, quick)
        # as the engine runs it; tensors apart; without each kind
        chains = [chain, *([p for p in distinct if p.kind != kind] for kind in ("", *kinds))]
        graphs: list[list[float]] = [[] for _ in chains]
        medians: list[list[float]] = [[] for _ in chains]
        _eager_us(engine.backend, distinct)  # results may land in another block than the step's
        before = content(alone)
        repeats: list[Repeats] = []
        for each in chains:
            repeats.append(rig.repeats([piece.issue for piece in each]))
            stack.callback(repeats[-1].close)
        for round_ in range(rounds):
            stepped += _step_us(engine, n_tokens, steps)
            eager += [_eager_us(engine.backend, chain) for _ in range(times)]
            for i in order_of(round_, len(repeats)):
                taken = repeats[i].time_us(times)
                graphs[i] += taken
                medians[i].append(float(np.median(taken)))
        same = all(map(np.array_equal, before, content(alone)))
        read = weight_bytes(alone)
    whole = np.array(medians[1])
    return {
        "quick": quick, "toggles": engine.toggles.to_dict(), "n_tokens": n_tokens,
        "weight_bytes": engine.model.weight_bytes_per_token,
        "product_flops": product_flops(engine, n_tokens), "launches": len(chain),
        "unchanged": same, "step_us": spread(stepped), "eager_us": spread(eager),
        "graph_us": spread(graphs[0]), "apart_us": spread(graphs[1]),
        "kinds": {
            kind: {
                "launches": sum(piece.kind == kind for piece in chain),
                "weight_bytes": read.get(kind, 0), "without_us": spread(graphs[i]),
                "us": spread(whole - np.array(medians[i])),
            }
            for i, kind in enumerate(kinds, 2)
        },
    }  # fmt: skip


def _step_us(engine: wb.Engine, n_tokens: int, n: int) -> list[float]:
    """The host's time for each of n steps of one shape, us. Steps of one token follow each other; a
    step of more tokens goes into an empty cache."""
    rng = np.random.default_rng(0)
    tokens = [int(token) for token in rng.integers(0, engine.model.n_vocab, n_tokens)]
    found = []
    engine.reset()
    for _ in range(n):
        if n_tokens > 1:
            engine.reset()
        begin = time.perf_counter_ns()
        engine.step(tokens)
        found.append((time.perf_counter_ns() - begin) / 1e3)
    engine.synchronize()  # drops a step that was launched ahead
    return found


def _eager_us(backend: Any, chain: Sequence[Piece]) -> float:
    backend.synchronize()
    begin = time.perf_counter_ns()
    for piece in chain:
        piece.issue()
    backend.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3
