"""Where the time of a step goes, and what a launch costs, for data/results:
DEVICE-ablation-MODEL[-N].json and DEVICE-launches.json.

A step of N tokens (1 where the name has no number), everything on but plans, five ways:

    step_us    as the engine runs it, by the host's clock
    eager_us   its launches on the device alone, issued one after another, waited for at the end
    graph_us   the same launches as one captured graph: no time of the host in it
    kinds      for each kind of launch: the graph without it (without_us), and what it costs by that
               (us: the difference to the whole graph of the same round)
    weight_bytes, product_flops   with read_gbps and product_tflops: what the step cannot do without

Costs of kinds need not add up to the graph. Neighbours overlap where launches begin early, and a
product whose weights were requested early waits less than it reads. Behind a launch left out the
others compute on what memory holds, which may be no numbers, and kernels may take longer over
those: a kind can cost less than nothing, and then the costs of the others are doubtful too. The
whole graph runs last in every round: it leaves a cache of finite numbers. Where there are no graphs
(CPU devices), launches are called one by one.

`launches`: an empty kernel of 2 blocks on each of 132 multiprocessors, in a stream and in a graph,
plainly and programmatically; and the fastest of several reading kernels, launched plainly, for the
weights of every product of an 8B model: what a plainly launched kernel can reach at most.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import workbench as wb
from tests.gpu.measuring import Session, everything, product_flops, slug
from workbench.backend import kernels
from workbench.backend.base import Issue, open_backend
from workbench.backend.cuda_kernel import Kernel, Work, blocks
from workbench.backend.issue import Prepared
from workbench.bench import provenance
from workbench.bench.comparison import order_of
from workbench.bench.kernel_cases import SHAPES, TYPES
from workbench.bench.kernel_rigs import PDL, PLAIN, Repeats, rig_of, rotating_bytes
from workbench.graph.ir import Kind, Node
from workbench.program.commands import COMPUTE_STREAM, DEVICE, Launch, Space

# model -> tokens of the steps that are taken apart
STEPS: dict[tuple[str, str], tuple[int, ...]] = {
    ("qwen3-4b", "Q4_K_M"): (1,),
    ("llama-3-8b", "Q4_0"): (1, 64),
    ("llama-3-8b", "Q8_0"): (64,),
}
ROUNDS, STEPS_A_ROUND, REPLAYS = 7, 8, 4

# What a launch is for, by its kernel (`file.function`); the others compute their node's kind.
KERNEL_KINDS = {
    "dequantise.half": "activations to halves",
    "dequantise.dequantise": "weights to halves",
    "elementwise.quantize": "quantize",
    "elementwise.swiglu": "swiglu",
    "norm.": "norm",
    "rope_store.": "rope_store",
}
# And by its node: names of products without their layer, ops of all others.
PRODUCT_KINDS = {"qkv": "qkv", "attn_out": "attn_out", "ffn_glu": "glu", "ffn_out": "ffn_down"}
OP_KINDS = {"attention_quantize": "attention"}


class Piece(NamedTuple):
    """One launch of a step on the device."""

    kind: str
    issue: Issue


def kind_of(node: Node, work: Work | None = None) -> str:
    """What a launch is called here. work: the one of the node's kernels, None for all of them."""
    if isinstance(work, Kernel):
        name = f"{work.file}.{work.function}"
        for start, kind in KERNEL_KINDS.items():
            if name.startswith(start):
                return kind
    if is_product(node):
        name = re.sub(r"-\d+$", "", node.name)
        return PRODUCT_KINDS.get(name, name)
    return OP_KINDS.get(node.op, node.op)


def is_product(node: Node) -> bool:
    return any(part.op == "mul_mat" for part in (node, *node.parts))


def pieces(prepared: Prepared, backend: Any) -> list[Piece]:
    """The launches of a step on `backend` in order; on cuda every kernel and every cuBLAS product
    is one, elsewhere every node."""
    found = []
    commands = zip(prepared.program.commands, prepared._calls, strict=True)
    for command, call in commands:
        if not isinstance(command, Launch) or command.stream.backend != DEVICE:
            continue
        if backend.name == "cuda":
            found += _works(prepared, backend, command)
        else:
            found.append(Piece(kind_of(command.node), call))
    return found


def _works(prepared: Prepared, backend: Any, command: Launch) -> list[Piece]:
    """As `CudaBackend.launch` prepares a node, kernel by kernel."""
    tensors, node = prepared.program.placement[command.stream.backend], command.node
    scratch = 0 if command.scratch is None else prepared._address(command.scratch)
    place = kernels.Place(
        lambda tensor: prepared._address(tensors[tensor.storage]), scratch,
        backend._counters_of(command.stream.id), backend._sm,
    )  # fmt: skip
    there = backend._stream(command.stream.id)
    return [
        Piece(
            kind_of(node, work),
            backend._prepare(work, there, f"launch {node.name}", command.programmatic),
        )
        for work in kernels.launches(node, place)
    ]


