"""Programs: the patterns of #17795 letter for letter, commands and their ranges."""

from __future__ import annotations

import pytest

from workbench.config import CopyStream, SyncMode
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import StepShape
from workbench.model.decoder import Model, build_graph
from workbench.program.as_json import program_as_json
from workbench.program.commands import (
    DEVICE,
    HOST,
    RESULT,
    Buffer,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Space,
    Sync,
    Wait,
    Write,
)
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import RULES, Ordering

DECODE = StepShape(1, 1, 256)
# the patterns as the thread writes them, for the device split of a step with six inputs; and how
# often the host waits, the blocking copies' own among them
PATTERNS = {
    SyncMode.PER_COPY: ("scscscscscscg", "scscg", 13),
    SyncMode.BLOCKING_COPIES: ("sccccccsg", "sccccsg", 9),
    SyncMode.COPY_BOUNDARY: ("saaaaaasg", "saaaasg", 3),
    SyncMode.WRITE_READ_BOUNDARY: ("aaaaaasg", "aaaasg", 2),
    SyncMode.IMPLICIT: ("aaaaaag", "aaaag", 1),
    SyncMode.EVENT_GUARDED: ("saaaaaarwg", "saaaarwg", 2),
    SyncMode.PACKED: ("sasg", "sasg", 3),
    SyncMode.PACKED_IMPLICIT: ("ag", "ag", 1),
}
INPUTS = ["inp_embd", "inp_pos", "attn_inp_k_idxs", "attn_inp_v_idxs", "attn_inp_kq_mask",
          "inp_out_ids"]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model):
    m = Model(tiny_model("tiny-llama", "Q8_0"))
    yield m
    m.close()


class House:
    """A model placed on a host and a device that exist only as names."""

    def __init__(self, model: Model, n_cells: int = 512, on_host=()):
        self.model, self.on_host = model, on_host
        self.caches = model.caches(n_cells)
        tensors = [*model.weights, *(t for pair in self.caches for t in pair)]
        self.residents = [
            {t: Range(Buffer(t.name, Space.DEVICE, t.nbytes, b), 0, t.nbytes) for t in tensors}
            for b in (HOST, DEVICE)
        ]

    def backend_of(self, node) -> int:
        embeds = node.op == "get_rows" and node.inputs[0] is self.model.embedding
        return HOST if embeds or node.layer in self.on_host else DEVICE

    def graph(self, shape: StepShape):
        return build_graph(self.model, shape, self.caches)

    def program(self, sync, copy_stream="own", shape=DECODE, **others) -> Program:
        graph = self.graph(shape)
        splits = split(graph, self.backend_of)
        targets = [Target(name, lambda node: 0) for name in ("host", "dev")]
        ordering = Ordering(sync, copy_stream, **others)
        layout = lay_out(graph, splits, self.residents, targets, ordering)
        return lower(graph, splits, layout, targets, ordering)

    def lowered(self, graph, scratch=lambda node: 0, early=None) -> Program:
        """Any graph, in one mode."""
        splits = split(graph, self.backend_of)
        targets, ordering = (
            [Target("host", scratch), Target("dev", scratch, early)],
            Ordering("copy_boundary"),
        )
        layout = lay_out(graph, splits, self.residents, targets, ordering)
        return lower(graph, splits, layout, targets, ordering)


@pytest.fixture(scope="module")
def house(model):
    return House(model)


@pytest.mark.parametrize("copy_stream", [CopyStream.OWN, CopyStream.COMPUTE])
@pytest.mark.parametrize("sync", list(RULES))
def test_patterns_are_those_of_the_thread(house, sync, copy_stream):
    program = house.program(sync, copy_stream)
    whole, folded, waits = PATTERNS[sync]
    assert program.pattern() == f"h {whole}"
    assert program.pattern(fold=True) == f"h {folded}"
    assert program.counts()["waits"] == waits
    rides = {c.stream.id for c in inputs(program)}
    assert rides == {1 if copy_stream == CopyStream.OWN else 0}
    kinds = [type(c) for c in program.commands]
    assert kinds[:6] == [Write] * 6 and kinds[-2:] == [Sync, Read]
    for command in program.commands:
        for r in (*command.reads, *command.writes):
            assert r.offset >= 0 and r.offset + r.nbytes <= r.buffer.nbytes, command


