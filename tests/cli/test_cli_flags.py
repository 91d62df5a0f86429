"""llama.cpp's flags and toggles as flags: lists, strict numbers, families and presets."""

from __future__ import annotations

from itertools import permutations
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clashes import clashing
from workbench.cli import generate, main, measure
from workbench.cli.flags import EngineSettings
from workbench.cli.lists import numbers
from workbench.common.errors import UsageError
from workbench.config import (
    BASELINE,
    BEST,
    FAMILIES,
    EngineConfig,
    TogglePreset,
    Toggles,
    parse_override,
)
from workbench.config.presets import fixed_presets, preset_names

QUICK = settings(max_examples=40, deadline=None)
RUN = ["run", "-m", "x", "--tokens", "1"]


@pytest.mark.parametrize(("text", "meant"), [
    ("512", [512]), ("512,1024", [512, 1024]), ("-1", [-1]), ("1-4", [1, 2, 3, 4]),
    ("128-512+128", [128, 256, 384, 512]), ("1-8*2", [1, 2, 4, 8]), ("1-9*2,3", [1, 2, 4, 8, 3]),
])  # fmt: skip
def test_lists_are_llama_bench_s(text, meant):
    assert numbers("-p", text) == numbers("-p", [text]) == meant
    assert numbers("-p", [text, "7"]) == [*meant, 7]


@given(text=st.text(alphabet="0123456789,-+*. e", max_size=8))
@QUICK
def test_any_other_list_is_refused_in_one_line(text):
    try:
        found = numbers("-p", text)
    except UsageError as error:
        assert str(error).startswith("-p ") and "\n" not in str(error)
    else:
        assert found and all(isinstance(n, int) for n in found) and len(found) <= 4000
    for endless in ("8-1", "1-8*1", "0-8*2", "1-8+0", "1-100000"):
        with pytest.raises(UsageError, match="-p "):
            numbers("-p", endless)


REFUSED = [
    *([*RUN, flag, n] for flag in ("-n", "-c", "--n-ubatch", "-ngl", "-t") for n in ("1.5", "²")),
    *([*RUN, "-c", n] for n in ("1e3", "0x10", "1_000", "", "two", "1.0", "nan")),
    ["bench", "-m", "x", "-p", "1.5"], [*RUN, "-fa", "maybe"], [*RUN, "-n", "-3"],
    [*RUN, "-m", "y"], [*RUN, "-c", "1", "-c", "2"], [*RUN, "--fuse", "maybe"],
    [*RUN, "--fuse"], [*RUN, "--fuse", "on", "--fuse=off"],
    [*RUN, "--fuse", "on", "--fuse-qkv", "off", "--fuse-qkv", "on"], [*RUN, "--preset", "fast"],
    ["model", "tiny", "--fuse", "on"],
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words)[:40])
def test_wrong_uses_are_one_line_that_names_the_flag(call, words):
    status, out, err = call(*words)
    flag = [w for w in words if w.startswith("-")][-1].partition("=")[0]
    flag = {"--n-ubatch": "-ub"}.get(flag, flag)
    assert status == 2 and not out and err.count("\n") == 1 and err.startswith("error: ")
    assert flag in err or "preset 'fast' does not exist" in err or "toggle fuse='maybe'" in err


def settings_of(*flags: str) -> list[EngineConfig]:
    """What engines a bench asks for."""
    found = []

    class Engine:
        recorder = None
        counters = MappingProxyType({})

        def __enter__(self):
            return self

        def __exit__(self, *_):
            """Nothing is open."""

    def load(model, config, *_, fit, **__):
        found.append((str(model), fit(Toggles(), config)))
        return Engine()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "load", load)
        patch.setattr("workbench.benchmarks.llama.llama_bench.measured", lambda *_, **__: [])
        main(["bench", *flags])
    return found


def test_bench_measures_every_model_and_combination_once():
    found = settings_of("-m", "a", "-m", "b", "-t", "1,2", "-ub", "128", "-ub", "256", "-ngl", "99")
    assert [m for m, _ in found] == ["a"] * 4 + ["b"] * 4
    assert [(c.n_ubatch, c.threads, c.n_gpu_layers) for _, c in found[:4]] == [
        (128, 1, 99), (128, 2, 99), (256, 1, 99), (256, 2, 99),
    ]  # fmt: skip
    assert len(settings_of("-m", "a", "-fa", "0,1", "-b", "512,1024")) == 1
    assert [c.n_ubatch for _, c in settings_of("-m", "a", "-b", "64,1024")] == [64, 512]
    ((_, config),) = settings_of("-m", "a", "-p", "4096", "-n", "0", "-d", "1000")
    assert config.n_ctx == 5096, "what the tests need"


