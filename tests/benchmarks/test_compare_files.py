"""Files of llama-bench beside run folders: every form, several builds, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3

import numpy as np
import pytest

from tests.benchmarks.made_runs import write
from workbench.benchmarks.compare.compare import AVERAGES, HISTORY, METHOD, compare
from workbench.benchmarks.compare.stats import SAME, SLOWER
from workbench.benchmarks.llama.llama_files import llama_rows
from workbench.benchmarks.llama.llama_format import FIELDS, TABLE, csv_of, sql_of
from workbench.common.errors import UsageError

DAY = "2026-11-21"


def a_row(tps=(100.0,) * 6, **changes):
    """A row of llama.cpp's llama-bench, with every field."""
    usual = {str: "none", int: 0, bool: False, float: 0.0}
    row = {name: usual[kind] for name, kind in FIELDS.items()} | {
        "build_commit": "fade123", "cpu_info": "A CPU", "gpu_info": "", "backends": "CPU",
        "model_filename": "models/tiny.gguf", "model_type": "llama 2M Q8_0", "n_threads": 2,
        "model_n_params": 1_700_000, "n_gen": 8, "test_time": f"{DAY}T12:00:00Z",
        "avg_ts": float(np.mean(tps)), "stddev_ts": 1.0, "avg_ns": 10, "stddev_ns": 1,
    }  # fmt: skip
    return row | changes | {"samples_ts": list(tps), "samples_ns": [1] * len(tps)}


ROWS = [a_row(np.linspace(99, 101, 6)), a_row(np.linspace(990, 1010, 6), n_gen=0, n_prompt=16)]


def bare(rows):
    return [{name: row[name] for name in FIELDS} for row in rows]


def save(path, rows):
    """Writes rows in the form that the name of the file says."""
    form = path.suffix[1:]
    if form in ("db", "sqlite"):
        with sqlite3.connect(path) as database:
            database.executescript(sql_of(TABLE, FIELDS, bare(rows)))
        database.close()
        return path
    path.write_text({
        "json": lambda: json.dumps(rows, indent=2),
        "jsonl": lambda: "".join(json.dumps(row) + "\n" for row in rows),
        "csv": lambda: csv_of(FIELDS, bare(rows)),
        "sql": lambda: sql_of(TABLE, FIELDS, bare(rows)),
    }[form]())  # fmt: skip
    return path


@pytest.fixture
def ours(tmp_path):
    """A run folder of the same model, half as fast at tg8."""
    return write(
        tmp_path, "ours", {"tg8": 50.0, "pp16": 1000.0}, n=6,
        model={"name": "tiny", "quant": "Q8_0", "hash": "h1", "n_params": 1_700_000},
    )  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_forms_with_repetitions_are_judged_beside_a_run_folder(tmp_path, ours, form):
    found = compare(save(tmp_path / f"a.{form}", ROWS), ours)
    assert {row.sides.after.test: row.verdict for row in found.rows} == {
        "tg8": SLOWER,
        "pp16": SAME,
    }
    assert {(len(row.sides.before.tps), len(row.sides.after.tps)) for row in found.rows} == {(6, 6)}
    constant = found.table().attrs["constant"]
    assert constant["Engine"] == "build fade123, CPU -> workbench"
    assert constant["Toggles"] == "everything off"
    assert not found.unmatched().size and "fade123 -> aaaaaaaa" in " ".join(found.lines)
    back = compare(ours, save(tmp_path / f"b.{form}", ROWS))
    assert back.summary()["engine"][0] == "workbench -> build fade123, CPU"
    alone = compare(tmp_path / f"a.{form}", tmp_path / f"a.{form}").table()
    assert "Toggles" not in alone.attrs["constant"] and "Toggles" not in alone
    one = save(tmp_path / f"one.{form}", [a_row((100.0,))])
    assert not any("averages only" in line for line in compare(one, ours).lines)


@pytest.mark.parametrize("form", ["csv", "sql", "db", "sqlite"])
def test_forms_with_averages_have_ratios_and_no_verdict(tmp_path, ours, form):
    path = save(tmp_path / f"a.{form}", ROWS)
    assert [row.test for row in llama_rows(path)] == ["tg8", "pp16"]
    found = compare(path, ours)
    assert {row.verdict for row in found.rows} == {AVERAGES}
    assert found.summary()["speedup"][0] == pytest.approx(0.5, rel=0.02)
    assert any(f"a.{form} has averages only" in line for line in found.lines)
    assert "resampled" not in "".join(found.lines) and not set(METHOD) & set(found.lines)
    table = found.table()
    assert table["t/s baseline"].tolist() == ["100.00 ± 1.00", "1000.00 ± 1.00"]
    assert table["n"].tolist() == ["-/6"] * 2 and not {"95% CI", "can tell"} & set(table)


