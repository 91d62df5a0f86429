"""A debug arena: every tensor of a step alone in memory, so that a stray access shows.

In an engine's arena (`graph/arena.py`) an access beside its tensor lands in another's, and nothing
notices. Here every tensor, and the scratch of every node, is an allocation of its own (cudaMalloc,
there is no pool), nodes run one by one, and `Mode` says what is around and in the allocations:

    guarded  red zones on both sides, checked after every node; NaN in every byte before a tensor
             is made, and again once nobody reads it, kept to the end and checked then. Without any
             tool this shows writes beside a tensor and after its last use, and, as NaN in what is
             computed, reads beside it and of what nothing wrote.
    exact    just the tensor's bytes, NaN at first, given back after the last use: for memcheck,
             to which a red zone would be memory like any other.
    bare     as exact, but written by kernels alone: for initcheck, which takes a poisoned byte for
             an initialised one. Caches are zeros, as the engine's are: attention asks for whole
             tiles and drops what its mask hides.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Memory
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.engine.batch import make_batch
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.engine import Engine
from workbench.engine.step_programs import fused_graph, unfused_graph
from workbench.graph.ir import Kind, Node, Tensor
from workbench.program.commands import Space
from workbench.program.split import split

ZONE = 512  # bytes on either side of every tensor: a multiple of every alignment
ZONE_BYTE, POISON = 0xA5, 0xFF  # 0xFF in every byte: NaN as float and as half


class Mode(StrEnum):
    GUARDED = "guarded"
    EXACT = "exact"
    BARE = "bare"


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Block:
    """`nbytes` bytes at `address`. what: its name, for messages. Every method waits to its end."""

    def __init__(self, backend: Backend, nbytes: int, mode: Mode, what: str):
        self.nbytes, self.what, self._backend = nbytes, what, backend
        self._zone = ZONE if mode == Mode.GUARDED else 0
        # on a GPU without the zeros that would make every byte initialised
        allocate = backend._allocate if isinstance(backend, CudaBackend) else backend.allocate
        self._memory: Memory = allocate(nbytes + 2 * self._zone, Space.DEVICE)
        self.free, self.address = self._memory.free, self._memory.address + self._zone
        if mode != Mode.BARE:
            image = np.full(nbytes + 2 * self._zone, POISON, np.uint8)
            image[: self._zone] = image[self._zone + nbytes :] = ZONE_BYTE
            self._copy(0, image, to_host=False)

    def _copy(self, at: int, array: np.ndarray, to_host: bool) -> None:
        there, here = self._memory.address + at, array.ctypes.data
        ends = (here, there) if to_host else (there, here)
        self._backend.copy(*ends, array.nbytes, 0, to_host)()
        self._backend.sync_stream(0)()

    def fill(self, content: np.ndarray) -> None:
        raw = as_bytes(content)
        assert raw.nbytes == self.nbytes, (self.what, raw.nbytes, self.nbytes)
        self._copy(self._zone, raw, to_host=False)

    def poison(self, byte: int = POISON) -> None:
        self.fill(np.full(self.nbytes, byte, np.uint8))

    def content(self, writer: str = "somebody") -> np.ndarray:
        """uint8 (nbytes,). The red zones, where there are any, must be untouched."""
        whole = np.zeros(self.nbytes + 2 * self._zone, np.uint8)
        self._copy(0, whole, to_host=True)
        before, own, behind = np.split(whole, [self._zone, self._zone + self.nbytes])
        for where, zone in (("before", before), ("behind", behind)):
            strays = np.count_nonzero(zone != ZONE_BYTE)
            assert not strays, f"{strays} bytes written {where} {self.what} by {writer}"
        return own


class DebugArena(contextlib.AbstractContextManager["DebugArena"]):
    """Memory of some tensors, and nodes that run in it, one by one.

    residents: addresses of tensors that live elsewhere (weights).
    """

    def __init__(
        self, backend: Backend, mode: Mode, residents: Mapping[Tensor, int] = MappingProxyType({})
    ):
        self._backend, self._mode, self._residents = backend, mode, residents
        self._live: dict[Tensor, Block] = {}
        self._retired: list[Block] = []

    def _make(self, tensor: Tensor) -> None:
        self._live[tensor] = Block(self._backend, tensor.nbytes, self._mode, repr(tensor))

    def hold(self, tensor: Tensor, content: np.ndarray) -> None:
        """Gives `tensor` memory with `content` in it, until the end."""
        if tensor not in self._live:
            self._make(tensor)
        self._live[tensor].fill(content)

    def content(self, tensor: Tensor) -> np.ndarray:
        """The bytes of a tensor that is held, uint8 (nbytes,)."""
        return self._live[tensor.storage].content()

    def address_of(self, tensor: Tensor) -> int:
        s = tensor.storage
        return self._live[s].address if s in self._live else self._residents[s]

    def run(self, nodes: Sequence[Node], keep: Collection[Tensor], programmatic=False) -> None:
        """Computes `nodes`, each to its end before the next. What they make is dropped after its
        last use, except `keep` (storages). programmatic: as in `Backend.launch`, where the kernels
        allow it."""
        last_use = {t.storage: i for i, node in enumerate(nodes) for t in node.inputs}
        made: set[Tensor] = set()
        for i, node in enumerate(nodes):
            outputs = [t.storage for t in node.outputs]
            for t in outputs:
                if t not in self._live and t not in self._residents:
                    self._make(t)
                    made.add(t)
            self._launch(node, programmatic)
            for t in {*outputs, *(t.storage for t in node.inputs)}:
                if t in made and t not in keep and last_use.get(t, -1) <= i:
                    self._retire(self._live.pop(t))

    def _launch(self, node: Node, programmatic: bool) -> None:
        backend, need = self._backend, self._backend.scratch_bytes(node)
        scratch = [Block(backend, need, self._mode, f"scratch of {node.name}")] if need else []
        address = scratch[0].address if scratch else 0
        early = programmatic and backend.begins_early(node)
        backend.launch(node, self.address_of, address, 0, early)()
        backend.sync_stream(0)()
        self.check(f"{node.op} {node.name}", *scratch)
        for block in scratch:
            self._retire(block)

    def _retire(self, block: Block) -> None:
        """After the last use: poisons the memory, to be looked at again, or gives it back."""
        if self._mode == Mode.GUARDED:
            block.poison()
            self._retired.append(block)
        else:
            block.free()

    def check(self, writer: str, *more: Block) -> None:
        """Holds every live tensor's red zones to be untouched."""
        if self._mode == Mode.GUARDED:
            for block in (*self._live.values(), *more):
                block.content(writer)

    def __exit__(self, kind: object, *_: object) -> None:
        """Gives everything back; asserts that what was retired has not been written."""
        written = []
        for block in self._retired if kind is None else ():
            if (block.content("a node after its last use") != POISON).any():
                written.append(block.what)
        for block in [*self._live.values(), *self._retired]:
            block.free()
        assert not written, f"written after the last use: {', '.join(written)}"


