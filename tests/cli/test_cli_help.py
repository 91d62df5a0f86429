"""Help: every parameter of every command has a line, and what a newcomer looks for is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from cyclopts import App
from cyclopts.argument import ArgumentCollection

from workbench.cli.common import app
from workbench.config import FAMILIES, Toggles
from workbench.config.presets import fixed_presets, preset_names
from workbench.model.synth.shapes import PRESETS, QUANTS


def commands(of: App = app, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command with a function, by its words."""
    for name in of:
        if not name.startswith("-"):
            found = of[name]
            if found.default_command is not None:
                yield (*names, name), found
            yield from commands(found, (*names, name))


def leaves(command: App) -> ArgumentCollection:
    """The arguments that a person can give."""
    return command.assemble_argument_collection().filter_by(parse=True)


EVERY = dict(commands())
WITH_TOGGLES = [
    words for words, command in EVERY.items()
    if any("--preset" in a.names for a in command.assemble_argument_collection())
]  # fmt: skip


@pytest.fixture
def shown(call):
    """The text of `--help`, spaces and frames folded."""
    return lambda *words: " ".join(re.sub(r"[│╭╮╰╯─•*]", " ", call(*words, "--help")[1]).split())


def test_every_parameter_has_a_line_and_every_command_too():
    """cyclopts rounds 1.5 to 1; every `int` has a converter that does not."""
    assert {" ".join(words) for words in EVERY} >= {
        "run", "logits", "program", "check", "bench", "ab", "perplexity", "bench-kernels", "report",
        "profile", "toggles", "model synth", "model tiny", "model inspect",
    }  # fmt: skip
    for words, command in EVERY.items():
        assert command.help or command.default_command.__doc__
        bare = [a.name for a in leaves(command) if a.show and not (a.parameter.help or "").strip()]
        assert not bare, f"{' '.join(words)}: no help for {bare}"
        loose = [a.name for a in leaves(command) if a.hint is int and not a.parameter.converter]
        assert not loose, f"{' '.join(words)}: use Whole for {loose}"
    for words in (*WITH_TOGGLES, ("bench-kernels",)):
        (flag,) = [a for a in leaves(EVERY[words]) if "--nvtx" in a.names]
        assert "auto, on, off" in flag.parameter.help


@pytest.mark.parametrize("words", WITH_TOGGLES, ids=" ".join)
def test_toggles_list_their_values_with_a_word_on_each(shown, words):
    text = shown(*words)
    for name in Toggles.names():
        row = Toggles.row(name)
        assert f"--{name.replace('_', '-')} STR {row.about}" in text
        if not any(name in Toggles.members(family) for family in FAMILIES):
            for value in row.values:
                baseline = " (baseline)" if value == getattr(Toggles(), name) else ""
                assert f"{value.value}{baseline}: {value.word}" in text
    assert all(f" {name}: " in text for name in preset_names())
    for values in fixed_presets().values():
        assert " ".join(f"{k}={v}" for k, v in values.items()) in text
    assert "--fuse STR every --fuse-... that is not given itself: off or on" in text
    assert "where toggles begin: best, but baseline in ab, check and program." in text
    for flag in ("-m", "-ngl", "-ot", "-t", "-c", "-ub", "-b", "-fa"):  # llama.cpp's names
        assert re.search(rf"(^| ){flag} ", text), flag


def test_shapes_types_and_default_folders_are_named(shown):
    assert all(name in shown("model", "synth") for name in (*PRESETS, *QUANTS))
    assert "data/models" in shown("model", "tiny")
    assert "data/runs" in shown("bench-kernels") and "data/runs" in shown("perplexity")
    assert "reports" in shown("report") and "--fuse" not in shown("report")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_of_toggles(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = call("toggles")[1]
    assert max(map(len, out.splitlines())) <= max(columns, 80)
    assert all(name in out for name in (*Toggles.names(), *Toggles.values("sync")))
    assert all(f"  {name}: " in out for name in preset_names())
    for name in Toggles.names() if columns == 200 else ():
        toggle = Toggles.row(name)
        (line,) = [row for row in out.splitlines() if row.startswith(f"| {name} ")]
        row = [cell.strip() for cell in line.strip("|").split("|")]
        assert row[0] == name and set(row[1].split(", ")) == set(Toggles.values(name))
        assert row[1].split(", ")[0] == getattr(Toggles(), name)
        assert row[2:] == [toggle.thread.removeprefix("llama.cpp "), toggle.room, toggle.answer]


def test_the_table_as_json_has_a_word_on_each_value(call):
    found = {row["toggle"]: row for row in json.loads(call("toggles", "--json")[1])}
    assert list(found) == Toggles.names()
    assert all(word for row in found.values() for word in (row["about"], *row["values"].values()))
    assert set(found["sync"]["values"]) == set(Toggles.values("sync"))
    assert found["results"]["served"] == {"host": "", "others": "behind"}
    assert found["plans"]["needs"]["ours"] == {"capture": 1}
    assert found["sync"]["clashes"] == {"event_guarded": {"copy_stream": "compute"}}
    assert found["plan_end"]["wants"] == {"word": {"launch_ahead": ["on"]}}
