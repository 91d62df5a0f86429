"""A folder is replaced as a whole: whoever is killed, whoever reads, and whoever else writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.made_runs import a_run
from tests.common.killed_saves import no_exchange, save
from workbench.benchmarks.runs.results import SampleTable, load_run, write_run
from workbench.common import output_swap
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, writing, writing_folder
from workbench.common.output_swap import read_files

ROOT = Path(__file__).resolve().parents[2]
LEFT = f".workbench-{'0' * 16}"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(params=["exchange", "two-renames"])
def swap(request, monkeypatch):
    if request.param != "exchange":
        monkeypatch.setattr(output_swap, "exchange", no_exchange)
    return request.param


def test_a_save_killed_at_any_call_leaves_one_save_s_files(tmp_path, swap):
    script = [sys.executable, "tests/common/killed_saves.py", str(tmp_path), swap]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(one["killed"] for one in found) > 25
    for one in found:
        before = None if one["starts"] == "new" else 1
        for seen in one["after"]:
            assert len(set(seen)) == 1, one  # never a file of each
            assert seen[0] in (before, 2) or (seen[0] is None and swap != "exchange")
        assert one["after"][1][0] in (before, 2), "who loads it finds a save"
        assert {value for seen in one["next"] for value in seen} == {3}
        assert one["listed"] == ["run"], "the next save removes what the killed one left"
        assert one["other"] == (one["starts"] == "old"), "another's file stays"
    for starts in ("new", "old"):  # both outcomes were met
        after = [one["after"][1][0] == 2 for one in found if one["starts"] == starts]
        assert not after[0] and after[-1] and after == sorted(after)


def test_leftovers_are_removed_by_the_next_writing_there(tmp_path):
    lefts = (tmp_path / LEFT / "in" / "x", tmp_path / LEFT.replace("0", "1"))
    mine = tmp_path / ".workbench-mine"
    mine.write_text("no name of ours")
    save(tmp_path / "run", 1)
    (tmp_path / "run" / LEFT).mkdir()  # as an older version left it
    for write in (
        lambda: save(tmp_path / "run", 1),
        lambda: check_folder(tmp_path / "run"),
        lambda: writing(tmp_path / "file").__enter__(),
    ):
        for left in lefts:
            left.parent.mkdir(parents=True, exist_ok=True)
            left.write_text("x")
        write()
        assert not (tmp_path / LEFT).exists() and not lefts[1].exists()
    assert mine.exists() and names(tmp_path / "run") == ["a", "b"]


def test_what_a_living_process_writes_is_left_alone(tmp_path, swap):
    with writing_folder(tmp_path / "one") as one, writing(tmp_path / "file", "t") as file:
        save(tmp_path / "two", "1")
        save(tmp_path / "two", "2")
        assert len(names(tmp_path)) == 3
        file.write("content")
        with one.writing("a", "t") as a:
            a.write("content")
    assert names(tmp_path) == ["file", "one", "two"]
    assert (tmp_path / "file").read_text() == (tmp_path / "one" / "a").read_text() == "content"


def test_without_locks_a_leftover_is_known_by_its_age(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", none)
    old, young = tmp_path / LEFT, tmp_path / LEFT.replace("0", "1")
    for path in (old, young):
        path.mkdir()
    then = time.time() - 7200
    os.utime(old, (then, then))
    save(tmp_path / "run", "1")
    assert names(tmp_path) == [young.name, "run"]


def test_a_reader_has_run_and_samples_of_one_save(tmp_path, swap):
    def write(repetitions: int) -> None:
        samples = SampleTable("r1")
        for i in range(repetitions):
            samples.add("a", False, "tg1", i, np.array([5]), np.array([1]))
        write_run(tmp_path / "run", a_run(repetitions=repetitions), samples.frame())

    write(1)
    seen = set()
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(lambda: [write(i) for i in range(2, 12)])
        while not writer.done():
            found = load_run(tmp_path / "run")
            assert len(found.samples) == found.run["repetitions"]
            seen.add(len(found.samples))
        writer.result()
    assert len(seen) > 1


def test_a_save_between_two_files_mixes_none(tmp_path, swap, monkeypatch):
    save(tmp_path / "run", "old")
    opened, saved = os.open, []

    def between(path, *how, **named):
        found = opened(path, *how, **named)
        if os.path.basename(path) == "a" and not saved:
            saved.append(path)
            save(tmp_path / "run", "new")
        return found

    monkeypatch.setattr(os, "open", between)
    assert len({bytes(content) for content in read_files(tmp_path / "run", "a", "b")}) == 1
    assert saved


def test_two_writers_leave_the_folder_of_one(tmp_path, swap):
    def write(value: str) -> None:
        for _ in range(60):
            save(tmp_path / "run", value)

    with ThreadPoolExecutor(2) as pool:
        for writer in [pool.submit(write, value) for value in ("one", "two")]:
            writer.result()
    found = {p.name: p.read_text() for p in (tmp_path / "run").iterdir()}
    assert found in ({"a": v, "b": v} for v in ("one", "two")) and names(tmp_path) == ["run"]


def test_of_two_new_runs_at_one_folder_the_second_is_refused(tmp_path):
    first, second = (a_run(started=f"2025-11-2{i}T00:00:00Z") for i in (1, 2))
    none = SampleTable("r1").frame()
    for _ in range(2):  # its own saves it replaces
        write_run(tmp_path / "r", first, none, new=True)
        with pytest.raises(UsageError, match="exists already"):
            write_run(tmp_path / "r", second, none, new=True)
    assert load_run(tmp_path / "r").run["started"] == first["started"]
    assert names(tmp_path) == ["r"]
    x = tmp_path / "x"
    with pytest.raises(UsageError, match="exists already"), writing_folder(x, new=True):
        save(x, "meanwhile")
    assert (tmp_path / "x" / "a").read_text() == "meanwhile"


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_other_files_folders_and_modes_stay(tmp_path, swap, monkeypatch, links):
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    run = tmp_path / "run"
    save(run, "1")
    (run / "in" / "side").mkdir(parents=True)
    (run / "in" / "side" / "x").write_text("x")
    (run / "link").symlink_to("nowhere")
    (run / "b.parquet").write_text("x")
    run.chmod(0o750)
    if not links:  # the file system has none
        monkeypatch.setattr(os, "link", none)
    with writing_folder(run, without=("b.parquet",)) as made:
        (run / "late").write_text("somebody else's")
        with made.writing("a", "t") as file:
            file.write("2")
    assert names(run) == ["a", "b", "in", "late", "link"] and (run / "a").read_text() == "2"
    assert (run / "in" / "side" / "x").read_text() == "x" and (run / "link").is_symlink()
    assert run.stat().st_mode & 0o777 == 0o750


def test_tables_of_another_run_do_not_stay(tmp_path):
    tokens = {"tokens.parquet": SampleTable("r").frame()}
    none = SampleTable("r1").frame()
    write_run(tmp_path / "r", a_run(kind="perplexity"), none, tokens)
    write_run(tmp_path / "r", a_run(kind="perplexity"), none)  # the same, with more in `result`
    assert "tokens.parquet" in names(tmp_path / "r")
    write_run(tmp_path / "r", a_run(kind="ab"), none)
    assert names(tmp_path / "r") == ["run.json", "samples.parquet"]


def test_a_folder_behind_a_link_and_the_current_one(tmp_path, monkeypatch, swap):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", "1")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == ["a", "b"]
    monkeypatch.chdir(tmp_path / "real")
    for value in ("2", "3"):  # this process goes on in the new folder
        save(Path("."), value)
        assert Path("a").read_text() == (tmp_path / "real" / "a").read_text() == value


def test_what_is_mounted_is_refused_before_the_writing_too(tmp_path, monkeypatch):
    save(tmp_path / "run", "1")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("run"))
    for attempt in (check_folder, lambda path: save(path, "2")):
        with pytest.raises(UsageError, match="something is mounted there"):
            attempt(tmp_path / "run")
    assert (tmp_path / "run" / "a").read_text() == "1"
