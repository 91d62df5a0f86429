"""A model loaded on its backends: order, progress, refusals, and what an interruption leaves; and
layers and single weights on the host or on two devices: the same answer, and nothing waits for the
host that need not."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backend.cpu.kernel_runs import repack
from tests.gates import hold
from tests.profiles import share
from tests.reuse import N_CTX, N_UBATCH, mixed_run
from workbench.backend.cpu.device import embedded
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.backend.cpu.device.ring import Ring
from workbench.backend.cpu.kernels import op_table
from workbench.backend.null import NullBackend
from workbench.common import progress
from workbench.common.devices import DEVICES
from workbench.common.errors import DeviceError, UsageError
from workbench.config import EngineConfig, Toggles
from workbench.engine import load
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded
from workbench.graph.ir import QUANTISED, WEIGHT_DTYPES, DType, Kind, Node, Tensor
from workbench.model.synth import models
from workbench.program import commands as c
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Copy, Launch, Space, Sync

CONFIG = EngineConfig(device="null", n_ctx=64, n_ubatch=32)


class Recording(NullBackend):
    """Logs, keeps what it gave out, and refuses, or raises, what it is told to."""

    def __init__(self, refused: str = "", raises_at: int = -1, fails: str = ""):
        super().__init__("recording", Capabilities(True, True, True, False, 2))
        self.refused, self.raises_at, self.fails = refused, raises_at, fails
        self.given: list[Any] = []
        self.asked: list[Node] = []

    def refuses(self, node: Node) -> str:
        self.asked.append(node)
        return "it is Tuesday; wait" if node.op == self.refused else ""

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> Any:
        if len(self.given) == self.raises_at:
            raise KeyboardInterrupt
        self.given.append(super().load_weight(tensor, data))
        return self.given[-1]

    def finish_loading(self) -> None:
        self.log.append(("finish_loading",))
        if self.fails == "finish_loading":
            raise DeviceError("it fell off the bus")

    def synchronize(self) -> None:
        super().synchronize()
        if self.fails == "synchronize":
            raise DeviceError("it fell off the bus")

    @property
    def done(self) -> list[str]:
        return [entry[0] for entry in self.log]

    def check_all_is_back(self) -> None:
        assert all(memory.array is None for memory in self.given), "a weight was not freed"
        assert self.done[-1] == "close" and "synchronize" in self.done


@pytest.fixture
def opened(monkeypatch):
    """`opened(**how)`: a Recording that `Loaded` gets as its device."""

    def make_one(**how: Any) -> Recording:
        made, real = Recording(**how), load.open_backend
        monkeypatch.setattr(
            load, "open_backend", lambda name, n: real(name, n) if name == "host" else made
        )
        return made

    return make_one


@pytest.fixture
def own_model(tiny_model, tmp_path):
    """`own_model(quant)`: a copy that no other test has open. Afterwards nobody has it open or
    mapped, and no thread is left that loads."""
    before, made = threading.active_count(), list[Path]()

    def copy(quant: str = "Q4_0") -> Path:
        made.append(Path(shutil.copy(tiny_model("tiny-llama", quant), tmp_path)).resolve())
        return made[-1]

    yield copy
    gc.collect()
    for path in made:
        assert str(path) not in Path("/proc/self/maps").read_text() and not files_open(path)
    assert threading.active_count() == before


def files_open(path: Path) -> int:
    """Descriptors of `path` that this process has."""
    return sum(os.path.realpath(fd) == str(path) for fd in Path("/proc/self/fd").iterdir())


def test_weights_go_in_file_order_each_once(own_model, opened, capsys):
    device, path = opened(), own_model()
    model = Loaded(path, CONFIG).share()
    names = [entry[1] for entry in device.log if entry[0] == "load_weight"]
    offsets = {n: info.offset for n, info in model.model.file.tensors.items()}
    assert names == sorted(set(names), key=offsets.__getitem__)
    assert set(names) | {"token_embd.weight"} == {t.name for t in model.model.weights}
    assert device.done.index("finish_loading") == len(names)
    assert device.done.count("finish_loading") == 1
    assert files_open(path) == 1, "the map's own"
    assert capsys.readouterr().err == "", "a small model loads in silence"
    inputs = {n.inputs[1].dtype.name for n in device.asked if n.op == "mul_mat"}
    tokens = {n.output.rows for n in device.asked if n.op == "mul_mat"}
    assert inputs == {"F32", "Q8_ACT"} and tokens == {1, 32}, "both batches, both activations"
    assert not [n for n in device.asked if n.op == "get_rows" and n.name == "inp_embd"]
    model.release()
    device.check_all_is_back()


def test_progress_is_shown_in_bytes(own_model, opened, monkeypatch):
    opened()
    path = own_model("F16")  # made before: what makes it shows its progress, too
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.shown_on(io.StringIO()) as out:
        Loaded(path, CONFIG).share().release()
    first, *_, last = out.getvalue().splitlines()
    assert re.fullmatch(r"loading: 0\.\d of (\d+\.\d) MB, about \d+ s left", first)
    assert re.fullmatch(r"loading: (\d+\.\d) of \1 MB", last)


# refusals and interruptions -----------------------------------------------------------------------

PDL, BASE = Toggles(pdl="on"), Toggles()


def no(asked: Loaded) -> None:
    """A check sees model and device."""
    assert (asked.model.n_vocab, asked.device, asked.config) == (1024, "null", CONFIG)
    raise UsageError("not today" if asked.tokenizer.eog_ids else "no ends")


@pytest.mark.parametrize(
    ("how", "given", "says"),
    [("mul_mat", {}, "blk.0.attn_q.weight: it is Tuesday; wait"),
     ("attention", {}, "kqv_out-0: it is Tuesday; wait"),
     ("", {"toggles": PDL}, "the null device cannot honour pdl=on"),
     ("", {"variants": [BASE, PDL]}, "the null device cannot honour pdl=on"),
     ("", {"check": no}, "not today")],
)  # fmt: skip
def test_what_is_refused_uploads_nothing(own_model, opened, how, given, says):
    device = opened(refused=how)
    with pytest.raises((DeviceError, UsageError)) as refusal:
        Engine.load(own_model(), config=CONFIG, **{"toggles": BASE} | given)
    assert says in str(refusal.value)
    assert "load_weight" not in device.done and device.done[-1] == "close"
    assert bool(device.asked) == bool(how), "toggles come first: they are cheap to judge"
    del refusal


@pytest.mark.parametrize(
    "how",
    [{"raises_at": 0}, {"raises_at": 7}, {"fails": "finish_loading"}, {"fails": "synchronize"}],
)
def test_interrupted_loading_leaves_nothing(own_model, opened, how: dict[str, Any]):
    """Nor what cannot be waited for when it is let go."""
    device = opened(**how)
    with pytest.raises((KeyboardInterrupt, DeviceError)) as raised:
        Loaded(own_model(), CONFIG).share().release()
    device.check_all_is_back()
    assert len(device.given) == how.get("raises_at", len(device.given))
    assert "raises_at" in how or "fell off the bus" in str(raised.value)


@pytest.mark.parametrize("at", [1, 20])
def test_interrupted_while_the_workers_work(own_model, monkeypatch, at: int):
    """Ctrl-C in the wait for a weight: the workers end their work on the map before it goes."""
    path, wait, waits = own_model("Q8_0"), Ring.wait, []

    def interrupted(ring: Ring, sequence: int) -> None:
        waits.append(sequence)
        if len(waits) == at:
            raise KeyboardInterrupt
        wait(ring, sequence)

    monkeypatch.setattr(Ring, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Loaded(path, EngineConfig(device="embedded", n_ctx=64))
    assert len(waits) > at, "nobody waited for the workers afterwards"


# the bytes on the CPU devices ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: d.name)
def test_workers_together_load_what_one_would(dtype: DType, device, monkeypatch):
    """Parts of one group of rows up to all in one part, on one to three workers. New memory is not
    always zero, and a layout belongs to an address only while it lives."""
    for rows, part_bytes in ((1, 100), (17, 1), (100, 100), (100, 1 << 30)):
        tensor = Tensor("w", dtype, (rows, 512), Kind.WEIGHT)
        data = np.random.default_rng(rows).integers(0, 256, tensor.nbytes, np.uint8)
        layout = op_table.weight_layout(dtype)
        alone = np.zeros(op_table.repacked_bytes(dtype, rows, 512, layout), np.uint8)
        repack(alone.ctypes.data, data.ctypes.data, dtype, rows, 512, layout)
        assert (layout == "file") == (dtype not in QUANTISED)
        monkeypatch.setattr(embedded, "LOAD_PART_BYTES", part_bytes)
        with pytest.raises(DeviceError, match=rf"w.* wants {len(data)} bytes, not {len(data) - 1}"):
            device.load_weight(tensor, data[1:])
        given = data.copy()
        memory = device.load_weight(tensor, given)
        given[:] = 0xEE  # loaded is loaded: read no later
        assert ctypes.string_at(memory.address, memory.nbytes) == alone.tobytes()
        assert device._layouts.get(memory.address, "file") == layout
        memory.free()
    assert not device._layouts


def test_auto_is_a_real_shape_on_a_gpu_and_a_tiny_model_elsewhere(tmp_path, monkeypatch):
    """It is written once, and beside the folder of notebooks. A tiny model stands for the real
    shape here, and the embedded device for a GPU."""
    (inside := tmp_path / "notebooks").mkdir()
    made = tmp_path / "data" / "models"
    monkeypatch.chdir(inside)
    assert models.ON_GPU == ("llama-3.2-1b", "Q4_K"), "a real shape, in seconds"
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="cuda needs CuPy"):
        Engine.load("auto", device="cuda")
    assert not made.exists(), "nothing is written for a GPU that is not there"
    with Engine.load("auto", device="embedded") as engine:
        assert engine.model.path.resolve() == made / "tiny-llama-Q8_0.gguf"
    os.utime(made / "tiny-llama-Q8_0.gguf", ns=(1, 1))
    monkeypatch.chdir(tmp_path)
    with Engine.load("auto", device="null") as engine:
        assert engine.model.path == Path("data/models/tiny-llama-Q8_0.gguf")
        assert engine.model.path.stat().st_mtime_ns == 1, "it is kept"
    monkeypatch.setitem(DEVICES, "embedded", DEVICES["embedded"]._replace(gpu=True))
    monkeypatch.setattr(models, "ON_GPU", ("tiny-llama-bias", "F32"))
    with Engine.load("auto", device="embedded") as engine:
        assert engine.model.path.name == "tiny-llama-bias-F32.gguf"


def test_the_host_uses_the_files_bytes_in_place(own_model):
    """All of a model on the host, the embedding alone beside a device."""
    for device in ("host", "embedded"):
        model = Loaded(own_model("Q4_K"), EngineConfig(device=device, n_ctx=64)).share()
        assert device == "host" or [t.name for t in model.residents[0]] == ["token_embd.weight"]
        for tensor, where in model.residents[0].items():
            data = model.model.file.data(tensor.name)
            assert model.memory[where.buffer].address == data.ctypes.data
        del data
        model.release()


# placed weights -----------------------------------------------------------------------------------

PROMPT = [5, 900, 17, 403, 77, 12, 99, 3] * 8
PLACED = {  # and the work of the splits, without waits and copies
    "two devices": ({"n_devices": 2}, "h g g"),
    "everything": ({}, "h g"),
    "the last layer and the output": ({"n_gpu_layers": 2}, "h g"),
    "the output": ({"n_gpu_layers": 1}, "h g"),
    "nothing": ({"n_gpu_layers": 0}, "h"),
    "feed-forward on the host": ({"override_tensor": ("ffn_.*=host",)}, "h g h g h g"),
    "one weight on the host": ({"override_tensor": (r"blk\.1\.attn_q\.weight=host",)}, "h g h g"),
    "one weight on the device": (
        {"n_gpu_layers": 0, "override_tensor": ("blk.0.ffn_up=device",)}, "h g h"
    ),
    "the first that matches wins": (
        {"override_tensor": ("blk.1.ffn_up=device", "blk.1.ffn_up=host")}, "h g"
    ),
}  # fmt: skip
TRAINS = [
    {},
    {"sync": "copy_boundary", "graph_reuse": "pointer_table", "input_order": "user_first"},
    {"sync": "packed", "copy_stream": "compute", "step_wait": "outputs"},
    {"n_copies": "4", "step_wait": "outputs", "graph_reuse": "patch_pointers"},
    {"sync": "event_guarded", "n_copies": "4", "host_source": "pinned_ring_4",
     "step_wait": "outputs"},
]  # fmt: skip
EACH = [(placed, *model) for placed in PLACED
        for model in (("tiny-llama", "Q8_0"), ("tiny-qwen3", "F32"))]  # fmt: skip
FUSED = Toggles().switched("fuse", "on")


@pytest.fixture(scope="module")
def open_at(tiny_model):
    def make(preset="tiny-llama", quant="Q8_0", **config) -> Engine:
        sizes = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_seqs": 8, "threads": 2}
        given = {"device": "embedded", "toggles": Toggles()} | sizes | config
        return Engine.load(tiny_model(preset, quant), **given)

    return make


@pytest.fixture(scope="module")
def two(open_at):
    with open_at(n_devices=2, n_ubatch=8) as engine:
        yield engine


@pytest.mark.parametrize(("placed", "preset", "quant"), share(EACH, every=11, slow=3))
def test_the_answer_is_the_same_wherever_weights_are(open_at, placed, preset, quant):
    """Host and embedded device compute with the same kernels: bit by bit, fused and not, with and
    without a wait for each ubatch."""
    with open_at(preset, quant) as whole, open_at(preset, quant, **PLACED[placed][0]) as engine:
        wanted = mixed_run(whole)
        for train in TRAINS:
            with engine.variant(Toggles(**train)) as variant:
                assert all(map(np.array_equal, mixed_run(variant), wanted)), train
        with engine.variant(FUSED) as fused, whole.variant(FUSED) as off:
            assert all(map(np.array_equal, mixed_run(fused), mixed_run(off)))


@pytest.mark.parametrize("placed", PLACED)
def test_splits_alternate_where_weights_do(open_at, placed):
    """What a host split takes from a device is waited for; each layer's cache is where it is."""
    config, wanted = PLACED[placed]
    with open_at(**config) as engine:
        program = engine.program()
    work = ["".join(x for x in group if x in "gh") for group in program.pattern().split()]
    assert " ".join(work) == wanted
    for i, command in enumerate(program.commands):
        of_host = isinstance(command, Copy) and command.split != c.RESULT
        if of_host and program.splits[command.split] == c.HOST:
            wait = program.commands[i + 1]
            assert isinstance(wait, Sync) and wait.blocks is command
    stores = {(x.node.layer, x.stream.backend) for x in program.commands
              if isinstance(x, Launch) and x.node.op in ("set_rows", "attention")}  # fmt: skip
    n_on_host = {"the last layer and the output": 1, "the output": 2}.get(placed, 0)
    n_on_host = 2 if config.get("n_gpu_layers") == 0 else n_on_host
    last = 2 if placed == "two devices" else c.DEVICE
    where = [*[c.HOST] * n_on_host, c.DEVICE, last][:2]
    assert stores == {(0, where[0]), (1, where[1])}


