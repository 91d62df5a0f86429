"""Of which sources a run is, said and marked where they are older; and how tables are written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.measure import readme, sources
from data.measure.recorded import NOT_MEASURED, Recorded, Share
from data.measure.sources import age, mark, source_hash, unmarked
from data.measure.tables import Line, Table, block, filled, n_rounds, span
from workbench.common.errors import WorkbenchError

OLDER = " (older sources: no evidence of today's times)"
ROOT = Path(__file__).resolve().parents[2]


def of(commit: str) -> dict:
    return {"commit": {"hash": commit, "dirty": False}, "started": "2026-01-02T03:04:05+00:00"}


def test_a_run_of_older_sources_is_marked(tmp_path, monkeypatch):
    """In a checkout of two commits, of which the second changed a kernel."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "kernels").mkdir()
    made = []
    for content in ("old", "new"):
        (tmp_path / "kernels" / "rows.cu").write_text(content)
        git("add", "-A")
        git("commit", "-qm", content)
        made.append(git("rev-parse", "HEAD"))
    old, new = made
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "_has_changed", sources._has_changed.__wrapped__)
    assert age(of(new)) == f"commit {new[:8]}, 2026-01-02"
    assert age(of(old)) == f"commit {old[:8]}, 2026-01-02{OLDER}" != unmarked(age(of(old)))
    assert mark(of(new), of(old)) == OLDER and mark(of(new)) == mark(of("f" * 40)) == mark() == ""
    for name, commit, date in (("a", old, "01"), ("b", new, "03"), ("c", new, "02")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        run = of(commit) | {"started": f"2026-01-{date}"}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(run))
    assert sources.commits(Recorded(tmp_path / "runs")).splitlines()[2:] == [
        f"- commit {new[:8]}, 2026-01-02: 2 runs",
        f"- commit {old[:8]}, 2026-01-01{OLDER}: 1 run",
    ]
    (tmp_path / "kernels" / "rows.cu").write_text("newer")
    assert mark(of(new)) == OLDER, "what is not committed counts"


def test_sources_are_kernels_and_backends(tmp_path):
    for folder in sources.FOLDERS:
        (tmp_path / folder / "deep").mkdir(parents=True)
    seen = [source_hash(tmp_path)]
    for path in ("kernels/a.cu", "kernels/b.cuh", "workbench/backend/deep/c.py",
                 "kernels/README.md", "workbench/d.py"):  # fmt: skip
        (tmp_path / path).write_text("x")
        seen.append(source_hash(tmp_path))
    assert len(set(seen[:4])) == 4 and len(set(seen[3:])) == 1
    found = {"source_hash": source_hash(), "date": "2026-01-02T03"}
    assert age(found) == f"sources {source_hash()[:8]}, 2026-01-02"
    assert age(found | {"source_hash": "0123456789"}) == f"sources 01234567, 2026-01-02{OLDER}"


def run_of(device: str, **result: object) -> SimpleNamespace:
    run = of("f" * 40) | {"engine": {"device_description": device}, "repetitions": 5}
    return SimpleNamespace(run=run | {"tests": ["tg8"], "result": result})


def test_a_table_is_its_lines_and_a_caption_of_its_runs():
    lines = [
        Line({"name": "a", "share": Share(0.5)}, [run_of("one", read_gbps=10.4)]),
        Line({"name": "b", "share": None}, [run_of("two", read_gbps=11.6)]),
    ]

    def made(*parts: object) -> list[str]:
        return block(parts, Recorded(Path("nowhere"))).splitlines()

    columns = {"Name": "{name}", "%": "{share:.1f}"}
    table = Table("T", lambda _: lines, columns, "{read} GB/s, {n} times")
    head, _, first, second, _, said = made(table)
    assert [part.strip() for part in head.split("|")[1:-1]] == ["Name", "%"]
    assert "50.0" in first and second.split("|")[2].strip() == ""
    assert said == "one and two; 10 to 12 GB/s, 5 times; commit ffffffff; 2026-01-02."
    *_, said = made(Table("T", lambda _: lines, columns, "", by_device=True))
    assert said == "one; commit ffffffff; 2026-01-02. two; commit ffffffff; 2026-01-02."
    empty = Table("Gaps", lambda _: [], None, "")
    assert made(empty, "From row to row:", Table("", lambda _: [])) == ["Gaps: not measured."]
    told = made(table, empty, "Behind it.", lambda recorded: "And this.")
    assert told[-3:] == ["Behind it.", "", "And this."], "one was measured"
    assert filled("{a:.1f} of {b}", {"a": None, "b": 2}) == "" == span([])
    assert span([2.6, 1.2]) == "1 to 3" and span([1.0, 1.2]) == "1"
    assert [*map(n_rounds, ([5, 5], [10, 5], [44, 5, 10]))] == ["5", "5 and 10", "5 to 44"]


@pytest.mark.parametrize("name", readme.BLOCKS)
def test_a_page_can_be_made_without_runs(tmp_path, name):
    """What reads no run stands on its page as it is; all else says that it was not measured."""
    made = readme.made(name, Recorded(tmp_path))
    pages = "".join((ROOT / page).read_text() for page in readme.PAGES)
    assert NOT_MEASURED in made or made in pages, f"{name} is out of date: run `make readme`"
    with pytest.raises(WorkbenchError, match="'speed' is not one of"):
        readme.fill("<!-- begin speed -->\n<!-- end speed -->", tmp_path)
