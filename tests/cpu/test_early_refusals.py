"""What a command can refuse it refuses before weights are loaded; most before a file is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.benchmarks.scores import token_source
from workbench.cli import main
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded

SAMPLE = ["--tokens-from", "sample:9"]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture
def refused(capsys, model):
    """`refused(arguments)`: (exit status, the one line) of a command on the model."""

    def run(arguments: list[str]) -> tuple[int, str]:
        command, *rest = arguments
        with pytest.raises(SystemExit) as stop:
            main([command, "-m", str(model), *rest])
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert not out and line.startswith("error: ")
        return int(stop.value.code or 0), line

    return run


# no model is opened ------------------------------------------------------------------------------

ARGUMENTS = {
    "run: no prompt": (["run"], "either a prompt (-p)"),
    "run: ids": (["run", "--tokens", "1,x"], "no list of token ids"),
    "run: fewer than no tokens": (["run", "--tokens", "1", "-n=-3"], "for -n. Must be >= -2"),
    "run: seed": (["run", "--tokens", "1", "--seed=-1"], "--seed"),
    "run: temperature": (["run", "--tokens", "1", "--temp=-1"], "temperature=-1.0"),
    "run: min_p": (["run", "--tokens", "1", "--min-p=1.5"], "min_p=1.5"),
    "logits: ids": (["logits", "--tokens", "x", "-o", "x.npy"], "no list of token ids"),
    "logits: folder": (["logits", "--tokens", "1", "-o", "/no/x.npy"], "make it first"),
    "program: no tokens": (["program", "--n-tokens", "0"], "--n-tokens"),
    "program: a past below 0": (["program", "--n-past=-1"], "--n-past"),
    "program: too long": (["program", "--n-past", "2048"], "2048 + 1 tokens do not fit"),
    "program: no step": (["program", "--n-tokens", "600"], "a step has 1 to 512 tokens"),
    "bench: format": (["bench", "-o", "xml"], "choose one of"),
    "bench: sizes": (["bench", "-p", "many"], "no list of whole numbers"),
    "bench: below 0": (["bench", "-n=-1"], "cannot be measured"),
    "bench: no test": (["bench", "-p", "0", "-n", "0"], "there is no test to run"),
    "bench: repetitions": (["bench", "-r", "0"], "for -r. Must be >= 1"),
    "bench: folder": (["bench", "--out", "/tmp"], "/tmp exists already"),
    "bench: nothing to resume": (["bench", "--resume"], "give it as out"),
    "bench: no run": (["bench", "--resume", "--out", "/no"], "/no is no run folder"),
    "ab: toggle": (["ab", "--toggle", "speed=11"], "toggle 'speed' does not exist"),
    "ab: value": (["ab", "--toggle", "sync=never"], "sync='never' does not exist"),
    "ab: the background's": (["ab", "--toggle", "sync=per_copy"], "what the background has"),
    "ab: a clash": (
        ["ab", "--toggle", "sync=event_guarded", "--copy-stream", "compute"],
        "copy_stream=compute clash",
    ),
    "ab: rounds": (["ab", "--toggle", "pdl=on", "--rounds", "1"], "rounds=1 is too few"),
    "ab: test": (["ab", "--toggle", "pdl=on", "--test", "xx9"], "test 'xx9' does not exist"),
    "ab: folder": (["ab", "--toggle", "pdl=on", "-o", "/tmp"], "/tmp exists already"),
    "ab: nothing to resume": (["ab", "--toggle", "pdl=on", "--resume"], "give it as out"),
    "ab: no run": (["ab", "--toggle", "pdl=on", "--resume", "-o", "/no"], "is no run folder"),
    "perplexity: no tokens": (["perplexity"], "either a text file (-f)"),
    "perplexity: no sample": (["perplexity", "--tokens-from", "sample:xx"], "names no sample"),
    "perplexity: nothing": (["perplexity", "--tokens-from", "sample:0"], "draws nothing"),
    "perplexity: text": (["perplexity", "-f", "/no/such"], "/no/such cannot be read"),
    "perplexity: file": (["perplexity", "--tokens-from", "/no/such"], "cannot be read"),
    "perplexity: size 0": (["perplexity", *SAMPLE, "--sizes", "0"], "0 tokens cannot be"),
    "perplexity: size": (["perplexity", *SAMPLE, "--sizes", "513"], "513 tokens cannot be"),
    "perplexity: sizes": (["perplexity", *SAMPLE, "--sizes", "x"], "--sizes 'x'"),
    "perplexity: folder": (["perplexity", *SAMPLE, "-o", "/tmp"], "/tmp exists already"),
    "perplexity: nothing to resume": (["perplexity", *SAMPLE, "--resume"], "give it as out"),
    "perplexity: no run": (["perplexity", *SAMPLE, "--resume", "-o", "/no"], "is no run folder"),
    "perplexity: against": (["perplexity", *SAMPLE, "--against", "x=1"], "'x' does not exist"),
    "perplexity: check": (["perplexity", *SAMPLE, "--check"], "--check needs a reference"),
}  # fmt: skip


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_are_judged_before_a_model_is_opened(refused, monkeypatch, what):
    arguments, says = ARGUMENTS[what]
    opened: list[object] = []
    monkeypatch.setattr(Engine, "load", lambda *asked, **how: opened.append(asked))
    status, line = refused(arguments)
    assert (status, opened) == (2, []) and says in line


# opened, and no weight is read -------------------------------------------------------------------

PDL, ASYNC = "the host device cannot honour pdl=on", "cannot honour sync=copy_boundary"
OF_THE_MODEL = {
    "pdl": (["run", "--tokens", "1", "--pdl", "on"], 1, PDL),
    "sync": (["logits", "--tokens", "1", "-o", "x.npy", "--sync", "copy_boundary"], 1, ASYNC),
    "copies": (["run", "--tokens", "1", "--n-copies", "4", "--sync", "auto"], 1, "n_copies=4"),
    "ring": (["run", "--tokens", "1", "--host-source", "pinned_ring_4"], 1, "host_source=pinned_r"),
    "stream": (["run", "--tokens", "1", "--copy-stream", "own"], 1, "needs two streams"),
    "-ot": (["run", "--tokens", "1", "-ot", "ffn=device"], 2, "has no GPU to put weights on"),
    "bench": (["bench", "--pdl", "on"], 1, PDL),
    "program": (["program", "--pdl", "on"], 1, PDL),
    "ab: a value": (["ab", "--toggle", "pdl=off,on"], 1, PDL),
    "ab: background": (["ab", "--toggle", "fuse=on", "--sync", "copy_boundary"], 1, ASYNC),
    "ab: test": (["ab", "--toggle", "fuse=on", "--test", "tg9999"], 2, "needs 9999 KV cells"),
    "perplexity": (["perplexity", *SAMPLE, "--pdl", "on"], 1, PDL),
    "against": (["perplexity", *SAMPLE, "--against", "pdl=on"], 1, PDL),
    "an id": (["run", "--tokens", "1,99999"], 2, "token id 99999 at index 1"),
    "an id of logits": (["logits", "--tokens", "99999", "-o", "x.npy"], 2, "token id 99999"),
    "a long prompt": (["run", "--tokens", "1,2,3,4", "--n-ctx", "3"], 2, "do not fit the context"),
    "a long text": (["run", "-p", "one two three", "--n-ctx", "2"], 2, "do not fit the context"),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_THE_MODEL)
def test_what_takes_a_model_to_see_is_judged_before_its_weights(refused, monkeypatch, what):
    arguments, wanted, says = OF_THE_MODEL[what]
    loaded: list[Loaded] = []
    monkeypatch.setattr(Loaded, "_load_weights", loaded.append)
    status, line = refused([*arguments, "--device", "host"])
    assert (status, loaded) == (wanted, []) and says in line


@pytest.mark.parametrize(("flag", "text", "says"), [
    ("--tokens-from", "1 99999", "token id 99999"), ("--tokens-from", "", "holds 0 tokens"),
    ("-f", "", "holds 0 tokens"),
])  # fmt: skip
def test_tokens_of_a_file_are_judged_before_weights(
    refused, monkeypatch, tmp_path, flag, text, says
):
    (tmp_path / "file").write_text(text)
    loaded: list[Loaded] = []
    monkeypatch.setattr(Loaded, "_load_weights", loaded.append)
    status, line = refused(["perplexity", flag, str(tmp_path / "file"), "--device", "host"])
    assert (status, loaded) == (2, []) and says in line


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
