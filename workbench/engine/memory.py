"""Where programs live: weights and caches, which stay, and the workspace, which may grow.

Addresses are fixed while a prepared program refers to them. Growing the workspace therefore drops
every kept program first, which `on_grow` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workbench.backend.base import Backend, Memory
from workbench.program.commands import Buffer


class Workspace:
    """Staging, arenas and result memory of one engine, by buffer name."""

    def __init__(self, backends: list[Backend], on_grow: Callable[[], None]):
        self._backends = backends
        self._on_grow = on_grow
        self._memory: dict[str, Memory] = {}

    def bind(self, buffers: Iterable[Buffer]) -> dict[Buffer, Memory]:
        """Memory for each buffer: what is there where it is large enough, else newly allocated."""
        bound = {}
        for buffer in buffers:
            memory = self._memory.get(buffer.name)
            if memory is None or memory.nbytes < buffer.nbytes:
                memory = self._replace(buffer, memory)
            bound[buffer] = memory
        return bound

    def _replace(self, buffer: Buffer, old: Memory | None) -> Memory:
        backend = self._backends[buffer.backend]
        if old is not None:
            backend.synchronize()
            self._on_grow()
            old.free()
        self._memory[buffer.name] = backend.allocate(max(buffer.nbytes, 1), buffer.space)
        return self._memory[buffer.name]

    def free(self) -> None:
        for memory in self._memory.values():
            memory.free()
        self._memory.clear()
