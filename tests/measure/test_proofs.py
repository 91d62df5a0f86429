"""The proof table: what is recorded is what is proved again, and what the rows say."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pandas as pd
import pytest

from data.measure import proofs, readme
from data.measure.proofs import OUT, proved
from data.measure.races_of_record import record_rows
from data.measure.recorded import Recorded
from workbench.answers.proofs import proof_frame

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tiny_model) -> dict:
    return proved(tiny_model("tiny-llama", "Q8_0"))


@pytest.fixture(scope="module")
def rows(found) -> dict[tuple[str, str], dict]:
    return {(row["ordering"], row["run"]): row for row in found["rows"]}


def test_what_is_recorded_is_proved_again(found):
    assert json.loads(OUT.read_text()) == found


def test_the_mode_before_the_change_waits_in_vain_for_all_but_one_copy(rows):
    row = rows["per_copy, own", "decode"]
    assert row["races"] == 0 and row["waits"] == 13
    assert row["superfluous"] >= 5 and row["sufficient"] == 2
    assert row["because"] == "enough: the wait for the copy of inp_out_ids, the wait for the logits"
    assert rows["per_copy, compute", "decode"]["because"] == "enough: the wait for the logits"


def test_what_was_merged_is_safe_and_its_waits_are_two_more_than_a_decode_wants(rows):
    own, compute = (rows[f"copy_boundary, {s}", "decode"] for s in ("own", "compute"))
    assert own["races"] == compute["races"] == 0
    assert own["because"] == "enough: the wait behind the copies, the wait for the logits"
    assert compute["because"] == "enough: the wait for the logits"


@pytest.mark.parametrize(("ordering", "run", "says"), [
    ("write_read_boundary, own", "train", "before copy inp_embd on null:1 of the next step"),
    ("implicit, own", "decode", "nothing orders copy inp_embd on null:1 before launch rms_norm"),
    ("implicit, compute", "train", "nothing orders copy inp_pos on null:0 before write inp_pos"),
    ("event_guarded, own", "train", "nothing orders copy inp_pos on null:1 before write inp_pos"),
])  # fmt: skip
def test_what_races_says_between_which_commands(rows, ordering, run, says):
    assert rows[ordering, run]["races"] > 0 and says in rows[ordering, run]["because"]


def test_a_ring_mends_what_the_host_writes_and_nothing_else(found):
    """Pageable memory is no safer than pinned, and a ring on the device mends no mode."""
    races = {(row["ordering"], row["run"]): row["races"] for row in found["sources"]}
    assert all(set(by) == set(proofs.SOURCES) for by in races.values())
    safe = {key: {source for source, n in by.items() if not n} for key, by in races.items()}
    rings = {"pinned_ring_2", "pinned_ring_4"}
    racing = {key: sources for key, sources in safe.items() if sources != set(proofs.SOURCES)}
    assert racing == {
        ("implicit, own", "decode"): set(),
        ("implicit, own", "train"): set(),
        ("write_read_boundary, own", "train"): set(),
        ("implicit, compute", "train"): rings,
        ("packed_implicit, own", "decode"): set(),
        ("packed_implicit, own", "train"): set(),
        ("packed_implicit, compute", "train"): rings,
        ("event_guarded, own", "train"): rings,
    }


def test_every_race_of_record_is_there_before_its_fix_and_not_after():
    table = pd.DataFrame(record_rows())
    assert set(table["thread"]) >= {"#20463", "#26040", "#20927", "#14855", "#8897"}
    assert (table["before"] > 0).all() and (table["after"] == 0).all()
    assert {"of the thread", "reconstructed"} == set(table["pair"])
    assert "copy inp_embd (step 0, split 1)" in table["first"].tolist()


def test_readme_has_the_table(tmp_path):
    page = (ROOT / "data/results/README.md").read_text()
    assert readme.made("proofs", Recorded(OUT.parent)) in page
    assert readme.made("proofs", Recorded(tmp_path)) == "Proofs: not measured."


def test_reasons_are_shown_whole(found):
    table = proof_frame(found["rows"])
    longest = max(table["because"], key=len)
    assert len(longest) > 100 and longest in html.unescape(table._repr_html_())