def test_a_node_of_several_weights_is_fused_only_in_one_place(open_at):
    """Q on the host, K and V on the device: no product of all three."""
    with open_at(override_tensor=("attn_q=host",), toggles=FUSED) as engine:
        ops = [x.node.op for x in engine.program().commands if isinstance(x, Launch)]
    assert "glu" in ops and not {"qkv", "qkv_rope_store"} & set(ops)


# two devices --------------------------------------------------------------------------------------


def test_devices_are_ordered_by_events_and_not_by_the_host(two):
    with two.variant(Toggles(**TRAINS[3])) as variant:
        program = variant.program()
    crossing = [
        i for i, x in enumerate(program.commands)
        if isinstance(x, Copy) and x.split != c.RESULT and x.src.buffer.space == Space.DEVICE
    ]  # fmt: skip
    before, after = program.commands[crossing[0] - 1], program.commands[crossing[-1] + 1]
    behind = program.commands[crossing[-1] + 2]
    assert isinstance(before, c.Wait) and before.stream.backend == 1, "its place was read"
    assert isinstance(after, c.Record) and after.stream.backend == 1
    assert isinstance(behind, c.Wait) and behind.stream.backend == 2 and behind.event == after.event
    first = program.commands[crossing[0]].split
    hosts = [x for x in program.commands if isinstance(x, Sync) and x.split == first]
    assert all(x.event is not None or x.blocks is not None for x in hosts)


