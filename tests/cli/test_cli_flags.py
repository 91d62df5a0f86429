"""llama.cpp's flags and toggles as flags: lists, strict numbers, families and presets; and their
help."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clashes import clashing
from tests.profiles import examples
from workbench.cli import generate, main, measure
from workbench.cli.entry import app
from workbench.cli.flags import EngineSettings
from workbench.cli.lists import numbers
from workbench.common.errors import UsageError
from workbench.config import BASELINE, BEST, FAMILIES, EngineConfig, TogglePreset, Toggles
from workbench.config import parse_override as override
from workbench.config.presets import fixed_presets, preset_names

QUICK = settings(max_examples=examples(150), deadline=None)
RUN = ["run", "-m", "x", "--tokens", "1"]


def test_lists_are_llama_bench_s():
    for text, meant in {
        "512,1024": [512, 1024], "-1": [-1], "1-4": [1, 2, 3, 4], "1-8*2": [1, 2, 4, 8],
        "1-9*2,3": [1, 2, 4, 8, 3], "128-512+128": [128, 256, 384, 512],
    }.items():  # fmt: skip
        assert numbers("-p", text) == meant and numbers("-p", [text, "7"]) == [*meant, 7]
    assert numbers("-pg", "8,8", twice=True) == [8, 8]
    for repeated in ("8,8", ["1-4", "3"], "1-8*2,4"):
        with pytest.raises(UsageError, match=r"-p has \d twice; give each value once"):
            numbers("-p", repeated)
    for endless in ("8-1", "1-8*1", "0-8*2", "1-8+0", "1-100000"):
        with pytest.raises(UsageError, match="-p "):
            numbers("-p", endless)


@given(text=st.text(alphabet="0123456789,-+*. e", max_size=8))
@QUICK
def test_any_other_list_is_refused_in_one_line(text):
    try:
        found = numbers("-p", text)
    except UsageError as error:
        assert str(error).startswith("-p ") and "\n" not in str(error)
    else:
        assert found and all(isinstance(n, int) for n in found) and len(found) <= 4000


def asked_of(*words: str) -> tuple[EngineSettings, TogglePreset]:
    """What a command asks for, of an engine that is never loaded."""
    found = []

    def load(model, config, toggles, *_, start=BEST, **__):
        found.extend((config, toggles if isinstance(toggles, TogglePreset) else
                      toggles.wanted(start)))  # fmt: skip
        raise UsageError("enough")

    with pytest.MonkeyPatch.context() as patch:
        for module in (generate, measure):
            patch.setattr(module, "load", load)
        with pytest.raises(SystemExit) as stop:
            main(list(words))
    assert stop.value.code == 2
    return found[0], found[1]


def config_of(*flags: str) -> EngineSettings:
    return asked_of("program", "-m", "x", *flags)[0]


def test_short_flags_have_llama_cpp_s_meaning():
    long = config_of("--ctx-size=64", "--ubatch-size=8").plain()
    assert long == EngineConfig(n_ctx=64, n_ubatch=8)
    assert config_of("-ngl", "all").n_gpu_layers == config_of("-ngl", "auto").n_gpu_layers == -1
    both = config_of("-ot", "exps=CPU", "-ot=ffn=device").override_tensor
    assert both == ("exps=CPU", "ffn=device")
    assert override("exps=CPU")[1] and not override("a=CUDA0")[1]
    assert not config_of("-fa", "1").notes and len(config_of("-fa", "off").notes) == 1


@given(flags=st.fixed_dictionaries({}, optional=dict.fromkeys(
    ["-c", "-ub", "-b", "-t", "-ngl"], st.integers(-3, 1 << 25)
)))  # fmt: skip
@QUICK
def test_any_whole_numbers_are_an_engine_or_one_line(flags):
    words = [word for flag, n in flags.items() for word in (flag, str(n))]
    n = {"-c": 2048, "-ub": 512, "-b": 2048, "-t": 0, "-ngl": -1} | flags
    most = 1 << 24
    if not (
        0 <= n["-c"] <= most and n["-b"] >= 1 and 1 <= min(n["-ub"], n["-b"]) <= most
        and n["-t"] >= -1 and n["-ngl"] >= -1
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main(["program", "-m", "x", *words])
        assert stop.value.code == 2
        return
    assert config_of(*words).plain() == EngineConfig(
        n_ctx=n["-c"], n_ubatch=min(n["-ub"], n["-b"]), threads=max(n["-t"], 0),
        n_gpu_layers=n["-ngl"],
    )  # fmt: skip


@pytest.mark.parametrize(("command", "more"), [
    ("run", ["--tokens", "1"]), ("logits", ["--tokens", "1", "--out", "x.npy"]), ("bench", []),
    ("perplexity", ["--tokens-from", "sample:8"]), ("program", []),
    ("ab", ["--toggle", "sync=per_copy,packed"]),
])  # fmt: skip
def test_answers_take_best_and_experiments_the_baseline(command, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [command, "-m", "x", *more]
    start = BASELINE if command in ("program", "ab") else BEST
    assert asked_of(*words)[1] == TogglePreset(start)
    assert asked_of(*words, "--preset", "llama.cpp@2024-06")[1].name == "llama.cpp@2024-06"


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
    assert asked_of(*command, *words)[1] == made


def commands(of=app, names=()):
    """Every command with a function, by its words; and the arguments that a person can give."""
    for name in of:
        if not name.startswith("-"):
            found = of[name]
            if found.default_command is not None:
                yield (*names, name), found.assemble_argument_collection().filter_by(parse=True)
            yield from commands(found, (*names, name))


EVERY = dict(commands())


def test_every_parameter_has_a_line_and_whole_numbers():
    """cyclopts rounds 1.5 to 1; every `int` has a converter that does not."""
    assert len(EVERY) >= 14 and ("model", "inspect") in EVERY
    for words, leaves in EVERY.items():
        bare = [a.name for a in leaves if a.show and not (a.parameter.help or "").strip()]
        assert not bare, f"{' '.join(words)}: no help for {bare}"
        loose = [a.name for a in leaves if a.hint is int and not a.parameter.converter]
        assert not loose, f"{' '.join(words)}: use Whole for {loose}"


def test_toggles_list_their_values_with_a_word_on_each(call):
    text = " ".join(re.sub(r"[│╭╮╰╯─•*]", " ", call("run", "--help", "toggles")[1]).split())
    for name in Toggles.names():
        row = Toggles.row(name)
        assert f"--{name.replace('_', '-')} STR {row.about}" in text
        if not any(name in Toggles.members(family) for family in FAMILIES):
            for value in row.values:
                baseline = " (baseline)" if value == getattr(Toggles(), name) else ""
                assert f"{value.value}{baseline}: {value.word}" in text
    assert all(f" {name}: " in text for name in preset_names())


@pytest.mark.parametrize("columns", [60, 200])
def test_the_table_of_toggles(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = call("toggles")[1]
    assert max(map(len, out.splitlines())) <= max(columns, 80)
    assert all(name in out for name in (*Toggles.names(), *Toggles.values("sync"), *preset_names()))
    found = {row["toggle"]: row for row in json.loads(call("toggles", "--json")[1])}
    assert list(found) == Toggles.names() and all(row["values"] for row in found.values())
    assert found["results"]["served"] == {"host": "", "others": "behind"}
    assert found["plans"]["needs"]["ours"] == {"capture": 1}
    assert found["sync"]["clashes"] == {"event_guarded": {"copy_stream": "compute"}}
    assert found["plan_end"]["wants"] == {"word": {"launch_ahead": ["on"]}}