class DebugSteps(contextlib.AbstractContextManager["DebugSteps"]):
    """Steps of an engine's model with its backends, weights and toggles in debug arenas, new ones
    for each step, on a cache of its own: a twin of `Engine.step`, which must give the same."""

    def __init__(self, engine: Engine, mode: Mode):
        self._engine, self._mode, self._loaded = engine, mode, engine._open
        self._cache = KVCache(engine.config.n_ctx, engine.config.n_kv_pad)
        self._pairs = engine.model.caches(self._cache.n_cells)
        # Cells no token sees hold NaN where that can be: a kernel that used one would show it.
        byte = 0 if mode == Mode.BARE else POISON
        self._cells = DebugArena(self._loaded.backend, mode)
        for t in itertools.chain(*self._pairs):
            self._cells.hold(t, np.full(t.nbytes, byte, np.uint8))

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every token, float32 (len(tokens), n_vocab)."""
        engine, model = self._engine, self._engine.model
        work = [(0, tokens, "all")]
        batch = make_batch(work, self._cache, model.n_vocab, engine.config.n_ubatch)
        graph = unfused_graph(model, batch.shape, self._pairs, engine.toggles)
        graph, backend_of = fused_graph(graph, engine.toggles, self._loaded.placement, 1)
        values: dict[Tensor, np.ndarray] = {t: batch.values[t.name] for t in graph.inputs}
        parts = split(graph, backend_of)
        # what goes from a split to another, and the outputs, by storage
        crossing = {t for part in parts for t in part.inputs} | {t.storage for t in graph.outputs}
        with contextlib.ExitStack() as open_arenas:
            used = {part.backend for part in parts}
            arenas = {b: open_arenas.enter_context(self._arena(b)) for b in used}
            for part in parts:
                arena = arenas[part.backend]
                for t in part.inputs:
                    arena.hold(t, values[t])
                arena.run(part.nodes, crossing, engine.toggles.pdl == "on")
                made = {t.storage for node in part.nodes for t in node.outputs}
                values.update({t: arena.content(t) for t in made & crossing})
                self._cells.check(f"a node on {self._loaded.backends[part.backend].name}")
        self._cache.store(batch.sequences, batch.positions, batch.cells)
        (logits,) = (values[t.storage] for t in graph.outputs)
        return logits.view(np.float32).reshape(len(tokens), model.n_vocab)

    def _arena(self, b: int) -> DebugArena:
        loaded = self._loaded
        at = lambda there: loaded.memory[there.buffer].address + there.offset  # noqa: E731
        residents = {t: at(there) for t, there in loaded.residents[b].items()}
        residents |= {t: self._cells.address_of(t) for t in itertools.chain(*self._pairs)}
        return DebugArena(loaded.backends[b], self._mode, residents)

    def __exit__(self, *error: Any) -> None:
        self._cells.__exit__(*error)


def run_alone(backend: Backend, node: Node, values, mode: Mode, in_parts=False, times=1):
    """Bytes of what `node` makes, or its parts one by one, by storage. values: of all it reads, by
    storage, weights as in the file; these are loaded as the backend likes. What the node does not
    make must stay as it is, and each time it must make the same."""
    raw = {t: as_bytes(a) for t, a in values.items()}
    weights = {t: backend.load_weight(t, a) for t, a in raw.items() if t.kind == Kind.WEIGHT}
    outputs = {t.storage for t in node.outputs}
    given = {t: a for t, a in raw.items() if t not in weights}
    found: list[dict[Tensor, np.ndarray]] = []
    try:
        with DebugArena(backend, mode, {t: m.address for t, m in weights.items()}) as arena:
            for _ in range(times):
                for t in outputs if found else ():  # which are held by now
                    arena.hold(t, np.full(t.nbytes, POISON, np.uint8))
                for t, a in given.items():
                    arena.hold(t, a)
                arena.run(node.parts if in_parts else [node], outputs)
                for t in given.keys() - outputs:
                    assert np.array_equal(arena.content(t), given[t]), f"{t!r} was overwritten"
                found.append({t: arena.content(t) for t in outputs})
                assert all(np.array_equal(a, found[0][t]) for t, a in found[-1].items()), node
            return found[0]
    finally:
        backend.synchronize()
        for memory in weights.values():
            memory.free()
