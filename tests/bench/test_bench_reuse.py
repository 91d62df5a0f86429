"""What a token costs before its first command is issued, where programs are kept: inputs taken, the
kept program found, and its 64 stores patched.

Requirement: at most 60 us in each of the three ways, for 32 layers on the embedded device, whether
its workers are idle or busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from workbench.backend.base import Issue
from workbench.backend.issue.prepared import Prepared
from workbench.config import GraphReuse, Toggles
from workbench.engine.engine import Engine
from workbench.engine.look.watch import Watch
from workbench.model.synth import shapes as presets
from workbench.model.synth.models import write_model

REUSED = [way.value for way in GraphReuse if way != GraphReuse.REBUILD]
N_LAYERS, N_KV, STEPS_QUEUED = 32, 256, 3


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Iterator[Engine]:
    """An engine on the embedded device, whose model is tiny and has 32 layers."""
    shape = replace(presets.find_preset("tiny-llama"), n_layer=N_LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "tiny-deep", shape)
        path = write_model("tiny-deep", "Q8_0", tmp_path_factory.mktemp("bench") / "deep.gguf")
    with Engine.load(path, device="embedded", n_ctx=N_KV, toggles=Toggles()) as engine:
        yield engine


class NothingIssued(Watch):
    """Hands out no command."""

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        return ()


@pytest.mark.parametrize("workers", ["idle", "busy"])
@pytest.mark.parametrize("way", REUSED)
def test_graph_work_of_a_token(benchmark, deep, way, workers):
    """`submit` of a token but for the commands. Busy: the workers compute steps that were queued
    before."""
    with deep.variant(Toggles(graph_reuse=way, sync="implicit")) as engine:
        engine.step([7])
        plain = engine.issuer._watch_of
        (prepared,) = (kept.prepared for kept in engine.steps.programs._kept.values())

        def setup() -> None:
            engine.issuer._watch_of = plain
            if engine.n_past >= 250:
                engine.reset()
            engine.step([7])  # the inputs of the next are made while it is waited for
            engine.issuer._watch_of = lambda step: NothingIssued()
            for _ in range(STEPS_QUEUED if workers == "busy" else 0):
                for call in prepared.head:
                    call()

        try:
            benchmark.group = f"graph work of a token, workers {workers}"
            benchmark.pedantic(engine.submit, ([(0, [7], "last")],), setup=setup, rounds=200)
        finally:
            engine.issuer._watch_of = plain
            engine.synchronize()
        assert engine.counters["programs_built"] == 1
        assert engine.counters["programs_reused"] >= 2
