"""Names of tests, the scope of a repetition, and what is compiled before the first."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.backend.cuda.fake_cuda import fake_backend
from tests.benchmarks.fake_engine import BOS, N_VOCAB, Clock, FakeEngine
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cuda.kernels import nvrtc
from workbench.benchmarks import workload
from workbench.benchmarks.workload import Workload, draw_tokens, parse, take_sample
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, Toggles
from workbench.trace.profile import profile_each


@given(st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 9999))
def test_a_name_reads_back(n_prompt, n_gen, n_depth):
    made = Workload(n_prompt, n_gen, n_depth)
    assert not made.n_tokens or parse(made.name) == made


def test_names_of_tests():
    for name, expected in (
        ("tg128 @ d4096", (0, 128, 4096)), (" pp1+tg2 @d3 ", (1, 2, 3)),
        ("pp512+tg128@b8", (512, 128, 0, 8, False)), ("pp512+tg128 @ s32", (512, 128, 0, 32, True)),
    ):  # fmt: skip
        assert parse(name) == Workload(*expected) == parse(parse(name).name)
    assert workload.parse_tests("pp8, tg4, tg4") == [Workload(8), Workload(0, 4)]
    for name in ("", "pp", "tg0", "pp0+tg4", "pp4tg4", "+tg4", "pp4+", "tg4@4", "tg-4", "xx8",
                 "tg4@d", "@d7", "tg4 tg5", "pp1@b0", "tg1@d3@b2", "tg1@x2"):  # fmt: skip
        with pytest.raises(UsageError, match=r"does not exist; .*name it as llama-bench does"):
            parse(name)
    tests = [parse("tg1@b3"), parse("tg1@b2")]
    assert [workload.wide_enough(tests, EngineConfig(n_seqs=n)).n_seqs for n in (1, 8)] == [3, 8]


def test_tokens_follow_from_seed_test_and_repetition():
    w = Workload(30, 20, 10)
    a = draw_tokens(w, N_VOCAB, 1, 0, bos=BOS)
    assert a == draw_tokens(w, N_VOCAB, 1, 0, bos=BOS)
    assert a not in (draw_tokens(w, N_VOCAB, 1, 1, bos=BOS), draw_tokens(w, N_VOCAB, 2, 0, bos=BOS))
    assert [len(part) for part in a] == [10, 30, 20]
    assert a.depth[0] == a.gen[0] == BOS  # BOS into the empty cache, and before the generation
    without = draw_tokens(Workload(900), N_VOCAB, 1)
    assert min(without.prompt) == 0 and max(without.prompt) == N_VOCAB - 1
    engine = FakeEngine(Clock())
    assert workload.bos_token(engine) == BOS
    engine.model.file.metadata["tokenizer.ggml.add_bos_token"] = False
    assert workload.bos_token(engine) is None


@pytest.mark.parametrize("test", ["pp20+tg3", "pp20"])
def test_nothing_is_collected_while_the_clock_runs(monkeypatch, test):
    """A full collection looks at all that the process has imported."""
    on, clock = list[bool](), Clock().install(monkeypatch)
    engine = FakeEngine(clock, ns_of=lambda *_: on.append(gc.isenabled()) or 1000)
    take_sample(engine, parse(test), draw_tokens(parse(test), N_VOCAB, 0))
    assert on and not any(on) and gc.isenabled()


def test_scope_of_a_repetition(monkeypatch):
    """The depth is not timed, the prompt is one entry, and every token is one."""
    clock = Clock().install(monkeypatch)
    engine = FakeEngine(clock, ns_of=lambda toggles, n, nth: 1000 * n + nth, n_ctx=64)
    tokens = draw_tokens(parse("pp20+tg3@d32"), N_VOCAB, 0)
    sample = take_sample(engine, parse("pp20+tg3@d32"), tokens)
    assert [len(call) for call in engine.calls] == [16, 16, 16, 4, 1, 1, 1]
    assert [t for call in engine.calls for t in call] == tokens.depth + tokens.prompt + tokens.gen
    assert sample.token_ns.tolist() == [20_000 + 3 + 4, 1005, 1006, 1007]
    assert sample.token_n.tolist() == [20, 1, 1, 1]
    assert sample.tokens_per_second == pytest.approx(23e9 / sample.token_ns.sum())
    assert engine.n_waits == 1  # at the end, so that nothing is left for whoever is next
    again = take_sample(engine, parse("pp20+tg3@d32"), tokens)  # the cache was emptied first
    np.testing.assert_array_equal(sample.last_logits, again.last_logits)
    for refused, says in (("tg33@d32", "n_ctx=65"), ("tg2", "recorder")):
        with pytest.raises(UsageError, match=says):
            take_sample(engine, parse(refused), draw_tokens(parse(refused), N_VOCAB, 0))
        engine.recorder = object()


def test_several_sequences_are_packed_into_steps():
    own, shared = parse("pp5+tg3@b4"), parse("pp5+tg3@s4")
    assert (own.n_tokens, own.n_cells, shared.n_tokens, shared.n_cells) == (32, 32, 17, 17)
    # the mean step of three: 20 (5) cells of prompts, and cells of two steps
    assert own.step_bytes(1000, 10) == 1000 + 10 * (20 + 8)
    assert shared.step_bytes(1000, 10) == 1000 + 10 * (5 + 8)
    tokens = draw_tokens(own, N_VOCAB, 0, bos=1)
    assert tokens.prompt[::5] == [1] * 4 and len(tokens.gen) == 12
    assert len({tuple(tokens.prompt[i : i + 5]) for i in range(0, 20, 5)}) == 4
    # prompts are packed into ubatches of 10, each the end of a prompt; steps of 9 tokens are two
    found = [
        [(s, len(ids), out) for s, ids, out in w] for w in workload.prompt_steps(own, range(20), 10)
    ]
    assert found == [[(0, 5, "none"), (1, 5, "none")], [(2, 5, "none"), (3, 5, "last")]]
    for test, n, lengths in ((own, 12, [[4]] * 3), (parse("tg1@b9"), 9, [[8, 1]])):
        assert [
            [len(work) for work in row] for row in workload.gen_steps(test, range(n), 8)
        ] == lengths


def test_warm_up_ends_when_times_settle(monkeypatch):
    clock = Clock().install(monkeypatch)
    for ns_of, ends in (
        (lambda toggles, n, nth: 9000 if nth <= 4 else 1000, (3, True)),
        (lambda toggles, n, nth: 1000 if nth <= 4 else 1000 * nth, (2, True)),  # slower: no warm-up
        (lambda toggles, n, nth: 10**6 * 0.97**nth, (workload.WARM_MAX, False)),
        (lambda toggles, n, nth: 10**11 / nth, (2, False)),
    ):
        assert workload.warm_up([FakeEngine(clock, ns_of=ns_of)], Workload(0, 4), 0, None) == ends
    assert workload.warm_up([FakeEngine(clock)], Workload(0, 4), 0, None, once=True) == (1, False)


@pytest.mark.parametrize(("gain", "rounds"), [(0.15, 2), (0.25, 3)])
def test_warm_up_forgives_noise_of_one_engine_among_many(monkeypatch, gain, rounds):
    clock = Clock().install(monkeypatch)
    steady = [FakeEngine(clock) for _ in range(9)]
    quicker = FakeEngine(clock, ns_of=lambda toggles, n, nth: 1000 * (1 - gain * (nth > 4)))
    warm = workload.warm_up([*steady, quicker], Workload(0, 4), 0, None)
    assert warm == (rounds, True), "one of ten that gains 15 % is 1.5 % of a round"


TOGGLES = {
    "plain": Toggles(graph_reuse="set_rows"),
    "served": Toggles(
        kv_cache="per_sequence", graph_reuse="set_rows", batch_sizes="padded",
        kv_growth="geometric", skip_masked_kv="tail",
    ),
}  # fmt: skip
TESTS = ("tg40", "pp37+tg3", "tg3@d33", "pp20+tg4@b3", "pp20+tg4@s3", "tg2@b19")


@pytest.fixture
def load(tiny_model):
    def made(device: str, toggles: str, test: str, quant: str = "Q8_0") -> wb.Engine:
        n_seqs = max(2, parse(test).n_seqs)
        return wb.Engine.load(
            tiny_model("tiny-llama", quant), device=device, n_ctx=64 * n_seqs, n_seqs=n_seqs,
            n_ubatch=16, n_kv_pad=32, threads=1, toggles=TOGGLES[toggles],
        )  # fmt: skip

    return made


def taken_by(monkeypatch: pytest.MonkeyPatch, engine: wb.Engine) -> Mock:
    """What an engine asks its programs for from now on."""
    asked = Mock(wraps=engine.steps.programs.get)
    monkeypatch.setattr(engine.steps.programs, "get", asked)
    return asked


@pytest.mark.parametrize("toggles", TOGGLES)
@pytest.mark.parametrize("test", TESTS)
def test_a_rehearsal_has_the_shapes_of_the_steps(load, monkeypatch, toggles, test):
    """What launches on CUDA ask NVRTC for then was asked of many at once before."""
    with load("null", toggles, test) as engine:
        wanted = engine.rehearsal.from_empty(workload.acts(parse(test), engine.config.n_ubatch))
        taken = taken_by(monkeypatch, engine)
        take_sample(engine, parse(test), draw_tokens(parse(test), engine.model.n_vocab, 0))
        assert wanted == [*dict.fromkeys(c.args[0].shape for c in taken.call_args_list)]
    fake_backend(monkeypatch)
    ready, late, cubin = set[Any](), set[Any](), nvrtc.cubin

    def noted(file: str, arch: str, defines: Any = (), sources: Any = None) -> bytes:
        late.update({(file, defines)} - ready)
        return cubin(file, arch, defines, sources=sources)

    monkeypatch.setattr(nvrtc, "compile_many", lambda wanted, arch, left: ready.update(wanted))
    with load("cuda", toggles, test, "Q4_K") as engine:
        monkeypatch.setattr(nvrtc, "cubin", noted)
        workload.warm_up([engine], parse(test), 0, None, once=True)
    assert len(ready) > 3 and not late


@pytest.mark.parametrize("measured", ["ab", "profile_each"])
def test_all_arms_wait_for_the_compiler_together(load, monkeypatch, measured):
    """Of a comparison also all tests, and the steps whose logits are compared."""
    fake_backend(monkeypatch)
    ready, late, cubin = list[set[Any]](), set[Any](), nvrtc.cubin

    def noted(file: str, arch: str, defines: Any = (), sources: Any = None) -> bytes:
        late.update({(file, defines)} - set().union(*ready))
        return cubin(file, arch, defines, sources=sources)

    monkeypatch.setattr(nvrtc, "compile_many", lambda wanted, arch, left: ready.append({*wanted}))
    with load("cuda", "plain", "tg1", "Q4_K") as engine:
        monkeypatch.setattr(nvrtc, "cubin", noted)
        if measured == "ab":
            wb.ab(engine, "fuse=off,on", tests=["tg2", "pp40+tg2@b2"], rounds=1, smoke=True)
        else:
            arms = {way: engine.toggles.switched("fuse", way) for way in ("off", "on")}
            profile_each(engine, arms, collector="events")
    assert len(ready[0]) > 5 and late <= {("stamp", ())}  # of the device's clock
    assert all(more <= ready[0] for more in ready)


@pytest.mark.parametrize(
    ("device", "toggles", "test"),
    [("embedded", "served", "pp37+tg3"), ("host", "served", "pp20+tg4@b3"),
     ("embedded", "plain", "tg3@d33")],
)  # fmt: skip
def test_no_repetition_compiles_a_cpu_kernel(load, monkeypatch, device, toggles, test):
    """From an empty cache: each kernel that this process has is forgotten."""
    compiled, seen = Mock(wraps=compiler.compile_kernel), list[int]()

    def take(*given: Any, **named: Any) -> Any:
        seen.append(compiled.call_count)
        return take_sample(*given, **named)

    with load(device, toggles, test) as engine:
        monkeypatch.setattr(compiler, "compile_kernel", compiled)
        monkeypatch.setattr(workload, "take_sample", take)
        op_table.kernel.cache_clear()
        workload.warm_up([engine], parse(test), 0, None, once=True)
    assert seen == [compiled.call_count] and seen[0] > 5


def test_a_prompt_and_its_tokens_find_theirs(load, monkeypatch):
    """`generate` rehearses what comes, from the cache as it is."""
    with load("embedded", "served", "tg1") as engine:
        engine.prefill([1] * 21)
        made: list[Any] = []
        monkeypatch.setattr(engine, "make_ready", made.extend)
        taken = taken_by(monkeypatch, engine)
        engine.generate(tokens=[5] * 18, max_tokens=10)
        shapes = {c.args[0].shape for c in taken.call_args_list}
        assert shapes and shapes <= {*made}
