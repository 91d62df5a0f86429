"""What the notebooks show as recorded: one run of all of them, of one model, card and commit, in
which every effect can be told from noise."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from tests.notebooks.record import MADE
from workbench.answers import kept, skipped
from workbench.answers.loaded import CONTROL, SERVING, SUSPECTS, load_steady, slug, speedups
from workbench.benchmarks.compare.comparison import AB
from workbench.engine.cache.extent import WAYS

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "results"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DECIDED = ("faster", "slower", "same work", "A/A control")
UNTOLD = 0.03  # the largest effect that a recorded table may leave undecided
# of 23 sets in turn, and of loads one after the other: a host's noise is longer than a round there
UNTOLD_OF = {"notebook-together": 0.06, "served": 0.06}


def shown(path: Path) -> str:
    cells = nbformat.read(path, 4).cells
    outputs = [out for cell in cells if cell.cell_type == "code" for out in cell.outputs]
    texts = [out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs]
    return "\n".join(texts)


def folders() -> list[Path]:
    return [RUNS / f"notebook-{end}" for ends in MADE.values() for end in ends]


def test_every_run_is_of_one_card_one_model_and_one_commit():
    runs = [json.loads((path / "run.json").read_text()) for path in folders()]
    (device,) = {run["engine"]["device_description"] for run in runs}
    assert "NVIDIA" in device
    assert len({run["model"]["hash"] for run in runs}) == 1
    assert len({run["commit"]["hash"] for run in runs}) == 1
    assert len({run["started"][:10] for run in runs}) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=attrgetter("stem"))
def test_what_is_shown_has_the_parameters_in_view(path):
    """The device was chosen, since the cell in view has `device = "auto"`."""
    said, device = shown(path), json.loads((RUNS / "notebook-tour" / "run.json").read_text())
    assert device["engine"]["device_description"] in said and "(as asked)" not in said
    commits = set(re.findall(r"commit ([0-9a-f]{8}), 20\d\d-\d\d-\d\dT", said))
    assert commits <= {device["commit"]["hash"][:8]}


def rows() -> pd.DataFrame:
    """The rows of all comparisons: of t/s, of requests of random lengths, of a steady load."""
    found = []
    for path in folders():
        if json.loads((path / "run.json").read_text())["kind"] == "ab":
            found.append(AB.load(path).summary().assign(of=path.name))
    ragged = {way: RUNS / f"notebook-ragged-{way.replace('_', '-')}" for way in WAYS}
    ragged[skipped.AGAIN] = RUNS / "notebook-ragged-off-again"
    frame = skipped.ragged_frame(ragged)
    found.append(frame[~frame["is_control"]].assign(of="ragged", test=frame["phase"]))
    served = {name: load_steady(RUNS / f"notebook-served-{slug(name)}")
              for name in (SERVING, *SUSPECTS, CONTROL)}  # fmt: skip
    found.append(speedups(served).assign(of="served", test="", label=lambda f: f["setting"]))
    return pd.concat(found, ignore_index=True)


@pytest.mark.long
def test_no_table_has_an_effect_that_its_noise_swallows():
    every = rows()
    assert len(every) > 80
    undecided = every[~every["verdict"].isin(DECIDED)]
    most = undecided["of"].map(UNTOLD_OF).fillna(UNTOLD)
    large = undecided[(undecided["speedup"] - 1).abs() > most]
    assert large[["of", "test", "label", "speedup", "verdict"]].to_numpy().tolist() == []


def test_a_quote_of_the_results_is_the_page_s():
    assert kept.recorded_verdict() in shown(ROOT / "notebooks" / "03_graph_reuse.ipynb")
