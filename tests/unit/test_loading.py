"""Loading: the uploader over a device that does everything as late as it may, refusals, and what
is left behind when loading ends early. No GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.planes import planes, repacked
from workbench.backend import cuda_weights
from workbench.backend.cuda_kernel import Kernel
from workbench.backend.cuda_weights import MOST_TOKENS, Uploader, refuses
from workbench.backend.null import NullBackend
from workbench.config import EngineConfig
from workbench.engine import loaded
from workbench.engine.loaded import Loaded
from workbench.errors import DeviceError, ModelFileError
from workbench.graph.ir import (
    DTYPES,
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_K,
    Q6_K,
    WEIGHT_DTYPES,
    DType,
    Kind,
    Node,
    Tensor,
)
from workbench.graph.ops import make
from workbench.program.commands import Capabilities, Space

COPIES, REPACKS = 0, 1


class Memory:
    """Host memory that stands for either kind; filled with 0xA5 and guarded behind its end."""

    def __init__(self, nbytes: int):
        self.block = np.full(nbytes + 256, 0xA5, np.uint8)
        self.array: np.ndarray | None = self.block[:nbytes]
        self.address, self.nbytes = int(self.block.ctypes.data), nbytes
        self.freed = False

    @property
    def content(self) -> np.ndarray:
        return self.block[: self.nbytes]

    def free(self) -> None:
        self.freed = True
        self.array = None


class Event:
    def __init__(self) -> None:
        self.handle: list[tuple[int, int]] = []  # (stream, commands before it), the latest last


class LateDriver:
    """Two streams whose commands run when somebody waits for them, and no sooner."""

    def __init__(self) -> None:
        self.queues: dict[int, list[Any]] = {COPIES: [], REPACKS: []}
        self.done = {COPIES: 0, REPACKS: 0}
        self.calls: list[str] = []
        self.memory: dict[Space, list[Memory]] = {space: [] for space in Space}
        self.fail_at: tuple[str, int, BaseException] | None = None

    event = staticmethod(Event)

    def allocate(self, nbytes: int, space: Space) -> Memory:
        self.memory[space].append(Memory(nbytes))
        return self.memory[space][-1]

    def run(self, stream: int, until: int) -> None:
        while self.done[stream] < until:
            command = self.queues[stream][self.done[stream]]
            command()
            self.done[stream] += 1

    def call(self, function: str, what: str, *args: Any) -> None:
        self.calls.append(function)
        if self.fail_at and self.fail_at[:2] == (function, self.calls.count(function)):
            raise self.fail_at[2]
        getattr(self, function)(*args)

    def cuMemcpyHtoDAsync(self, dst: int, src: int, n: int, stream: int) -> None:
        self.queues[stream].append(lambda: ctypes.memmove(dst, src, n))

    def cuEventRecord(self, handle: list[tuple[int, int]], stream: int) -> None:
        handle.append((stream, len(self.queues[stream])))

    def cuMemsetD8Async(self, dst: int, value: int, n: int, stream: int) -> None:
        """Zeroes behind a weight, up to a multiple of 16, where this memory has nothing."""
        assert (value, (dst + n) % 16) == (0, 0) and 0 < n < 16

    def cuStreamWaitEvent(self, stream: int, handle: Any, flags: int) -> None:
        other, until = handle[-1]
        self.queues[stream].append(lambda: self.run(other, until))

    def cuEventSynchronize(self, handle: list[tuple[int, int]]) -> None:
        self.run(*handle[-1])

    def cuStreamSynchronize(self, stream: int) -> None:
        self.run(stream, len(self.queues[stream]))

    def prepare(self, kernel: Kernel, stream: int, what: str) -> Any:
        return lambda: self.queues[stream].append(lambda: self.repack(kernel))

    def repack(self, kernel: Kernel) -> None:
        """kernels/repack.cu by tests/planes.py: only bytes of the blocks named are written."""
        dtype = DTYPES[kernel.function.removeprefix("repack_")]
        dst, src, first, n, total = (int(a) for a in kernel.args)
        assert kernel.file == "repack" and src % 16 == 0 and dst % 16 == dst % 256 % 16
        assert kernel.grid[0] * kernel.block >= n * dtype.block // 32 > 0
        blocks = np.frombuffer(ctypes.string_at(src, n * dtype.block_bytes), np.uint8)
        plane = dst
        for piece in planes(blocks, dtype):
            width = piece.shape[1]
            ctypes.memmove(plane + first * width, piece.tobytes(), piece.nbytes)
            plane += total * width


@pytest.fixture
def late() -> LateDriver:
    return LateDriver()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("loading")]


@pytest.fixture
def small_slots(monkeypatch) -> None:
    monkeypatch.setattr(cuda_weights, "SLOT_BYTES", 8192)
    monkeypatch.setattr(cuda_weights, "N_SLOTS", 3)


def uploader(driver: LateDriver) -> Uploader:
    anything = cast(Any, driver)
    return Uploader(anything, anything.allocate, anything.prepare, COPIES, REPACKS)


def weight(name: str, dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    tensor = Tensor(name, dtype, (rows, cols), Kind.WEIGHT)
    rng = np.random.default_rng(len(name) + rows)
    data = rng.integers(0, 256, tensor.nbytes, np.uint8)
    data.flags.writeable = False
    return tensor, data


# the uploader -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slots")
def test_every_byte_arrives_in_its_plane(late: LateDriver):
    """Odd sizes of every type, between them small ones; slots are reused many times."""
    weights = []
    for rows in (1, 3, 37):
        for dtype in WEIGHT_DTYPES:
            weights.append(weight(f"{dtype.name}.{rows}", dtype, rows, 768))
            weights.append(weight(f"norm.{dtype.name}.{rows}", F32, 1, 5))
    up = uploader(late)
    memory = [cast(Memory, up.load(*w)) for w in weights]
    assert "cuStreamSynchronize" not in late.calls, "a wait before the end"
    up.finish()
    for (tensor, data), there in zip(weights, memory, strict=True):
        assert np.array_equal(there.content, repacked(data, tensor.dtype)), tensor
        assert (there.block[tensor.nbytes :] == 0xA5).all(), f"written behind {tensor}"
        assert not there.freed
    assert late.calls.count("cuStreamSynchronize") == 2
    assert late.calls.count("cuEventSynchronize") > 3 * cuda_weights.N_SLOTS
    slots = [m for m in late.memory[Space.PINNED] + late.memory[Space.DEVICE] if m.freed]
    assert len(slots) == 2 * cuda_weights.N_SLOTS


@pytest.mark.usefixtures("small_slots")
def test_the_map_is_read_once(late: LateDriver, monkeypatch):
    read: list[tuple[int, int]] = []
    fill = cuda_weights.Slot.fill

    def noted(slot: cuda_weights.Slot) -> None:
        assert threading.current_thread() is not threading.main_thread()
        read.extend((int(p.source.ctypes.data), p.source.nbytes) for p in slot.parts)
        fill(slot)

    monkeypatch.setattr(cuda_weights.Slot, "fill", noted)
    weights = [weight("a", Q4_0, 129, 256), weight("b", F16, 99, 77), weight("c", Q6_K, 11, 512)]
    up = uploader(late)
    for w in weights:
        up.load(*w)
    up.finish()
    for tensor, data in weights:
        begin = int(data.ctypes.data)
        inside = sorted(r for r in read if begin <= r[0] < begin + tensor.nbytes)
        ends = [at + n for at, n in inside]
        assert [at for at, _ in inside] == [begin, *ends[:-1]] and ends[-1] == begin + data.nbytes


def test_small_tensors_travel_together(late: LateDriver):
    up = uploader(late)
    weights = [weight(f"norm{i}", F32, 1, 4096) for i in range(65)]
    memory = [cast(Memory, up.load(*w)) for w in weights]
    up.finish()
    assert len(late.memory[Space.PINNED]) == 1 and "cuEventSynchronize" not in late.calls
    for (_, data), there in zip(weights, memory, strict=True):
        assert np.array_equal(there.content, data)


def test_nothing_loaded_is_nothing_done(late: LateDriver):
    uploader(late).finish()
    assert not late.memory[Space.PINNED] and not late.memory[Space.DEVICE]


def test_a_block_as_large_as_a_slot_fits_and_no_more(late: LateDriver, monkeypatch):
    monkeypatch.setattr(cuda_weights, "SLOT_BYTES", 256)
    tensor, data = weight("w", Q6_K, 5, 512)
    up = uploader(late)
    there = cast(Memory, up.load(tensor, data))
    up.finish()
    assert np.array_equal(there.content, repacked(data, Q6_K))


def test_a_weight_of_the_wrong_size_is_refused_before_memory_is_taken(late: LateDriver):
    up = uploader(late)
    tensor, data = weight("w", Q4_0, 4, 64)
    for wrong in (data[:-1], np.concatenate([data, data]), data[:0]):
        with pytest.raises(DeviceError, match=r"w:Q4_0\[4, 64\] wants 144 bytes, not \d+"):
            up.load(tensor, wrong)
    up.finish()
    assert not late.memory[Space.DEVICE]


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize(
    "where", ["cuMemcpyHtoDAsync", "cuEventSynchronize", "cuStreamSynchronize"]
)
def test_interrupted_it_leaves_no_thread_and_no_slot(late: LateDriver, where: str):
    late.fail_at = (where, 2, KeyboardInterrupt())
    up = uploader(late)
    with pytest.raises(KeyboardInterrupt):
        for i in range(9):
            up.load(*weight(f"w{i}", MXFP4, 64, 512))
        up.finish()
    up.close()
    up.close()
    of_weights = [m for m in late.memory[Space.DEVICE] if m.nbytes != cuda_weights.SLOT_BYTES]
    assert all(m.freed for m in late.memory[Space.PINNED]) and late.memory[Space.PINNED]
    assert sum(m.freed for m in late.memory[Space.DEVICE]) == len(late.memory[Space.PINNED])
    assert not any(m.freed for m in of_weights), "weights are their owner's to free"


def test_a_failure_of_a_worker_is_raised_by_finish(late: LateDriver, monkeypatch):
    def fail(slot: cuda_weights.Slot) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(cuda_weights.Slot, "fill", fail)
    up = uploader(late)
    up.load(*weight("w", F16, 8, 64))
    with pytest.raises(OSError, match="disk is gone"):
        up.finish()
    assert "cuMemcpyHtoDAsync" not in late.calls
    assert all(m.freed for m in late.memory[Space.PINNED])


# refusals ---------------------------------------------------------------------------------------


def product(dtype: DType, tokens: int) -> Node:
    w = Tensor("w", dtype, (8, 256), Kind.WEIGHT)
    return make("mul_mat", "p", w, Tensor("x", F32, (tokens, 256)))


def test_every_type_of_a_model_file_has_its_kernels():
    for dtype in WEIGHT_DTYPES:
        for tokens in (1, 8, 9, 512):
            assert refuses(product(dtype, tokens), lambda node: []) == ""


def test_a_type_without_a_kernel_is_refused(monkeypatch):
    monkeypatch.delitem(MOST_TOKENS, ("mul_mat_float", "Q4_K"))
    why = refuses(product(Q4_K, 1), lambda node: [])
    assert "no mul_mat_float kernel for Q4_K weights" in why and "\n" not in why


def test_a_type_without_a_kernel_for_the_batch_is_refused(monkeypatch):
    monkeypatch.setitem(MOST_TOKENS, ("mul_mat", "F16"), 8)
    assert refuses(product(F16, 8), lambda node: []) == ""
    assert "no mul_mat kernel for F16 weights and 9 tokens; use a smaller n_ubatch" in refuses(
        product(F16, 9), lambda node: []
    )


def test_a_shape_without_a_kernel_is_refused():
    def plan(node: Node) -> None:
        raise DeviceError("head_dim 20 has no kernel; use device=host")

    assert refuses(product(F16, 1), plan) == "head_dim 20 has no kernel; use device=host"


# a model on its backends ------------------------------------------------------------------------


class Recording(NullBackend):
    """Logs, keeps what it gave out, and refuses, or raises, what it is told to."""

    def __init__(self, refused: str = "", raises_at: int = -1, finish_raises: bool = False):
        super().__init__("recording", Capabilities(True, True, True, False, 2))
        self.refused, self.raises_at, self.finish_raises = refused, raises_at, finish_raises
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
        if self.finish_raises:
            raise DeviceError("it fell off the bus")


@pytest.fixture
def opened(monkeypatch):
    """`opened(**how)`: a Recording that `Loaded` gets as its device."""

    def make_one(**how: Any) -> Recording:
        recording, real = Recording(**how), loaded.open_backend
        monkeypatch.setattr(
            loaded,
            "open_backend",
            lambda name, threads: real(name, threads) if name == "host" else recording,
        )
        return recording

    return make_one


CONFIG = EngineConfig(device="null", n_ctx=64, n_ubatch=32)


def maps_of(path: Path) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(str(path))


def files_open(path: Path) -> int:
    """Descriptors of `path` that this process has."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the scan's own, closed by now
            links.append(os.readlink(entry.path))
    return links.count(str(path))