def weight_bytes(prepared: Prepared) -> dict[str, int]:
    """Bytes of weights that each kind of product reads, each matrix once."""
    found: dict[str, int] = {}
    for command in prepared.program.commands:
        if isinstance(command, Launch) and is_product(command.node):
            matrices = (t for t in command.node.inputs if t.kind == Kind.WEIGHT and t.rows > 1)
            kind = kind_of(command.node)
            found[kind] = found.get(kind, 0) + sum(t.nbytes for t in matrices)
    return found


def ablation(session: Session) -> None:
    """Every step of STEPS taken apart [ablation-MODEL, ablation-MODEL-N], then what launches cost
    [launches]."""
    for (preset, quant), sizes in STEPS.items():
        if not session.takes(preset, quant):
            continue
        suffixes = {n: "" if n == 1 else f"-{n}" for n in sizes}
        names = {n: f"ablation-{slug(preset, quant)}{suffix}" for n, suffix in suffixes.items()}
        wanted = {n: name for n, name in names.items() if session.wants(name)}
        if not wanted:
            continue
        with session.engine(preset, quant) as engine:
            rates = session.rates(engine.backend)
            for n, name in wanted.items():
                with engine.variant(everything(engine)) as side:
                    found = take_apart(side, n, session.quick)
                session.write(name, provenance.collect(engine) | rates | found)
                costs = ", ".join(f"{k} {v['us']['median']:.1f}" for k, v in found["kinds"].items())
                times = (
                    f"{k} {found[f'{k}_us']['median']:.1f}" for k in ("step", "eager", "graph")
                )
                print(f"{name}: us: {', '.join(times)}; {costs}", flush=True)
    launches(session)


def _said(found: dict[str, Any]) -> str:
    times = {way: found[f"{way}_us"] for way in ("step", "eager", "graph")}
    costs = {kind: of["us"] for kind, of in found["kinds"].items()}
    both = (", ".join(f"{k} {us['median']:.1f}" for k, us in d.items()) for d in (times, costs))
    return "us: " + "; without each kind less ".join(both)


