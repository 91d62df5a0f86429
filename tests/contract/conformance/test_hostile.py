"""Devices that copy without any order (`hostile.py`): the conformance suite tells a liar from an
honest one, and the engine refuses on them what it must and is right with all else.

What a device is driven with against its capabilities shows that the tests could tell: those answers
are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from tests.contract.conformance.conformance import CHECKS, failures, run_check
from tests.contract.conformance.hostile import LIES, DetachedCopies, OutOfOrderCopies
from tests.profiles import share
from workbench.backend.base import Backend, open_backend
from workbench.common.errors import DeviceError, UsageError
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.config import engine as config
from workbench.engine import load as loaded
from workbench.engine.engine import Engine
from workbench.program.check.hazards import races

Device = type[OutOfOrderCopies] | type[DetachedCopies]
DEVICES: dict[str, Device] = {kind.name: kind for kind in (OutOfOrderCopies, DetachedCopies)}
SEEDS = range(3)

# the suite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "name"),
    share([(check, name) for check in CHECKS for name in DEVICES], every=5, slow=2),
)
def test_an_honest_device_keeps_what_it_claims(name, check):
    run_check(check, partial(DEVICES[name], threads=2, seed=len(check)))


DRAINED = {
    "Sync(stream) waits for copies to the host": "Sync(stream) returned before a copy to the host "
    "was done: ",
    "Sync(stream) waits for copies to the device, whose source is free then": "Sync(stream) "
    "returned before a copy out of pinned memory was done: ",
    "synchronize waits for every stream": "synchronize returned before a copy on stream ",
}
ORDERED = {
    "a copy reads what launches in front of it have made": "overtook the launches in front of it",
    "a launch reads what copies in front of it have brought": "did not wait for the copy in front",
    "copies of a stream run in order": "a copy did not wait for the copy in front of it",
    "Sync(event) waits for the copies before its Record": "Sync(event) returned before a copy in "
    "front of its Record was done: ",
    "an event stands for the copies before its Record": "waited for an event, and ran before the "
    "copy in front of the event's Record",
}
KEPT = (  # for it lies about copies alone
    "launches of a stream run in order, each as often as it is called",
    "Sync(stream) waits for launches",
    "Sync(event) waits for the launches before its Record",
)


@pytest.mark.parametrize(
    ("lie", "broken"),
    [
        (partial(OutOfOrderCopies, capabilities=LIES), ORDERED),
        pytest.param(
            partial(DetachedCopies, capabilities=LIES), ORDERED | DRAINED, marks=pytest.mark.slow
        ),
        # claims a queue that at least a Sync drains
        pytest.param(
            partial(DetachedCopies, capabilities=OutOfOrderCopies.HONEST),
            DRAINED,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["out of order as embedded", "detached as embedded", "detached as out of order"],
)
def test_a_liar_is_told_what_it_did(lie, broken):
    """Each clause with its words, in one of some tries: on a busy machine a copy out of host memory
    comes too late now and then, which is told before pinned memory is tried."""
    left = dict(broken)
    for seed in range(20):
        found = failures(partial(lie, threads=2, seed=seed), left)
        left = {name: said for name, said in left.items() if said not in found.get(name, "")}
    assert not left
    for name in KEPT:  # what a launch made is fetched by a copy, which may come late now and then
        assert any(not failures(partial(lie, threads=2, seed=seed), [name]) for seed in range(20))


# the engine --------------------------------------------------------------------------------------

PROMPT, NEXT = [1, 17, 300, 4, 99, 512, 7, 250, 33, 611, 5, 902, 18, 404], [77, 403, 900]
N_UBATCH = 4  # so the prompt is a train of four
OVERRIDES = {"device": (), "hybrid": ("ffn_=host",)}  # override_tensor: hybrid goes to and fro


@contextmanager
def plugged(name: str, make: Callable[[int], Backend]) -> Iterator[None]:
    """`device=name` opens what `make` makes of a number of threads."""

    def opened(wanted: str, threads: int = 0) -> Backend:
        return make(threads) if wanted == name else open_backend(wanted, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DEVICES", (*config.DEVICES, name))
        patch.setattr(loaded, "open_backend", opened)
        yield


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model("tiny-llama", "Q8_0")


def load(path, device: str, **fields) -> Engine:
    return Engine.load(path, device=device, n_ctx=64, n_ubatch=N_UBATCH, n_kv_pad=32, threads=2,
                       **{"toggles": Toggles()} | fields)  # fmt: skip


def logits(engine: Engine) -> np.ndarray:
    """Of the prompt's last token and of each token after it, float32 (1 + len(NEXT), n_vocab)."""
    engine.reset()
    return np.concatenate([engine.prefill(PROMPT), *(engine.step([t]) for t in NEXT)])


