"""`workbench/benchmarks/README.md` has every column and key, in the code's order, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import workbench as wb
from tests.benchmarks.made_runs import comparison
from workbench.benchmarks import proof
from workbench.benchmarks.energy import joules
from workbench.benchmarks.runs import results
from workbench.benchmarks.scores.perplexity import perplexity
from workbench.benchmarks.scores.token_source import sample
from workbench.config import Toggles

PAGE = Path(wb.__file__).parent / "benchmarks" / "README.md"
ROW = re.compile(r"^\| `([^`]+)` \|([^|]*)\|(.*)\|$")


def tables() -> dict[str, list[tuple[str, str, str]]]:
    """The rows of each table by the heading above it: name, unit or type, meaning."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif row := ROW.match(line):
            found.setdefault(heading, []).append((row[1], row[2].strip(), row[3].strip()))
    return found


@pytest.fixture(scope="module")
def made(loaded, tmp_path_factory) -> dict[str, list[str]]:
    """The columns and keys of what the code makes, by the heading that describes them."""
    folder = tmp_path_factory.mktemp("runs")
    loaded.reset()
    how = {"out": folder / "ab", "rounds": 1, "smoke": True, "tests": "tg2"}
    ab, bench = wb.ab(loaded, "sync=per_copy,packed", **how), wb.bench(loaded, "tg2", 1)
    perplexity(loaded, sample(loaded, 4, 0), against=Toggles(fuse_glu="on"), out=folder / "ppl")
    load = wb.serve_bench(loaded, slots=1, concurrency="1", n_prompt="2", n_gen="2", n_requests=1,
                          n_warm_up=1, out=folder / "serve")  # fmt: skip
    run = ab.run
    return {
        "`AB.to_frame()`, `Comparisons.to_frame()`": list(ab.to_frame()),
        "Energy, where it was counted": ["j_per_token_baseline", *joules.COLUMNS[3:]],
        "`AB.table()`": list(comparison().table()),
        "`Bench.to_frame()`": list(bench.to_frame()),
        "`ServeBench.to_frame()`": list(load.to_frame()),
        "`wb.check(...).to_frame()`": list(proof.COLUMNS),
        "`percentiles()` of an AB": list(ab.percentiles()),
        "`wb.runs(folder)`": list(wb.runs(folder)),
        "Keys of `run.json`": list(results.RUN_KEYS),
        "Keys of an entry of `arms`": list(results.ARM_KEYS),
        **{f"Keys of `{key}`": list(run[key]) for key in ("commit", "machine", "model", "engine")},
        "Keys of `result`, kind `ab`": list(run["result"]),
        "Keys of `result`, kind `bench`": list(bench.run["result"]),
        "Columns of `samples.parquet`": list(results.SAMPLE_SCHEMA.names),
        "Columns of `requests.parquet`, kind `serve`": pq.read_schema(
            folder / "serve" / results.REQUESTS
        ).names,
        "Columns of `tokens.parquet`, kind `perplexity`": pq.read_schema(
            folder / "ppl" / results.TOKENS
        ).names,
    }


@pytest.mark.long
def test_the_page_has_every_column_and_key_and_no_other(made):
    page = tables()
    described = {name: [row[0] for row in rows] for name, rows in page.items() if name in made}
    assert described == made
    assert set(page) - set(made) <= {"What can be compared"}
    assert all(meaning for rows in page.values() for _, _, meaning in rows)


def test_the_types_and_the_units_are_the_codes():
    page = tables()
    kinds = {name: kind for name, kind, _ in page["Keys of `run.json`"]}
    for name, kind in results.RUN_KEYS.items():
        accepted = kind if isinstance(kind, tuple) else (kind,)
        assert kinds[name] in [one.__name__ for one in accepted], name
    samples = {name: kind for name, kind, _ in page["Columns of `samples.parquet`"]}
    assert samples == {field.name: str(field.type) for field in results.SAMPLE_SCHEMA}
    for rows in page.values():
        for name, unit, _ in rows:
            if name.endswith("_us"):
                assert unit in ("us", "float"), name


def test_the_page_shows_calls_that_exist():
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(code, "page", "exec")
    assert set(re.findall(r"wb\.(\w+)", text)) <= set(dir(wb))
    assert max(map(len, text.splitlines())) <= 130