@pytest.fixture
def own_model(tiny_model, tmp_path):
    """`own_model(preset, quant)`: a copy that no other test has open."""

    def copy(preset: str, quant: str) -> Path:
        return Path(shutil.copy(tiny_model(preset, quant), tmp_path)).resolve()

    return copy


def test_weights_go_in_file_order_each_once_and_end_once(own_model, opened, capsys):
    device, path = opened(), own_model("tiny-llama", "Q4_0")
    model = Loaded(path, CONFIG).share()
    names = [entry[1] for entry in device.log if entry[0] == "load_weight"]
    offsets = {n: info.offset for n, info in model.model.file.tensors.items()}
    assert names == sorted(set(names), key=offsets.__getitem__)
    assert set(names) | {"token_embd.weight"} == {t.name for t in model.model.weights}
    assert [e[0] for e in device.log].index("finish_loading") == len(names)
    assert device.log.count(("finish_loading",)) == 1
    assert files_open(path) == 1, "the map's own"
    assert capsys.readouterr().err == "", "a small model loads in silence"
    model.release()
    del model
    assert not maps_of(path) and not files_open(path)


def test_progress_is_shown_in_bytes(own_model, opened, capsys, monkeypatch):
    opened()
    monkeypatch.setattr(loaded, "SHOW_PROGRESS_ABOVE", 0)
    Loaded(own_model("tiny-llama", "F16"), CONFIG).share().release()
    shown = capsys.readouterr()
    assert "loading: 100%" in shown.err and "B/s" in shown.err and not shown.out


