"""What orderings that race do on real devices: how it is recorded, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench as wb
from data.measure import racing
from data.measure.matrix import RACED
from data.measure.racing import lines, said
from data.measure.recorded import Recorded

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "data" / "results" / f"cuda-pipeline-races-{RACED}.json"


@pytest.mark.slow
def test_orderings_without_a_race_give_the_answer_and_others_are_counted(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(racing, "N_UBATCH", 16)
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=144, n_ubatch=16, n_seqs=1,
        n_devices=2, threads=2, unsafe=True, toggles=wb.Toggles(graph_reuse="set_rows"),
    ) as engine:  # fmt: skip
        found = racing.compared(engine, quick=True)
    assert not any(any(o["differing"]) for o in found["orderings"] if not o["races"])
    assert sum(any(o["differing"]) for o in found["orderings"]) > 10, said(found)
    assert found["logits"] == 16 * 1024


@pytest.mark.skipif(not FILE.is_file(), reason="not recorded on two GPUs")
def test_on_two_gpus_only_orderings_that_race_gave_other_logits():
    found = json.loads(FILE.read_text())
    assert found["engine"]["config"]["n_devices"] == 2
    assert not any(any(o["differing"]) for o in found["orderings"] if not o["races"])
    table = [line.values for line in lines(Recorded(FILE.parent))]
    assert sum(int(row["orderings"]) for row in table) == len(found["orderings"])
    gave = sum(bool(o["races"]) and any(o["differing"]) for o in found["orderings"])
    assert sum(int(row["gave other logits"]) for row in table) == gave
    assert {row["safe ones that did"] for row in table} == {"0"}
