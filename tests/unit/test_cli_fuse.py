"""Toggles as flags: families, presets, what is given beside them, and their errors."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clashes import clashing
from workbench.cli import generate, main, measure
from workbench.common.errors import UsageError
from workbench.config import BASELINE, BEST, FAMILIES, TogglePreset, Toggles
from workbench.config.presets import fixed_presets, preset_names

EVERY = Toggles().switched("fuse", "on")
COMMANDS = ("run", "logits", "program", "bench", "ab", "perplexity", "check")
QUICK = settings(max_examples=40, deadline=None)


def preset_of(*arguments: str) -> TogglePreset:
    """What a command is given, of an engine that is never loaded."""
    found: list[TogglePreset] = []

    def load(model, config, toggles, *_, start=BEST, **__):
        found.append(toggles if isinstance(toggles, TogglePreset) else toggles.wanted(start))
        raise UsageError("enough")

    with pytest.MonkeyPatch.context() as patch:
        for module in (generate, measure):
            patch.setattr(module, "load", load)
        with pytest.raises(SystemExit):
            main(list(arguments))
    return found[0]


def toggles_of(*flags: str) -> Toggles:
    made = preset_of("program", "-m", "x.gguf", *flags)
    return made.toggles()


ASKED = [("--fuse", "on"), ("--fuse-qkv", "off"), ("--sync", "copy_boundary")]


@pytest.mark.parametrize("order", list(permutations(ASKED)))
def test_all_but_one_in_any_order(order):
    found = toggles_of(*(word for flag in order for word in flag))
    assert found == EVERY.switched("fuse_qkv", "off").switched("sync", "copy_boundary")


@pytest.mark.parametrize("flags", [
    ("--fuse=on", "--fuse-qkv=off"), ("--fuse-qkv=off", "--fuse", "on"),
    ("--fuse", "on", "--fuse_qkv", "off"),
])  # fmt: skip
def test_however_the_flags_are_spelled(flags):
    assert toggles_of(*flags) == EVERY.switched("fuse_qkv", "off")


def test_alone_it_is_all_or_none_and_off_leaves_what_is_named():
    assert toggles_of("--fuse", "on") == EVERY
    assert toggles_of("--fuse", "off") == toggles_of() == Toggles()
    assert toggles_of("--fuse-glu", "on", "--fuse", "off") == Toggles(fuse_glu="on")
    members = [w for m in Toggles.members("fuse") for w in ("--" + m.replace("_", "-"), "off")]
    assert toggles_of("--fuse", "on", *members) == Toggles()


def test_a_preset_is_where_toggles_begin():
    name = "llama.cpp@2025-12"
    assert toggles_of("--preset", name) == Toggles.preset(name)
    assert toggles_of("--preset", name, "--fuse-glu", "off") == Toggles.preset(name, fuse_glu="off")
    assert preset_of(
        "program", "-m", "x", "--preset", "best", "--sync", "per_copy"
    ) == TogglePreset("best", {"sync": "per_copy"})


RUN = ["run", "-m", "x.gguf", "--tokens", "1"]
STARTS = {
    BEST: [
        RUN, ["logits", "-m", "x.gguf", "--tokens", "1", "-o", "x.npy"], ["bench", "-m", "x.gguf"],
        ["perplexity", "-m", "x.gguf", "--tokens-from", "sample:8"],
    ],
    BASELINE: [
        ["program", "-m", "x.gguf"], ["ab", "-m", "x.gguf", "--toggle", "sync=per_copy,packed"],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("start", "arguments"), [
    (start, arguments) for start, every in STARTS.items() for arguments in every
])  # fmt: skip
def test_answers_take_best_and_experiments_the_baseline(start, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert preset_of(*arguments) == TogglePreset(start)
    assert preset_of(*arguments, "--preset", "llama.cpp@2024-06").name == "llama.cpp@2024-06"


@given(
    preset=st.sampled_from([None, *preset_names()]),
    flags=st.fixed_dictionaries({}, optional={
        name: st.sampled_from(Toggles.values(name)) for name in (*FAMILIES, *Toggles.names())
    }),
    start=st.sampled_from([BEST, BASELINE]),
)  # fmt: skip
@QUICK
def test_any_flags_are_what_the_same_call_in_python_is(preset, flags, start):
    words = [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", v)]
    words += ["--preset", preset] if preset else []
    made = TogglePreset(preset or start, flags)
    if not made.of_device and clashing(fixed_presets()[made.name], flags):
        with pytest.raises(UsageError, match="clash"):  # best only once a device is known
            made.toggles()
        return
    command = RUN if start == BEST else ["program", "-m", "x.gguf"]
    assert preset_of(*command, *words) == made


BAD = {
    "a value that does not exist": (
        ["run", "--fuse", "maybe"], "toggle fuse='maybe' does not exist; choose one of off, on",
    ),
    "no value": (["run", "--fuse"], "--fuse requires an argument"),
    "given twice": (["run", "--fuse", "on", "--fuse=off"], "--fuse specified multiple times"),
    "a member twice": (
        ["run", "--fuse", "on", "--fuse-qkv", "off", "--fuse-qkv", "on"], "--fuse-qkv",
    ),
    "a command without toggles": (["model", "tiny", "--fuse", "on"], "--fuse."),
    "an unknown preset": (["run", "--preset", "fast"], "preset 'fast' does not exist; choose one"),
    "a clash": (
        ["program", "--preset", "baseline", "--sync", "event_guarded", "--copy-stream", "compute"],
        "sync=event_guarded and copy_stream=compute clash",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_uses_give_one_line_that_names_the_flag(capsys, what):
    arguments, says = BAD[what]
    named = {"run": ["-m", "x", "--tokens", "1"], "program": ["-m", "x"]}.get(arguments[0], [])
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *named])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("error: ") and says in err


@pytest.mark.parametrize("command", COMMANDS)
def test_it_stands_in_the_help_of_every_command_with_toggles(capsys, command):
    main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--fuse STR every --fuse-... that is not given itself" in shown
    assert "--fuse-qkv" in shown and "--preset" in shown


def test_those_are_the_commands_with_toggles(capsys):
    main(["--help"])
    listed = capsys.readouterr().out
    assert all(command in listed for command in COMMANDS)
    for other in ("bench-kernels", "report"):
        main([other, "--help"])
        assert "--fuse" not in capsys.readouterr().out


def test_llama_cpp_s_short_flags_are_known(monkeypatch):
    found = []
    monkeypatch.setattr(generate, "load", lambda model, config, *_, **__: found.append(config))
    for flags in (["-ngl", "3", "-ot", "ffn=host"], ["-ngl=3", "-ot=ffn=host"]):
        with pytest.raises(TypeError):  # of an engine that is none
            generate.app(["program", "-m", "x", *flags], exit_on_error=False)
    assert [(c.n_gpu_layers, c.override_tensor) for c in found] == [(3, ("ffn=host",))] * 2
