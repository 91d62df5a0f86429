"""What the host pays to build a program, to reuse one, and to import the package.

Requirements: at most 20 ms to build the program of a 32-layer llama from nothing, at most 100 us
to reuse one; `import workbench` under 0.5 s. What lies between two tokens besides driver calls has
no figure to reach: a GPU waits while it lasts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import gguf
import pytest

from workbench.backend.issue.prepared import Prepared
from workbench.backend.null import open_backend
from workbench.config import Toggles
from workbench.engine.batches import NOBODY
from workbench.engine.engine import Engine
from workbench.engine.programs import KeepByShape, Key
from workbench.graph.ir import StepShape
from workbench.model.decoder import Model, build_graph
from workbench.model.synth.shapes import find_preset, tensor_type, tensors
from workbench.program.commands import DEVICE, HOST, Buffer, Launch, Range, Space
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import Ordering

DECODE = StepShape(1, 1, 256)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A llama-3-8b Q4_0 of header and holes: shapes are read, weights never."""
    path = tmp_path_factory.mktemp("bench") / "llama-3-8b.gguf"
    preset = find_preset("llama-3-8b")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(preset.n_layer)
    writer.add_embedding_length(preset.n_embd)
    writer.add_feed_forward_length(preset.n_ff)
    writer.add_head_count(preset.n_head)
    writer.add_head_count_kv(preset.n_head_kv)
    writer.add_context_length(8192)
    writer.add_layer_norm_rms_eps(1e-5)
    total = 0
    for spec in tensors(preset):
        dtype = tensor_type(spec, preset, "Q4_0")
        nbytes = (
            spec.shape[0] * dtype.row_bytes(spec.shape[1])
            if len(spec.shape) > 1
            else (dtype.row_bytes(spec.shape[0]))
        )
        total += -(-nbytes // 32) * 32
        writer.add_tensor_info(
            spec.name, spec.shape, None, nbytes, gguf.GGMLQuantizationType[dtype.name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + total + 64)
    m = Model(path)
    yield m
    m.close()


class Rig:
    """The model placed on a null device: everything of a step but computing."""

    def __init__(self, model: Model):
        self.model = model
        self.caches = model.caches(2048)
        self.backends = [open_backend(), open_backend()]
        tensors = [*model.weights, *(t for pair in self.caches for t in pair)]
        buffers = {t: Buffer(t.name, Space.DEVICE, t.nbytes, DEVICE) for t in tensors}
        self.residents = [{t: Range(b, 0, t.nbytes) for t, b in buffers.items()}] * 2
        self.memory = {b: self.backends[1].allocate(1, Space.DEVICE) for b in buffers.values()}

    def program(self, shape=DECODE):
        graph = build_graph(self.model, shape, self.caches)
        splits = split(graph, self.backend_of)
        targets, ordering = (
            [Target(b, lambda node: 0) for b in ("host", "null")],
            Ordering("per_copy"),
        )
        layout = lay_out(graph, splits, self.residents, targets, ordering)
        return lower(graph, splits, layout, targets, ordering)

    def backend_of(self, node):
        return HOST if node.op == "get_rows" and node.inputs[0] is self.model.embedding else DEVICE

    def prepare(self, program):
        made = {b: self.backends[1].allocate(b.nbytes, b.space) for b in program.buffers}
        return Prepared(program, self.backends, self.memory | made)


@pytest.fixture(scope="module")
def rig(model):
    return Rig(model)


def test_build_from_nothing(benchmark, rig):
    """To be at most 20 ms: graph, splits, arena and commands of 32 layers, on one core."""
    program = benchmark(rig.program)
    assert len(program.commands) > 32 * 20


def test_prepare(benchmark, rig):
    """Binding the program to addresses: what a rebuild pays on top."""
    program = rig.program()
    assert benchmark(rig.prepare, program).program is program


def test_reuse(benchmark, rig):
    """To be at most 100 us: finding the kept program of a step shape."""
    kept = KeepByShape(lambda key, phases, cell: rig.prepare(rig.program(key.shape)), NOBODY)
    key = Key(DECODE, 0)
    first = kept.get(key)
    assert benchmark(kept.get, key) is first and kept.reused


@pytest.mark.slow
def test_between_tokens(benchmark, model, monkeypatch):
    """A decode step without the launches of its layers, on a device that does nothing: inputs made
    and written, the embedding looked up, results handed out; and, which a GPU hides behind its
    kernels, the inputs of the next step made."""
    toggles = Toggles(graph_reuse="set_rows", sync="implicit", copy_stream="compute")
    with Engine.load(model.path, device="null", n_ctx=8192, toggles=toggles) as engine:
        whole = engine._step_programs.of

        def bare(*shape, **others):
            program = whole(*shape, **others)
            program.commands = [
                c for c in program.commands if not isinstance(c, Launch) or c.split == 0
            ]
            return program

        monkeypatch.setattr(engine._step_programs, "of", bare)

        def step():
            if engine.n_past == 256:  # one program serves all
                engine.reset()
            return engine.step([7])

        step()  # builds the program
        logits = benchmark(step)
        assert engine.counters["programs_built"] == 1
    assert logits.shape == (1, model.n_vocab)


def test_import(benchmark):
    """To be under 0.5 s, the interpreter's start included."""
    benchmark.pedantic(
        subprocess.run, ([sys.executable, "-c", "import workbench"],), {"check": True}, rounds=5
    )
