"""The comparison of logits with an earlier commit's: its cases, its verdicts, its record."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from data.measure.recorded import Recorded
from data.measure.same_logits import block, cases, compare, record, trees
from data.measure.same_logits.cases import Engine, Key, cut, distinct, text
from workbench.config import EngineConfig, Toggles
from workbench.model.synth.models import TINY

ROOT = Path(__file__).resolve().parents[2]


FILES = [path for path in (cases.FILE, cases.GPU_FILE) if path.exists()]


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def found(request) -> dict:
    return json.loads(request.param.read_text())


@pytest.fixture(scope="module")
def whole(found) -> list[dict]:
    return list(cases.unpacked(found))


# the cases ---------------------------------------------------------------------------------------


def test_every_case_has_every_toggle_of_its_commit_written_out(found, whole):
    assert found["commit"] == trees.OLD
    names = set(found["values"])
    assert names <= set(Toggles.names())
    for written_out in {text(case["toggles"]) for case in whole}:
        assert set(json.loads(written_out)) == names
        Toggles(**json.loads(written_out))


def test_the_cases_are_of_tiny_models_and_of_settings_that_exist(found, whole):
    names = {name for name, _, _ in TINY}
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    assert len(whole) > (500 if found["of"] == "cpu" else 0)
    assert len({case["case"] for case in whole}) == len(whole)
    for case in whole:
        assert case["model"] in names & set(found["models"])
        assert set(case["config"]) <= known - {"device", "unsafe"}
        assert case["device"] in (
            ("embedded", "host", "cuda") if found["of"] == "cpu" else ("cuda",)
        )
        assert case["sequences"]
    for sequence in found["sequences"]:
        assert 0 < cases.n_tokens(sequence) <= cases.MOST_TOKENS
        for what, tokens, outputs, times in sequence:
            assert what in ("step", "prefill") and outputs in ("last", "all", "none")
            assert tokens > 0 and times > 0
    different = {text({**case, "case": 0, "sequences": 0}) for case in whole}
    assert len(different) == len(whole)


# values that the old commit did not have
SINCE = {
    "sync": {"packed_implicit"}, "graph_reuse": {"patch_pointers", "pointer_table"},
    "defer_norm": {"one"},
}  # fmt: skip


def test_every_value_of_every_toggle_is_tried(found):
    for name, values in found["values"].items():
        tried, known = set(values), set(Toggles.values(name)) - SINCE.get(name, set())
        assert tried == known if found["of"] == "cpu" else tried <= known


def test_cases_are_written_and_read_as_they_are():
    config = text({"n_ctx": 64})
    made = {
        Key(device, "tiny-llama-F16.gguf", config, text(toggles.to_dict())): [sequence]
        for device, toggles, sequence in [
            ("embedded", Toggles(), (("prefill", 4, "last", 1),)),
            ("embedded", Toggles(sync="packed"), (("prefill", 4, "last", 1),)),
            ("embedded", Toggles(pdl="on"), (("step", 1, "all", 2),)),
            ("host", Toggles(), (("step", 1, "all", 2),)),
        ]
    }
    packed = json.loads(cases.written({"of": "cpu", **cases.packed(made)}))
    again = {
        Key(c["device"], c["model"], text(c["config"]), text(c["toggles"])):
        [tuple(map(tuple, s)) for s in c["sequences"]]
        for c in cases.unpacked(packed)
    }  # fmt: skip
    assert again == made


# reading logs ------------------------------------------------------------------------------------

ABOUT = {
    "test": "tests/cpu/test_x.py::test_y",
    "model": {"file": "tiny-llama-Q8_0.gguf", "sha256": "ab"},
    "config": {"device": "embedded", "n_ctx": 64, "n_ubatch": 8, "unsafe": False},
    "toggles": Toggles().to_dict(),
    "device": "embedded",
    "plain": True,
}


def test_a_log_is_read_as_sequences(tmp_path):
    lines = [
        "T " + json.dumps({"toggles": Toggles(sync="packed").to_dict()}),
        "E 1 " + json.dumps(ABOUT),
        "P 1 5 last 0", "S 1 1 last 5", "S 1 1 last 6", "S 1 1 all 7",
        "P 1 5 last 0", "S 1 1 last 5",  # begins the first
        "P 1 3 all 0", "S 1 1 last 9",  # nobody knows how 9 came to be
        "S 1 1 last 10",
        "S 0 1 last 0",  # of an engine that was never made
    ]  # fmt: skip
    (tmp_path / "7.log").write_text("\n".join(lines) + "\n")
    logs = cases.read_logs(tmp_path)
    whole, seen = cases.collected(logs, {"tiny-llama-Q8_0.gguf": "ab"})
    config = text({"n_ctx": 64, "n_ubatch": 8})
    key = Key("embedded", "tiny-llama-Q8_0.gguf", config, text(Toggles().to_dict()))
    assert whole[key] == [
        (("prefill", 5, "last", 1), ("step", 1, "last", 2), ("step", 1, "all", 1)),
        (("prefill", 3, "all", 1),),
    ]
    assert seen["calls left out: what the cache held is not known"] == 2
    assert seen["toggles without an engine"] == 1 and len(whole) == 2


@pytest.mark.parametrize(
    ("change", "device", "counted"),
    [
        ({"device": "null", "config": {"device": "null"}}, "embedded", "computes nothing"),
        ({"plain": False, "config": {"device": "liar"}}, "embedded", "copy as none does"),
        ({"config": {"unsafe": True}}, "embedded", "unsafe"),
        ({"device": "host", "config": {"device": "host"}}, "host", "engines made"),
        ({"device": "cuda", "config": {"device": "cuda"}}, "cuda", "engines made"),
        ({"model": {"file": "m.gguf", "sha256": "ab"}}, "", "another file"),
        ({"model": {"file": "tiny-llama-Q8_0.gguf", "sha256": "cd"}}, "", "another file"),
    ],
)
def test_where_an_engine_of_the_tests_is_replayed(change, device, counted):
    about = ABOUT | change | {"config": ABOUT["config"] | change.get("config", {})}
    logs = cases.Logs([Engine(about)], [], {text(about["toggles"])})
    whole, seen = cases.collected(logs, {"tiny-llama-Q8_0.gguf": "ab"})
    assert [key.device for key in whole] == ([device] if device else ["embedded"])
    if not device:  # the toggles alone are left, and are tried on another model
        assert next(iter(whole)).config == text(cases.ALONE["config"])
    assert all("unsafe" not in key.config for key in whole)
    assert any(counted in word and n for word, n in seen.items())


def test_long_sequences_are_cut_and_the_first_call_is_kept():
    assert cut([("prefill", 700, "last", 1), ("step", 1, "last", 3)], 600) == (
        ("prefill", 700, "last", 1),
    )
    assert cut([("prefill", 10, "last", 1), ("step", 4, "last", 9)], 21) == (
        ("prefill", 10, "last", 1),
        ("step", 4, "last", 2),
    )


def test_what_begins_another_sequence_is_not_replayed_twice():
    long = (("prefill", 5, "last", 1), ("step", 1, "last", 4))
    short = (("prefill", 5, "last", 1), ("step", 1, "last", 2))
    other = (("prefill", 5, "all", 1),)
    assert distinct([short, long, other, short]) == [long, other]


def test_a_file_of_cases_is_read_as_it_was_written(found):
    assert json.loads(cases.written(found)) == found


# verdicts ----------------------------------------------------------------------------------------


def rows(**changes) -> dict[str, dict]:
    made = {
        "cpu 0": {"case": "cpu 0", "arrays": [["aa", 1, 100, True], ["bb", 1, 100, True]]},
        "cpu 1": {"case": "cpu 1", "refused": ["DeviceError", "no"]},
    }
    made["cpu 0"] |= changes
    return made


CASES = [{"case": f"cpu {n}", "device": "embedded", "model": "m.gguf"} for n in (0, 1)]


def test_equal_arrays_and_equal_refusals():
    found = compare.compare(CASES, rows(), rows())
    counts = found["counts"]["embedded"]
    assert found["others"] == [] and compare.adds_up(counts)
    assert counts == {
        "cases": 2, "equal": 1, "refused by both": 1, "arrays": 2, "arrays equal": 2,
        "values equal": 200, "arrays not finite": 0, "refusals in other words": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "was", "says"),
    [
        ({"arrays": [["aa", 1, 100, True], ["cc", 1, 100, True]]}, "different", "number 1"),
        ({"arrays": [["aa", 1, 100, True]]}, "different", "2 and 1 arrays"),
        ({"failed": ["DeviceError", "lost"]}, "failed", "new: DeviceError: lost"),
    ],
)
def test_what_is_not_as_it_was_is_said(changes, was, says):
    found = compare.compare(CASES, rows(), rows(**changes), "cuda")
    (other,) = found["others"]
    assert other["was"] == was and says in other["what"] and other["device"] == "cuda"
    assert compare.adds_up(found["counts"]["cuda"])


def test_a_refusal_of_one_commit_only():
    refused = rows() | {"cpu 0": {"case": "cpu 0", "refused": ["UsageError", "clash"]}}
    (other,) = compare.compare(CASES, rows(), refused)["others"]
    assert other["was"] == compare.NEWLY_REFUSED and "clash" in other["what"]
    (other,) = compare.compare(CASES, refused, rows())["others"]
    assert other["was"] == compare.NEWLY_ALLOWED


def test_a_case_that_was_not_replayed_is_an_error():
    with pytest.raises(KeyError):
        compare.compare(CASES, rows(), {"cpu 0": rows()["cpu 0"]})


# the record --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads(record.RECORD.read_text())


def test_the_record_s_counts_add_up(recorded):
    assert recorded["old"]["commit"]["hash"] == trees.OLD
    assert record.is_whole(recorded)
    for device, run in recorded["runs"].items():
        assert run["counts"]["arrays"] > 1000, device
        assert run["others"] == [], device
    assert {"embedded", "host", "cuda"} == set(recorded["runs"])


def test_a_record_that_does_not_add_up_is_seen(recorded):
    for name in ("cases", "equal", "arrays equal"):
        other = copy.deepcopy(recorded)
        other["runs"]["embedded"]["counts"][name] += 1
        assert not record.is_whole(other), name


def test_the_record_is_of_this_history(recorded):
    asked = ["git", "-C", str(ROOT), "cat-file", "-t", recorded["new"]["commit"]]
    done = subprocess.run(asked, capture_output=True, text=True)
    if (ROOT / ".git").exists() and done.returncode == 0:
        ancestor = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor"]
        assert subprocess.run([*ancestor, recorded["new"]["commit"], "HEAD"]).returncode == 0


def test_what_was_changed_on_purpose_is_listed_and_is_changed(recorded):
    assert len(recorded["changed_on_purpose"]) >= 7
    for row in recorded["changed_on_purpose"]:
        assert row["old"] != row["new"], row["what"]


def test_the_page_tells_every_device_and_every_change(recorded):
    found = Recorded(record.RECORD.parent)
    assert [line.values["device"] for line in block.counts(found)] == list(recorded["runs"])
    lines = [line.values for line in block.changed(found)]
    assert len(lines) == len(recorded["changed_on_purpose"])
    assert all(line["before"] != line["now"] and ".gguf" not in line["now"] for line in lines)