def inputs(program: Program) -> list[Copy]:
    return [c for c in program.commands if isinstance(c, Copy) and c.split != RESULT]


@pytest.mark.parametrize("order", ["graph", "user_first"])
@pytest.mark.parametrize(("source", "space"), [("pinned", Space.PINNED), ("pageable", Space.HOST)])
def test_each_input_is_copied_once_from_where_it_should(house, order, source, space):
    """The embedding, which the host computes, is the first input that the graph wants."""
    program = house.program("copy_boundary", input_order=order, host_source=source)
    names = INPUTS if order == "graph" else [*INPUTS[1:], INPUTS[0]]
    assert [c.name for c in inputs(program)] == names
    assert {c.src.buffer.space for c in inputs(program)} == {space}
    (read,) = [c for c in program.commands if isinstance(c, Read)]
    assert read.staging.buffer.space == Space.PINNED, "logits land in pinned memory"


def test_direct_results_need_no_copy_behind_the_last_kernel(house):
    copied, direct = house.program("implicit"), house.program("implicit", results="direct")
    assert copied.pattern(result=True) == "h aaaaaagas"
    assert direct.pattern(result=True) == "h aaaaaags"
    (read,) = [c for c in direct.commands if isinstance(c, Read)]
    launch = [c for c in direct.commands if isinstance(c, Launch)][-1]
    assert launch.writes[0] == read.staging and read.staging.buffer.space == Space.PINNED
    assert read.staging.buffer.lands


@pytest.mark.parametrize(("n_outputs", "direct"), [(0, False), (8, True), (9, False)])
def test_many_rows_of_results_are_copied(house, n_outputs, direct):
    """Kernels for many rows would wait for the host's memory."""
    program = house.program("implicit", shape=StepShape(9, n_outputs, 256), results="direct")
    copies = [c for c in program.commands if isinstance(c, Copy) and c.name == "result_output"]
    assert len(copies) == (0 if direct or not n_outputs else 1)


def test_modes_move_waits_and_nothing_else(house):
    def work(program):
        kept = [c for c in program.commands if not isinstance(c, Sync | Wait | Record)]
        return [(c.kind, c.split, c.reads, c.writes) for c in map(_plain, kept)]

    unpacked = [sync for sync, rule in RULES.items() if not rule.packed]
    first, *others = [work(house.program(sync, "own")) for sync in unpacked]
    assert all(other == first for other in others)


def test_packed_inputs_are_one_copy_of_the_same_bytes(house):
    """What several copies bring, one brings too: the same bytes to the same addresses."""

    def bytes_of(program):
        copies = [c for c in program.commands if isinstance(c, Copy) and c.split != RESULT]
        return [(c.src.offset, c.dst.offset, c.src.nbytes, c.dst.nbytes) for c in copies]

    single, (packed,) = bytes_of(house.program("copy_boundary")), bytes_of(house.program("packed"))
    assert len(single) == 6 and packed[:2] == single[0][:2]
    assert packed[2] == packed[3]
    assert [packed[i] + packed[2] for i in (0, 1)] == [
        single[-1][i] + single[-1][2] for i in (0, 1)
    ]
    launches = [[c.reads for c in map(_plain, house.program(sync).commands) if c.kind == "launch"]
                for sync in ("copy_boundary", "packed")]  # fmt: skip
    assert launches[0] == launches[1]


def test_a_train_ends_with_the_way_of_its_logits(house):
    """As the threads write it: `aaaag aaaag aaaagas`, here with the host's split in front."""
    shapes = [StepShape(4, 0, 256), StepShape(4, 0, 256), StepShape(4, 1, 256)]
    train = [house.program("implicit", shape=s, step_wait="outputs", copy_stream="compute")
             for s in shapes]  # fmt: skip
    found = [program.pattern(fold=True, result=True) for program in train]
    assert found == ["h aaaag", "h aaaag", "h aaaagas"]
    assert house.program("per_copy").pattern(fold=True, result=True) == "h scscgas"


