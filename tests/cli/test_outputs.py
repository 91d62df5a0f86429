"""What every command does where its output cannot be written: one line before a model is opened or
anything is measured, or when the disk is full at the end; and nothing left behind."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.profiles import share
from workbench.backend import base
from workbench.cli import main
from workbench.common.output import WHY
from workbench.engine.engine import Engine
from workbench.model.synth import models as synth

IDS, HOST = ["--tokens", "1,2,3"], ["--device", "host"]
FILES = {
    "logits": ["logits", "-m", "MODEL", *IDS, "-o", "OUT", *HOST],
    "profile": ["profile", "-m", "MODEL", "--test", "tg2", "-r", "1", "-o", "OUT", *HOST],
    "model synth": ["model", "synth", "tiny-llama-spm", "Q4_0", "OUT"],
    "compare": ["compare", "RUN", "RUN", "-o", "OUT"],
}
FOLDERS = {
    "bench": ["bench", "-m", "MODEL", "-p", "4", "-n", "2", "-r", "1", "--out", "OUT", *HOST],
    "ab": ["ab", "-m", "MODEL", "--toggle", "graph_reuse=set_rows", "--test", "tg2", "-o", "OUT",
           "--rounds", "5", *HOST],
    "perplexity": ["perplexity", "-m", "MODEL", "--tokens-from", "sample:9", "-o", "OUT", *HOST],
    "bench-kernels": ["bench-kernels", "--types", "Q4_0", "--shapes", "qwen3-30b-a3b.gate",
                      "--quick", "-o", "OUT", *HOST],
}  # fmt: skip
MANY = {
    "model tiny": ["model", "tiny", "OUT"],
    "report": ["report", "00_tour", "--out", "OUT", *HOST],
}

# where OUT is, and what the line says; `folder` is there, `file` is a file, `loop` leads to itself
NOWHERE = {
    "file/x": "file is no folder",
    "/proc/x": "takes no new f",
    "loop": "in a circle",
    "n" * 300: "too long",
}
WRONG = (
    [(name, out, says) for name in FILES for out, says in NOWHERE.items()]
    + [(name, "folder", "it is a folder; name a file in it") for name in FILES]
    + [(name, out, says) for name in FOLDERS for out, says in NOWHERE.items()]
    + [(name, out, "exists already") for name in FOLDERS for out in ("folder", "file")]
    + [(name, out, says) for name in MANY for out, says in NOWHERE.items()]
    + [(name, "file", "file is no folder") for name in MANY]
)
COMMANDS = FILES | FOLDERS | MANY


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture(scope="module")
def a_run(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = [{"MODEL": str(model), "OUT": str(folder)}.get(w, w) for w in FOLDERS["bench"]]
    main(words)
    return folder


@pytest.fixture
def call(call, model, a_run):
    """`call(name, out)`: (exit status, lines on stderr) of the command with its output at `out`."""

    def run(name: str, out: Path) -> tuple[int, list[str]]:
        said = {"MODEL": str(model), "OUT": str(out), "RUN": str(a_run)}
        status, _, err = call(*(said.get(word, word) for word in COMMANDS[name]))
        return status, err.splitlines()

    return run


@pytest.mark.parametrize(("name", "out", "says"), WRONG)
def test_it_is_refused_before_anything_is_opened(call, monkeypatch, tmp_path, name, out, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    opened: list[str] = []
    for owner, work in ((Engine, "load"), (base, "open_backend"), (synth, "write_tiny_models")):
        if not (name == "model tiny" and work == "write_tiny_models"):
            monkeypatch.setattr(owner, work, lambda *_, **__: opened.append("opened"))
    status, lines = call(name, tmp_path / out)
    assert (status, len(lines), opened) == (2, 1, []), lines
    assert lines[0].startswith("error: ") and says in lines[0]
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", share([*FILES, *FOLDERS, "model tiny"], every=2))
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(call, monkeypatch, tmp_path, name):
    write, out = os.write, tmp_path / "deep" / "out.gz"
    if name in ("logits", "profile"):  # which make no folders
        out = tmp_path / "out.gz"

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)  # it had room for a byte when it was checked

    monkeypatch.setattr(os, "write", full)
    status, lines = call(name, out)
    assert status == 2 and lines[-1].startswith("error: ") and "no space is left" in lines[-1]
    assert not [line for line in lines if "Traceback" in line] and not os.listdir(tmp_path)


# what no file is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logits", "model synth", "compare"])
def test_a_file_reaches_through_links_and_into_pipes(call, tmp_path, name):
    ends = {"file": tmp_path / "file.gz", "pipe": tmp_path / "pipe.gz"}
    os.mkfifo(ends["pipe"])
    link, got = tmp_path / "link.gz", []
    link.symlink_to("file.gz")
    assert call(name, link)[0] == 0 and link.is_symlink()
    reader = threading.Thread(target=lambda: got.append(ends["pipe"].read_bytes()))
    reader.start()
    assert call(name, ends["pipe"])[0] == 0
    reader.join()
    assert stat.S_ISFIFO(ends["pipe"].stat().st_mode)
    assert len(got[0]) > 100
    if name in ("logits", "model synth"):  # the same bytes every time
        assert got[0] == ends["file"].read_bytes()


@pytest.mark.parametrize("name", ["logits", "model synth", "compare"])
def test_a_device_stays_one(call, name):
    assert call(name, Path("/dev/null"))[0] == 0
    status, lines = call(name, Path("/dev/full"))
    assert status == 2 and "/dev/full cannot be written: no space is left" in lines[-1]
    for device in ("/dev/null", "/dev/full"):
        assert stat.S_ISCHR(os.stat(device).st_mode)


def test_an_old_file_keeps_its_mode_and_is_whole(call, tmp_path):
    out = tmp_path / "x.npy"
    out.write_bytes(b"old")
    out.chmod(0o600)
    assert call("logits", out)[0] == 0
    assert np.load(out).shape == (3, 1024) and stat.S_IMODE(out.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["x.npy"]


def test_a_cache_that_finds_no_room_is_one_line_too(call, monkeypatch, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/of/numba")

    monkeypatch.setattr(Engine, "load", full)
    status, lines = call("logits", tmp_path / "x.npy")
    assert status == 2 and os.listdir(tmp_path) == []
    assert lines == [f"error: /cache/of/numba cannot be written: {WHY[errno.ENOSPC]}"]