@pytest.fixture(scope="module", params=OVERRIDES)
def placement(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def right(path, placement) -> np.ndarray:
    """What the embedded device says with every wait in place."""
    with load(path, "embedded", override_tensor=OVERRIDES[placement]) as engine:
        return logits(engine)


@pytest.fixture(scope="module", params=DEVICES)
def hostile(request, path, placement) -> Iterator[Engine]:
    """An engine on an honest hostile device."""
    kind = DEVICES[request.param]
    with plugged(kind.name, partial(kind, seed=1)):
        engine = load(path, kind.name, override_tensor=OVERRIDES[placement])
    with engine:
        yield engine


CANNOT, RACE = "cannot honour sync=", "race on the"
ANY = tuple(StepWait)
REFUSED: dict[tuple[str, str], dict[str, str]] = {
    # sync mode, step_wait: what the refusal says on each device
    **{
        (mode, w): {"out_of_order": RACE, "detached": CANNOT}
        for mode in ("implicit", "packed_implicit")
        for w in ANY
    },
    **{("event_guarded", w): {"out_of_order": CANNOT, "detached": CANNOT} for w in ANY},
    **{(mode, w): {"detached": CANNOT} for mode in ("copy_boundary", "packed") for w in ANY},
    ("write_read_boundary", "every"): {"detached": CANNOT},
    ("write_read_boundary", "outputs"): {"out_of_order": RACE, "detached": CANNOT},
}


@pytest.mark.parametrize("step_wait", StepWait)
@pytest.mark.parametrize("copy_stream", [CopyStream.OWN, CopyStream.COMPUTE])
@pytest.mark.parametrize("sync", share(SyncMode, every=3))
def test_refused_or_right(hostile, right, sync, copy_stream, step_wait):
    if (sync, copy_stream) == (SyncMode.EVENT_GUARDED, CopyStream.COMPUTE):
        pytest.skip("these toggles clash on every device")
    toggles = Toggles(sync=sync, copy_stream=copy_stream, step_wait=step_wait)
    refusal = REFUSED.get((sync, step_wait), {}).get(hostile.device)
    if refusal:
        with pytest.raises((DeviceError, UsageError), match=refusal) as caught:
            hostile.variant(toggles)
        said = str(caught.value)
        assert len(said.splitlines()) == 1
        assert f"{hostile.device} device" in said and f"sync={sync}" in said
        assert "use sync=auto" in said
        return
    with hostile.variant(toggles) as engine:
        assert np.array_equal(logits(engine), right)
        assert not races(engine.programs(len(PROMPT), len(NEXT)), one_order=False)


@pytest.mark.parametrize("step_wait", StepWait)
@pytest.mark.parametrize("copy_stream", [CopyStream.OWN, CopyStream.COMPUTE])
def test_auto_chooses_what_is_safe(hostile, copy_stream, step_wait):
    """Asynchronous copies and a wait behind them where a Sync drains copies; in front of them too
    where launches of the step before may still read; copies that block where nothing else helps."""
    with hostile.variant(Toggles(sync="auto", copy_stream=copy_stream, step_wait=step_wait)) as e:
        *_, split = (part for part in e.program().pattern().split() if part.endswith("g"))
    boundary = "a+sg" if step_wait == StepWait.EVERY else "sa+sg"
    wanted = {"out_of_order": boundary, "detached": "sc+sg"}[hostile.device]
    assert re.fullmatch(wanted, split), split


@pytest.mark.parametrize("sync", ["per_copy", "auto"])
def test_a_ring_is_refused_where_no_event_stands_behind_copies(hostile, sync):
    with pytest.raises(DeviceError, match="cannot honour host_source=pinned_ring_2: an event does"):
        hostile.variant(Toggles(sync=sync, host_source="pinned_ring_2"))


@pytest.mark.parametrize("step_wait", StepWait)
@pytest.mark.parametrize("sync", ["per_copy", "auto"])
def test_rings_are_right(hostile, right, sync, step_wait):
    with hostile.variant(Toggles(sync=sync, n_copies="4", step_wait=step_wait)) as engine:
        assert np.array_equal(logits(engine), right)
        assert not races(engine.programs(len(PROMPT), len(NEXT)), one_order=False)


# driven against the contract ---------------------------------------------------------------------


def wrong_seeds(path, make: Callable[..., Backend], toggles: Toggles, unsafe: bool) -> list[int]:
    """The seeds with which a device that is driven so gives other logits than it should."""
    with load(path, "embedded") as engine:
        expected = logits(engine)
    found = []
    for seed in SEEDS:
        with plugged("liar", partial(make, seed=seed)):
            engine = load(path, "liar", toggles=toggles, unsafe=unsafe)
        with engine:
            if not np.array_equal(logits(engine), expected):
                found.append(seed)
    return found


@pytest.mark.parametrize(
    ("make", "sync", "unsafe"),
    [
        # it says that stream order will do
        (partial(OutOfOrderCopies, capabilities=LIES), "implicit", False),
        # it does not, and is told to all the same
        (OutOfOrderCopies, "implicit", True),
        # it says that its copies can be waited for
        (partial(DetachedCopies, capabilities=LIES), "copy_boundary", False),
        (partial(DetachedCopies, capabilities=OutOfOrderCopies.HONEST), "copy_boundary", False),
    ],
    ids=["implicit, believed", "implicit, unsafe", "boundary, as embedded", "boundary, as a queue"],
)
def test_against_the_contract_the_answer_is_wrong(path, make, sync, unsafe):
    toggles = Toggles(sync=sync, copy_stream="compute")
    assert wrong_seeds(path, make, toggles, unsafe)


def test_the_same_tests_find_nothing_wrong_with_what_is_allowed(path):
    toggles = Toggles(sync="copy_boundary", copy_stream="compute")
    assert not wrong_seeds(path, OutOfOrderCopies, toggles, unsafe=False)


def test_the_checker_needs_no_run_to_know(path):
    """The program that was run above: safe where copies keep their stream's order, and not here."""
    with plugged("out_of_order", OutOfOrderCopies):
        toggles = Toggles(sync="implicit", copy_stream="compute")
        engine = load(path, "out_of_order", toggles=toggles, unsafe=True)
    with engine:
        steps = engine.programs(len(PROMPT), len(NEXT))
    assert not races(steps, one_order=True)
    kinds = {(r.first.command.kind, r.second.command.kind) for r in races(steps, one_order=False)}
    assert ("copy", "launch") in kinds  # a graph that reads what has not landed


def test_unsafe_does_not_ask_for_what_a_device_cannot(path):
    with plugged("detached", DetachedCopies), pytest.raises(DeviceError, match="not asynchronous"):
        load(path, "detached", toggles=Toggles(sync="copy_boundary"), unsafe=True)