@pytest.mark.parametrize(("n_copies", "ahead"), [("1", 1), ("4", 4)])
def test_a_device_goes_on_while_the_next_one_stands_still(two, n_copies, ahead):
    """With the second device held, the first computes as many ubatches as their results have
    places for there; the rest of the prompt follows once it is let go."""
    toggles = Toggles(sync="implicit", copy_stream="compute", n_copies=n_copies,
                      host_source="pinned_ring_4", step_wait="outputs")  # fmt: skip
    found: list[np.ndarray] = []
    with two.variant(toggles) as variant:
        first, second = (b for b in variant._open.backends if isinstance(b, EmbeddedDevice))
        ring = first.streams[0]
        wanted = variant.prefill(PROMPT)
        variant.reset()
        begun = ring.issued
        variant.prefill(PROMPT)
        one_step = (ring.issued - begun) // 8
        variant.reset()
        with hold(second):
            before = ring.completed
            host = threading.Thread(target=lambda: found.append(variant.prefill(PROMPT)))
            host.start()
            done = -1
            while done != ring.completed:  # until it stands still, too
                done = ring.completed
                time.sleep(0.2)
            steps = (done - before) // one_step
        host.join()
    assert steps == ahead
    assert np.array_equal(found[0], wanted)


@pytest.mark.parametrize(("order", "first"), [("graph", "embedded 0"), ("user_first", "host")])
def test_what_another_device_made_has_its_place_among_inputs(two, order, first):
    """In the order of first use it is what the second device's first node reads (#28874)."""
    with two.variant(Toggles(sync="copy_boundary", input_order=order)) as variant:
        program = variant.program()
    copies = [x for x in program.commands if isinstance(x, Copy) and x.split == 2]
    places = {Space.DEVICE: program.backends[1]}
    sources = [places.get(x.src.buffer.space, "host") for x in copies]
    assert sources[0] == first and set(sources) == {"host", "embedded 0"}