def test_no_progress_is_shown_where_nothing_is_read(own_model, capsys, monkeypatch):
    monkeypatch.setattr(loaded, "SHOW_PROGRESS_ABOVE", 1)
    config = EngineConfig(device="host", n_ctx=64)
    Loaded(own_model("tiny-llama", "F16"), config).share().release()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("op", ["mul_mat", "attention"])
def test_a_refused_model_uploads_nothing(own_model, opened, op: str):
    device, path = opened(refused=op), own_model("tiny-llama", "Q6_K")
    with pytest.raises(DeviceError) as refusal:
        Loaded(path, CONFIG)
    named = "blk.0.attn_q.weight" if op == "mul_mat" else "kqv_out-0"
    assert str(refusal.value) == f"{path}: {named}: it is Tuesday; wait"
    done = [entry[0] for entry in device.log]
    assert "load_weight" not in done and "finish_loading" not in done and "close" in done
    del refusal
    assert not maps_of(path) and not files_open(path)


def test_both_batches_and_both_activations_are_asked_about(own_model, opened):
    device = opened()
    Loaded(own_model("tiny-llama", "Q4_0"), CONFIG).share().release()
    inputs = {n.inputs[1].dtype.name for n in device.asked if n.op == "mul_mat"}
    tokens = {n.output.rows for n in device.asked if n.op == "mul_mat"}
    assert inputs == {"F32", "Q8_ACT"} and tokens == {1, 32}
    assert not [n for n in device.asked if n.op == "get_rows" and n.name == "inp_embd"]


