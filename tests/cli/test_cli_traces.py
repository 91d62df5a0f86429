"""`compare` on traces: what takes longer, on the terminal and on a page; and what it refuses."""

from __future__ import annotations

import gzip
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import workbench as wb
from tests.benchmarks.test_compare_files import ROWS, save
from tests.trace.test_critical_paths import longer
from tests.trace.test_trace_files import step
from tests.trace.test_trace_imports import FILES
from workbench.trace.spans import Recorded


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Traces of three steps; in the second a kernel of layer 0 takes 20 us longer."""
    paths = [tmp_path / "a.json", tmp_path / "b.pftrace.gz"]
    for path, us in zip(paths, (0, 20), strict=True):
        spans = [s for n in range(3) for s in longer(step(n, 120 * n), "q-0", us)]
        wb.Profile(Recorded(spans, "events", source=f"a note of {us}")).save(path)
    return paths


def test_what_takes_longer_is_printed_and_on_a_page(call, two, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # a narrower terminal gets the columns in two tables
    page = tmp_path / "new" / "page.html"
    status, out, err = call("compare", *two, "--out", page)
    assert status == 0, err
    first, *rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert [c.strip() for c in first.strip("|").split("|")] == [
        "where", "what", "calls", "us before", "us after", "delta us", "% of step",
    ]  # fmt: skip
    assert [c.strip() for c in rows[0].strip("|").split("|")] == [
        "device", "mul_mat, layer 0", "1 -> 1", "10.0", "30.0", "20.0", "20.0",
    ]  # fmt: skip
    assert "a step, traced: 100.0 us before, 100.0 us after (+0.0%); the largest" in out
    assert "change: device, mul_mat, layer 0, +20.0 us" in " ".join(out.split())
    assert "before: a.json: a note of 0" in out and "after: b.pftrace.gz: a note of 20" in out
    assert "after: critical path of step 1: 100.0 us = host" in out
    assert f"page: {page}" in err
    text = page.read_text()
    assert "What takes longer in b.pftrace.gz than in a.json?" in text and "layer 1" in text


def test_a_foreign_trace_is_compared_by_its_kernels(call, tmp_path):
    files = [FILES / f"nsys-{name}-node.sqlite.gz" for name in ("llama", "ours")]
    how = "--step", "cu(da)?GraphLaunch", "--out", tmp_path / "page.html"
    status, out, err = call("compare", *files, *how)
    assert status == 0, err
    assert "mul_mat_vec_q<(ggml_typ..." in out and "product_norm" in out
    assert "more rows are on the page" in err
    assert max(map(len, (row for row in out.splitlines() if row.startswith("|")))) <= 100


def test_what_is_no_pair_of_traces_is_refused_and_nothing_written(call, two, tmp_path):
    page = tmp_path / "page.html"
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes((FILES / "kineto-graph.json.gz").read_bytes()[:-9])
    export, foreign = tmp_path / "cut.sqlite", tmp_path / "foreign.sqlite"
    export.write_bytes(gzip.decompress((FILES / "nsys-llama-node.sqlite.gz").read_bytes())[:3000])
    with closing(sqlite3.connect(foreign)) as made:
        made.execute("create table other (x)")
    refused = [
        ([*two, two[0]], "3 traces were given; give two"),
        ([two[0], tmp_path / "no"], "no does not exist; name two traces"),
        ([two[0], tmp_path], "is a trace and .* is none"),
        ([*two, "--across"], "traces have no verdict"),
        ([*two, "--step", "5"], "--step '5' is of traces of other tools, and these two have steps"),
        ([two[0], FILES / "nsys-llama-node.sqlite.gz"], "has no steps"),
        ([two[0], cut], "cut.json.gz is cut or damaged"),
        ([two[0], export], "cut.sqlite is cut"),
        ([foreign, two[0]], "foreign.sqlite .* nsys"),
    ]
    for given, words in refused:
        status, out, err = call("compare", *given, "--out", page)
        assert status == 2 and out == "", given
        (line,) = err.splitlines()
        assert re.search(words, line), line
        assert not page.exists()


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "sql", "sqlite"])
def test_a_trace_beside_a_file_of_llama_bench_is_refused_by_what_each_is(call, two, tmp_path, form):
    of_llama = save(tmp_path / f"runs.{form}", ROWS)
    for given in ([two[1], of_llama], [of_llama, two[1]]):
        status, out, err = call("compare", *given, "--out", tmp_path / "page.html")
        assert (status, out, err.count("\n")) == (2, "", 1), given
        assert f"b.pftrace.gz is a trace and {of_llama} is a file of llama-bench; compare" in err
        assert "traces with traces" in err and not (tmp_path / "page.html").exists()
