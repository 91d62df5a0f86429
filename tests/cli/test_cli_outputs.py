"""`-o` prints a format, `--out` writes a file or a folder; a path given to -o is taken as --out."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest

from workbench.benchmarks.llama.llama_format import FORMATS
from workbench.benchmarks.runs.results import load_run
from workbench.cli.entry import app
from workbench.cli.outputs import print_frame, with_out
from workbench.traffic import bench_text

HOST = ("--device", "host")
LOGITS = ("logits", "--tokens", "1,2", *HOST)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


@pytest.mark.parametrize(("words", "meant", "n_lines"), [
    (["bench", "-o", "json"], ["bench", "-o", "json"], 0),
    (["bench", "-o", "r", "-o", "md"], ["bench", "--out", "r", "-o", "md"], 1),
    (["bench", "-o=r", "-p", "1"], ["bench", "--out", "r", "-p", "1"], 1),
    (["bench", "-o=sql"], ["bench", "-o=sql"], 0),
    (["ab", "-o", "sql"], ["ab", "--out", "sql"], 1),  # bench's, not ab's
    (["ab", "-o", "csv"], ["ab", "-o", "csv"], 0),
    (["profile", "-o", "t.json"], ["profile", "--out", "t.json"], 1),
    (["compare", "a", "b", "-o", "p.html"], ["compare", "a", "b", "--out", "p.html"], 1),
    (["run", "-o", "x"], ["run", "-o", "x"], 0),  # it writes nothing, and cyclopts refuses it
    (["bench", "-o"], ["bench", "-o"], 0),
    (["bench", "-o", "--seed"], ["bench", "-o", "--seed"], 0),
    (["bench", "--", "-o", "x"], ["bench", "--", "-o", "x"], 0),
    (["-o", "x"], ["-o", "x"], 0), ([], [], 0),
])  # fmt: skip
def test_what_is_no_format_is_a_path(capsys, words, meant, n_lines):
    assert with_out(words) == meant
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == n_lines and all(" is taken as --out " in line for line in lines)


def test_the_line_names_formats_and_the_nearest(capsys):
    with_out(["ab", "-o", "jsno"])
    assert capsys.readouterr().err == (
        "-o jsno is taken as --out jsno; formats that -o prints are md, csv, json "
        "(did you mean -o json?)\n"
    )


def test_formats_are_those_that_are_printed():
    def of(name):
        (found,) = [a for a in app[name].assemble_argument_collection() if "-o" in a.names]
        return found.hint.__args__

    assert of("bench") == FORMATS and of("serve-bench") == bench_text.FORMATS


def test_old_spellings_write_what_they_wrote(call, model, tmp_path):
    out = tmp_path / "rows.npy"
    status, _, err = call(*LOGITS, "-m", model, "-o", out)
    assert status == 0 and err.startswith(f"-o {out} is taken as --out {out}\n")
    assert np.load(out).shape == (2, 1024)
    ask = ("bench", "-m", model, "-p", 2, "-n", 0, "-r", 1, *HOST)
    status, out, err = call(*ask, "-o", tmp_path / "run", "-o", "jsonl")
    assert status == 0 and json.loads(out)["n_prompt"] == 2
    assert load_run(tmp_path / "run").run["kind"] == "bench"


def test_ab_prints_rows_alone(call, model):
    ask = ("ab", "-m", model, "--toggle", "fuse=on", "--test", "tg1", "--rounds", 5, *HOST)
    status, text, _ = call(*ask, "-o", "json")
    on, control = json.loads(text)
    assert status == 0 and (on["toggle"], on["arm"], on["n"]) == ("fuse", "on", 5)
    assert not on["is_control"] and control["is_control"] and on["tps_toggled"] > 0
    status, text, _ = call(*ask, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert status == 0 and list(rows[0]) == list(on) and len(rows) == 2


def test_a_missing_number_is_null_in_json_and_empty_in_csv(capsys):
    """JSON has no NaN."""
    frame = pd.DataFrame({"test": ["tg2", "pp4"], "tps": [1.5, np.nan], "n": np.int64([5, 0])})
    print_frame(frame, "json")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == [
        {"test": "tg2", "tps": 1.5, "n": 5}, {"test": "pp4", "tps": None, "n": 0},
    ]  # fmt: skip
    print_frame(frame, "csv")
    assert capsys.readouterr().out.splitlines() == ["test,tps,n", "tg2,1.5,5", "pp4,,0"]


@pytest.mark.parametrize(("words", "says"), [
    ((*LOGITS, "--out", "x.pt"), "x.pt has an unknown extension; the file can be .npy"),
    (("profile", "--out", "t.perf"), "can be .pftrace.gz or .pftrace or .json.gz or .json"),
    (("profile", "--out", "t.gz"), "t.gz has an unknown extension"),
    (("profile", "--out", "t"), "t has no extension; the file can be .pftrace.gz"),
    (("compare", "a", "b", "--out", "p.pdf"), "p.pdf has an unknown extension"),
    (("model", "synth", "tiny-llama", "Q8_0", "x.bin"), "can be .gguf"),
    (("bench", "--out", "r.json"), "r.json would be a run folder"),
    (("bench", "--out", "r.docx"), "r.docx would be a run folder"),
    (("ab", "--toggle", "fuse=on", "--out", "r.csv"), "r.csv would be a run folder"),
    (("perplexity", "--tokens-from", "sample:9", "--out", "r.txt"), "would be a run folder"),
    (("bench-kernels", "--out", "r.parquet"), "would be a run folder"),
    (("serve-bench", "--rate", "1", "--out", "r.json"), "would be a run folder"),
])  # fmt: skip
def test_an_unknown_extension_is_refused_before_anything_runs(
    call, model, tmp_path, monkeypatch, words, says
):
    monkeypatch.chdir(tmp_path)
    of = () if words[0] in ("compare", "model", "bench-kernels") else ("-m", tmp_path / "no.gguf")
    status, out, err = call(*words, *of)
    assert status == 2 and not out and says in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_without_an_extension_and_a_device_are_fine(call, model, tmp_path):
    for out in (tmp_path / "rows", "/dev/null"):
        assert call(*LOGITS, "-m", model, "--out", out)[0] == 0
    assert np.load(tmp_path / "rows").shape == (2, 1024)
