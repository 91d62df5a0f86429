"""Two devices whose handles belong to one context each (`contexts.py`): whatever an engine
does on several devices, each call finds the handles of its own device, and that device current."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import workbench as wb
from tests.contract.conformance import contexts
from tests.contract.test_contract import N_SEQS, answers
from tests.nll import nll
from tests.orderings import PLACED, every_ordering
from tests.profiles import share
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common import devices
from workbench.common.errors import DeviceError, UsageError
from workbench.config import Toggles
from workbench.config import engine as config
from workbench.engine.look.kernel_spans import kernel_spans
from workbench.trace.profile import profile

NEXT = (7, 12, 900)
KEPT = {"graph_reuse": "set_rows"}
PLANS = KEPT | {"plans": "ours", "plan_scope": "step", "copy_stream": "compute"}
RINGS = {"host_source": "pinned_ring_4", "step_wait": "outputs"}
# launches ahead and stamped plans
AHEAD = PLANS | RINGS | {
    "sync": "packed_implicit", "results": "direct", "launch_ahead": "on", "plan_end": "word",
}  # fmt: skip
SETS = {
    "baseline": Toggles(),
    "a plan of each split": Toggles(**KEPT, plans="ours", plan_scope="split"),
    "a plan of each step": Toggles(**PLANS, **RINGS, sync="implicit"),
    "a ring, and copies on a stream of their own": Toggles(
        **KEPT, **RINGS, sync="event_guarded", n_copies="4"),
    "rebuilt, with results behind": Toggles(sync="packed", copy_stream="compute", results="behind",
                                            host_source="pinned_ring_2"),
    "a cache that grows": Toggles(**KEPT, kv_growth="geometric"),
    "a cache of regions": Toggles(**KEPT, kv_cache="per_sequence", kv_growth="full"),
    "several streams": Toggles(**KEPT, streams="3", plans="ours"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def plugged() -> Iterator[None]:
    """The device is in the table of devices, which may have several of its kind."""
    row = devices.Device("tests.contract.conformance.contexts", "two contexts", numbered=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.DEVICES, contexts.NAME, row)
        patch.setattr(config, "DEVICES", (*config.DEVICES, contexts.NAME))
        yield


@pytest.fixture(scope="module")
def load(tiny_model) -> Callable[..., wb.Engine]:
    def make(n_devices: int = 2, device: str = contexts.NAME, **config) -> wb.Engine:
        config = {"toggles": Toggles(), "n_ctx": 240, "n_seqs": N_SEQS, "n_kv_pad": 32} | config
        path = tiny_model("tiny-llama", "Q8_0")
        return wb.Engine.load(
            path, device=device, n_ubatch=8, threads=2, n_devices=n_devices, **config
        )

    return make


@pytest.fixture(scope="module")
def two(load) -> Iterator[wb.Engine]:
    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def right(load) -> np.ndarray:
    with load(n_devices=1, device="embedded") as engine:
        return answers(engine)


def test_a_handle_of_another_device_is_refused():
    first, second = contexts.ContextDevice(1, 0), contexts.ContextDevice(1, 1)
    try:
        first.attach()
        mine, strange = first.event(), second.sync_stream(0)  # made while the first is current
        issued = first.record(mine, 0)
        issued()
        second.attach()
        second.wait(mine, 2)()  # any device may wait for an event
        for call, says in (
            (strange, r"\('stream', 0\) of device 0"),
            (issued, "device 1 is current"),
            (second.record(mine, 2), "of device 0"),
        ):
            with pytest.raises(DeviceError, match=says):
                call()
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("name", share(SETS, every=3))
def test_two_contexts_give_the_answer_of_one_device(two, right, name):
    """Cells move, too. Traced, stamped and noted: rings of stamps, marks, the clock."""
    both = {f"{contexts.NAME} 0", f"{contexts.NAME} 1"}
    with two.variant(SETS[name]) as variant:
        found = answers(variant)
        assert compare_logits(right, found, "rounding").holds
        assert np.array_equal(found, right) or "cache" in name
        with profile(variant, nvtx=False, collector="events") as prof:
            for token in NEXT:
                variant.step([token])
        spans = [s for s in prof.timeline.spans if s.category == "device"]
        assert {s.lane.partition(" stream")[0] for s in spans} == both
        with variant.stamped() as stamps:
            for token in NEXT:
                variant.step([token])
        assert stamps
        with kernel_spans(variant) as found:
            variant.step([3])
        (step,) = found.steps
        assert {span.lane.partition(" stream")[0] for span in step} == both
    assert all(backend.checks for backend in two._open.backends[1:])


@pytest.mark.parametrize("placed", share(PLACED, every=len(PLACED)))
def test_every_placement_and_ordering_finds_its_handles(load, placed):
    alone = {"n_devices": 1, "n_ctx": 128, "n_seqs": 1, "n_kv_pad": 256}
    with load(**alone | PLACED[placed]) as engine:
        wanted = nll(engine)
        for toggles in [*every_ordering(graph_reuse="set_rows")][::23]:
            try:
                variant = engine.variant(toggles)
            except UsageError:
                continue
            with variant:
                assert np.array_equal(nll(variant), wanted), toggles


def test_engines_on_one_device_and_on_two_take_turns(load, right):
    """Whichever device the other left current, a new stamped plan is made on its own."""
    ahead, plans = Toggles(**AHEAD), Toggles(**PLANS, sync="implicit")
    with load(n_devices=1, toggles=ahead) as one, load(toggles=plans) as two:
        for engine in (one, two, one):
            assert np.array_equal(answers(engine), right)
        for token in range(5, 20):
            two.step([token])
            one.step([token])
        assert one.counters["plans_replayed"] > 5
        with one.variant(plans) as fresh, fresh.stamped() as stamps:
            for token in NEXT:
                fresh.step([token])
                two.step([token])
        assert len(stamps) >= 2


def test_another_thread_may_step_and_wait(two, right):
    found = [answers(two)]
    thread = threading.Thread(target=lambda: found.append(answers(two)))
    thread.start()
    thread.join()
    found.append(answers(two))
    assert len(found) == 3 and all(np.array_equal(each, right) for each in found)


def test_engines_close_in_any_order(load):
    first, second = load(), load()
    variant = first.variant(SETS["a plan of each step"])
    for engine in (first, second, variant):
        answers(engine)
    first.close()
    wanted = answers(second)
    assert np.array_equal(answers(variant), wanted)
    second.close()
    assert np.array_equal(answers(variant), wanted)
    variant.close()
