"""`--fuse`, the flag that stands for all toggles of its family: what it means, and its errors."""

from __future__ import annotations

from itertools import permutations

import pytest

from workbench.cli import generate, long_names, main, spell_out
from workbench.config import Toggles
from workbench.errors import UsageError

EVERY = Toggles().switched("fuse", "on")
COMMANDS = ("run", "logits", "program", "bench", "ab", "perplexity")


@pytest.fixture
def toggles_of(monkeypatch):
    """`toggles_of(*flags)`: the toggles a command is given, of an engine that is never loaded."""

    def parse(*flags: str) -> Toggles:
        found: list[Toggles] = []

        def load(model, config, toggles, *_, **__):
            found.append(toggles)
            raise UsageError("enough")

        monkeypatch.setattr(generate, "load", load)
        with pytest.raises(SystemExit):
            main(["program", "-m", "x.gguf", *flags])
        return found[0]

    return parse


ASKED = [("--fuse", "on"), ("--fuse-qkv", "off"), ("--sync", "copy_boundary")]


@pytest.mark.parametrize("order", list(permutations(ASKED)))
def test_all_but_one_in_any_order(toggles_of, order):
    found = toggles_of(*(word for flag in order for word in flag))
    assert found == EVERY.switched("fuse_qkv", "off").switched("sync", "copy_boundary")


@pytest.mark.parametrize("flags", [
    ("--fuse=on", "--fuse-qkv=off"), ("--fuse-qkv=off", "--fuse", "on"),
    ("--fuse", "on", "--fuse_qkv", "off"),
])  # fmt: skip
def test_however_the_flags_are_spelled(toggles_of, flags):
    assert toggles_of(*flags) == EVERY.switched("fuse_qkv", "off")


def test_alone_it_is_all_or_none_and_off_leaves_what_is_named(toggles_of):
    assert toggles_of("--fuse", "on") == EVERY
    assert toggles_of("--fuse", "off") == toggles_of() == Toggles()
    assert toggles_of("--fuse-glu", "on", "--fuse", "off") == Toggles(fuse_glu="on")
    members = [w for m in Toggles.members("fuse") for w in ("--" + m.replace("_", "-"), "off")]
    assert toggles_of("--fuse", "on", *members) == Toggles()


def test_what_is_behind_two_dashes_is_left_alone():
    assert spell_out(["program", "--", "--fuse", "on"]) == ["program", "--", "--fuse", "on"]


BAD = {
    "a value that does not exist": (
        ["run", "--fuse", "maybe"], "--fuse 'maybe' does not exist; choose one of off, on",
    ),
    "no value": (["run", "--fuse"], "--fuse '' does not exist"),
    "given twice": (["run", "--fuse", "on", "--fuse=off"], "--fuse is given twice"),
    "a member twice": (
        ["run", "--fuse", "on", "--fuse-qkv", "off", "--fuse-qkv", "on"], "--fuse-qkv",
    ),
    "a command without toggles": (["model", "tiny", "--fuse", "on"], "--fuse."),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_uses_give_one_line_that_names_the_flag(capsys, what):
    arguments, says = BAD[what]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("error: ") and says in err


@pytest.mark.parametrize("command", COMMANDS)
def test_it_stands_in_the_help_of_every_command_with_toggles(capsys, command):
    main([command, "--help"])
    shown = capsys.readouterr().out
    assert "--fuse off|on sets every --fuse-..." in shown and "--fuse-qkv" in shown


def test_those_are_the_commands_with_toggles(capsys):
    main(["--help"])
    listed = capsys.readouterr().out
    assert all(command in listed for command in COMMANDS)
    for other in ("bench-kernels", "report"):
        main([other, "--help"])
        assert "--fuse" not in capsys.readouterr().out


def test_llama_cpp_s_short_flags_are_known():
    given = ["program", "-ngl", "3", "-ot=ffn=host", "-m", "x", "--", "-ngl"]
    assert long_names(given) == [
        "program", "--n-gpu-layers", "3", "--override-tensor=ffn=host", "-m", "x", "--", "-ngl",
    ]  # fmt: skip
