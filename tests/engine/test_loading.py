"""A model loaded on its backends: order, progress, refusals, and what an interruption leaves."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backend.cpu.kernel_runs import repack
from workbench.backend.cpu.device import embedded
from workbench.backend.cpu.device.ring import Ring
from workbench.backend.cpu.kernels import op_table
from workbench.backend.null import NullBackend
from workbench.common import progress
from workbench.common.errors import DeviceError, UsageError
from workbench.config import EngineConfig, Toggles
from workbench.engine import load
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded
from workbench.graph.ir import QUANTISED, WEIGHT_DTYPES, DType, Kind, Node, Tensor
from workbench.program.capabilities import Capabilities

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
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.shown_on(io.StringIO()) as out:
        Loaded(own_model("F16"), CONFIG).share().release()
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