# what is refused ----------------------------------------------------------------------------------

UNPLACED = [
    ({"override_tensor": ("ffn_gaet=host",)}, "'ffn_gaet=host' matches no weight of "),
    ({"override_tensor": ("token_embd=device",)}, "token_embd and rope_freqs have backends of"),
    ({"device": "host", "n_gpu_layers": 1}, "the host device has no GPU to put layers on"),
    ({"device": "host", "n_devices": 2}, "n_devices=2 and the host device is one"),
    ({"n_devices": 2, "n_gpu_layers": 1}, "n_devices=2: n_gpu_layers=1 leaves some without layers"),
    ({"n_gpu_layers": -2}, "n_gpu_layers=-2 must be -1 (all) or more"),
    ({"override_tensor": ("ffn",)}, "'ffn' is no PATTERN=host and no PATTERN=device"),
    ({"override_tensor": ("ffn=gpu",)}, "'ffn=gpu' is no PATTERN=host"),
    ({"override_tensor": ("(ffn=host",)}, "'(ffn' is no regular expression (missing )"),
]


@pytest.mark.parametrize(("config", "says"), UNPLACED, ids=[said for _, said in UNPLACED])
def test_what_cannot_be_placed_is_refused_in_one_line(open_at, config, says):
    with pytest.raises(UsageError) as refused:
        open_at(**config)
    assert says in str(refused.value) and "\n" not in str(refused.value)