@pytest.mark.parametrize("sync", list(RULES))
def test_a_step_without_outputs_ends_without_a_wait(house, sync):
    shape = StepShape(4, 0, 256)
    every, train = (house.program(sync, shape=shape, step_wait=w) for w in ("every", "outputs"))
    assert every.pattern() == train.pattern()
    assert every.counts()["waits"] == train.counts()["waits"] + 1
    assert isinstance(train.commands[-1], Launch) and isinstance(every.commands[-1], Sync)
    with_logits = [house.program(sync, step_wait=w).counts() for w in ("every", "outputs")]
    assert with_logits[0] == with_logits[1]


class _plain:
    """A command with its ranges by name, so that two programs' commands compare equal."""

    def __init__(self, c):
        self.kind, self.split = c.kind, c.split
        self.reads = [(r.buffer.name, r.offset, r.nbytes) for r in c.reads]
        self.writes = [(r.buffer.name, r.offset, r.nbytes) for r in c.writes]


def test_layers_may_lie_on_the_host_between_device_splits(model):
    house = House(model, on_host=(1,))
    program = house.program("copy_boundary")
    first, second, third, last = program.pattern(fold=True).split()
    assert (first, second) == ("h", "saaaasg")
    assert third.startswith("c") and third.endswith("h")  # brought to the host, then computed
    assert last.startswith("sa") and last.endswith("sg")


# fused nodes and programmatic launches ------------------------------------------------------------


def launched(program: Program) -> list[Launch]:
    return [c for c in program.commands if isinstance(c, Launch)]


def test_a_fused_launch_reads_and_writes_what_its_parts_do(house):
    """A fused launch has the ranges of its parts' launches, less what stays inside it."""
    graph = house.graph(StepShape(3, 1, 256))
    plain, fused = (house.lowered(g) for g in (graph, fuse(graph, FUSIONS)))
    named = {c.node: c for c in launched(plain)}
    assert len(launched(fused)) < len(launched(plain)) / 2
    for command in launched(fused):
        parts = [named[part] for part in command.node.parts or (command.node,)]
        inside = {t.name for t in ops.interior(command.node)}
        made = {part.node.output.storage for part in parts}
        sizes = [
            sorted(
                (t.name, n) for c in parts for t, _, n in ops.writes(c.node) if t.name not in inside
            ),
            sorted((t.name, n) for t, _, n in ops.writes(command.node)),
        ]
        assert sizes[0] == sizes[1]
        assert [r.nbytes for r in command.writes[: len(sizes[1])]] == [
            n for _, _, n in ops.writes(command.node)
        ]
        assert not any(t in made for t, _, _ in ops.reads(command.node))


def test_a_fused_launch_has_scratch_of_its_own(house):
    """What its parts hand to each other lies in scratch that no live tensor shares."""
    graph = fuse(house.graph(StepShape(3, 1, 256)), FUSIONS)
    program = house.lowered(graph, lambda node: 512 if node.parts else 0)
    for command in launched(program):
        assert (command.scratch is not None) == bool(command.node.parts)
        if command.scratch is not None:
            assert command.scratch.nbytes == 512
            assert command.scratch in command.reads and command.scratch in command.writes
            begin, end = command.scratch.offset, command.scratch.offset + 512
            for r in (*command.reads, *command.writes):
                if r.buffer is command.scratch.buffer and r is not command.scratch:
                    assert r.offset >= end or r.offset + r.nbytes <= begin


def test_launches_are_programmatic_where_their_kernels_wait(house):
    """Only the device's, only those that declare it, and none without the toggle."""
    graph = house.graph(DECODE)
    assert not any(c.programmatic for c in launched(house.lowered(graph)))
    program = house.lowered(graph, early=lambda node: node.op != "attention")
    for c in launched(program):
        assert c.programmatic == (c.stream.backend == DEVICE and c.node.op != "attention")
    shown = [c for c in program_as_json(program)["commands"] if c.get("programmatic")]
    assert len(shown) == sum(c.programmatic for c in launched(program)) > 0
