"""A model on its backends: opened once, shared by an engine and its variants."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from workbench.backend.base import Backend, Memory, choose_device, open_backend
from workbench.config import EngineConfig
from workbench.graph.ir import Node, Tensor
from workbench.model.decoder import Model
from workbench.program.commands import DEVICE, HOST, Buffer, Range, Space

SHOW_PROGRESS_ABOVE = 256 << 20  # bytes of weights


class Loaded:
    """Model, backends, and where each weight resides. Closed when its last user lets go.

    The token embedding is the host's; every other weight is the device's (a tied output is both).
    With device `host` there is one backend and everything is its.
    """

    def __init__(self, path: str | Path, config: EngineConfig):
        self._users = 0
        self.backends: list[Backend] = []
        self.memory: dict[Buffer, Memory] = {}
        self.model = Model(path)
        try:
            self.device, self.device_reason = choose_device(config.device)
            self.backends.append(open_backend("host", config.threads))
            if self.device != "host":
                self.backends.append(open_backend(self.device, config.threads))
            self.residents: list[dict[Tensor, Range]] = [{} for _ in self.backends]
            self._load_weights()
        except BaseException:
            self._close()
            raise

    @property
    def backend(self) -> Backend:
        """The one that computes the layers."""
        return self.backends[-1]

    def backend_of(self, node: Node) -> int:
        """Placement: the embedding lookup on the host, all else on the device if there is one."""
        embeds = node.op == "get_rows" and node.inputs[0] is self.model.embedding
        return HOST if embeds or len(self.backends) == 1 else DEVICE

    def _load_weights(self) -> None:
        model, last = self.model, len(self.backends) - 1
        wanted = [(HOST, model.embedding)] + [
            (last, t)
            for t in model.weights
            if t is not model.embedding or (model.output is t and last != HOST)
        ]
        total = sum(t.nbytes for _, t in wanted)
        quiet = total < SHOW_PROGRESS_ABOVE
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="loading", disable=quiet, file=sys.stderr
        ) as bar:
            for b, tensor in wanted:
                memory = self.backends[b].load_weight(tensor, model.file.data(tensor.name))
                self.reside(b, tensor, memory)
                bar.update(tensor.nbytes)

    def reside(self, b: int, tensor: Tensor, memory: Memory) -> None:
        """Notes that backend b keeps `tensor` in `memory`."""
        space = Space.HOST if b == HOST else Space.DEVICE
        buffer = Buffer(tensor.name, space, memory.nbytes, b)
        self.memory[buffer] = memory
        self.residents[b][tensor] = Range(buffer, 0, tensor.nbytes)

    def share(self) -> Loaded:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._close()

    def _close(self) -> None:
        for backend in self.backends:
            backend.synchronize()
        for memory in self.memory.values():
            memory.free()
        self.memory.clear()
        for backend in reversed(self.backends):
            backend.close()
        self.model.close()
