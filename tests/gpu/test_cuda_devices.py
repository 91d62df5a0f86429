"""Layers over two GPUs: the answer is one GPU's, per token and to the bit, under every ordering
that is safe, and two ubatches are under way at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from tests.gpu.test_cuda_toggles import SCOPES
from tests.nll import ORDERINGS, is_the_same_under_every_ordering, nll
from tests.orderings import PLACED
from workbench.backend.cuda.device.backend import open_backend
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.program.commands import COMPUTE_STREAM, HOST, Copy, Launch
from workbench.trace.profile import profile

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

PIPELINED = Toggles(
    sync="event_guarded", n_copies="4", host_source="pinned_ring_4", step_wait="outputs",
    graph_reuse="set_rows",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def second_gpu() -> None:
    try:
        open_backend(device=1).close()
    except DeviceError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


def load(path, **config) -> wb.Engine:
    config = {"toggles": Toggles(), "n_ctx": 128, "n_ubatch": 8} | config
    return wb.Engine.load(path, device="cuda", **config)


@pytest.fixture(scope="module")
def of_one(path) -> np.ndarray:
    with load(path) as engine:
        return nll(engine)


@pytest.fixture(scope="module", params=PLACED)
def placed(request, path) -> Iterator[tuple[str, wb.Engine]]:
    with load(path, **PLACED[request.param]) as engine:
        yield request.param, engine


def test_the_nll_is_that_of_any_safe_ordering(placed, of_one):
    """Of another placement the bits are others where the host computes, and only there."""
    name, engine = placed
    wanted = nll(engine)
    if "host" not in name:
        assert np.array_equal(wanted, of_one)
    assert np.allclose(wanted, of_one, atol=0.05)
    assert is_the_same_under_every_ordering(engine, wanted) == ORDERINGS


@pytest.mark.parametrize("quant", ["F16", "Q4_K_M"])
def test_long_prompts_and_fused_launches_cross_over_too(tiny_model, quant):
    """cuBLAS, scratch and programmatic launches on either device."""
    path = tiny_model("tiny-llama", quant)
    tokens = [int(t) for t in np.random.default_rng(3).integers(3, 300, 1100)]
    config = {"n_ctx": 1200, "n_ubatch": 300}
    config["toggles"] = PIPELINED.switched("fuse", "on").switched("pdl", "on")
    found = []
    for n_devices in (1, 2):
        with load(path, n_devices=n_devices, **config) as engine:
            rows = [engine.prefill(tokens, outputs="all")]
            found.append(np.concatenate([*rows, *(engine.step([t]) for t in (5, 6, 7))]))
    assert np.array_equal(*found)


@pytest.mark.parametrize("scope", SCOPES)
def test_each_device_replays_its_part_of_a_step(path, of_one, scope):
    """Copies from one device to the other are in plans, too."""
    toggles = Toggles(graph_reuse="set_rows", plans="ours", **SCOPES[scope])
    with load(path, n_devices=2, toggles=toggles) as engine:
        assert np.array_equal(nll(engine), of_one)
        counters = engine.counters
    assert counters["plans_captured"] >= 2 and counters["plans_replayed"] > 16, counters


def test_the_first_goes_on_while_the_second_stands_still(path):
    """With the second held, the first has computed every ubatch that its results have room for:
    a mark that follows them is reached, and the prompt's own answer is not there yet."""
    tokens = np.random.default_rng(5).integers(3, 300, 32).tolist()  # four ubatches, room for four
    with load(path, n_devices=2, toggles=PIPELINED) as engine:
        wanted = engine.prefill(tokens, outputs="all")
        engine.reset()
        first, second = engine._open.backends[1:]
        with hold(second):
            engine.prefill(tokens[:24], outputs="none")  # returns: nothing waits
            first.sync_stream(COMPUTE_STREAM)()
        assert np.array_equal(engine.prefill(tokens[24:], outputs="all"), wanted[24:])


def test_an_engine_over_one_goes_on_beside_one_over_two(path):
    """Whichever device the other has left the thread with, steps that exist and new ones."""
    with load(path) as one, load(path, n_devices=2, toggles=PIPELINED) as two:
        with one.variant(Toggles(graph_reuse="set_rows")) as kept:
            wanted = [kept.prefill([1, 2, 3]), kept.step([4]), kept.step([5])]
            kept.reset()
            for tokens, row in zip(([1, 2, 3], [4], [5]), wanted, strict=True):
                two.prefill([1, 2, 3])
                assert np.array_equal(kept.prefill(tokens), row)
            with profile(kept, nvtx=False, collector="events") as prof:
                two.step([4])
                kept.step([6])
        two.close()
        assert np.array_equal(one.prefill([1, 2, 3]), wanted[0])
    assert prof.timeline.spans


@pytest.mark.parametrize("collector", ["events", "cupti"])
def test_both_devices_are_seen(path, collector):
    if collector == "cupti":
        pytest.importorskip("cupti.cupti")
    with load(path, n_devices=2, toggles=PIPELINED) as engine:
        engine.prefill([1, 2, 3])
        with profile(engine, nvtx=False, collector=collector) as prof:
            for token in range(5, 9):
                engine.step([token])
        assert prof.collector == collector and prof.complete is not False, prof.note
        program = engine.program(n_past=engine.n_past)
        device = [s for s in prof.timeline.spans if s.category == "device"]
        assert {s.lane.partition(" stream")[0] for s in device} == {"cuda 0", "cuda 1"}
        seen = {s.args["index"] for s in device}
        for i, command in enumerate(program.commands):
            launched = isinstance(command, Launch) and command.stream.backend != HOST
            assert (i in seen) == (isinstance(command, Copy) or launched)
