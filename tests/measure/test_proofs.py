"""The proof table: what is recorded is what is proved again, and what the rows say."""

from __future__ import annotations

import json

import pytest

from data.measure import proofs
from data.measure.arena_peaks import MODELS, peaks
from data.measure.arena_peaks import OUT as PEAKS
from data.measure.proofs import OUT, proved
from tests.profiles import share
from workbench.config import Lifetimes

pytestmark = pytest.mark.long  # all orderings are proved


@pytest.fixture(scope="module")
def found(tiny_model) -> dict:
    return proved(tiny_model("tiny-llama", "Q8_0"))


def by_ordering(rows: list[dict]) -> dict[tuple[str, str], dict]:
    return {(row["ordering"], row["run"]): row for row in rows}


def test_what_is_recorded_is_proved_again(found):
    assert json.loads(OUT.read_text()) == found


def test_waits_of_modes_are_enough_and_more_or_less(found):
    """Before the change all but one copy are waited for in vain; what was merged is safe."""
    rows = by_ordering(found["rows"])
    row = rows["per_copy, own", "decode"]
    assert (row["races"], row["waits"], row["sufficient"]) == (0, 13, 2) and row["superfluous"] >= 5
    assert row["because"] == "enough: the wait for the copy of inp_out_ids, the wait for the logits"
    assert rows["per_copy, compute", "decode"]["because"] == "enough: the wait for the logits"
    own, compute = (rows[f"copy_boundary, {s}", "decode"] for s in ("own", "compute"))
    assert own["races"] == compute["races"] == 0
    assert own["because"] == "enough: the wait after the copies, the wait for the logits"
    assert compute["because"] == "enough: the wait for the logits"


@pytest.mark.parametrize(("ordering", "run", "says"), [
    ("write_read_boundary, own", "train", "before copy inp_embd on null:1 of the next step"),
    ("implicit, own", "decode", "nothing orders copy inp_embd on null:1 before launch rms_norm"),
    ("implicit, compute", "train", "nothing orders copy inp_pos on null:0 before write inp_pos"),
    ("event_guarded, own", "train", "nothing orders copy inp_pos on null:1 before write inp_pos"),
])  # fmt: skip
def test_what_races_says_between_which_commands(found, ordering, run, says):
    row = by_ordering(found["rows"])[ordering, run]
    assert row["races"] > 0 and says in row["because"]


def test_a_ring_mends_what_the_host_writes_and_nothing_else(found):
    """Pageable memory is no safer than pinned, and a ring on the device mends no mode."""
    races = {key: row["races"] for key, row in by_ordering(found["sources"]).items()}
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


@pytest.mark.parametrize("model", share(MODELS, every=4))
def test_memory_by_lifetimes_is_computed_again(model):
    """Visibility overwrites nothing and the others do; no right layout is below the least."""
    every = json.loads(PEAKS.read_text())["rows"]
    recorded = [row for row in every if row["model"].startswith(f"{model} ")]
    assert recorded == list(peaks([model]))
    for row in every:
        alone = len(set(row["bytes"].values())) == 1 and not any(row["overwritten"].values())
        assert not row["overwritten"][Lifetimes.VISIBILITY]
        assert row["bytes"][Lifetimes.VISIBILITY] >= row["least"]
        assert alone if row["used"] == 1 else row["overwritten"][Lifetimes.SERIAL]
