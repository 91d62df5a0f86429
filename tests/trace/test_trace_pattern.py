"""The pattern of real runs on the embedded device: the program's, but for waits that hide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.oracles.trace_pattern import HIDDEN, trace_pattern
from tests.orderings import PLACED
from tests.profiles import share
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.backend.issue.issued import Issued
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.program.commands import Space
from workbench.trace.profile import profile
from workbench.trace.spans import HOST_LANE


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=256, toggles=Toggles()
    ) as e:
        yield e


ELSEWHERE = {
    "pageable": Toggles(sync="copy_boundary", host_source="pageable"),
    "train on the compute stream": Toggles(
        sync="copy_boundary", copy_stream="compute", step_wait="outputs"
    ),
    "train on a ring": Toggles(
        sync="implicit", copy_stream="compute", host_source="pinned_ring_4", step_wait="outputs"
    ),
    "train with copies": Toggles(
        sync="event_guarded", n_copies="4", host_source="pinned_ring_2", step_wait="outputs"
    ),
    "llama.cpp's pipeline": Toggles(n_copies="4", step_wait="outputs"),
    "plans of steps": Toggles(
        sync="packed_implicit",
        host_source="pinned_ring_2",
        step_wait="outputs",
        plans="ours",
        plan_scope="step",
    ),
    "branches": Toggles(sync="copy_boundary", streams="3"),
    "branches anywhere, and copies": Toggles(sync="event_guarded", streams="8", fork="any"),
    "branches in plans of steps": Toggles(
        sync="event_guarded", plans="ours", plan_scope="step", streams="3", fork="any"
    ),
}


@pytest.fixture(scope="module", params=PLACED)
def placed(request, tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, n_ubatch=8, threads=2,
        toggles=Toggles(), **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("ordering", share(ELSEWHERE, every=3))
def test_runs_on_every_placement_are_as_programmed(placed, ordering):
    """Step by step: a prompt of five ubatches, then tokens. Whether a copy was held takes many
    steps alike to tell, which a prompt has not: hidden waits have tests of their own."""
    with placed.variant(replace(ELSEWHERE[ordering], graph_reuse="set_rows")) as engine:
        programs = engine.programs(40, 5)
        with profile(engine, nvtx=False) as prof:
            engine.prefill(list(range(3, 43)))
            for token in range(5, 10):
                engine.step([token])
        found = [trace_pattern(prof, step=n).replace(HIDDEN, "") for n in range(len(programs))]
    assert found == [p.pattern() for p in programs]
    commands = [s for s in prof.recorder.spans if s.lane == HOST_LANE and "index" in s.args]
    kinds = [[s.category for s in commands if s.args["step"] == n] for n in range(len(programs))]
    assert kinds == [[c.kind for c in p.commands] for p in programs]


@pytest.mark.parametrize("waits", [False, True], ids=["queued", "held"])
def test_a_copy_that_holds_the_host_shows_in_the_trace(loaded, monkeypatch, waits):
    """Input copies behind a long one: only where their call waits for it do they hold the host.
    The long one is queued by the first input's call, so that it is part of that copy's span."""
    original = EmbeddedDevice.copy
    engine = loaded.variant(Toggles(sync="implicit", copy_stream="compute", graph_reuse="set_rows"))
    device = engine.backend
    nbytes = 16 << 20
    blocks = [device.allocate(nbytes, Space.DEVICE) for _ in range(2)]

    def copy(self, dst, src, n, stream, to_host):
        issue = original(self, dst, src, n, stream, to_host)
        if to_host:
            return issue
        large = original(self, blocks[0].address, blocks[1].address, nbytes, stream, False)
        wait = self.sync_stream(stream)

        def slow() -> None:
            large()
            issue()
            if waits:
                wait()

        return Issued(slow, ("copy",))

    monkeypatch.setattr(EmbeddedDevice, "copy", copy)
    with engine:
        first = engine.step([1])
        pattern = engine.program(n_past=engine.n_past).pattern()
        with profile(engine, nvtx=False) as prof:
            for token in range(5, 10):
                engine.step([token])
        engine.reset()
        assert np.array_equal(engine.step([1]), first)
    assert pattern.startswith("h a") and "c" not in pattern
    assert trace_pattern(prof) == (pattern.replace("a", "a(s)") if waits else pattern)
    for block in blocks:
        block.free()
