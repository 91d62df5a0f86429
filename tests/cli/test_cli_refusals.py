"""What a command can refuse it refuses before weights are loaded; most before a file is opened."""

from __future__ import annotations

import pytest

from workbench.benchmarks.scores import token_source
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded

SAMPLE = ["--tokens-from", "sample:9"]
AB = ["ab", "--toggle", "pdl=on"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


@pytest.fixture
def refused(call, model):
    """`refused(arguments)`: (exit status, the one line) of a command on the model."""

    def run(arguments: list[object], path: object = model) -> tuple[int, str]:
        command, *rest = arguments
        status, out, err = call(command, "-m", path, *rest)
        (line,) = err.splitlines()
        assert not out and line.startswith("error: ")
        return status, line

    return run


ARGUMENTS = [
    (["run"], "either a prompt (-p)"), (["run", "--tokens", "1,x"], "no list of token ids"),
    (["run", "--tokens", "1", "-n=-3"], "for -n. Must be >= -2"),
    (["run", "--tokens", "1", "--seed=-1"], "--seed"),
    (["run", "--tokens", "1", "--temp=-1"], "temperature=-1.0"),
    (["run", "--tokens", "1", "--min-p=1.5"], "min_p=1.5"), (["run", "--speed", "11"], "--speed"),
    (["run", "--tokens", "1", "--device", "abacus"], "device 'abacus' does not exist"),
    (["logits", "--tokens", "x", "-o", "x.npy"], "no list of token ids"),
    (["logits", "--tokens", "1", "-o", "/no/x.npy"], "make it first"),
    (["program", "--n-tokens", "0"], "--n-tokens"), (["program", "--n-past=-1"], "--n-past"),
    (["program", "--n-past", "2048"], "2048 + 1 tokens do not fit"),
    (["program", "--n-tokens", "600"], "a step has 1 to 512 tokens"),
    (["check", "--n-tokens", "3000"], "3000 tokens do not fit the context"),
    (["bench", "-o", "xml"], "choose one of"), (["bench", "-p", "many"], "no list of whole"),
    (["bench", "-n=-1"], "cannot be measured"), (["bench", "-r", "0"], "for -r. Must be >= 1"),
    (["bench", "-p", "0", "-n", "0"], "there is no test to run"),
    (["bench", "--out", "/tmp"], "/tmp exists already"), (["bench", "--resume"], "give it as out"),
    (["bench", "--resume", "--out", "/no"], "/no is no run folder"),
    (["bench", "--until", "often"], "--until 'often' is no share between 0 and 1; write it as 1%"),
    (["bench", "--until", "1%", "--at-most", "10"], "--at-most '10' is no length of time"),
    (["bench", "--at-most", "10m"], "--at-most ends what --until repeats; add --until 1%"),
    ([*AB, "--at-most", "10m"], "--at-most ends what --until repeats; add --until 1%"),
    (["ab", "--toggle", "speed=11"], "toggle 'speed' does not exist"),
    (["ab", "--toggle", "sync=never"], "sync='never' does not exist"),
    (["ab", "--toggle", "sync=per_copy"], "what the background has"),
    (["ab", "--toggle", "sync=event_guarded", "--copy-stream", "compute"],
     "copy_stream=compute clash"),
    ([*AB, "--rounds", "1"], "rounds=1 is too few"), ([*AB, "-o", "/tmp"], "/tmp exists already"),
    ([*AB, "--test", "xx9"], "test 'xx9' does not exist"), ([*AB, "--resume"], "give it as out"),
    ([*AB, "--resume", "-o", "/no"], "is no run folder"),
    (["perplexity"], "either a text file (-f)"), (["perplexity", *SAMPLE, "-f", "x"], "either a"),
    (["perplexity", "--tokens-from", "sample:xx"], "names no sample"),
    (["perplexity", "--tokens-from", "sample:0"], "draws nothing"),
    (["perplexity", "-f", "/no/such"], "/no/such cannot be read"),
    (["perplexity", "--tokens-from", "/no/such"], "cannot be read"),
    (["perplexity", *SAMPLE, "--sizes", "0"], "0 tokens cannot be"),
    (["perplexity", *SAMPLE, "--sizes", "513"], "513 tokens cannot be"),
    (["perplexity", *SAMPLE, "--sizes", "x"], "--sizes 'x'"),
    (["perplexity", *SAMPLE, "-o", "/tmp"], "/tmp exists already"),
    (["perplexity", *SAMPLE, "--resume"], "give it as out"),
    (["perplexity", *SAMPLE, "--resume", "-o", "/no"], "is no run folder"),
    (["perplexity", *SAMPLE, "--against", "x=1"], "'x' does not exist"),
    (["perplexity", *SAMPLE, "--check"], "--check needs a reference"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS, ids=lambda v: str(v)[:40])
def test_arguments_are_judged_before_a_model_is_opened(refused, monkeypatch, arguments, says):
    opened: list[object] = []
    monkeypatch.setattr(Engine, "load", lambda *asked, **how: opened.append(asked))
    status, line = refused(arguments)
    assert (status, opened) == (2, []) and says in line


PDL, ASYNC = "the host device cannot honour pdl=on", "cannot honour sync=copy_boundary"
OF_THE_MODEL = [
    (["run", "--tokens", "1", "--pdl", "on"], 1, PDL),
    (["logits", "--tokens", "1", "-o", "x.npy", "--sync", "copy_boundary"], 1, ASYNC),
    (["run", "--tokens", "1", "--n-copies", "4", "--sync", "auto"], 1, "n_copies=4"),
    (["run", "--tokens", "1", "--host-source", "pinned_ring_4"], 1, "host_source=pinned_r"),
    (["run", "--tokens", "1", "--copy-stream", "own"], 1, "needs two streams"),
    (["run", "--tokens", "1", "-ot", "ffn=device"], 2, "has no GPU to put weights on"),
    (["bench", "--pdl", "on"], 1, PDL), (["program", "--pdl", "on"], 1, PDL),
    (["ab", "--toggle", "pdl=off,on"], 1, PDL),
    (["ab", "--toggle", "fuse=on", "--sync", "copy_boundary"], 1, ASYNC),
    (["ab", "--toggle", "fuse=on", "--test", "tg9999"], 2, "needs 9999 KV cells"),
    (["perplexity", *SAMPLE, "--pdl", "on"], 1, PDL),
    (["perplexity", *SAMPLE, "--against", "pdl=on"], 1, PDL),
    (["run", "--tokens", "1,99999"], 2, "token id 99999 at index 1"),
    (["run", "--tokens=-4"], 2, "token id -4"),
    (["logits", "--tokens", "99999", "-o", "x.npy"], 2, "token id 99999"),
    (["run", "--tokens", "1,2,3,4", "--n-ctx", "3"], 2, "do not fit the context"),
    (["run", "-p", "one two three", "--n-ctx", "2"], 2, "do not fit the context"),
    (["run", "--tokens", "1", "--device", "embedded", "--sync", "implicit", "--copy-stream", "own"],
     2, "sync=implicit and copy_stream=own race on the embedded device: nothing orders a copy"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "wanted", "says"), OF_THE_MODEL, ids=lambda v: str(v)[:40])
def test_what_takes_a_model_is_judged_before_its_weights(
    refused, monkeypatch, arguments, wanted, says
):
    loaded: list[Loaded] = []
    monkeypatch.setattr(Loaded, "_load_weights", loaded.append)
    device = [] if "--device" in arguments else ["--device", "host"]
    status, line = refused([*arguments, *device])
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
    status, line = refused(["perplexity", flag, tmp_path / "file", "--device", "host"])
    assert (status, loaded) == (2, []) and says in line


@pytest.mark.parametrize("damage", ["missing", "truncated", "magic", "version", "empty"])
def test_damaged_files_are_refused_by_name(refused, model, tmp_path, damage):
    data = model.read_bytes()
    changed = {
        "truncated": data[: len(data) // 2], "magic": b"JUNK" + data[4:], "empty": b"",
        "version": data[:4] + (99).to_bytes(4, "little") + data[8:],
    }  # fmt: skip
    bad = tmp_path / "bad.gguf"
    if damage in changed:
        bad.write_bytes(changed[damage])
    out = tmp_path / "out.npy"
    status, line = refused(["logits", "--tokens", "1", "-o", out, "--device", "embedded"], bad)
    assert status == 1 and line.startswith(f"error: {bad}") and not list(tmp_path.glob("out*"))


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
