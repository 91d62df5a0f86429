"""The one function behind every table of the pages: templates, captions, and what is absent."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from data.measure.recorded import Recorded, Share
from data.measure.tables import Line, Table, block, facts, filled, span


class Made(NamedTuple):
    run: dict


def run_of(device: str = "a GPU", **result: object) -> Made:
    return Made(
        {
            "engine": {"device_description": device}, "commit": {"hash": "f" * 40, "dirty": False},
            "started": "2026-01-02T03:04:05Z", "repetitions": 5, "tests": ["tg8"], "result": result,
        }
    )  # fmt: skip


RECORDED = Recorded(Path("nowhere"))
LINES = [
    Line({"name": "a", "share": Share(0.5)}, [run_of("one", read_gbps=10.4)]),
    Line({"name": "b", "share": None}, [run_of("two", read_gbps=11.6)]),
]
CELLS = {"Name": "{name}", "%": "{share:.1f}"}


def made(*parts: object) -> list[str]:
    return block(parts, RECORDED).splitlines()


def test_a_share_is_written_as_a_percentage_and_counts_as_a_fraction():
    assert f"{Share(0.5):.1f}" == "50.0" and Share(0.5) == 0.5 and max(Share(0.1), 0.2) == 0.2


def test_a_cell_with_a_value_that_is_missing_is_empty():
    assert filled("{a:.1f} of {b}", {"a": 1.0, "b": 2}) == "1.0 of 2"
    assert filled("{a:.1f} of {b}", {"a": None, "b": 2}) == ""


def test_a_table_is_its_lines_and_a_caption_of_its_runs():
    head, _, first, second, _, said = made(
        Table("T", lambda _: LINES, CELLS, "{read} GB/s, {n} times")
    )
    assert [part.strip() for part in head.split("|")[1:-1]] == ["Name", "%"]
    assert "50.0" in first and second.split("|")[2].strip() == ""
    assert said == "one and two; 10 to 12 GB/s, 5 times; commit ffffffff; 2026-01-02."


def test_each_device_can_have_a_caption_of_its_own():
    *_, said = made(Table("T", lambda _: LINES, CELLS, "", by_device=True))
    assert said == "one; commit ffffffff; 2026-01-02. two; commit ffffffff; 2026-01-02."


def test_what_was_not_measured_is_said_once():
    empty = Table("Gaps", lambda _: [], None, "")
    assert made(empty, "From row to row:", Table("", lambda _: [])) == ["Gaps: not measured."]
    missing = Table("T", lambda _: [Line({"name": "a", "verdict": "not measured"})], None, "")
    assert made(missing) == ["T: not measured."], "lines without any run"
    told = made(Table("T", lambda _: LINES, CELLS), "Behind it.", lambda recorded: "And this.")
    assert told[-3:] == ["Behind it.", "", "And this."]


def test_captions_tell_of_all_runs():
    found = facts([run_of(read_gbps=1.0, product_tflops=7.0), run_of()])
    assert (found["read"], found["peak"], found["n"], found["tests"]) == ("1", "7", "5", "tg8")
    assert span([]) == "" and span([2.6, 1.2]) == "1 to 3" and span([1.0, 1.2]) == "1"
