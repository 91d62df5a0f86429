"""What reuse saves a token, phase by phase, for a model of 32 layers on the embedded device.

`test_phase` does one phase of a decode step again: what a token pays where nothing is kept.
`test_step` times whole tokens, with each layer of reuse done again in turn: its difference from
`kept` is that layer's cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.look.phases import Phases
from workbench.engine.programs import REDO, Key
from workbench.model.synth import shapes as presets
from workbench.model.synth.models import write_model

NAME, N_LAYER, N_KV = "tiny-llama-32-layers", 32, 256
KEPT = Toggles(graph_reuse="set_rows", sync="implicit", copy_stream="compute", fuse="on")
ARMS = {
    "rebuild": KEPT.switched("graph_reuse", "rebuild"),
    "kept": KEPT,
    **{name: KEPT.switched(name, "on") for name in (*REDO, "redo")},
}
PHASES = [phase for phases in REDO.values() for phase in phases]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("bench") / "32.gguf"
    shape = dataclasses.replace(presets.find_preset("tiny-llama"), n_layer=N_LAYER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, NAME, shape)
        write_model(NAME, "Q4_0", path, progress=False)
    with Engine.load(path, device="embedded", n_ctx=N_KV, toggles=KEPT) as engine:
        yield engine


@pytest.mark.parametrize("phase", PHASES)
def test_phase(benchmark, base, phase):
    with base.variant(KEPT) as engine:
        phases = Phases(engine._spent)
        prepared = engine.bound.build(Key(engine.program().shape, 0), phases, 0)
        assert sum(c.kind == "launch" for c in prepared.program.commands) > 7 * N_LAYER
        benchmark(phases.again[phase])


@pytest.mark.parametrize("arm", ARMS)
def test_step(benchmark, base, arm):
    with base.variant(ARMS[arm]) as engine:

        def step() -> None:
            if engine.n_past == N_KV:
                engine.reset()
            engine.step([7])

        step()
        before = engine.counters
        benchmark(step)
        table = engine.phases(since=before)
        benchmark.extra_info |= {f"{row.phase}_us": row.us for row in table}
        done = {row.phase for row in table if row.us and row.phase in PHASES}
        wanted = {p for name in Toggles.members("redo") for p in REDO[name]
                  if arm in ("rebuild", "redo", name)}  # fmt: skip
        assert done == wanted
