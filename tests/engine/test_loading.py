"""A model loaded on its backends: order, progress, refusals, and what an interruption leaves."""

from __future__ import annotations

import contextlib
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

from workbench.backend.null import NullBackend
from workbench.common import progress
from workbench.common.errors import DeviceError, UsageError
from workbench.config import EngineConfig, Toggles
from workbench.engine import load as loaded
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded
from workbench.graph.ir import (
    Node,
    Tensor,
)
from workbench.program.capabilities import Capabilities


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("loading")]


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


def test_progress_is_shown_in_bytes(own_model, opened, monkeypatch):
    opened()
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.shown_on(io.StringIO()) as out:
        Loaded(own_model("tiny-llama", "F16"), CONFIG).share().release()
    first, *_, last = out.getvalue().splitlines()
    assert re.fullmatch(r"loading: 0\.\d of (\d+\.\d) MB, about \d+ s left", first)
    assert re.fullmatch(r"loading: (\d+\.\d) of \1 MB", last)


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


PDL = Toggles(pdl="on")


@pytest.mark.parametrize("asked", [{"toggles": PDL}, {"variants": [Toggles(), PDL]}])
def test_toggles_the_device_cannot_honour_upload_nothing(own_model, opened, asked):
    device, path = opened(), own_model("tiny-llama", "Q4_0")
    with pytest.raises(DeviceError, match="the null device cannot honour pdl=on") as refusal:
        Engine.load(path, config=CONFIG, **{"toggles": Toggles()} | asked)
    done = [entry[0] for entry in device.log]
    assert "load_weight" not in done and done[-1] == "close"
    assert not device.asked, "toggles come first: they are cheap to judge"
    del refusal
    assert not maps_of(path) and not files_open(path)


def test_a_check_sees_model_and_device_and_ends_the_loading(own_model, opened):
    device, path = opened(), own_model("tiny-llama", "Q4_0")
    seen: list[Any] = []

    def check(asked: Loaded) -> None:
        seen.append(
            (asked.model.n_vocab, asked.device, asked.config, bool(asked.tokenizer.eog_ids))
        )
        raise UsageError("not today")

    with pytest.raises(UsageError, match="not today"):
        Engine.load(path, config=CONFIG, check=check, toggles=Toggles())
    assert seen == [(1024, "null", CONFIG, True)]
    assert "load_weight" not in [entry[0] for entry in device.log]


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
