"""What a run folder says of programs and files: names, and no places of a machine."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from test_compare import gpu, write

from workbench.benchmarks.compare.compare import compare
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.runs.draft import new_run
from workbench.benchmarks.runs.nameless import (
    card_number,
    nameless_command,
    nameless_text,
    portable,
)

WORDS = {
    "/home/me/bin/workbench": "workbench",
    "-m": "-m",
    "/home/me/models/x.gguf": "x.gguf",
    "../../me/models/x.gguf": "x.gguf",
    "--model=/home/me/a,/home/me/b.gguf": "--model=a,b.gguf",
    "-m/home/me/x.gguf": "-mx.gguf",
    "data/runs/first/": "first",
    "/home/jane doe/x y.gguf": "x y.gguf",
    "sync=per_copy,auto": "sync=per_copy,auto",
    "plans=off | plans=ours pdl=on": "plans=off | plans=ours pdl=on",
    "512,1024": "512,1024",
    "--url=http://127.0.0.1:8000/v1": "--url=http://127.0.0.1:8000/v1",
    "http://me:secret@gpu7.lab:8000/v1?key=secret": "http://host:8000/v1",
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_a_command_loses_its_folders(word):
    assert nameless_command([word]) == [WORDS[word]]


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("as asked", "as asked"),
        ("no GPU: /usr/lib/x86_64/libcuda.so.1 is missing", "no GPU: libcuda.so.1 is missing"),
        ("~me/models/x.gguf", "x.gguf"),
        ("16/32 t/s, and/or 1 / 2", "16/32 t/s, and/or 1 / 2"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("at https://gpu7.lab:80/v1, twice", "at https://host:80/v1, twice"),
        ("file:///home/me/x.gguf", "x.gguf"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_other_text_loses_absolute_paths_and_hosts(said, left):
    assert nameless_text(said) == left


def test_all_that_a_run_begins_with_is_portable():
    engine = {"device": "unknown", "url": "http://gpu7:1", "config": {"n_ctx": 5, "x": ("/a/b",)},
              "command": ["serve", "-m", "some/x.gguf"]}  # fmt: skip
    found = {
        "command": ["/opt/w", "-m", "some/x.gguf"],
        "engine": engine,
        "model": {"name": "/m/x"},
    }
    run = new_run("serve", "r", "r", found, [], [], 1, 0)
    assert run["command"] == ["w", "-m", "x.gguf"] and run["model"] == {"name": "x"}
    assert run["engine"] == {
        "device": "unknown", "url": "http://host:1", "config": {"n_ctx": 5, "x": ["b"]},
        "command": ["serve", "-m", "x.gguf"],
    }  # fmt: skip
    assert portable(None) is None and portable(1.5) == 1.5


class FakeNvml(SimpleNamespace):
    """An NVML whose every query answers 7, but for those that are named."""

    class NVMLError(Exception):
        pass

    def __getattr__(self, name):
        return 0 if name.startswith("NVML_") else lambda *_: 7


def test_a_gpu_has_no_serial_number_and_is_told_from_another(monkeypatch):
    def seen(uuid):
        nvml = FakeNvml(
            nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetUUID=lambda handle: uuid,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=1),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return provenance.gpus()

    uuid = "GPU-3c0f7a14-1b1f-4a6e-9d53-5f2d3c0a9b11"
    (one,), (same,), (other,) = seen(uuid), seen(uuid), seen(uuid.replace("3c", "4c"))
    assert one == same and one["card"] != other["card"] and one["card"] == card_number(uuid)
    assert not any(part in json.dumps(one) for part in uuid.split("-")[1:])


def test_an_older_run_with_the_number_is_of_the_same_card(tmp_path):
    old, new = gpu(), gpu(card_number("GPU-1"))
    old["machine"]["gpus"] = [{"uuid": "GPU-1", "driver": "580.1"}]
    a, b = write(tmp_path, "a", **old), write(tmp_path, "b", **new)
    assert not any("history" in line for line in compare(a, b).lines)
    c = write(tmp_path, "c", **gpu(card_number("GPU-2")))
    assert any("another card" in line for line in compare(a, c).lines)
    assert not any("GPU-1" in line for line in compare(a, c).lines)
