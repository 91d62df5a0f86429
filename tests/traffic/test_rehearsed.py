"""The shapes of a load's steps are found before the load, and its kernels are compiled then."""

from __future__ import annotations

from typing import Any

import pytest

import workbench as wb
from tests.backend.cuda.fake_cuda import fake_backend
from tests.profiles import long
from workbench.answers import effort, loaded, skipped
from workbench.backend.cuda.kernels import nvrtc
from workbench.engine.engine import OPENED
from workbench.traffic import load
from workbench.traffic.bench import BenchSpec
from workbench.traffic.rehearsed import EACH, SHAPING, make_ready, shapes_of

SLOTS = 4
SIZES: dict[str, Any] = {
    "n_ctx": SLOTS * 128, "n_seqs": SLOTS, "n_ubatch": 32, "n_kv_pad": 32, "threads": 1,
}  # fmt: skip
SERVED = wb.Toggles(
    graph_reuse="set_rows", kv_cache="per_sequence", batch_sizes="padded", kv_growth="geometric",
    slot_choice="longest_prefix", sampling="device",
)  # fmt: skip
CHANGES = [f"{name}={value}" for name in SHAPING for value in wb.Toggles.values(name)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lengths", [("uniform:1-90", "9"), ("40", "uniform:1-20")])
def test_a_rehearsed_load_has_the_shapes_of_the_load(tiny_model, change, lengths):
    asked: dict[str, Any] = {"n_requests": EACH * SLOTS, "seed": 3, "n_shared": 5}
    path, toggles = tiny_model("tiny-llama", "Q8_0"), SERVED.switched(*change.split("="))
    with wb.Engine.load(path, device="embedded", toggles=toggles, **SIZES) as engine:
        ids = load.id_range(None, engine.model.n_vocab)
        settings = load.arrivals("poisson", None, f"{SLOTS}")
        rehearsed = shapes_of(engine, SLOTS, settings, BenchSpec.of(*lengths, ids, **asked))
        assert not engine.n_steps and not engine.steps.programs.shapes, "nothing is computed on it"
        wb.serve_bench(
            engine, slots=SLOTS, concurrency=f"{SLOTS}", n_prompt=lengths[0], n_gen=lengths[1],
            n_warm_up=0, **asked,
        )  # fmt: skip
        assert {*engine.steps.programs.shapes} == {*rehearsed} and len(rehearsed) > 3


def test_nothing_is_rehearsed_beside_a_trace(tiny_model):
    """A trace of a cell also has the engines that are made in it."""
    with wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded", **SIZES) as engine:
        spec = BenchSpec.of("9", "2", load.id_range(None, engine.model.n_vocab), n_requests=2)
        made = list[str]()
        with OPENED.told(lambda one: made.append(one.device)):
            with wb.profile(engine):
                make_ready([engine], SLOTS, load.arrivals("poisson", None, "2"), spec)
            assert made == []
            make_ready([engine], SLOTS, load.arrivals("poisson", None, "2"), spec)
        assert made == ["null"]


@pytest.fixture
def compiled(monkeypatch) -> tuple[list[set[Any]], set[Any]]:
    """What the compiler is asked for, many kernels at a time; and kernels that are then missing."""
    fake_backend(monkeypatch)
    for of in ("PASSES", "TURNS"):  # a load comes once, then counts once
        monkeypatch.setattr(effort, f"GPU_{of}", 1)
    together, late, cubin = list[set[Any]](), set[Any](), nvrtc.cubin

    def noted(file: str, arch: str, defines: Any = (), sources: Any = None) -> bytes:
        late.update({(file, defines)} - set().union(*together))
        return cubin(file, arch, defines, sources=sources)

    monkeypatch.setattr(
        nvrtc, "compile_many", lambda wanted, arch, left: together.append({*wanted})
    )
    monkeypatch.setattr(nvrtc, "cubin", noted)
    return together, late


@pytest.mark.parametrize(
    "what", ["one engine", *map(long, ("ways of skipping", "settings", "batches"))]
)
def test_what_a_load_launches_is_compiled_before_it(compiled, tiny_model, tmp_path, what):
    """Of all engines that the load comes to."""
    together, late = compiled
    path = tiny_model("tiny-llama", "Q4_K")
    with wb.Engine.load(path, device="cuda", toggles=SERVED, **SIZES) as engine:
        together.clear()
        late.clear()  # what weights are repacked by
        if what == "one engine":
            wb.serve_bench(
                engine, slots=SLOTS, concurrency="2", n_prompt="uniform:1-90", n_gen="3",
                n_requests=8, n_warm_up=0,
            )  # fmt: skip
        elif what == "ways of skipping":
            found = skipped.ragged(engine, SERVED, 90, 3, 8, 2, 0, str(tmp_path))
            assert len(found) == 5
        elif what == "batches":
            arms = {"serving": SERVED, "baseline": wb.Toggles()}
            loaded.together_table(engine, arms, "pp20+tg3", "1,2", 1, 0, str(tmp_path))
        else:
            arms = {"serving": SERVED, "A/A": SERVED, "host": SERVED.switched("sampling", "host")}
            loaded.measured(engine, arms, "pp20+tg3", f"1,{SLOTS}", 2, 0, str(tmp_path))
    assert len(together[0]) > 5 and late <= {("stamp", ())}  # of the device's clock
    assert all(more <= together[0] for more in together)