@pytest.mark.parametrize("at", [0, 1, 7])
def test_interrupted_loading_leaves_nothing(own_model, opened, at: int):
    device, path = opened(raises_at=at), own_model("tiny-llama", "Q5_K")
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Loaded(path, CONFIG)
    assert len(device.given) == at and all(m.array is None for m in device.given)
    assert all(m._block is None for m in device.given), "a weight was not freed"
    assert device.log[-1] == ("close",) and ("synchronize",) in device.log
    assert not maps_of(path) and not files_open(path)
    assert threading.active_count() == threads


def test_a_failure_at_the_end_leaves_nothing(own_model, opened):
    device, path = opened(finish_raises=True), own_model("tiny-llama", "Q8_0")
    with pytest.raises(DeviceError, match="off the bus"):
        Loaded(path, CONFIG)
    assert all(m._block is None for m in device.given) and device.log[-1] == ("close",)
    assert not maps_of(path) and not files_open(path)


def test_what_cannot_be_waited_for_is_given_back_all_the_same(own_model, opened, monkeypatch):
    device, path = opened(), own_model("tiny-llama", "MXFP4")
    model = Loaded(path, CONFIG).share()

    def fail() -> None:
        raise DeviceError("the context is gone")

    monkeypatch.setattr(device, "synchronize", fail)
    with pytest.raises(DeviceError, match="context is gone"):
        model.release()
    assert all(m._block is None for m in device.given) and device.log[-1] == ("close",)
    del model
    assert not maps_of(path) and not files_open(path)


def test_rows_that_do_not_divide_into_blocks_are_refused_by_name(own_model, tmp_path, opened):
    """A file that says its RoPE factors are Q6_K, in blocks of 256."""
    device, name = opened(), "rope_freqs.weight"
    raw = bytearray(own_model("tiny-llama", "F32").read_bytes())
    at = raw.index(name.encode()) + len(name)
    assert raw[at : at + 4] == b"\1\0\0\0"  # one dimension
    cols = int.from_bytes(raw[at + 4 : at + 12], "little")
    assert cols % 256
    raw[at + 12 : at + 16] = (14).to_bytes(4, "little")
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError) as refusal:
        Loaded(path, CONFIG)
    assert f"tensor {name} has rows of {cols}, not a multiple of" in str(refusal.value)
    assert "\n" not in str(refusal.value) and not device.log
