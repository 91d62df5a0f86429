"""The memory of programs: weights and caches, which stay, and the workspace, which may grow.

Addresses are fixed while a prepared program refers to them. So `on_grow` drops every kept program
before the workspace grows.
"""

from collections.abc import Callable

from workbench.backend.base import Backend, Memory
from workbench.backend.issue.landing import Landing, hands_out
from workbench.engine.load import Loaded, resident
from workbench.graph.ir import Tensor
from workbench.program.commands import Buffer, Program, Range


class Residents:
    """The memory that keeps its address while an engine lives: weights, which variants share, and
    the engine's cache.

    caches: K and V by layer.
    last_tokens: as `build_graph` has it.
    ranges[b]: where backend b finds a tensor.
    memory: by buffer.
    """

    def __init__(self, loaded: Loaded, n_cells: int, last_tokens: Tensor | None = None):
        self.caches = loaded.model.caches(n_cells)
        self.last_tokens = last_tokens
        self.ranges: list[dict[Tensor, Range]] = [dict(r) for r in loaded.residents]
        self.memory = dict(loaded.memory)
        self._own: list[Memory] = []

    def allocate(self, loaded: Loaded) -> None:
        """Allocates the caches. Where this fails, `free` gives back what was allocated."""
        for layer, pair in enumerate(self.caches):
            for tensor in pair:
                self._keep(loaded, loaded.placement.of_cache(layer), tensor)
        if self.last_tokens is not None:
            self._keep(loaded, len(loaded.backends) - 1, self.last_tokens)

    def _keep(self, loaded: Loaded, b: int, tensor: Tensor) -> None:
        kept = self.ranges[b][tensor] = resident(b, tensor, tensor.nbytes)
        memory = self.memory[kept.buffer] = loaded.backends[b].allocate(
            tensor.nbytes, kept.buffer.space
        )
        self._own.append(memory)

    def free(self) -> None:
        """Gives the caches back. Weights belong to the model."""
        for memory in self._own:
            memory.free()


class Workspace:
    """Staging, arenas and result memory of one engine, by buffer name.

    A result can need a landing in one step and plain memory in the next. Each has memory of its
    own.
    """

    def __init__(self, backends: list[Backend], on_grow: Callable[[], None]):
        self._backends = backends
        self._on_grow = on_grow
        self._memory: dict[tuple[str, bool], Memory] = {}

    def bind(self, program: Program) -> dict[Buffer, Memory]:
        """The memory of each buffer of `program`. Memory that is large enough is kept."""
        bound = {}
        for buffer in program.buffers:
            lands = hands_out(buffer)
            memory = self._memory.get((buffer.name, lands))
            if memory is None or memory.nbytes < buffer.nbytes:
                memory = self._replace(buffer, lands, memory)
            bound[buffer] = memory
        return bound

    def _replace(self, buffer: Buffer, lands: bool, old: Memory | None) -> Memory:
        backend, nbytes = self._backends[buffer.backend], max(buffer.nbytes, 1)
        if old is not None:
            backend.synchronize()
            self._on_grow()
            old.free()
        allocate = backend.allocate
        made: Memory = Landing(backend, nbytes) if lands else allocate(nbytes, buffer.space)
        self._memory[buffer.name, lands] = made
        return made

    def free(self) -> None:
        for memory in self._memory.values():
            memory.free()
        self._memory.clear()