def take_apart(engine: wb.Engine, n_tokens: int, quick: bool = False) -> dict[str, Any]:
    """The numbers of the module's docstring for steps of n_tokens into an empty cache."""
    rounds, times = (2, 1) if quick else (ROUNDS, REPLAYS)
    steps = 2 if quick else STEPS_A_ROUND
    _step_us(engine, n_tokens, 2)  # builds the program, and gives memory finite numbers
    prepared = engine._programs.get(engine.program(n_tokens).shape)
    chain = pieces(prepared, engine.backend)
    kinds = list(dict.fromkeys(piece.kind for piece in chain))
    rig = rig_of(engine.backend, quick)
    stepped: list[float] = []
    eager: list[float] = []
    graphs: list[list[float]] = [[] for _ in range(len(kinds) + 1)]  # the whole, without each kind
    medians: list[list[float]] = [[] for _ in graphs]
    with ExitStack() as stack:
        repeats: list[Repeats] = []
        for left_out in ("", *kinds):
            issues = [piece.issue for piece in chain if piece.kind != left_out]
            repeats.append(rig.repeats(issues))
            stack.callback(repeats[-1].close)
        for round_ in range(rounds):
            repeats[0].time_us(1)  # makes good what the launches behind a gap wrote
            stepped += _step_us(engine, n_tokens, steps)
            eager += [_eager_us(engine.backend, chain) for _ in range(times)]
            for i in order_of(round_, len(repeats)):
                taken = repeats[i].time_us(times)
                graphs[i] += taken
                medians[i].append(float(np.median(taken)))
        repeats[0].time_us(1)
    whole = np.array(medians[0])
    read = weight_bytes(prepared)
    return {
        "quick": quick,
        "toggles": engine.toggles.to_dict(),
        "n_tokens": n_tokens,
        "weight_bytes": engine.model.weight_bytes_per_token,
        "product_flops": product_flops(engine, n_tokens),
        "launches": len(chain),
        "step_us": spread(stepped),
        "eager_us": spread(eager),
        "graph_us": spread(graphs[0]),
        "kinds": {
            kind: {
                "launches": sum(piece.kind == kind for piece in chain),
                "weight_bytes": read.get(kind, 0),
                "without_us": spread(graphs[i]),
                "us": spread(whole - np.array(medians[i])),
            }
            for i, kind in enumerate(kinds, 1)
        },
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least, most and number of some times."""
    found = np.array(list(values), float)
    return {
        "median": round(float(np.median(found)), 3),
        "min": round(float(found.min()), 3),
        "max": round(float(found.max()), 3),
        "n": len(found),
    }


def _step_us(engine: wb.Engine, n_tokens: int, n: int) -> list[float]:
    """The host's time of n steps of one shape: of one token, one behind the other; of more, each
    into an empty cache."""
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
    return found


def _eager_us(backend: Any, chain: Sequence[Piece]) -> float:
    backend.synchronize()
    begin = time.perf_counter_ns()
    for piece in chain:
        piece.issue()
    backend.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


# what a launch costs ------------------------------------------------------------------------------

EMPTY_BLOCKS, EMPTY_THREADS = 264, 256
IN_GRAPH, IN_STREAM = 200, 400  # launches; more than a thousand do not wait in a stream
READ_GRIDS = (8, 16, 0)  # as those of backend/cuda_replay.py
LEAST_READS = 20  # of one replay


def launches(session: Session) -> None:
    """Writes DEVICE-launches.json, on a GPU alone."""
    if session.device != "cuda":
        print("launches: a GPU alone can tell; left out", flush=True)
        return
    if not session.wants("launches"):
        return
    backend: Any = open_backend("cuda")
    try:
        early = (PLAIN, PDL) if backend.capabilities.programmatic else (PLAIN,)
        empty = {kind: _empty(backend, kind == PDL) for kind in early}
        every = range(2 if session.quick else 9)
        found: dict[str, Any] = {
            "device_description": backend.description,
            **session.rates(backend),
            "quick": session.quick,
            "blocks": EMPTY_BLOCKS,
            "threads": EMPTY_THREADS,
            "stream_us": {
                k: spread(_queued_us(backend, i) for _ in every) for k, i in empty.items()
            },
            "graph_us": {k: spread(_replayed_us(backend, i, len(every))) for k, i in empty.items()},
            "reads": _reads(backend, session.quick),
        }
    finally:
        backend.close()
    session.write("launches", provenance.collect() | found)
    said = (f"{where} {found[f'{where}_us'][k]['median']:.2f} {k}"
            for where in ("stream", "graph") for k in early)  # fmt: skip
    print(f"launches: us: {', '.join(said)}", flush=True)


def _empty(backend: Any, programmatic: bool) -> Issue:
    kernel = Kernel("device", "nothing", (EMPTY_BLOCKS, 1), EMPTY_THREADS, [0], waits=True)
    stream = backend._stream(COMPUTE_STREAM)
    return backend._prepare(kernel, stream, "an empty kernel", programmatic)


def _queued_us(backend: Any, issue: Issue) -> float:
    """us for each of IN_STREAM launches that waited in the stream until the last was there, so that
    the host holds up none."""
    begin, end = (backend._driver.event(timing=True) for _ in range(2))
    with backend.gate(COMPUTE_STREAM):
        backend.record(begin, COMPUTE_STREAM)()
        for _ in range(IN_STREAM):
            issue()
        backend.record(end, COMPUTE_STREAM)()
    backend.synchronize()
    call = backend._driver.call
    return call("cuEventElapsedTime", "launches", begin.handle, end.handle) * 1e3 / IN_STREAM


def _replayed_us(backend: Any, issue: Issue, n: int) -> list[float]:
    from workbench.backend.cuda_replay import Replay

    with Replay(backend, [issue] * IN_GRAPH) as replay:
        return [us / IN_GRAPH for us in replay.time_us(n)]


def product_sizes() -> list[int]:
    """Bytes that the launches of `bench-kernels` for an 8B model read, of every type and shape."""
    shapes = [shape for name, shape in SHAPES.items() if name.startswith("8b.")]
    return sorted(
        {
            rows * dtype.row_bytes(shape.cols)
            for shape in shapes
            for rows in (shape.rows if shape.how == "product" else (sum(shape.rows),))
            for dtype in TYPES
        }
    )


def _reads(backend: Any, quick: bool) -> list[dict[str, Any]]:
    """For every size: us of the quickest reading kernel, launched plainly, memory never cached."""
    from workbench.backend.cuda_replay import READ_THREADS, READ_WORDS, WORD_BYTES, Replay, l2_bytes

    sizes = product_sizes()[:2] if quick else product_sizes()
    n_sm = backend._driver.properties["multiProcessorCount"]
    memory = backend.allocate(
        max(rotating_bytes(l2_bytes(backend), quick), sizes[-1]), Space.DEVICE
    )
    sink, stream = backend.allocate(4, Space.DEVICE), backend._stream(COMPUTE_STREAM)
    found = []
    try:
        for nbytes in sizes:
            apart = blocks(nbytes, 256) * 256
            starts = [memory.address + i * apart for i in range(max(memory.nbytes // apart, 1))]
            n = nbytes // WORD_BYTES
            best: dict[str, Any] | None = None
            for words, per_sm in itertools.product(READ_WORDS, READ_GRIDS):
                tiles = blocks(n, READ_THREADS * words)
                grid = (min(per_sm * n_sm or tiles, tiles), 1)
                name = f"read_{words}"
                issues = [
                    backend._prepare(
                        Kernel("read", name, grid, READ_THREADS, [at, n, -1, sink.address]),
                        stream, name,
                    )
                    for at in starts
                ]  # fmt: skip
                chain = issues * max(blocks(LEAST_READS, len(issues)), 1)
                with Replay(backend, chain) as replay:
                    us = spread(each / len(chain) for each in replay.time_us(2 if quick else 5))
                if best is None or us["median"] < best["us"]["median"]:
                    label = f"{name} x{per_sm}" if per_sm else f"{name} tiles"
                    best = {"bytes": nbytes, "kernel": label, "us": us}
            assert best is not None
            found.append(best)
    finally:
        backend.synchronize()
        memory.free()
        sink.free()
    return found
