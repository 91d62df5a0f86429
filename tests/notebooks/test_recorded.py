"""What the notebooks show as recorded: one run of all of them, of one model, card and commit, in
which every effect can be told from noise."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.record import MADE, TOOK
from tests.notebooks.told import held_up, rows, untold
from workbench.answers import kept

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "results"
MOST_S = 300.0  # all notebooks on one GPU, with kernels to compile
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def shown(path: Path) -> str:
    cells = nbformat.read(path, 4).cells
    outputs = [out for cell in cells if cell.cell_type == "code" for out in cell.outputs]
    texts = [out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs]
    return "\n".join(texts)


def folders() -> list[Path]:
    made = {f"notebook-{end}" for ends in MADE.values() for end in ends}
    assert {path.name for path in RUNS.glob("notebook-*")} == made
    return [RUNS / name for name in sorted(made)]


def test_every_run_is_of_one_card_one_model_and_one_commit():
    runs = [json.loads((path / "run.json").read_text()) for path in folders()]
    (device,) = {run["engine"]["device_description"] for run in runs}
    assert "NVIDIA" in device
    assert len({run["model"]["hash"] for run in runs}) == 1
    assert len({run["commit"]["hash"] for run in runs}) == 1
    assert len({run["started"][:10] for run in runs}) == 1


def test_all_of_them_take_five_minutes_at_most():
    seconds = json.loads((RUNS / TOOK).read_text())
    assert [*seconds] == [path.stem for path in NOTEBOOKS]
    assert sum(seconds.values()) <= MOST_S


@pytest.mark.parametrize("path", NOTEBOOKS, ids=attrgetter("stem"))
def test_what_is_shown_has_the_parameters_in_view(path):
    """The device was chosen, since the cell in view has `device = "auto"`."""
    said, device = shown(path), json.loads((RUNS / "notebook-tour" / "run.json").read_text())
    assert device["engine"]["device_description"] in said and "(as asked)" not in said
    commits = set(re.findall(r"commit ([0-9a-f]{8}), 20\d\d-\d\d-\d\dT", said))
    assert commits <= {device["commit"]["hash"][:8]}


@pytest.mark.long
def test_no_table_has_an_effect_that_its_noise_swallows():
    every = rows(RUNS)
    assert len(every) > 80
    large = untold(every)
    assert large[["of", "test", "label", "speedup", "verdict"]].to_numpy().tolist() == []


def test_requests_that_come_one_by_one_find_a_free_slot():
    assert not held_up(RUNS)


def test_a_quote_of_the_results_is_the_page_s():
    assert kept.recorded_verdict() in shown(ROOT / "notebooks" / "03_graph_reuse.ipynb")
