"""Devices that copy without any order (`hostile.py`): the conformance suite tells a liar from an
honest one, and the engine refuses on them what it must and is right with all else.

What a device is driven with against its capabilities shows that the tests could tell: those answers
are wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from tests.contract.conformance.conformance import CHECKS, failures, run_check
from tests.contract.conformance.hostile import LIES, DetachedCopies, OutOfOrderCopies
from tests.profiles import rest, share
from workbench.backend.base import Backend, open_backend
from workbench.common.errors import DeviceError, UsageError
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.config import engine as config
from workbench.engine import load as loaded
from workbench.engine.engine import Engine
from workbench.program.check.hazards import races

DEVICES = {kind.name: kind for kind in (OutOfOrderCopies, DetachedCopies)}
BELIEVED = {name: partial(kind, capabilities=LIES) for name, kind in DEVICES.items()}
AS_A_QUEUE = partial(DetachedCopies, capabilities=OutOfOrderCopies.HONEST)


@pytest.mark.parametrize(
    ("check", "name"),
    share([(check, name) for check in CHECKS for name in DEVICES], every=13, slow=5),
)
def test_an_honest_device_keeps_what_it_claims(name, check):
    run_check(check, partial(DEVICES[name], threads=2, seed=len(check)))


DRAINED = (
    "Sync(stream) waits for copies to the host",
    "Sync(stream) waits for copies to the device, whose source is free then",
    "synchronize waits for every stream",
)
ORDERED = (
    "a copy reads what launches in front of it have made",
    "a launch reads what copies in front of it have brought",
    "copies of a stream run in order",
    "Sync(event) waits for the copies before its Record",
    "an event stands for the copies before its Record",
)
KEPT = (  # for it lies about copies alone
    "launches of a stream run in order, each as often as it is called",
    "Sync(stream) waits for launches",
    "Sync(event) waits for the launches before its Record",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lie", "broken"),
    [
        (BELIEVED["out_of_order"], ORDERED),
        *rest([(BELIEVED["detached"], ORDERED + DRAINED), (AS_A_QUEUE, DRAINED)], slow=2),
    ],
    ids=["out of order as embedded", "detached as embedded", "detached as out of order"],
)
def test_a_liar_is_told_what_it_did(lie, broken):
    """Each clause in one of some tries, for a busy machine may do what the device did not wait for.
    What a launch made is fetched by a copy, which may come late now and then."""
    left = set(broken)
    for seed in range(20):
        left -= failures(partial(lie, threads=2, seed=seed), left).keys()
    assert not left
    for name in KEPT:
        assert any(not failures(partial(lie, threads=2, seed=seed), [name]) for seed in range(20))


# the engine --------------------------------------------------------------------------------------

PROMPT, NEXT = [1, 17, 300, 4, 99, 512, 7, 250, 33, 611, 5, 902, 18, 404], [77, 403, 900]
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
    """With ubatches of four tokens, so that the prompt is a train of four."""
    fields = {"toggles": Toggles()} | fields
    return Engine.load(path, device=device, n_ctx=64, n_ubatch=4, n_kv_pad=32, threads=2, **fields)


def logits(engine: Engine) -> np.ndarray:
    """Of the prompt's last token and of each token after it, float32 (1 + len(NEXT), n_vocab)."""
    engine.reset()
    return np.concatenate([engine.prefill(PROMPT), *(engine.step([t]) for t in NEXT)])


@pytest.fixture(scope="module", params=[*itertools.product(DEVICES, OVERRIDES)], ids="-".join)
def hostile(request, path) -> Iterator[tuple[Engine, np.ndarray]]:
    """An engine on an honest hostile device, and what the embedded device says."""
    name, placement = request.param
    where = {"override_tensor": OVERRIDES[placement]}
    with load(path, "embedded", **where) as engine:
        right = logits(engine)
    with plugged(name, partial(DEVICES[name], seed=1)):
        engine = load(path, name, **where)
    with engine:
        yield engine, right


RINGS = ["per_copy", "auto"]


def is_right(hostile: tuple[Engine, np.ndarray], toggles: Toggles) -> None:
    engine, right = hostile
    with engine.variant(toggles) as variant:
        assert np.array_equal(logits(variant), right)
        assert not races(variant.programs(len(PROMPT), len(NEXT)), one_order=False)


