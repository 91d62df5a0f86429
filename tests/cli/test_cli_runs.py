"""`workbench runs`: what is listed, shown, removed and exported, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile

import pandas as pd
import pytest

from data.measure.command import RESULTS
from tests.benchmarks.made_runs import a_run, comparison, write
from workbench.benchmarks.runs import folders, results
from workbench.benchmarks.runs.results import load_run, new_run_folder, write_run
from workbench.common import output_swap
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.traffic.bench import load_served


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with runs `one` and `two`, and with a newer and a damaged run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("one", "two", "newer", "bad"):
        write(tmp_path / "runs", name, {"tg8": 100.0, "pp4": 50.0}, n=5)
    text = (tmp_path / "runs/newer/run.json").read_text().replace('"schema": 1', '"schema": 4')
    (tmp_path / "runs/newer/run.json").write_text(text)
    (tmp_path / "runs/bad/run.json").write_text("{")
    return tmp_path / "runs"


NEWER = "schema 4 of run.json is newer than 1"


def test_ls_has_a_row_for_each_folder_and_its_status(call, root):
    status, out, err = call("runs", "ls", root)
    assert status == 0
    assert max(len(line) for line in out.splitlines() if line.startswith("|")) <= 80
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("| ")}
    assert set(rows) == {"folder", "one", "two", "newer", "bad"}
    assert "| complete " in rows["one"] and "| newer schema |" in rows["newer"]
    assert "| unreadable " in rows["bad"] and NEWER in " ".join(out.split())
    assert "bad: Expecting" in " ".join(out.split())
    assert "no room for took s, device" in err and "--json shows them" in err
    assert "| tg8, pp4 |" in rows["two"], "what was measured, rather than when and where"
    found = {row["run_id"]: row for row in json.loads(call("runs", "ls", root, "--json")[1])}
    assert found["two"]["tests"] == "tg8, pp4" and found["newer"]["status"].startswith("newer sch")


@pytest.mark.parametrize(("length", "columns"), [(20, 60), (50, 80), (70, 80), (50, 100)])
def test_long_names_leave_room_for_what_was_measured(call, root, monkeypatch, length, columns):
    name = "n" * length
    write(root, name, {"tg8": 100.0, "pp4": 50.0}, n=5)
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = call("runs", "ls", root.name)  # from the folder above: paths are short
    assert max(map(len, out.splitlines())) <= columns and name in out
    lines = " ".join(out.partition(name)[2].splitlines()[:3])
    assert "complete" in lines and "tg8, pp4" in lines and "tiny Q8_0" in lines


def test_a_name_that_ls_prints_is_taken(call, root, tmp_path):
    shutil.copytree(root, tmp_path / "data" / "runs")
    shutil.rmtree(root)
    for words in (
        ["runs", "show", "one"], ["runs", "export", "one", "--out", "one.csv"],
        ["compare", "one", "two", "--out", "c.html"], ["runs", "rm", "one", "--yes"],
    ):  # fmt: skip
        status, _, err = call(*words)
        assert status == 0, err
    assert not (tmp_path / "data" / "runs" / "one").exists()
    status, _, err = call("runs", "show", "one")
    assert status != 0 and "one is no run folder" in err


def test_ls_without_runs(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call("runs", "ls")
    assert (status, out) == (0, "") and "no runs in data/runs" in err
    status, _, err = call("runs", "ls", "nowhere")
    assert status == 2 and "nowhere is no folder" in err


def test_show_has_the_figures_of_a_load(call):
    """Its samples are of requests that were served side by side: their times say no throughput.
    What a load does not know of its server has no line."""
    folder = RESULTS / "notebook-served-serving"
    status, out, _ = call("runs", "show", folder)
    assert status == 0 and "out t/s" in out and "median t/s" not in out
    for row in load_served(folder).rows:
        assert f"{row.figures['output_throughput']:.1f}" in out
    run = load_run(folder).run
    assert "settings" in folders.facts(run) and not any(one["toggles"] for one in run["arms"])
    unknown = folders.facts(run | {"engine": run["engine"] | {"config": {}}})
    assert "settings" not in unknown and "everything off" not in unknown.values()


@pytest.mark.parametrize(("name", "has"), [
    ("cuda-gaps-on-llama-3.2-1b-f16", "one wait adds"), ("cuda-kernels", "| GB/s")
])  # fmt: skip
def test_show_has_the_figures_of_gaps_and_of_kernels(call, name, has):
    """Their samples are no times of tokens."""
    status, out, err = call("runs", "show", RESULTS / name)
    assert status == 0 and has in out and "token p50 us" not in out, err


def test_show_says_what_was_measured_with_units(call, root):
    status, out, _ = call("runs", "show", root / "one")
    lines = out.splitlines()
    assert (
        status == 0 and lines[0] == "run       one: bench, complete" and max(map(len, lines)) <= 80
    )
    assert "| median t/s | token p50 us |  p90 us |  p99 us | first token us |" in out
    assert json.loads(call("runs", "show", root / "one", "--json")[1])["run_id"] == "one"
    folder = write_run(root / "ab", comparison().run, comparison().samples)
    out = call("runs", "show", folder)[1]
    assert "Speedup" in out and "copy_boundary: faster" in out


@pytest.mark.parametrize("command", ["show", "export", "compare"])
def test_what_cannot_be_read_is_one_line(call, root, command):
    for name, says in (("newer", NEWER), ("bad", "Expecting"), ("no", "it does not exist")):
        words = ["compare", root / name, root / "one"] if command == "compare" else [
            "runs", command, root / name, *(["--out", "x.zip"] if command == "export" else [])
        ]  # fmt: skip
        status, out, err = call(*words)
        assert (status, out, err.count("\n")) == (2, "", 1) and says in err and name in err
        assert os.listdir(".") == ["runs"]


def test_rm_removes_run_folders_and_nothing_else(call, root):
    assert call("runs", "rm", root / "one", root / "newer", root / "bad", "--yes")[0] == 0
    assert os.listdir(root) == ["two"] and load_run(root / "two").run["run_id"] == "two"


@pytest.fixture
def odd(root):
    """Paths that are no run folder -> what is said."""
    (root / "link").symlink_to(root / "one")
    (root / "file").write_text("mine")
    (root / "notes").mkdir()
    shutil.copy(root / "one/run.json", root / "notes")  # a run without samples
    write(root, "mixed")
    (root / "mixed/photos").mkdir()
    return {
        root: "run.json is missing", root / "file": "it is a file", root / "no": "does not exist",
        root / "notes": "samples.parquet is missing", root / "link": "is a link to",
        root / "mixed": "photos is no run folder",
    }  # fmt: skip


@pytest.fixture
def swept(root):
    """A sweep whose record says next to nothing, with two runs."""
    (root / "swept").mkdir()
    (root / "swept/sweep.json").write_text('{"schema": 1}')
    for name in ("a", "b"):
        write(root / "swept/groups", name)
    return root / "swept"


def test_a_sweep_is_listed_as_one_and_removed_as_one(call, swept, root):
    lines = call("runs", "ls", root)[1].splitlines()
    (line,) = [line for line in lines if "swept" in line]
    assert line.split("|")[1].strip() == "swept" and "sweep (2 runs)" in line and "complete" in line
    (swept / "groups/b/run.json").write_text("{")
    (line,) = [line for line in call("runs", "ls", root)[1].splitlines() if "| swept" in line]
    assert "unreadable" in line and "sweep (2 runs)" in line
    assert sum("| groups/" in line for line in call("runs", "ls", swept)[1].splitlines()) == 2
    of = results.runs(root)["part_of"].tolist()
    assert sorted(of) == [""] * 4 + [str(swept)] * 2
    (swept / "sweep.json").write_text("{}")
    status, _, err = call("runs", "show", swept)  # its record cannot be read
    assert status == 2 and "schema None of sweep.json is not 1" in err and err.count("\n") == 1
    status, _, err = call("runs", "show", swept, "--json")
    assert status == 2 and "--json takes a run below it" in err
    status, _, err = call("runs", "export", swept, "--out", root / "x.csv")
    assert status == 2 and err.count("\n") == 1 and f"give {swept}/groups/NAME" in err
    assert f"wb.load('{swept}').to_csv('x.csv')" in err and not (root / "x.csv").exists()
    (swept / "groups/photos").mkdir()
    status, _, err = call("runs", "rm", swept, "--yes")
    assert status == 2 and "photos is no run folder" in err and load_run(swept / "groups/a")
    (swept / "groups/photos").rmdir()
    assert call("runs", "rm", swept, "--yes")[0] == 0 and not swept.exists()


@pytest.mark.parametrize(("file", "says"), [
    ("sweep.json", "until the sweep is run again with --resume"),
    ("advice.json", "loses the samples behind them"),
])  # fmt: skip
def test_rm_says_what_a_whole_lacks_without_a_part(call, swept, root, file, says, monkeypatch):
    (swept / "sweep.json").rename(swept / file)
    a, b = (swept / "groups" / name for name in "ab")
    status, _, err = call("runs", "rm", a, root / "one", "--yes")
    first, second = err.splitlines()
    assert status == 0 and not a.exists() and second.startswith("removed 2 run folders")
    assert first.startswith(f"{a} is part of swept: ") and first.endswith(says)
    monkeypatch.chdir(swept / "groups")
    assert "b is part of swept: " in call("runs", "rm", "b", "--yes")[2] and not b.exists()
    assert "part of" not in call("runs", "rm", swept, "--yes")[2] and not swept.exists()


@pytest.mark.parametrize("file", ["sweep.json", "advice.json"])
@pytest.mark.parametrize(("text", "status", "said"), [
    ('{"schema": 999}', "newer schema", "schema 999 of FILE is newer than 1"),
    ("{", "unreadable", "FILE cannot be read: Expecting"),
    ("{}", "unreadable", "schema None of FILE is not 1"),
])  # fmt: skip
def test_ls_says_that_a_record_cannot_be_read(call, swept, root, file, text, status, said):
    """Of a sweep, and of an advice."""

    def listed() -> tuple[str, str]:
        out = call("runs", "ls", root)[1]
        return next(line for line in out.splitlines() if "| swept" in line), " ".join(out.split())

    (swept / "sweep.json").rename(swept / file)
    assert "| complete " in listed()[0]
    (swept / file).write_text(text)
    line, out = listed()
    assert f"| {status} " in line and said.replace("FILE", file) in out


def test_ls_says_that_samples_are_cut_or_missing(call, root):
    samples = root / "one/samples.parquet"
    samples.write_bytes(samples.read_bytes()[:-20])
    (root / "two/samples.parquet").unlink()
    lines = call("runs", "ls", root)[1].splitlines()
    rows = {line.split()[1]: line for line in lines if line.startswith("| ")}
    assert "| unreadable " in rows["one"] and "| unreadable " in rows["two"]
    found = json.loads(call("runs", "ls", root, "--json")[1])
    why = {row["run_id"]: row["status"] for row in found}
    assert str(root / "one") in why["one"] and "samples.parquet" in why["two"], why


def test_rm_refuses_what_is_no_run_folder_before_it_removes_any(call, root, odd):
    before = sorted(str(path) for path in root.rglob("*"))
    for path, says in odd.items():
        status, _, err = call("runs", "rm", root / "one", path, "--yes")
        assert status == 2 and says in err and err.count("\n") == 1
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert call("runs", "rm", "--yes")[0] == 2


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("yes\n", True), ("n\n", False),
                                              ("\n", False), ("", False)])  # fmt: skip
def test_rm_asks(call, root, monkeypatch, answer, gone):
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    status, _, err = call("runs", "rm", root / "one")
    assert status == 0 and err.startswith("remove 1 run folder (")
    assert (root / "one").exists() != gone


def test_rm_with_nobody_to_ask_removes_nothing(call, root, monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    status, _, err = call("runs", "rm", root / "one")
    assert status == 2 and "give --yes" in err and load_run(root / "one")


def test_rm_that_is_killed_leaves_no_half_of_a_run(root, monkeypatch):
    """The name is gone in one step. The next run that is written there removes the rest."""

    class Killed(BaseException):
        pass

    def killed(path: str) -> None:
        os.unlink(os.path.join(path, "samples.parquet"))
        raise Killed

    monkeypatch.setattr(folders, "remove", killed)
    with pytest.raises(Killed):
        folders.remove_runs([folders.run_folder(root / "one")])
    left = sorted(os.listdir(root))
    assert "one" not in left and sum(map(output_swap.is_temporary, left)) == 1
    write_run(root / "next", a_run("next"), load_run(root / "two").samples)
    assert not any(map(output_swap.is_temporary, os.listdir(root)))


READERS = {
    "csv": pd.read_csv, "parquet": pd.read_parquet,
    "json": lambda path: pd.DataFrame(json.loads(path.read_text())),
    "jsonl": lambda path: pd.read_json(path, lines=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_export_writes_a_tidy_table(call, root, kind):
    out = root.parent / "deep" / f"x.{kind}"
    status, _, err = call("runs", "export", root / "one", "--out", out)
    rows, samples = READERS[kind](out), load_run(root / "one").samples
    assert status == 0 and err == f"wrote {out}\n" and len(rows) == len(samples)
    assert rows["ns"].tolist() == samples["ns"].tolist()
    assert rows["test"].tolist() == samples["test"].tolist()
    assert set(rows["run_id"]) == {"one"} and set(rows["model"]) == {"tiny Q8_0"}
    assert {"device", "toggles", "commit", "kind", "started"} <= set(rows.columns)


def test_each_row_of_an_export_has_the_toggles_of_its_own_arm(root):
    made = comparison()
    for arm in made.run["arms"]:
        arm["toggles"] = Toggles(sync="auto" if "A/A" in arm["name"] else "packed").to_dict()
    rows = folders.tidy(write_run(root / "ab", made.run, made.samples))
    said = rows.groupby("arm")["toggles"].unique()
    for arm, words in said.items():
        assert list(words) == [f"sync={'auto' if 'A/A' in arm else 'packed'}, all else off"]
    assert len(said) == len(made.run["arms"]) > 2


def test_an_exported_run_loads_elsewhere(call, root, tmp_path):
    (root / "one" / "timeline.pftrace.gz").write_bytes(b"trace")
    assert call("runs", "export", root / "one", "--out", "a.zip")[0] == 0
    first = (tmp_path / "a.zip").read_bytes()
    assert call("runs", "export", root / "one", "--out", "a.zip")[0] == 0
    assert (tmp_path / "a.zip").read_bytes() == first
    with zipfile.ZipFile("a.zip") as archive:
        archive.extractall(tmp_path / "elsewhere")
    assert call("runs", "export", root / "one", "--out", tmp_path / "elsewhere" / "b")[0] == 0
    for copy in ("a", "b"):
        found = load_run(tmp_path / "elsewhere" / copy)
        assert found.run == load_run(root / "one").run
        assert found.samples.equals(load_run(root / "one").samples)
        assert (found.folder / "timeline.pftrace.gz").read_bytes() == b"trace"


@pytest.mark.parametrize(("words", "says"), [
    (["--out", "x.xlsx"], "unknown extension; the file can be .csv, .parquet, .json, .jsonl, .zip"),
    (["--out", "runs"], "exists already"),
    (["--out", "x.csv", "--table", "tokens"], "runs/one has no table tokens; it has samples\n"),
    (["--out", "x.zip", "--table", "tokens"], "takes the whole run"),
    (["--out", "runs/one/run.json/x.csv"], "is no folder"),
])  # fmt: skip
def test_an_export_that_cannot_be_is_refused_and_writes_nothing(call, root, words, says):
    status, out, err = call("runs", "export", root / "one", *words)
    assert (status, out, err.count("\n")) == (2, "", 1) and says in err
    assert os.listdir(".") == ["runs"]


def test_an_export_to_a_path_without_its_flag_is_told_the_flag(call, root):
    for words in (["one", "x.csv"], ["--table", "tokens", "one", "x.csv"]):
        status, _, err = call("runs", "export", *words)
        assert status == 2 and err.endswith(" Write --out x.csv\n") and err.count("\n") == 1
    assert "Write" not in call("runs", "export", "one")[2]


def test_tables_of_other_kinds_are_exported_too(root):
    tokens = pd.DataFrame({"window": [0, 0], "nll": [1.5, float("nan")]})
    folder = new_run_folder(root, "ppl")
    write_run(folder, a_run("ppl", kind="perplexity"), load_run(root / "one").samples,
              {"tokens.parquet": tokens})  # fmt: skip
    found = folders.tidy(folder, "tokens")
    assert found["nll"][0] == 1.5 and set(found["run_id"]) == {"ppl"} and "toggles" not in found
    folders.export(folder, root / "x.json", "tokens")
    assert json.loads((root / "x.json").read_text())[1]["nll"] is None
    with pytest.raises(UsageError, match="ppl has no table requests; it has samples, tokens"):
        folders.tidy(folder, "requests")
