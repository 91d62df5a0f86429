"""llama.cpp's flags: their lists, strict numbers, and what the null device is refused for."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.cli import generate, main, measure
from workbench.cli.flags import EngineSettings
from workbench.cli.lists import numbers
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, Toggles, parse_override

QUICK = settings(max_examples=60, deadline=None)


def refused(capsys, *arguments: str) -> str:
    """The one line that a wrong use gives."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out and err.count("\n") == 1 and err.startswith("error: ")
    return err


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


@pytest.mark.parametrize("text", ["8-1", "1-8*1", "0-8*2", "1-8+0", "1-100000"])
def test_a_range_ends(text):
    with pytest.raises(UsageError, match="-p "):
        numbers("-p", text)


@given(n=st.sampled_from(["1.5", "1e3", "0x10", "1_000", "", "two", "²", "1.0", "nan", "- 1"]))
@QUICK
def test_a_number_that_is_not_whole_is_refused(n):
    for flags in (["-n", n], ["-c", n], ["--n-ubatch", n], ["-ngl", n], ["-t", n]):
        with pytest.raises(SystemExit) as stop:
            main(["run", "-m", "x.gguf", "--tokens", "1", *flags])
        assert stop.value.code == 2


def test_the_line_says_what_is_wrong(capsys):
    said = refused(capsys, "run", "-m", "x", "--tokens", "1", "-n", "1.5")
    assert said == "error: Invalid value for -n: '1.5' is no whole number\n"
    assert "-3" in refused(capsys, "run", "-m", "x", "--tokens", "1", "-n", "-3")
    assert "-p '1.5' is no list" in refused(capsys, "bench", "-m", "x", "-p", "1.5")
    assert "-fa 'maybe': choose one of" in refused(capsys, "run", "-m", "x", "-fa", "maybe")


def settings_of(*flags: str) -> list[EngineConfig]:
    """What engines a bench asks for."""
    found = []

    class Engine:
        recorder = None
        counters = MappingProxyType({})

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def load(model, config, *_, fit, **__):
        found.append((str(model), fit(Toggles(), config)))
        return Engine()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "load", load)
        patch.setattr("workbench.benchmarks.llama.llama_bench.measured", lambda *_, **__: [])
        main(["bench", *flags])
    return found


def test_bench_measures_every_model_and_combination():
    found = settings_of("-m", "a", "-m", "b", "-t", "1,2", "-ub", "128", "-ub", "256", "-ngl", "99")
    assert [m for m, _ in found] == ["a"] * 4 + ["b"] * 4
    assert [(c.n_ubatch, c.threads) for _, c in found[:4]] == [
        (128, 1), (128, 2), (256, 1), (256, 2),
    ]  # fmt: skip
    assert {c.n_gpu_layers for _, c in found} == {99}


def test_what_makes_the_same_engine_is_measured_once():
    assert len(settings_of("-m", "a", "-fa", "0,1", "-b", "512,1024")) == 1
    assert [c.n_ubatch for _, c in settings_of("-m", "a", "-b", "64,1024")] == [64, 512]
    assert settings_of("-m", "a", "-ngl", "all")[0][1].n_gpu_layers == -1


def test_the_context_is_what_the_tests_need():
    ((_, config),) = settings_of("-m", "a", "-p", "4096", "-n", "0", "-d", "1000")
    assert config.n_ctx == 5096


# settings -----------------------------------------------------------------------------------------


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
    assert config_of("--ctx-size=64", "--ubatch-size=8").plain() == EngineConfig(
        n_ctx=64, n_ubatch=8
    )
    assert config_of("-ngl", "all").n_gpu_layers == config_of("-ngl", "auto").n_gpu_layers == -1
    assert config_of("-ot", "exps=CPU", "-ot", "ffn=device").override_tensor == (
        "exps=CPU", "ffn=device",
    )  # fmt: skip
    assert parse_override("exps=CPU")[1] and not parse_override("a=CUDA0")[1]


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


def test_a_flag_that_takes_one_value_is_given_once(capsys):
    assert "-m" in refused(capsys, "run", "-m", "x", "-m", "y", "--tokens", "1")
    assert "-c" in refused(capsys, "run", "-m", "x", "--tokens", "1", "-c", "1", "-c", "2")


def test_what_changes_nothing_is_said():
    assert config_of("-fa", "off").notes == [
        "-fa off changes nothing: attention is one fused kernel here"
    ]
    assert not config_of("-fa", "1").notes and not config_of().notes


# the null device ----------------------------------------------------------------------------------

COMPUTING = {
    "run": ["run", "-m", "x", "--tokens", "1"],
    "logits": ["logits", "-m", "x", "--tokens", "1", "-o", "x.npy"],
    "bench": ["bench", "-m", "x"],
    "ab": ["ab", "-m", "x", "--toggle", "sync=per_copy,packed"],
    "perplexity": ["perplexity", "-m", "x", "--tokens-from", "sample:8"],
    "profile": ["profile", "-m", "x"],
    "bench-kernels": ["bench-kernels"],
    "report": ["report"],
}


@pytest.mark.parametrize("command", COMPUTING)
def test_the_null_device_has_no_answers_and_no_times(capsys, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *COMPUTING[command], "--device", "null")
    assert said.startswith("error: --device null computes nothing: it has no answers and no times;")
    assert list(tmp_path.iterdir()) == []
