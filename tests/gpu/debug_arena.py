"""A debug arena: every tensor of a step alone in memory, so that a stray access shows.

The engine puts the tensors of a step into one arena, whose bytes are used again as soon as nobody
reads them (`graph/arena.py`): an access beside its tensor lands in another's, and nothing notices.
Here every tensor, and the scratch of every node, is an allocation of its own (cudaMalloc, there is
no pool), nodes run one by one, and `Mode` says what is around and in the allocations:

    guarded  red zones before and behind, checked after every node; NaN in every byte before a
             tensor is made, and again once nobody reads it, kept to the end and checked then.
             Without any tool this shows writes beside a tensor and after its last use, and, as
             NaN in what is computed, reads beside it and of what nothing wrote.
    exact    just the tensor's bytes, NaN at first, given back after the last use: for memcheck,
             to which a red zone would be memory like any other.
    bare     as exact, but written by kernels alone: for initcheck, which takes a poisoned byte for
             an initialised one. Caches are zeros, as the engine's are: attention asks for whole
             tiles and drops what its mask hides.

It runs on any backend of the engine, so that it is tested without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any

import numpy as np

from workbench.backend.base import Backend, Memory
from workbench.backend.cuda.device import driver
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.engine.batch import make_batch
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.engine import Engine
from workbench.engine.step_programs import fused_graph, unfused_graph
from workbench.graph.ir import Graph, Kind, Node, Tensor
from workbench.program.commands import Space
from workbench.program.split import split

ZONE = 512  # bytes before and behind every tensor: a multiple of every alignment
ZONE_BYTE, POISON = 0xA5, 0xFF  # 0xFF in every byte: NaN as float and as half


class Mode(StrEnum):
    GUARDED = "guarded"
    EXACT = "exact"
    BARE = "bare"


@contextlib.contextmanager
def exact_sizes() -> Iterator[None]:
    """Within, the cuda backend asks for as many bytes as it was asked for, not for multiples of
    256, weights included: memcheck then knows where each ends. Multiples of 16 they are still: so
    much may be read (kernels/common.cuh)."""
    before, driver.ALIGN = driver.ALIGN, 16
    try:
        yield
    finally:
        driver.ALIGN = before


class Block:
    """The memory of one tensor, or of a node's scratch: `nbytes` bytes at `address`.

    what: its name, for messages. Every method waits until it is done.
    """

    def __init__(self, backend: Backend, nbytes: int, mode: Mode, what: str):
        self.nbytes = nbytes
        self.what = what
        self._backend, self._mode = backend, mode
        self._zone = ZONE if mode == Mode.GUARDED else 0
        # on a GPU without the zeros that would make every byte initialised
        allocate = backend._allocate if isinstance(backend, CudaBackend) else backend.allocate
        self._memory: Memory = allocate(nbytes + 2 * self._zone, Space.DEVICE)
        if mode != Mode.BARE:
            image = np.full(nbytes + 2 * self._zone, POISON, np.uint8)
            image[: self._zone] = image[self._zone + nbytes :] = ZONE_BYTE
            self._copy(0, image, to_host=False)

    @property
    def address(self) -> int:
        return self._memory.address + self._zone

    def _copy(self, at: int, array: np.ndarray, to_host: bool) -> None:
        there, here = self._memory.address + at, array.ctypes.data
        ends = (here, there) if to_host else (there, here)
        self._backend.copy(*ends, array.nbytes, 0, to_host)()
        self._backend.sync_stream(0)()

    def fill(self, content: np.ndarray) -> None:
        """content: any array of `nbytes` bytes."""
        raw = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        assert raw.nbytes == self.nbytes, (self.what, raw.nbytes, self.nbytes)
        self._copy(self._zone, raw, to_host=False)

    def content(self) -> np.ndarray:
        """uint8 (nbytes,)"""
        found = np.zeros(self.nbytes, np.uint8)
        self._copy(self._zone, found, to_host=True)
        return found

    def check(self, when: str) -> None:
        """Asserts that the red zones, where there are any, are untouched."""
        if not self._zone:
            return
        whole = np.zeros(self.nbytes + 2 * self._zone, np.uint8)
        self._copy(0, whole, to_host=True)
        for where, zone in (
            ("before", whole[: self._zone]),
            ("behind", whole[self._zone + self.nbytes :]),
        ):
            strays = np.flatnonzero(zone != ZONE_BYTE)
            assert not len(strays), f"{len(strays)} bytes written {where} {self.what} by {when}"

    def retire(self) -> bool:
        """After the last use: gives the memory back, or poisons it, to be looked at again; whether
        there is anything to look at."""
        if self._mode != Mode.GUARDED:
            self.free()
            return False
        self.fill(np.full(self.nbytes, POISON, np.uint8))
        return True

    def free(self) -> None:
        self._memory.free()


class DebugArena:
    """Memory of some tensors, and nodes that run in it, one by one.

    residents: addresses of tensors that live elsewhere (weights). Not to be used after `close`,
    which is the end of a `with`.
    """

    def __init__(
        self, backend: Backend, mode: Mode, residents: Mapping[Tensor, int] | None = None
    ) -> None:
        self._backend, self._mode = backend, mode
        self._residents = dict(residents or {})
        self._live: dict[Tensor, Block] = {}
        self._retired: list[Block] = []

    def hold(self, tensor: Tensor, content: np.ndarray) -> None:
        """Gives `tensor` memory with `content` in it, until `drop` or the end."""
        block = self._live.get(tensor)
        if block is None:
            block = Block(self._backend, tensor.nbytes, self._mode, repr(tensor))
            self._live[tensor] = block
        block.fill(content)

    def drop(self, tensor: Tensor) -> None:
        """Ends the use of `tensor`."""
        block = self._live.pop(tensor)
        if block.retire():
            self._retired.append(block)

    def content(self, tensor: Tensor) -> np.ndarray:
        """The bytes of a tensor that is held, uint8 (nbytes,)."""
        return self._live[tensor.storage].content()

    def address_of(self, tensor: Tensor) -> int:
        s = tensor.storage
        return self._live[s].address if s in self._live else self._residents[s]

    def run(
        self, nodes: Sequence[Node], keep: Collection[Tensor], programmatic: bool = False
    ) -> None:
        """Computes `nodes`, each to its end before the next. What they make is dropped after its
        last use, except `keep` (storages). programmatic: as in `Backend.launch`, where the kernels
        allow it."""
        last_use = {t.storage: i for i, node in enumerate(nodes) for t in node.inputs}
        made: set[Tensor] = set()
        for i, node in enumerate(nodes):
            outputs = [t.storage for t in node.outputs]
            for t in outputs:
                if t not in self._live and t not in self._residents:
                    self._live[t] = Block(self._backend, t.nbytes, self._mode, repr(t))
                    made.add(t)
            self._launch(node, programmatic)
            for t in {*outputs, *(t.storage for t in node.inputs)}:
                if t in made and t not in keep and last_use.get(t, -1) <= i:
                    self.drop(t)

    def _launch(self, node: Node, programmatic: bool) -> None:
        backend, need = self._backend, self._backend.scratch_bytes(node)
        scratch = Block(backend, need, self._mode, f"scratch of {node.name}") if need else None
        address = scratch.address if scratch else 0
        early = programmatic and backend.begins_early(node)
        backend.launch(node, self.address_of, address, 0, early)()
        backend.sync_stream(0)()
        for block in [*self._live.values(), *([scratch] if scratch else [])]:
            block.check(f"{node.op} {node.name}")
        if scratch and scratch.retire():
            self._retired.append(scratch)

    def close(self) -> None:
        """Gives everything back; asserts first that what was retired has not been written."""
        written = []
        for block in self._retired:
            block.check("a node after its last use")
            if (block.content() != POISON).any():
                written.append(block.what)
        self.free()
        assert not written, f"written after the last use: {', '.join(written)}"

    def free(self) -> None:
        for block in [*self._live.values(), *self._retired]:
            block.free()
        self._live.clear()
        self._retired.clear()

    def __enter__(self) -> DebugArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.free()


class DebugSteps:
    """The steps of an engine's model in debug arenas, on a cache of its own: a twin of
    `Engine.step`, which must give the same logits.

    The engine lends its backends, weights and toggles (patterns of fusion, activations, pdl). Each
    step has new arenas; caches live through all of them.
    """

    def __init__(self, engine: Engine, mode: Mode):
        self._engine, self._mode, self._loaded = engine, mode, engine._open
        self._cache = KVCache(engine.config.n_ctx, engine.config.n_kv_pad)
        self._pairs = engine.model.caches(self._cache.n_cells)
        # Cells no token sees hold NaN where that can be: a kernel that used one would show it.
        byte = 0 if mode == Mode.BARE else POISON
        self._cells = DebugArena(self._loaded.backend, mode)
        for t in (t for pair in self._pairs for t in pair):
            self._cells.hold(t, np.full(t.nbytes, byte, np.uint8))

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every token, float32 (len(tokens), n_vocab)."""
        engine, model = self._engine, self._engine.model
        work = [(0, tokens, "all")]
        batch = make_batch(work, self._cache, model.n_vocab, engine.config.n_ubatch)
        graph = unfused_graph(model, batch.shape, self._pairs, engine.toggles)
        graph, backend_of = fused_graph(graph, engine.toggles, self._loaded.placement, 1)
        values: dict[Tensor, np.ndarray] = {t: batch.values[t.name] for t in graph.inputs}
        self._run(graph, backend_of, values)
        self._cache.store(batch.sequences, batch.positions, batch.cells)
        (logits,) = (values[t.storage] for t in graph.outputs)
        return logits.view(np.float32).reshape(len(tokens), model.n_vocab)

    def _run(
        self, graph: Graph, backend_of: Callable[[Node], int], values: dict[Tensor, np.ndarray]
    ) -> None:
        """Computes `graph`; adds to `values` (by storage) what goes from a split to another, and
        the outputs."""
        parts = split(graph, backend_of)
        crossing = {t for part in parts for t in part.inputs} | {t.storage for t in graph.outputs}
        with contextlib.ExitStack() as open_arenas:
            arenas: dict[int, DebugArena] = {}
            for part in parts:
                if part.backend not in arenas:
                    arenas[part.backend] = open_arenas.enter_context(self._arena(part.backend))
                arena = arenas[part.backend]
                for t in part.inputs:
                    arena.hold(t, values[t])
                arena.run(part.nodes, crossing, self._engine.toggles.pdl == "on")
                made = {t.storage for node in part.nodes for t in node.outputs}
                values.update({t: arena.content(t) for t in made & crossing})
                self._check_caches(part.backend)

    def _arena(self, b: int) -> DebugArena:
        loaded = self._loaded
        residents = {
            t: loaded.memory[there.buffer].address + there.offset
            for t, there in loaded.residents[b].items()
        }
        for t in (t for pair in self._pairs for t in pair):
            residents[t] = self._cells.address_of(t)
        return DebugArena(loaded.backends[b], self._mode, residents)

    def _check_caches(self, b: int) -> None:
        for block in self._cells._live.values():
            block.check(f"a node on {self._loaded.backends[b].name}")

    def close(self) -> None:
        self._cells.close()

    def __enter__(self) -> DebugSteps:
        return self

    def __exit__(self, *_: Any) -> None:
        self._cells.free()


def run_alone(
    backend: Backend,
    node: Node,
    values: Mapping[Tensor, np.ndarray],
    mode: Mode,
    in_parts: bool = False,
) -> dict[Tensor, np.ndarray]:
    """Bytes of what `node` makes, or its parts one by one, by storage. values: of all it reads,
    by storage, weights as in the file; these are loaded as the backend likes."""
    weights = {
        t: backend.load_weight(t, np.ascontiguousarray(a).reshape(-1).view(np.uint8))
        for t, a in values.items()
        if t.kind == Kind.WEIGHT
    }
    addresses = {t: memory.address for t, memory in weights.items()}
    try:
        with DebugArena(backend, mode, addresses) as arena:
            for t, array in values.items():
                if t not in weights:
                    arena.hold(t, array)
            outputs = {t.storage for t in node.outputs}
            arena.run(node.parts if in_parts else [node], outputs)
            return {t: arena.content(t) for t in outputs}
    finally:
        backend.synchronize()
        for memory in weights.values():
            memory.free()
