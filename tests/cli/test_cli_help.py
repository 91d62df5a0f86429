"""Help: of a command on a screen, of the groups of flags that commands share, of one toggle."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_cli_flags import EVERY
from workbench.cli.screen import TOPICS, asked
from workbench.common.errors import UsageError
from workbench.config import FAMILIES, Toggles
from workbench.config.presets import preset_names
from workbench.config.table import CLASHES
from workbench.program.letters import LETTERS

SCREEN = 40  # lines, at 80 columns


@pytest.fixture
def lines(call, monkeypatch):
    """`lines(words...)`: what a command prints at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> list[str]:
        status, out, err = call(*words)
        assert (status, err) == (0, "")
        return out.splitlines()

    return run


@pytest.mark.parametrize("words", [(), ("model",), ("notebooks",), *EVERY], ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_of_every_command_fits_a_screen(lines, words, flag):
    printed = lines(*words, flag)
    assert 5 < len(printed) <= SCREEN and max(map(len, printed)) <= 80
    assert printed[0].startswith(f"Usage: {' '.join(['workbench', *words])}")
    assert not [line for line in printed if "[default: ]" in line or "default: None" in line]


def test_a_command_has_a_line_in_the_list(lines):
    printed = [line.strip("│ ") for line in lines("--help")]
    for words in EVERY:
        assert any(line.startswith(f"{words[0]} ") for line in printed), words
    texts = [line for line in printed if line.split(" ")[0] in {w[0] for w in EVERY}]
    assert all(line.endswith(".") for line in texts), "each is one sentence, in one line"


def test_groups_of_flags_are_named_and_shown_when_asked_for(lines):
    short = lines("bench", "--help")
    assert [line.split()[:2] for line in short[-2:]] == [
        ["--help", "engine"],
        ["--help", "toggles"],
    ]
    assert not any("--kv-parts" in line or "--n-kv-pad" in line for line in short[:-2])
    engine, toggles = lines("bench", "--help", "engine"), lines("bench", "--help", "toggles")
    assert "Engine" in engine[0] and "Toggles" in toggles[0]
    assert any("--n-kv-pad" in line for line in engine) and not any("--sync " in x for x in engine)
    for name in (*FAMILIES, *Toggles.names()):
        assert any(f"--{name.replace('_', '-')} " in line for line in toggles), name
    every = "\n".join(lines("bench", "--help", "all"))
    assert all("\n".join(part) in every for part in (engine, toggles, short[:-2]))


@pytest.mark.long
def test_topics_work_without_a_command_too(lines):
    assert lines("--help", "toggles") == lines("run", "--help", "toggles")
    assert lines("-h", "engine") == lines("run", "--help", "engine")
    assert lines("--help", "bench") == lines("bench", "--help")
    assert any("--port" in line for line in lines("serve", "--help", "server"))


@pytest.mark.parametrize(("words", "says"), [
    (["ab", "--help", "togles"], "did you mean toggles? ab has help on engine, toggles, all"),
    (["compare", "--help", "engine"], "compare has help on all"),
    (["model", "--help", "toggles"], "model has help on synth, tiny, inspect, all"),
    (["model", "--help", "tinny"], "did you mean tiny?"),
    (["--help", "engin"], "did you mean engine? workbench has help on engine, toggles, all, and"),
    (["--help", "bnch"], "did you mean bench?"),
    (["--help", "sync"], "--help sync: `workbench toggles sync` describes sync"),
    (["--help", "snyc"], "did you mean sync? `workbench toggles sync` describes it"),
    (["bench", "--help", "fuse"], "`workbench toggles fuse` describes fuse"),
    (["--help", "bset"], "did you mean best? `workbench toggles best` describes it"),
])  # fmt: skip
def test_an_unknown_topic_names_those_there_are(words, says):
    with pytest.raises(UsageError) as refused:
        asked(words)
    assert says in str(refused.value)


@pytest.mark.parametrize("words", [
    [], ["bench"], ["bench", "--help"], ["bench", "--help", "--seed"], ["--help", "bench"],
    ["bench", "--", "--help", "engine"],
])  # fmt: skip
def test_other_arguments_are_left_alone(words):
    assert asked(words).arguments == words and asked(words).screen.topic is None


def test_topics_are_names_of_groups():
    groups = {g.name.lower() for leaves in EVERY.values() for g in leaves.groups}
    assert set(TOPICS) <= groups


@pytest.mark.parametrize("name", Toggles.names())
def test_one_toggle_is_shown_alone(lines, name):
    said = " ".join(" ".join(lines("toggles", name)).split())
    row = Toggles.row(name)
    assert said.startswith(f"{name}: {row.about} flag --{name.replace('_', '-')} ")
    assert f"room workbench/{row.room} answer {row.answer}: " in said
    assert row.thread in said
    assert all(f" {value}{' (baseline)' * (value == row.off)}: " in said for value in row.values)
    assert all(" ".join(value.word.split()) in said for value in row.values)
    for toggle, value, clash in CLASHES:
        clashing = f"{toggle}={value} clashes with {clash.toggle}={clash.value}: {clash.why}"
        assert (clashing in said) == (name in (toggle, clash.toggle))


def test_the_letters_of_patterns_are_explained_where_patterns_are(lines):
    of_sync = {letter: words for letter, words in LETTERS.items() if letter not in "hp"}
    for printed in (lines("toggles", "sync"), lines("run", "--help", "toggles")):
        said = " ".join(" ".join(line.strip(" │") for line in printed).split())
        assert all(f"{letter}: {words};" in said for letter, words in of_sync.items())
    assert not any("letters" in line for line in lines("toggles", "copy_stream", "fork"))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_shown_with_its_toggles(lines, call, name):
    said = " ".join(" ".join(lines("toggles", name)).split())
    found = json.loads(call("toggles", name, "--json")[1])
    assert said.startswith(f"{name}: ") and found[0]["preset"] == name
    for one in found:
        assert all(f" {toggle}={value}" in said for toggle, value in one["toggles"].items())
    assert any(one["toggles"] for one in found) == (name != "baseline")


def test_families_and_dashes_and_json(lines, call):
    said = "\n".join(lines("toggles", "fuse"))
    assert all(name in said and Toggles.row(name).about in said for name in Toggles.members("fuse"))
    assert "sync" not in said and "--fuse sets every --fuse-..." in said
    assert lines("toggles", "copy-stream") == lines("toggles", "copy_stream")
    assert lines("toggles", "copy-stream=own") == lines("toggles", "copy_stream")
    both = lines("toggles", "pdl", "sync")
    assert both == [*lines("toggles", "pdl"), "", *lines("toggles", "sync")]
    (found,) = json.loads(call("toggles", "sync", "--json")[1])
    assert found["toggle"] == "sync" and found["values"]["packed"].startswith("sasg")


@pytest.mark.parametrize(("words", "meant"), [
    (["toggles", "snyc"], "did you mean sync?"),
    (["toggles", "sync=foo"], "toggle sync='foo' does not exist; choose one of per_copy"),
    (["toggles", "fues"], "did you mean fuse?"), (["toggles", "bset"], "did you mean best?"),
    (["bnch"], 'Did you mean "bench"?'), (["model", "tinny"], 'Did you mean "tiny"?'),
    (["run", "--moodel", "x"], "Did you mean --model"),
    (["program", "-m", "x", "--snyc", "packed"], "Did you mean --sync?"),
    (["program", "-m", "x", "--sync", "paked"], "did you mean packed?"),
    (["program", "-m", "x", "--preset", "bset"], "did you mean best?"),
    (["program", "-m", "x", "--device", "embeded"], "did you mean embedded?"),
    (["ab", "-m", "x", "--toggle", "snyc=packed"], "did you mean sync?"),
    (["ab", "-m", "x", "--toggle", "sync=paked"], "did you mean packed?"),
    (["ab", "-m", "x", "--toggle", "fuse=on", "--test", "tgg32"], "did you mean tg32?"),
    (["bench", "-m", "x", "--output", "jsno"], 'Did you mean "json"?'),
    (["profile", "-m", "x", "--by", "nod"], "did you mean node?"),
    (["bench-kernels", "--types", "MXFP"], "did you mean MXFP4?"),
    (["model", "synth", "llama-3.2-1bb", "Q4_0", "x.gguf"], "did you mean llama-3.2-1b?"),
])  # fmt: skip
def test_a_wrong_name_is_answered_with_the_nearest(call, words, meant):
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and meant in err
