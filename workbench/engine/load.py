"""A model on its backends: opened once, shared by an engine and its variants."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Generator
from functools import cached_property
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.backend.base import Backend, Memory, choose_device, open_backend
from workbench.backend.cpu.device.base import n_workers
from workbench.common import devices
from workbench.common.errors import DeviceError, UsageError
from workbench.common.nearest import choices
from workbench.common.progress import BYTES, bar
from workbench.config import FAMILIES, Activations, EngineConfig, Toggles
from workbench.config.toggles import no_setting
from workbench.engine.placement import Placement
from workbench.graph.ir import Kind, Node, StepShape, Tensor
from workbench.model.decoder import Model, build_graph
from workbench.model.gguf.expand import described
from workbench.model.synth import models
from workbench.program.commands import HOST, Buffer, Range, Space
from workbench.program.split import assign

if TYPE_CHECKING:
    from workbench.model.tokenizer.tokenizer import Tokenizer

# makes a configuration follow from the toggles, which decide what a context must hold
Fit = Callable[[Toggles, EngineConfig], EngineConfig]
READ_AHEAD_BYTES = 128 << 20  # how far the disk reads the file ahead of a backend


MOST_DEVICES = 15  # events have numbers for that many


class Loaded:
    """A model, its backends, and which backend keeps each weight. Closed when its last user
    releases it.

    The host keeps the token embedding, the device every other weight. Both keep a tied output. The
    configuration can change that (`engine/placement.py`). The device `host` keeps everything. A
    loading that fails or is interrupted leaves no memory, thread or open file.

    check: called with this object when the file and the backends are open. An error of `check` ends
        the loading before any weight is read. So does a node without a kernel on its backend.

    Raises ModelFileError, DeviceError, UsageError, and whatever `check` raises.
    """

    def __init__(
        self,
        path: str | Path,
        config: EngineConfig,
        check: Callable[[Loaded], None] | None = None,
    ):
        self._users = 0
        self.config = config
        self.backends: list[Backend] = []
        self.memory: dict[Buffer, Memory] = {}
        types = config.cache_type_k, config.cache_type_v
        self.device, self.device_reason = choose_device(config.device)
        if path == devices.AUTO:  # the word; Path("auto") is a file
            path = model_for(self.device)
        self.model = Model(path, config.expand, types)
        if config.n_ctx == 0:
            self.config = config = dataclasses.replace(config, n_ctx=self.model.n_ctx_train)
        try:
            self.backends.append(open_backend(devices.HOST, config.threads))
            self._open_devices(config)
            self.residents: list[dict[Tensor, Range]] = [{} for _ in self.backends]
            self.placement = Placement(self.model, config, len(self.backends) - 1)
            if check is not None:
                check(self)
            self._refuse(config)
            self._load_weights()
        except BaseException:
            self._close()
            raise

    def _open_devices(self, config: EngineConfig) -> None:
        n, device = config.n_devices, self.device
        if device == devices.HOST:
            if n > 1:
                raise UsageError(f"n_devices={n} and the host device is one; use another device")
            return
        if n == 1:
            self.backends.append(open_backend(device, config.threads))
            return
        if n > min(self.model.n_layer, MOST_DEVICES):
            raise UsageError(
                f"n_devices={n}: {self.model.path} has {self.model.n_layer} layers to share, and "
                f"{MOST_DEVICES} devices are the most; use fewer"
            )
        threads = max(1, n_workers(config.threads) // n)
        for i in range(n):
            backend = open_backend(device, threads, i)
            if not backend.capabilities.in_stream:
                raise DeviceError(f"the {device} device has no events to order {n} of its kind by")
            backend.name = f"{device} {i}"  # told apart in programs and timelines
            self.backends.append(backend)

    @property
    def backend(self) -> Backend:
        """The backend that computes the last layers."""
        return self.backends[-1]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's own tokenizer. Raises ModelFileError where the file describes none."""
        from workbench.model.tokenizer.tokenizer import load_tokenizer

        return load_tokenizer(self.model.file)

    def _refuse(self, config: EngineConfig) -> None:
        """Raises DeviceError, which names the first weight or node that its backend has no kernel
        for. Backends are asked for the nodes of a step of one token and of a full ubatch, with
        either kind of activations.
        """
        seen = set()
        caches = self.model.caches(config.n_kv_pad)
        for tokens, activations in product(sorted({1, config.n_ubatch}), Activations):
            shape = StepShape(tokens, 1, config.n_kv_pad)
            nodes = build_graph(self.model, shape, caches, activations).nodes
            for node, b in assign(nodes, self.placement.fixed).items():
                if (b, kind(node)) in seen:  # it needs the same kernels of the same backend
                    continue
                seen.add((b, kind(node)))
                if why := self.backends[b].refuses(node):
                    names = [t.name for t in node.inputs if t.kind == Kind.WEIGHT]
                    raise DeviceError(f"{self.model.path}: {(*names, node.name)[0]}: {why}")

    def _load_weights(self) -> None:
        """Gives every weight to its backends, in file order, and waits once, at the end."""
        model, new = self.model, self.model.expanded
        if new:
            print(f"expanding {described(new, model.expand)}", file=sys.stderr)
        for note in model.notes:
            print(note, file=sys.stderr)
        position = attrgetter("part", "offset")
        weights = sorted(model.weights, key=lambda t: position(model.stored(t)))
        kept = {t: self.placement.keepers(t, model.output) for t in weights}
        # the host uses the file's bytes where they are, unless they are expanded
        in_place = [t for t in kept if kept[t] == [HOST] and not model.is_expanded(t)]
        to_read = [t for t in kept if t not in in_place]
        total = sum(model.stored(t).nbytes for t in to_read)
        reading, threads = _read_ahead(model, to_read), n_workers(self.config.threads)
        with bar("loading", total, BYTES) as left, contextlib.closing(reading):
            for tensor, keepers in kept.items():
                if tensor not in in_place:
                    next(reading)
                data = model.data(tensor, threads, left.update)
                for b in keepers:
                    self.reside(b, tensor, self.backends[b].load_weight(tensor, data))
                if tensor not in in_place and not model.is_expanded(tensor):
                    left.update(tensor.nbytes)
            for backend in self.backends:
                backend.finish_loading()

    def reside(self, b: int, tensor: Tensor, memory: Memory) -> None:
        """Notes that backend b keeps `tensor` in `memory`."""
        kept = resident(b, tensor, memory.nbytes)
        self.memory[kept.buffer] = memory
        self.residents[b][tensor] = kept

    def share(self) -> Loaded:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._close()

    def _close(self) -> None:
        """Waits for the backends, then gives back weights, backends and file. A failure stops none
        of these; the last one is raised."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.model.close)
            for backend in self.backends:
                last_first.callback(backend.close)
            for memory in self.memory.values():
                last_first.callback(memory.free)
            self.memory.clear()
            for backend in self.backends:
                last_first.callback(backend.synchronize)


def _read_ahead(model: Model, tensors: list[Tensor]) -> Generator[Tensor, None, None]:
    """Hands out `tensors` one by one. The system is told READ_AHEAD_BYTES earlier that each will be
    read, so the disk works while a backend does. (A system may take no such advice.)"""
    advise = getattr(os, "posix_fadvise", None)
    told = begun = 0  # bytes
    untold = map(model.stored, tensors)
    for tensor in tensors:
        while advise and told < begun + READ_AHEAD_BYTES and (info := next(untold, None)):
            with open(model.file.files[info.part].path, "rb") as file:
                advise(file.fileno(), info.offset, info.nbytes, os.POSIX_FADV_WILLNEED)
            told += info.nbytes
        yield tensor
        begun += model.stored(tensor).nbytes


def model_for(device: str) -> Path:
    """The file of the model `auto`: llama-3.2-1b Q4_K with random weights for a GPU, tiny-llama
    Q8_0 for any other device. It is written to `synth.models_folder()` where it is not there yet.

    Raises DeviceError for a GPU that is not there, before a file is written, and UsageError where
    the folder cannot be written.
    """
    if not devices.is_gpu(device):
        return models.write_named(models.models_folder(), *models.ON_CPU)
    open_backend(device).close()
    return models.write_named(models.models_folder(), *models.ON_GPU)


def config_of(fields: dict[str, Any]) -> EngineConfig:
    """The configuration with these fields. Raises UsageError for a field that does not exist; of a
    toggle the line says where toggles are given."""
    known = EngineConfig.__dataclass_fields__
    for name, value in fields.items():
        if name in (*FAMILIES, *Toggles.names()):
            raise UsageError(no_setting(name, value))
        if name not in known:
            said = choices(name, ("toggles", "config", *known))
            raise UsageError(f"setting {name!r} does not exist; {said}")
    return EngineConfig(**fields)


def resident(b: int, tensor: Tensor, nbytes: int) -> Range:
    """Where backend b keeps `tensor` in memory of its own, of nbytes bytes."""
    space = Space.HOST if b == HOST else Space.DEVICE
    return Range(Buffer(tensor.name, space, nbytes, b), 0, tensor.nbytes)


def kind(node: Node) -> tuple:
    """A key that is equal for nodes which need the same kernels."""
    operands = ((t.dtype, t.shape, t.kind) for t in (*node.inputs, *node.outputs))
    return (node.op, node.params.get("activations"), *operands, *map(kind, node.parts))