@pytest.mark.parametrize("form", ["csv", "sql", "db"])
def test_a_setting_has_one_type_in_every_form(tmp_path, form):
    """csv has text, and SQLite has 0 for false. What differs is still told."""
    rows = [row | {"n_batch": 512, "no_kv_offload": True, "tensor_split": "0.00"} for row in ROWS]
    json_file, other = save(tmp_path / "a.json", rows), save(tmp_path / f"b.{form}", rows)
    assert llama_rows(other)[0].fields.items() <= llama_rows(json_file)[0].fields.items()
    assert not any("other settings" in line for line in compare(json_file, other).lines)
    more = save(tmp_path / f"c.{form}", [row | {"n_batch": 1024} for row in rows])
    assert f"c.{form}: other settings: n_batch 512 -> 1024" in compare(json_file, more).lines


def test_the_form_follows_from_the_content_and_not_from_the_name(tmp_path, ours):
    renamed = save(tmp_path / "a.jsonl", ROWS).rename(tmp_path / "a.txt")
    assert len(compare(renamed, ours).rows) == 2


def test_one_file_with_two_builds_has_both_sides(tmp_path):
    rows = [*ROWS, *(row | {"build_commit": "b2"} for row in ROWS)]
    for form in ("jsonl", "db"):
        found = compare(save(tmp_path / f"both.{form}", rows))
        assert [side.name for side in found.sides] == [f"both.{form} fade123", f"both.{form} b2"]
        assert found.summary()["speedup"].tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match="two runs or more"):
        compare(save(tmp_path / "one.json", ROWS))


def test_settings_that_vary_in_a_file_are_arms(tmp_path):
    rows = [a_row((t * 50.0,) * 6, n_threads=t) for t in (1, 2)]
    a, b = save(tmp_path / "a.json", rows), save(tmp_path / "b.json", rows)
    found = compare(a, b)
    assert [row.sides.after.arm for row in found.rows] == ["n_threads=1", "n_threads=2"]
    assert found.summary()["speedup"].tolist() == [1.0, 1.0]
    other = [row | {"n_batch": 512} for row in ROWS]
    found = compare(save(tmp_path / "c.json", ROWS), save(tmp_path / "d.json", other))
    assert "d.json: other settings: n_batch 0 -> 512" in found.lines


def test_rows_that_are_alike_are_repetitions(tmp_path):
    one, two = a_row((100.0, 101.0)), a_row((102.0, 103.0))
    path = save(tmp_path / "a.jsonl", [one, two])
    (row,) = compare(path, path).rows
    assert row.sides.after.tps.tolist() == [100.0, 101.0, 102.0, 103.0]
    averages = save(tmp_path / "a.csv", [one, two])
    (row,), lines = (found := compare(averages, averages)).rows, found.lines
    assert row.has_interval and row.sides.after.n == 2
    assert any("a.csv has averages only" in line for line in lines)


@pytest.mark.parametrize(("changes", "why"), [
    ({"test_time": "2026-11-22T00:00:00Z"}, "another day"),
    ({"cpu_info": "B"}, "another processor"),
    ({"gpu_info": "NVIDIA H100"}, "another gpu"),
])  # fmt: skip
def test_another_machine_or_day_is_history(tmp_path, ours, changes, why):
    found = compare(save(tmp_path / "a.json", [row | changes for row in ROWS]), ours)
    assert {row.verdict for row in found.rows} == {HISTORY} and why in " ".join(found.lines)
    assert compare(tmp_path / "a.json", ours, across=True).rows[0].verdict == SLOWER


@pytest.mark.parametrize(("changes", "matches"), [
    ({"model_type": "llama 2M Q8_0 - Medium"}, True), ({"model_type": "llama 2M Q4_0"}, False),
    ({"model_n_params": 1_700_001}, False),
])  # fmt: skip
def test_a_model_is_known_by_its_parameters_and_type(tmp_path, ours, changes, matches):
    found = compare(save(tmp_path / "a.json", [row | changes for row in ROWS]), ours)
    assert bool(found.rows) == matches and bool(found.unmatched().size) != matches


def test_run_folders_of_two_models_are_not_one_by_their_parameters(tmp_path, ours):
    other = write(
        tmp_path, "other", {"tg8": 50.0},
        model={"name": "another", "quant": "Q8_0", "hash": "h2", "n_params": 1_700_000},
    )  # fmt: skip
    assert not compare(ours, other).rows


def test_files_of_older_versions_lack_fields(tmp_path, ours):
    old = [{k: row[k] for k in ("build_commit", "model_type", "model_n_params", "n_prompt", "n_gen",
                                "avg_ts", "test_time", "cpu_info", "gpu_info")}
           for row in ROWS]  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, list(old[0]))
    writer.writeheader()
    writer.writerows(old)
    (tmp_path / "old.csv").write_text(text.getvalue() + text.getvalue())
    assert {row.sides.after.test for row in compare(tmp_path / "old.csv", ours).rows} == {
        "tg8", "pp16"
    }  # fmt: skip


