"""What a token costs before its first command is issued, where programs are kept: inputs taken, the
kept program found, and its 64 stores patched; and what reuse saves, phase by phase.

Requirement: at most 60 us in each of the three ways, for 32 layers on the embedded device, whether
its workers are idle or busy.

`test_phase` does one phase of a decode step again: what a token pays where nothing is kept.
`test_step` times whole tokens, with each layer of reuse done again in turn: its difference from
`kept` is that layer's cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from workbench.backend.base import Issue
from workbench.backend.issue.prepared import Prepared
from workbench.config import GraphReuse, Toggles
from workbench.engine.engine import Engine
from workbench.engine.look.phases import Phases
from workbench.engine.look.watch import Watch
from workbench.engine.programs import REDO, Key
from workbench.model.synth import shapes as presets
from workbench.model.synth.models import write_model

REUSED = [way.value for way in GraphReuse if way != GraphReuse.REBUILD]
N_LAYERS, N_KV, STEPS_QUEUED = 32, 256, 3
KEPT = Toggles(graph_reuse="set_rows", sync="implicit", copy_stream="compute", fuse="on")
ARMS = {
    "rebuild": KEPT.switched("graph_reuse", "rebuild"),
    "kept": KEPT,
    **{name: KEPT.switched(name, "on") for name in (*REDO, "redo")},
}
PHASES = [phase for phases in REDO.values() for phase in phases]


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Iterator[Engine]:
    """An engine on the embedded device, whose model is tiny and has 32 layers."""
    shape = replace(presets.find_preset("tiny-llama"), n_layer=N_LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "tiny-deep", shape)
        path = write_model("tiny-deep", "Q8_0", tmp_path_factory.mktemp("bench") / "deep.gguf")
    with Engine.load(path, device="embedded", n_ctx=N_KV, toggles=Toggles()) as engine:
        yield engine


class Withheld(Watch):
    """Hands out no command while it is told so. A step that is made ahead keeps its watch."""

    is_on = False

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        return () if self.is_on else prepared.head


@pytest.mark.parametrize("workers", ["idle", "busy"])
@pytest.mark.parametrize("way", REUSED)
def test_graph_work_of_a_token(benchmark, deep, way, workers):
    """`submit` of a token but for the commands. Busy: the workers compute steps that were queued
    before."""
    watch = Withheld()
    with deep.variant(Toggles(graph_reuse=way, sync="implicit")) as engine:
        engine.look(None, watch)
        engine.step([7])
        (prepared,) = (kept.prepared for kept in engine.steps.programs._kept.values())

        def setup() -> None:
            watch.is_on = False
            if engine.n_past >= 250:
                engine.reset()
            engine.step([7])  # the inputs of the next are made while it is waited for
            watch.is_on = True
            for _ in range(STEPS_QUEUED if workers == "busy" else 0):
                for call in prepared.head:
                    call()

        benchmark.group = f"graph work of a token, workers {workers}"
        benchmark.pedantic(engine.submit, ([(0, [7], "last")],), setup=setup, rounds=200)
        engine.synchronize()
        assert engine.counters["programs_built"] == 1
        assert engine.counters["programs_reused"] >= 2


@pytest.mark.parametrize("phase", PHASES)
def test_phase(benchmark, deep, phase):
    with deep.variant(KEPT) as engine:
        phases = Phases(engine._spent)
        prepared = engine.bound.build(Key(engine.program().shape, 0), phases, 0)
        assert sum(c.kind == "launch" for c in prepared.program.commands) > 7 * N_LAYERS
        benchmark(phases.again[phase])


@pytest.mark.parametrize("arm", ARMS)
def test_step(benchmark, deep, arm):
    with deep.variant(ARMS[arm]) as engine:

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
        again = [n for n in Toggles.members("redo") if arm in ("rebuild", "redo", n)]
        assert done == {phase for name in again for phase in REDO[name]}
