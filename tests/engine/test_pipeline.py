"""Layers over two devices: what one computes is copied to the next, and no wait of the host stands
between them, so that two ubatches are under way at once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.program.commands import RESULT, Copy, Launch, Record, Space, Sync, Wait

PROMPT = [5, 900, 17, 403, 77, 12, 99, 3] * 12  # twelve ubatches
TRAINS = {
    "llama.cpp's": Toggles(n_copies="4", step_wait="outputs", graph_reuse="set_rows"),
    "one place": Toggles(sync="copy_boundary", step_wait="outputs"),
    "one place, compute stream": Toggles(sync="packed", copy_stream="compute"),
    "rings": Toggles(
        sync="event_guarded", n_copies="4", host_source="pinned_ring_4", step_wait="outputs"
    ),
}


@pytest.fixture(scope="module")
def load(tiny_model):
    def make(preset: str = "tiny-llama", n_devices: int = 2, **config) -> wb.Engine:
        return wb.Engine.load(
            tiny_model(preset, "Q8_0"), device="embedded", n_ctx=256, n_ubatch=8, threads=2,
            n_devices=n_devices, **{"toggles": wb.Toggles()} | config,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def two(load):
    with load() as engine:
        yield engine


def run(engine: wb.Engine) -> np.ndarray:
    """A train, some tokens, and every row of a second prompt."""
    rows = [engine.prefill(PROMPT[:70]), engine.step([7]), engine.step([12])]
    return np.concatenate([*rows, engine.prefill(PROMPT[70:], outputs="all")])


@pytest.mark.parametrize("fuse", ["off", "on"])
@pytest.mark.parametrize("train", TRAINS)
def test_the_answer_is_that_of_one_device(load, two, train, fuse):
    toggles = TRAINS[train].switched("fuse", fuse)
    with load(n_devices=1) as one, one.variant(Toggles().switched("fuse", fuse)) as whole:
        wanted = run(whole)
    for _ in range(3):
        with two.variant(toggles) as variant:
            assert np.array_equal(run(variant), wanted)


def test_layers_are_neighbours_on_each_device_and_the_output_is_the_last_one_s(two):
    found = {}
    for command in two.program().commands:
        if isinstance(command, Launch) and command.stream.backend:
            found.setdefault(command.node.layer, set()).add(command.stream.backend)
    assert found == {0: {1}, 1: {2}, -1: {2}}
    assert two.program().backends == ("host", "embedded 0", "embedded 1")


def test_devices_are_ordered_by_events_and_not_by_the_host(two):
    with two.variant(TRAINS["llama.cpp's"]) as variant:
        program = variant.program()
    crossing = [
        i for i, c in enumerate(program.commands)
        if isinstance(c, Copy) and c.split != RESULT and c.src.buffer.space == Space.DEVICE
    ]  # fmt: skip
    before, after = program.commands[crossing[0] - 1], program.commands[crossing[-1] + 1]
    behind = program.commands[crossing[-1] + 2]
    assert isinstance(before, Wait) and before.stream.backend == 1, "its place was read"
    assert isinstance(after, Record) and after.stream.backend == 1
    assert isinstance(behind, Wait) and behind.stream.backend == 2 and behind.event == after.event
    first = program.commands[crossing[0]].split
    hosts = [c for c in program.commands if isinstance(c, Sync) and c.split == first]
    assert all(c.event is not None or c.blocks is not None for c in hosts)


@pytest.mark.parametrize(("n_copies", "ahead"), [("1", 1), ("4", 4)])
def test_a_device_goes_on_while_the_next_one_stands_still(load, n_copies, ahead):
    """With the second device held, the first computes as many ubatches as their results have
    places for there; the rest of the prompt follows once it is let go."""
    toggles = Toggles(sync="implicit", copy_stream="compute", n_copies=n_copies,
                      host_source="pinned_ring_4", step_wait="outputs")  # fmt: skip
    found: list[np.ndarray] = []
    with load() as engine, engine.variant(toggles) as variant:
        first, second = (b for b in variant._open.backends if isinstance(b, EmbeddedDevice))
        ring = first.streams[0]
        wanted = variant.prefill(PROMPT[:64])
        variant.reset()
        begun = ring.issued
        variant.prefill(PROMPT[:64])
        one_step = (ring.issued - begun) // 8
        variant.reset()
        with hold(second):
            before = ring.completed
            host = threading.Thread(target=lambda: found.append(variant.prefill(PROMPT[:64])))
            host.start()
            done = -1
            while done != ring.completed:  # until it stands still, too
                done = ring.completed
                time.sleep(0.2)
            steps = (done - before) // one_step
        host.join()
    assert steps == ahead
    assert np.array_equal(found[0], wanted)


def test_the_host_device_is_one(tiny_model):
    with pytest.raises(UsageError, match="n_devices=2 and the host device is one"):
        wb.Engine.load(
            tiny_model("tiny-llama", "Q8_0"), device="host", n_devices=2, toggles=wb.Toggles()
        )


@pytest.mark.parametrize(("order", "first"), [("graph", "embedded 0"), ("user_first", "host")])
def test_what_another_device_made_is_copied_first_or_behind_the_user_s_inputs(two, order, first):
    """In the order of first use it is what the second device's first node reads (#28874)."""
    with two.variant(Toggles(sync="copy_boundary", input_order=order)) as variant:
        program = variant.program()
    copies = [c for c in program.commands if isinstance(c, Copy) and c.split == 2]
    sources = [
        program.backends[1] if c.src.buffer.space == Space.DEVICE else "host" for c in copies
    ]
    assert sources[0] == first and set(sources) == {"host", "embedded 0"}
