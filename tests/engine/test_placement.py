"""Layers and single weights on the host or on two devices: the same answer, and nothing waits for
the host that need not."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from tests.profiles import share
from tests.reuse import N_CTX, N_UBATCH, mixed_run
from workbench.backend.cpu.device.embedded import EmbeddedDevice
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.program import commands as c
from workbench.program.commands import Copy, Launch, Space, Sync

PROMPT = [5, 900, 17, 403, 77, 12, 99, 3] * 8
PLACED = {  # and the work of the splits, without waits and copies
    "two devices": ({"n_devices": 2}, "h g g"),
    "everything": ({}, "h g"),
    "the last layer and the output": ({"n_gpu_layers": 2}, "h g"),
    "the output": ({"n_gpu_layers": 1}, "h g"),
    "nothing": ({"n_gpu_layers": 0}, "h"),
    "feed-forward on the host": ({"override_tensor": ("ffn_.*=host",)}, "h g h g h g"),
    "one weight on the host": ({"override_tensor": (r"blk\.1\.attn_q\.weight=host",)}, "h g h g"),
    "one weight on the device": (
        {"n_gpu_layers": 0, "override_tensor": ("blk.0.ffn_up=device",)}, "h g h"
    ),
    "the first that matches wins": (
        {"override_tensor": ("blk.1.ffn_up=device", "blk.1.ffn_up=host")}, "h g"
    ),
}  # fmt: skip
TRAINS = [
    {},
    {"sync": "copy_boundary", "graph_reuse": "pointer_table", "input_order": "user_first"},
    {"sync": "packed", "copy_stream": "compute", "step_wait": "outputs"},
    {"n_copies": "4", "step_wait": "outputs", "graph_reuse": "patch_pointers"},
    {"sync": "event_guarded", "n_copies": "4", "host_source": "pinned_ring_4",
     "step_wait": "outputs"},
]  # fmt: skip
EACH = [(placed, *model) for placed in PLACED
        for model in (("tiny-llama", "Q8_0"), ("tiny-qwen3", "F32"))]  # fmt: skip
FUSED = Toggles().switched("fuse", "on")


@pytest.fixture(scope="module")
def load(tiny_model):
    def make(preset="tiny-llama", quant="Q8_0", **config) -> wb.Engine:
        sizes = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_seqs": 8, "threads": 2}
        given = {"device": "embedded", "toggles": wb.Toggles()} | sizes | config
        return wb.Engine.load(tiny_model(preset, quant), **given)

    return make


@pytest.fixture(scope="module")
def two(load):
    with load(n_devices=2, n_ubatch=8) as engine:
        yield engine


@pytest.mark.parametrize(("placed", "preset", "quant"), share(EACH, every=11, slow=3))
def test_the_answer_is_the_same_wherever_weights_are(load, placed, preset, quant):
    """Host and embedded device compute with the same kernels: bit by bit, fused and not, with and
    without a wait for each ubatch."""
    with load(preset, quant) as whole, load(preset, quant, **PLACED[placed][0]) as engine:
        wanted = mixed_run(whole)
        for train in TRAINS:
            with engine.variant(Toggles(**train)) as variant:
                assert all(map(np.array_equal, mixed_run(variant), wanted)), train
        with engine.variant(FUSED) as fused, whole.variant(FUSED) as off:
            assert all(map(np.array_equal, mixed_run(fused), mixed_run(off)))


@pytest.mark.parametrize("placed", PLACED)
def test_splits_alternate_where_weights_do(load, placed):
    """What a host split takes from a device is waited for; each layer's cache is where it is."""
    config, wanted = PLACED[placed]
    with load(**config) as engine:
        program = engine.program()
    work = ["".join(x for x in group if x in "gh") for group in program.pattern().split()]
    assert " ".join(work) == wanted
    for i, command in enumerate(program.commands):
        of_host = isinstance(command, Copy) and command.split != c.RESULT
        if of_host and program.splits[command.split] == c.HOST:
            wait = program.commands[i + 1]
            assert isinstance(wait, Sync) and wait.blocks is command
    stores = {(x.node.layer, x.stream.backend) for x in program.commands
              if isinstance(x, Launch) and x.node.op in ("set_rows", "attention")}  # fmt: skip
    n_on_host = {"the last layer and the output": 1, "the output": 2}.get(placed, 0)
    n_on_host = 2 if config.get("n_gpu_layers") == 0 else n_on_host
    last = 2 if placed == "two devices" else c.DEVICE
    where = [*[c.HOST] * n_on_host, c.DEVICE, last][:2]
    assert stores == {(0, where[0]), (1, where[1])}