def config_of(*flags: str) -> EngineSettings:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "load", lambda model, config, *_, **__: found.append(config))
        with pytest.raises(TypeError):  # nothing was loaded
            main(["program", "-m", "x", *flags])
    return found[0]


def test_short_flags_have_llama_cpp_s_meaning():
    made = config_of("-c", "0", "-b", "64", "-ub", "512", "-t", "-1", "-ngl", "99", "-fa", "on")
    assert made.plain() == EngineConfig(n_ctx=0, n_ubatch=64, threads=0, n_gpu_layers=99)
    long = config_of("--ctx-size=64", "--ubatch-size=8").plain()
    assert long == EngineConfig(n_ctx=64, n_ubatch=8)
    assert config_of("-ngl", "all").n_gpu_layers == config_of("-ngl", "auto").n_gpu_layers == -1
    assert config_of("-ot", "exps=CPU", "-ot=ffn=device").override_tensor == (
        "exps=CPU", "ffn=device",
    )  # fmt: skip
    assert parse_override("exps=CPU")[1] and not parse_override("a=CUDA0")[1]
    assert config_of("-fa", "off").notes == [
        "-fa off changes nothing: attention is one fused kernel here"
    ]
    assert not config_of("-fa", "1").notes and not config_of().notes


@given(flags=st.fixed_dictionaries({}, optional=dict.fromkeys(
    ["-c", "-ub", "-b", "-t", "-ngl"], st.integers(-3, 1 << 25)
)))  # fmt: skip
@QUICK
def test_any_whole_numbers_are_an_engine_or_one_line(flags):
    words = [word for flag, n in flags.items() for word in (flag, str(n))]
    n = {"-c": 2048, "-ub": 512, "-b": 2048, "-t": 0, "-ngl": -1} | flags
    most = 1 << 24
    legal = (
        0 <= n["-c"] <= most and n["-b"] >= 1 and 1 <= min(n["-ub"], n["-b"]) <= most
        and n["-t"] >= -1 and n["-ngl"] >= -1
    )  # fmt: skip
    if not legal:
        with pytest.raises(SystemExit) as stop:
            main(["program", "-m", "x", *words])
        assert stop.value.code == 2
        return
    assert config_of(*words).plain() == EngineConfig(
        n_ctx=n["-c"], n_ubatch=min(n["-ub"], n["-b"]), threads=max(n["-t"], 0),
        n_gpu_layers=n["-ngl"],
    )  # fmt: skip


COMPUTING = {
    "run": RUN, "logits": ["logits", "-m", "x", "--tokens", "1", "-o", "x.npy"],
    "bench": ["bench", "-m", "x"], "ab": ["ab", "-m", "x", "--toggle", "sync=per_copy,packed"],
    "perplexity": ["perplexity", "-m", "x", "--tokens-from", "sample:8"],
    "profile": ["profile", "-m", "x"], "bench-kernels": ["bench-kernels"], "report": ["report"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMPUTING)
def test_the_null_device_has_no_answers_and_no_times(call, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = call(*COMPUTING[command], "--device", "null")
    assert status == 2 and list(tmp_path.iterdir()) == []
    assert err.startswith("error: --device null computes nothing: it has no answers and no times;")


# toggles as flags --------------------------------------------------------------------------------


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
    return preset_of("program", "-m", "x.gguf", *flags).toggles()


def test_a_family_is_all_or_none_but_what_is_named():
    every = Toggles().switched("fuse", "on")
    asked = [("--fuse", "on"), ("--fuse-qkv=off",), ("--sync", "copy_boundary")]
    for order in permutations(asked):
        found = toggles_of(*(word for flag in order for word in flag))
        assert found == every.switched("fuse_qkv", "off").switched("sync", "copy_boundary")
    assert toggles_of("--fuse=on", "--fuse_qkv", "off") == every.switched("fuse_qkv", "off")
    assert toggles_of("--fuse", "on") == every
    assert toggles_of("--fuse", "off") == toggles_of() == Toggles()
    assert toggles_of("--fuse-glu", "on", "--fuse", "off") == Toggles(fuse_glu="on")
    members = [w for m in Toggles.members("fuse") for w in ("--" + m.replace("_", "-"), "off")]
    assert toggles_of("--fuse", "on", *members) == Toggles()


@pytest.mark.parametrize("command", ["run", "logits", "bench", "perplexity", "program", "ab"])
def test_answers_take_best_and_experiments_the_baseline(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = COMPUTING.get(command, ["program", "-m", "x.gguf"])
    start = BASELINE if command in ("program", "ab") else BEST
    assert preset_of(*words) == TogglePreset(start)
    assert preset_of(*words, "--preset", "llama.cpp@2024-06").name == "llama.cpp@2024-06"


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