def test_our_engine_has_one_name_in_every_form(tmp_path, ours):
    """llama.cpp calls no device as we do."""
    rows = [row | {"devices": "host", "toggles": {"fuse_qkv": "on"}} for row in ROWS]
    a, b = save(tmp_path / "a.json", rows), save(tmp_path / "b.csv", rows)
    for before, after in ((a, b), (b, a), (ours, b), (b, b)):
        assert compare(before, after).table().attrs["constant"]["Engine"] == "workbench"
    cuda = save(tmp_path / "c.csv", [row | {"devices": "CUDA0"} for row in ROWS])
    assert compare(a, cuda).summary()["engine"][0] == "workbench -> build fade123, CPU"


def test_our_own_rows_keep_their_toggles(call, tiny_model, tmp_path):
    ask = ("bench", "-m", tiny_model("tiny-llama", "Q8_0"), "-p", 0, "-n", 2, "-r", 5, "--device",
           "host", "-o", "jsonl", "--fuse", "on")  # fmt: skip
    status, out, _ = call(*ask, "--out", tmp_path / "run")
    (tmp_path / "ours.jsonl").write_text(out)
    found = compare(tmp_path / "ours.jsonl", tmp_path / "run")
    (row,) = found.rows
    assert status == 0 and row.ratio.value == pytest.approx(1.0) and row.sides.differ == []
    assert "fuse=on" in row.sides.after.label and row.verdict == SAME


WRONG = {
    "cut json": ("a.json", lambda content: content[:300], "cut, or no file of llama-bench's json"),
    "cut jsonl": ("a.jsonl", lambda content: content[:300], "cut"),
    "cut csv": ("a.csv", lambda content: content[:-9], "cut"),
    "cut sqlite": ("a.db", lambda content: content[:2000], "cut"),
    "cut sql": ("a.sql", lambda content: content[:-9], "cut"),
    "empty": ("a.json", lambda content: b"", "has no rows of llama-bench"),
    "no rows": ("a.json", lambda content: b"[]", "has no rows of llama-bench"),
    "text": ("a.txt", lambda content: b"hello", "has no rows of llama-bench; compare takes"),
    "binary": ("a.bin", lambda content: b"\xff\xfe\0", "cut, or no file"),
    "other json": ("a.json", lambda content: b'[{"name": 1}]', "row 1 has no build_commit"),
    "a number": ("a.json", lambda content: b"[3]", "row 1 is no object"),
    "no rate": ("a.json", lambda c: json.dumps([a_row((0.0,))]).encode(), "not above 0"),
    "not a rate": ("a.json", lambda c: json.dumps([a_row() | {"samples_ts": ["x"]}]).encode(),
                   "holds no numbers"),
    "a spread below 0": ("a.json", lambda c: json.dumps([a_row(stddev_ts=-1.0)]).encode(),
                         "row 1 has a standard deviation that is no number of 0 or more: -1.0"),
    "endless spread": ("a.csv", lambda c: csv_of(FIELDS, bare([a_row(stddev_ts="inf")])).encode(),
                       "deviation that is no number of 0 or more: inf"),
    "no spread": ("a.json", lambda c: json.dumps([a_row(stddev_ts=np.nan)]).encode(), ": nan"),
    "no tokens": ("a.json", lambda c: json.dumps([a_row() | {"n_gen": 0}]).encode(), "no tokens"),
    "sql that does more": ("a.sql", lambda c: b"CREATE TABLE t (a);\nATTACH 'evil.db' AS e;",
                           "not authorized"),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_cut_and_foreign_files_are_one_line(call, tmp_path, monkeypatch, ours, how):
    monkeypatch.chdir(tmp_path)
    name, spoil, says = WRONG[how]
    source = name if name.rpartition(".")[2] in ("json", "jsonl", "csv", "db", "sql") else "a.json"
    save(tmp_path / source, ROWS)
    content = (tmp_path / source).read_bytes()
    (tmp_path / source).unlink()
    (tmp_path / name).write_bytes(spoil(content))
    status, out, err = call("compare", name, "ours", "--out", "page.html")
    assert (status, out, err.count("\n")) == (2, "", 1) and says in err and name in err
    assert sorted(os.listdir()) == sorted([name, "ours"])


def test_the_command_takes_both_and_writes_a_page(call, tmp_path, ours):
    page = tmp_path / "page.html"
    status, out, err = call("compare", save(tmp_path / "a.json", ROWS), ours, "--out", page)
    assert status == 0 and "tg8" in out and "slower" in out and f"page: {page}" in err
    assert "Is it faster than a.json? ours" in page.read_text()
    status, out, err = call("compare", tmp_path / "a.json", ours, "--step", "x", "--out", page)
    assert (status, out, err.count("\n")) == (2, "", 1) and "--step is of traces" in err