def test_a_node_of_several_weights_is_fused_only_in_one_place(load):
    """Q on the host, K and V on the device: no product of all three."""
    with load(override_tensor=("attn_q=host",), toggles=FUSED) as engine:
        ops = [x.node.op for x in engine.program().commands if isinstance(x, Launch)]
    assert "glu" in ops and not {"qkv", "qkv_rope_store"} & set(ops)


# two devices --------------------------------------------------------------------------------------


def test_devices_are_ordered_by_events_and_not_by_the_host(two):
    with two.variant(Toggles(**TRAINS[3])) as variant:
        program = variant.program()
    crossing = [
        i for i, x in enumerate(program.commands)
        if isinstance(x, Copy) and x.split != c.RESULT and x.src.buffer.space == Space.DEVICE
    ]  # fmt: skip
    before, after = program.commands[crossing[0] - 1], program.commands[crossing[-1] + 1]
    behind = program.commands[crossing[-1] + 2]
    assert isinstance(before, c.Wait) and before.stream.backend == 1, "its place was read"
    assert isinstance(after, c.Record) and after.stream.backend == 1
    assert isinstance(behind, c.Wait) and behind.stream.backend == 2 and behind.event == after.event
    first = program.commands[crossing[0]].split
    hosts = [x for x in program.commands if isinstance(x, Sync) and x.split == first]
    assert all(x.event is not None or x.blocks is not None for x in hosts)


@pytest.mark.parametrize(("n_copies", "ahead"), [("1", 1), ("4", 4)])
def test_a_device_goes_on_while_the_next_one_stands_still(two, n_copies, ahead):
    """With the second device held, the first computes as many ubatches as their results have
    places for there; the rest of the prompt follows once it is let go."""
    toggles = Toggles(sync="implicit", copy_stream="compute", n_copies=n_copies,
                      host_source="pinned_ring_4", step_wait="outputs")  # fmt: skip
    found: list[np.ndarray] = []
    with two.variant(toggles) as variant:
        first, second = (b for b in variant._open.backends if isinstance(b, EmbeddedDevice))
        ring = first.streams[0]
        wanted = variant.prefill(PROMPT)
        variant.reset()
        begun = ring.issued
        variant.prefill(PROMPT)
        one_step = (ring.issued - begun) // 8
        variant.reset()
        with hold(second):
            before = ring.completed
            host = threading.Thread(target=lambda: found.append(variant.prefill(PROMPT)))
            host.start()
            done = -1
            while done != ring.completed:  # until it stands still, too
                done = ring.completed
                time.sleep(0.2)
            steps = (done - before) // one_step
        host.join()
    assert steps == ahead
    assert np.array_equal(found[0], wanted)


@pytest.mark.parametrize(("order", "first"), [("graph", "embedded 0"), ("user_first", "host")])
def test_what_another_device_made_has_its_place_among_inputs(two, order, first):
    """In the order of first use it is what the second device's first node reads (#28874)."""
    with two.variant(Toggles(sync="copy_boundary", input_order=order)) as variant:
        program = variant.program()
    copies = [x for x in program.commands if isinstance(x, Copy) and x.split == 2]
    places = {Space.DEVICE: program.backends[1]}
    sources = [places.get(x.src.buffer.space, "host") for x in copies]
    assert sources[0] == first and set(sources) == {"host", "embedded 0"}


# what is refused ----------------------------------------------------------------------------------

REFUSED = [
    ({"override_tensor": ("ffn_gaet=host",)}, "'ffn_gaet=host' matches no weight of "),
    ({"override_tensor": ("token_embd=device",)}, "token_embd and rope_freqs have backends of"),
    ({"device": "host", "n_gpu_layers": 1}, "the host device has no GPU to put layers on"),
    ({"device": "host", "n_devices": 2}, "n_devices=2 and the host device is one"),
    ({"n_devices": 2, "n_gpu_layers": 1}, "n_devices=2: n_gpu_layers=1 leaves some without layers"),
    ({"n_gpu_layers": -2}, "n_gpu_layers=-2 must be -1 (all) or more"),
    ({"override_tensor": ("ffn",)}, "'ffn' is no PATTERN=host and no PATTERN=device"),
    ({"override_tensor": ("ffn=gpu",)}, "'ffn=gpu' is no PATTERN=host"),
    ({"override_tensor": ("(ffn=host",)}, "'(ffn' is no regular expression (missing )"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_placed_is_refused_in_one_line(load, config, says):
    with pytest.raises(UsageError) as refused:
        load(**config)
    assert says in str(refused.value) and "\n" not in str(refused.value)