STREAMS = [CopyStream.OWN, CopyStream.COMPUTE]
CLASH = SyncMode.EVENT_GUARDED, CopyStream.COMPUTE
ORDERINGS = [of for of in itertools.product(SyncMode, STREAMS, StepWait) if of[:2] != CLASH]
CANNOT, RACE = "cannot honour sync=", "race on the"
REFUSED = {  # what the refusal says on the out-of-order device; the detached one cannot
    "implicit": RACE, "packed_implicit": RACE, "event_guarded": CANNOT, "copy_boundary": None,
    "packed": None, "write_read_boundary": None,
}  # fmt: skip


@pytest.mark.parametrize(("sync", "copy_stream", "step_wait"), share(ORDERINGS, every=7, slow=3))
def test_refused_or_right(hostile, sync, copy_stream, step_wait):
    """Where only outputs are waited for, launches of the step before may still read."""
    toggles = Toggles(sync=sync, copy_stream=copy_stream, step_wait=step_wait)
    engine, refusal = hostile[0], REFUSED.get(sync)
    if (sync, step_wait) == ("write_read_boundary", "outputs"):
        refusal = RACE
    if engine.device == "detached":
        refusal = CANNOT if sync in REFUSED else None
    if refusal is None:
        is_right(hostile, toggles)
        return
    with pytest.raises((DeviceError, UsageError), match=refusal) as caught:
        engine.variant(toggles)
    said, words = str(caught.value), (f"{engine.device} device", f"sync={sync}", "use sync=auto")
    assert "\n" not in said and all(word in said for word in words)


@pytest.mark.parametrize(("copy_stream", "step_wait"), [*itertools.product(STREAMS, StepWait)])
def test_auto_chooses_what_is_safe(hostile, copy_stream, step_wait):
    """Asynchronous copies and a wait behind them where a Sync drains copies; before them too where
    launches of the step before may still read; copies that block where nothing else helps."""
    engine, toggles = hostile[0], Toggles(copy_stream=copy_stream, step_wait=step_wait, sync="auto")
    with engine.variant(toggles) as variant:
        *_, split = (part for part in variant.program().pattern().split() if part.endswith("g"))
    boundary = "a+sg" if step_wait == StepWait.EVERY else "sa+sg"
    wanted = {"out_of_order": boundary, "detached": "sc+sg"}[engine.device]
    assert re.fullmatch(wanted, split), split


@pytest.mark.parametrize(("sync", "step_wait"), share(itertools.product(RINGS, StepWait), every=5))
def test_rings_are_right_or_refused(hostile, sync, step_wait):
    """Of inputs; where no event stands for copies a ring of staging memory is refused."""
    with pytest.raises(DeviceError, match="cannot honour host_source=pinned_ring_2: its events do"):
        hostile[0].variant(Toggles(sync=sync, host_source="pinned_ring_2"))
    is_right(hostile, Toggles(sync=sync, n_copies="4", step_wait=step_wait))


# driven against the contract ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sync", "wrong"),
    [
        (BELIEVED["out_of_order"], "implicit", True),  # it says that stream order will do
        (OutOfOrderCopies, "implicit", True),  # it does not, and is told to all the same
        (BELIEVED["detached"], "copy_boundary", True),  # it says that copies can be waited for
        (AS_A_QUEUE, "copy_boundary", True),
        (OutOfOrderCopies, "copy_boundary", False),
    ],
    ids=["believed", "unsafe", "detached as embedded", "detached as a queue", "allowed"],
)
def test_against_the_contract_the_answer_is_wrong(path, make, sync, wrong):
    """With one of these seeds; what is allowed is right with all."""
    unsafe = wrong and make is OutOfOrderCopies
    with load(path, "embedded") as engine:
        expected = logits(engine)
    toggles, found = Toggles(sync=sync, copy_stream="compute"), []
    for seed in range(3):
        with plugged("liar", partial(make, seed=seed)):
            engine = load(path, "liar", toggles=toggles, unsafe=unsafe)
        with engine:
            found.append(np.array_equal(logits(engine), expected))
            if unsafe:  # the checker needs no run to know: a graph reads what has not landed
                steps = engine.programs(len(PROMPT), len(NEXT))
                assert not races(steps, one_order=True)
                pairs = [r[:2] for r in races(steps, one_order=False)]
                assert ("copy", "launch") in {tuple(at.command.kind for at in p) for p in pairs}
    assert wrong != all(found)


def test_unsafe_does_not_ask_for_what_a_device_cannot(path):
    with plugged("detached", DetachedCopies), pytest.raises(DeviceError, match="not asynchronous"):
        load(path, "detached", toggles=Toggles(sync="copy_boundary"), unsafe=True)
