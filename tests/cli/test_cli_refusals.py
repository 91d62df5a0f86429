"""What a command can refuse it refuses before weights are loaded, most before a file is opened:
wrong arguments, and outputs that cannot be written. Where a disk is full at the end, nothing
stays there. Each is one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.profiles import share
from workbench.backend import base
from workbench.benchmarks.scores import token_source
from workbench.cli import main
from workbench.common.output import WHY
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded
from workbench.model.synth import models as synth

ONE, SAMPLE, AB = ["--tokens", "1"], ["--tokens-from", "sample:9"], ["ab", "--toggle", "pdl=on"]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture
def refused(call, model):
    """`refused(arguments)`: (exit status, the one line) of a command on the model."""

    def run(arguments: list[object], path: object = model) -> tuple[int, str]:
        command, *rest = arguments
        asked = () if command in ("model", "bench-kernels", "report") else ("-m", path)
        status, out, err = call(command, *asked, *rest)
        (line,) = err.splitlines()
        assert not out and line.startswith("error: ")
        return status, line

    return run


NULL = "error: --device null computes nothing: it has no answers and no times;"
ARGUMENTS = [
    *(([*words, "--device", "null"], NULL) for words in (
        ["run", *ONE], ["logits", *ONE, "--out", "x.npy"], ["bench"], AB, ["perplexity", *SAMPLE],
        ["profile"], ["bench-kernels"], ["report"],
    )),
    *((["run", *ONE, flag, "1.5"], flag) for flag in ("-n", "-c", "-ub", "-ngl", "-t")),
    *((["run", *ONE, "-c", n], "-c") for n in ("1e3", "0x10", "1_000", "", "two", "nan", "²")),
    (["run", *ONE, "-m", "y"], "-m"), (["run", *ONE, "-c", "1", "-c", "2"], "-c"),
    (["run", *ONE, "--fuse", "maybe"], "toggle fuse='maybe'"), (["run", *ONE, "--fuse"], "--fuse"),
    (["run", *ONE, "--fuse-qkv", "off", "--fuse=on", "--fuse-qkv", "on"], "--fuse-qkv"),
    (["run", *ONE, "--preset", "fast"], "preset 'fast' does not exist"),
    (["model", "tiny", "--fuse", "on"], "--fuse"), (["run", *ONE, "-fa", "maybe"], "-fa"),
    (["bench", "-p", "1.5"], "-p"), (["run", *ONE, "--seed=-1"], "--seed"),
    (["run", *ONE, "--min-p=1.5"], "min_p=1.5"), (["perplexity"], "either a text file (-f)"),
    (["perplexity", *SAMPLE, "--resume"], "give it as out"),
    (["bench", "--at-most", "10m"], "--at-most ends what --until repeats; add --until 1%"),
    (["run"], "either a prompt (-p)"), (["run", "--tokens", "1,x"], "no list of token ids"),
    (["run", *ONE, "-n=-3"], "for -n. Must be >= -2"), (["run", *ONE, "--temp=-1"], "temperature="),
    (["run", "--speed", "11"], "--speed"), (["run", *ONE, "--device", "abacus"], "'abacus' does"),
    (["program", "--n-past", "2048"], "2048 + 1 tokens do not fit"),
    (["program", "--n-tokens", "600"], "a step has 1 to 512 tokens"),
    (["check", "--n-tokens", "3000"], "3000 tokens do not fit the context"),
    (["bench", "--output", "xml"], "Choose from"), (["bench", "-n=-1"], "cannot be measured"),
    (["bench", "-r", "0"], "Must be >= 1"), (["bench", "-p", "0", "-n", "0"], "there is no test"),
    (["bench", "--resume"], "give it as out"), (["bench", "--resume", "--out", "/no"], "is no run"),
    (["bench", "--until", "often"], "--until 'often' is no share between 0 and 1; write it as 1%"),
    (["bench", "--until", "1%", "--at-most", "10"], "--at-most '10' is no length of time"),
    ([*AB, "--at-most", "10m"], "--at-most ends what --until repeats; add --until 1%"),
    (["ab", "--toggle", "speed=11"], "toggle 'speed' does not exist"),
    (["ab", "--toggle", "preset=best,baseline"], "preset is no toggle; give its name alone, as"),
    (["ab", "--toggle", "sync=per_copy"], "what the background has"),
    (["ab", "--toggle", "sync=event_guarded", "--copy-stream", "compute"], "compute clash"),
    (["ab", "--toggle", "sync=per_copy,packed", "--sync", "packed"], "--sync is what is compared"),
    (["ab", "--toggle", "fuse=off,on", "--fuse", "on"], "put the baseline first in --toggle fuse"),
    ([*AB, "--rounds", "1"], "rounds=1 is too few"), ([*AB, "--test", "xx9"], "test 'xx9' does"),
    ([*AB, "--resume"], "give it as out"), ([*AB, "--resume", "--out", "/no"], "is no run folder"),
    (["perplexity", *SAMPLE, "-f", "x"], "either a text file (-f)"),
    (["perplexity", "--tokens-from", "sample:xx"], "names no sample"),
    (["perplexity", "-f", "/no/such"], "/no/such cannot be read"),
    (["perplexity", *SAMPLE, "--sizes", "513"], "513 tokens cannot be"),
    (["perplexity", *SAMPLE, "--resume", "--out", "/no"], "is no run folder"),
    (["perplexity", *SAMPLE, "--against", "x=1"], "'x' does not exist"),
    (["perplexity", *SAMPLE, "--check"], "--check needs a reference"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS, ids=lambda v: str(v)[:40])
def test_arguments_are_judged_before_a_model_is_opened(refused, monkeypatch, arguments, says):
    opened: list[object] = []
    monkeypatch.setattr(Engine, "load", lambda *asked, **how: opened.append(asked))
    status, line = refused(arguments)
    assert (status, opened) == (2, []) and says in line


NO_MODEL = "requires an argument. Give -m auto, or -m and a GGUF file (`workbench model tiny` "


@pytest.mark.parametrize(("command", "says"), [
    *(([name], NO_MODEL) for name in ("run", "bench", "profile", "check", "program", "perplexity",
                                      "advise", "serve")),
    (AB, NO_MODEL), (["logits", *ONE, "--out", "x.npy"], NO_MODEL), (["run", "-m"], NO_MODEL),
    (["sweep"], "the matrix has no model; give a GGUF file, or auto (-m auto in the command)"),
    (["serve-bench"], "name a server: --url http://127.0.0.1:8000, -m auto, or -m and a GGUF"),
    (["ab", "-m", "auto"], "--toggle requires an argument"),
    (["serve", "-m", "./auto"], "auto: no such file"),
    (["bench", "-m", "tiny"], "tiny: no such file; check the path; `-m auto` makes a model with"),
], ids=lambda v: str(v)[:40])  # fmt: skip
def test_who_names_no_model_is_told_what_to_give(call, tmp_path, monkeypatch, command, says):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*command)
    assert status and not out and err.startswith("error: ") and says in err, err
    assert err.count("\n") == 1 and os.listdir() == []


OF_THE_MODEL = [
    *((words, 1, "the host device cannot honour pdl=on") for words in (
        ["run", *ONE, "--pdl", "on"], ["bench", "--pdl", "on"], ["ab", "--toggle", "pdl=off,on"],
        ["program", "--pdl", "on"], ["perplexity", *SAMPLE, "--against", "pdl=on"],
    )),
    (["run", *ONE, "--copy-stream", "own"], 1, "needs two streams"),
    (["run", "--tokens", "1,2,3,4", "--n-ctx", "3"], 2, "do not fit the context"),
    (["logits", *ONE, "--out", "x.npy", "--sync", "copy_boundary"], 1, "honour sync=copy_boundary"),
    *((words, 2, "needs 64 KV cells, but the engine has n_ctx=32") for words in (
        ["ab", "-c", "32", "--toggle", "fuse=on", "--test", "pp64"],
        ["bench", "-c", "32", "-p", "16,64", "-n", "0"],
        ["profile", "--n-ctx", "32", "--test", "pp64"], ["advise", "-c", "32", "--test", "pp64"],
    )),
    (["bench", "-c", "32", "-npl", "4", "-p", "8", "-n", "4"], 2, "n_ctx=48 or more"),
    (["run", *ONE, "--n-copies", "4", "--sync", "auto"], 1, "n_copies=4"),
    (["run", *ONE, "-ot", "ffn=device"], 2, "has no GPU to put weights on"),
    (["run", "--tokens", "1,99999"], 2, "token id 99999 at index 1"),
    (["logits", "--tokens", "99999", "--out", "x.npy"], 2, "token id 99999"),
    (["run", "-p", "one two three", "--n-ctx", "2"], 2, "do not fit the context"),
    (["run", *ONE, "--device", "embedded", "--sync", "implicit", "--copy-stream", "own"],
     2, "sync=implicit and copy_stream=own race on the embedded device: nothing orders a copy"),
    (["perplexity", "--tokens-from", "FILE: 1 99999"], 2, "token id 99999"),
    (["perplexity", "--tokens-from", "FILE:"], 2, "holds 0 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "wanted", "says"), OF_THE_MODEL, ids=lambda v: str(v)[:40])
def test_what_takes_a_model_is_judged_before_its_weights(
    refused, monkeypatch, tmp_path, arguments, wanted, says
):
    loaded: list[Loaded] = []
    monkeypatch.setattr(Loaded, "_load_weights", loaded.append)
    if arguments[-1].startswith("FILE:"):
        (tmp_path / "file").write_text(arguments[-1].removeprefix("FILE:"))
        arguments = [*arguments[:-1], tmp_path / "file"]
    device = [] if "--device" in arguments else ["--device", "host"]
    status, line = refused([*arguments, *device])
    assert (status, loaded) == (wanted, []) and says in line


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_files_are_refused_by_name(refused, model, tmp_path, damage):
    bad, out = tmp_path / "bad.gguf", tmp_path / "out.npy"
    if damage == "truncated":
        bad.write_bytes(model.read_bytes()[:5000])
    status, line = refused(["logits", *ONE, "--out", out, "--device", "embedded"], bad)
    assert status == 1 and line.startswith(f"error: {bad}") and not out.exists()


def test_a_text_is_tokenised_once(model, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("The lamp had not been lit.")
    asked = token_source.ask(text, None)
    with Engine.load(
        model, device="host", n_ctx=64, check=asked.check_tokens, toggles=Toggles()
    ) as engine:
        ids = list(asked.ids or ())
        monkeypatch.setattr(engine.tokenizer, "encode", None)
        source = asked.open(engine)
    assert [t for w in source.windows for t in w.targets] == ids and len(ids) > 3


HOST = ["--device", "host"]
FILES = {
    "logits": ["logits", "-m", "MODEL", *ONE, "--out", "OUT", *HOST],
    "profile": ["profile", "-m", "MODEL", "--test", "tg2", "-r", "1", "--out", "OUT", *HOST],
    "model synth": ["model", "synth", "tiny-llama-spm", "Q4_0", "OUT"],
    "compare": ["compare", "RUN", "RUN", "--out", "OUT"],
}
FOLDERS = {
    "bench": ["bench", "-m", "MODEL", "-p", "4", "-n", "2", "-r", "1", "--out", "OUT", *HOST],
    "ab": ["ab", "-m", "MODEL", "--toggle", "graph_reuse=set_rows", "--test", "tg2", "--out", "OUT",
           "--rounds", "5", *HOST],
    "perplexity": ["perplexity", "-m", "MODEL", *SAMPLE, "--out", "OUT", *HOST],
    "bench-kernels": ["bench-kernels", "--types", "Q4_0", "--shapes", "qwen3-30b-a3b.gate",
                      "--quick", "--out", "OUT", *HOST],
}  # fmt: skip
MANY = {"model tiny": ["model", "tiny", "OUT"],
        "report": ["report", "00_tour", "--out", "OUT", *HOST]}  # fmt: skip
# where OUT is, and what the line says; `folder` is there, `file` is a file
WRONG = [(name, "file/x", "file is no folder") for name in (*FILES, *FOLDERS, *MANY)] + [
    *((name, "folder", "it is a folder; name a file in it") for name in FILES),
    *((name, out, "exists already") for name in FOLDERS for out in ("folder", "file")),
]


@pytest.fixture(scope="module")
def a_run(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    main([{"MODEL": str(model), "OUT": str(folder)}.get(w, w) for w in FOLDERS["bench"]])
    return folder


@pytest.fixture
def into(call, model, a_run):
    """`into(name, out)`: (exit status, lines on stderr) of the command with its output at `out`."""

    def run(name: str, out: Path) -> tuple[int, list[str]]:
        said = {"MODEL": model, "OUT": out, "RUN": a_run}
        words = (FILES | FOLDERS | MANY)[name]
        status, _, err = call(*(said.get(word, word) for word in words))
        return status, err.splitlines()

    return run


@pytest.mark.parametrize(("name", "out", "says"), WRONG)
def test_an_output_is_refused_before_anything_is_opened(
    into, monkeypatch, tmp_path, name, out, says
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    opened: list[str] = []
    for owner, work in ((Engine, "load"), (base, "open_backend"), (synth, "write_tiny_models")):
        if not (name == "model tiny" and work == "write_tiny_models"):
            monkeypatch.setattr(owner, work, lambda *_, **__: opened.append("opened"))
    status, lines = into(name, tmp_path / out)
    assert (status, len(lines), opened) == (2, 1, []), lines
    assert lines[0].startswith("error: ") and says in lines[0]
    assert len([*tmp_path.rglob("*")]) == 2 and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", share([*FILES, *FOLDERS, "model tiny"], every=2))
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(into, monkeypatch, tmp_path, name):
    write, out = os.write, tmp_path / "deep" / "out"
    if name in ("logits", "profile"):  # which make no folders
        out = tmp_path / ("t.json" if name == "profile" else "out")

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)  # it had room for a byte when it was checked

    monkeypatch.setattr(os, "write", full)
    status, lines = into(name, out)
    assert status == 2 and lines[-1].startswith("error: ") and "no space is left" in lines[-1]
    assert not [line for line in lines if "Traceback" in line] and not os.listdir(tmp_path)


def test_a_cache_that_finds_no_room_is_one_line_too(into, monkeypatch, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/of/numba")

    monkeypatch.setattr(Engine, "load", full)
    status, lines = into("logits", tmp_path / "x.npy")
    assert status == 2 and os.listdir(tmp_path) == []
    assert lines == [f"error: /cache/of/numba cannot be written: {WHY[errno.ENOSPC]}"]
