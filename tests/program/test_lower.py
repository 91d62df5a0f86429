"""Programs: the patterns of #17795 letter for letter, commands and their ranges."""

from __future__ import annotations

import pytest

from workbench.config import CopyStream, SyncMode
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import StepShape
from workbench.model.decoder import Model, build_graph
from workbench.program import commands as cmd
from workbench.program.as_json import program_as_json
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import RULES, Ordering

DECODE, BOUNDARY = StepShape(1, 1, 256), Ordering("copy_boundary")
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

    def __init__(self, model: Model, on_host=()):
        self.model, self.on_host = model, on_host
        self.caches = model.caches(512)
        tensors = [*model.weights, *(t for pair in self.caches for t in pair)]
        self.residents = [
            {
                t: cmd.Range(cmd.Buffer(t.name, cmd.Space.DEVICE, t.nbytes, b), 0, t.nbytes)
                for t in tensors
            }
            for b in (cmd.HOST, cmd.DEVICE)
        ]

    def backend_of(self, node) -> int:
        embeds = node.op == "get_rows" and node.inputs[0] is self.model.embedding
        return cmd.HOST if embeds or node.layer in self.on_host else cmd.DEVICE

    def graph(self, shape: StepShape):
        return build_graph(self.model, shape, self.caches)

    def program(self, sync, copy_stream="own", shape=DECODE, **others) -> cmd.Program:
        return self.lowered(self.graph(shape), ordering=Ordering(sync, copy_stream, **others))

    def lowered(self, graph, scratch=lambda node: 0, early=None,
                ordering=BOUNDARY) -> cmd.Program:  # fmt: skip
        splits = split(graph, self.backend_of)
        targets = [Target("host", scratch), Target("dev", scratch, early)]
        layout = lay_out(graph, splits, self.residents, targets, ordering)
        return lower(graph, splits, layout, targets, ordering)


@pytest.fixture(scope="module")
def house(model):
    return House(model)


def inputs(program: cmd.Program) -> list[cmd.Copy]:
    return [c for c in program.commands if isinstance(c, cmd.Copy) and c.split != cmd.RESULT]


def launched(program: cmd.Program) -> list[cmd.Launch]:
    return [c for c in program.commands if isinstance(c, cmd.Launch)]


def plain(c: cmd.Command) -> tuple:
    """A command with its ranges by name, so that two programs' commands compare equal."""
    return c.kind, c.split, *([(r.buffer.name, *r[1:]) for r in rs] for rs in (c.reads, c.writes))


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
    assert kinds[:6] == [cmd.Write] * 6 and kinds[-2:] == [cmd.Sync, cmd.Read]
    for command in program.commands:
        for r in (*command.reads, *command.writes):
            assert r.offset >= 0 and r.offset + r.nbytes <= r.buffer.nbytes, command


@pytest.mark.parametrize("order", ["graph", "user_first"])
@pytest.mark.parametrize(
    ("source", "space"), [("pinned", cmd.Space.PINNED), ("pageable", cmd.Space.HOST)]
)
def test_each_input_is_copied_once_from_where_it_should(house, order, source, space):
    """The embedding, which the host computes, is the first input that the graph wants."""
    program = house.program("copy_boundary", input_order=order, host_source=source)
    names = INPUTS if order == "graph" else [*INPUTS[1:], INPUTS[0]]
    assert [c.name for c in inputs(program)] == names
    assert {c.src.buffer.space for c in inputs(program)} == {space}
    (read,) = [c for c in program.commands if isinstance(c, cmd.Read)]
    assert read.staging.buffer.space == cmd.Space.PINNED, "logits land in pinned memory"


def test_direct_results_need_no_copy_after_the_last_kernel(house):
    copied, direct = house.program("implicit"), house.program("implicit", results="direct")
    assert copied.pattern(result=True) == "h aaaaaagas"
    assert direct.pattern(result=True) == "h aaaaaags"
    (read,) = [c for c in direct.commands if isinstance(c, cmd.Read)]
    assert launched(direct)[-1].writes[0] == read.staging
    assert read.staging.buffer.space == cmd.Space.PINNED and read.staging.buffer.lands
    for n_outputs, n_copies in ((0, 0), (8, 0), (9, 1)):
        # kernels for many rows would wait for the host's memory
        many = house.program("implicit", shape=StepShape(9, n_outputs, 256), results="direct")
        copies = [c for c in many.commands if isinstance(c, cmd.Copy) and c.name == "result_output"]
        assert len(copies) == n_copies


def test_modes_move_waits_and_nothing_else(house):
    def work(sync):
        commands = house.program(sync).commands
        return [plain(c) for c in commands if not isinstance(c, cmd.Sync | cmd.Wait | cmd.Record)]

    first, *others = [work(sync) for sync, rule in RULES.items() if not rule.packed]
    assert all(other == first for other in others)


def test_packed_inputs_are_one_copy_of_the_same_bytes(house):
    """What several copies bring, one brings too: the same bytes to the same addresses."""
    several, packed = house.program("copy_boundary"), house.program("packed")
    first, *_, last = inputs(several)
    (one,) = inputs(packed)
    assert len(inputs(several)) == 6 and one.src.nbytes == one.dst.nbytes
    for begin, end, whole in ((first.src, last.src, one.src), (first.dst, last.dst, one.dst)):
        assert whole.offset == begin.offset
        assert whole.offset + whole.nbytes == end.offset + end.nbytes
    assert [*map(plain, launched(several))] == [*map(plain, launched(packed))]


def test_a_train_ends_with_the_way_of_its_logits(house):
    """As the threads write it: `aaaag aaaag aaaagas`, here with the host's split before."""
    how = {"sync": "implicit", "step_wait": "outputs", "copy_stream": "compute"}
    for n_outputs, wanted in ((0, "h aaaag"), (1, "h aaaagas")):
        program = house.program(shape=StepShape(4, n_outputs, 256), **how)
        assert program.pattern(fold=True, result=True) == wanted
    assert house.program("per_copy").pattern(fold=True, result=True) == "h scscgas"


@pytest.mark.parametrize("sync", list(RULES))
def test_a_step_without_outputs_ends_without_a_wait(house, sync):
    shape = StepShape(4, 0, 256)
    every, train = (house.program(sync, shape=shape, step_wait=w) for w in ("every", "outputs"))
    assert every.pattern() == train.pattern()
    assert every.counts()["waits"] == train.counts()["waits"] + 1
    assert isinstance(train.commands[-1], cmd.Launch) and isinstance(every.commands[-1], cmd.Sync)
    with_logits = [house.program(sync, step_wait=w).counts() for w in ("every", "outputs")]
    assert with_logits[0] == with_logits[1]


def test_layers_may_lie_on_the_host_between_device_splits(model):
    program = House(model, on_host=(1,)).program("copy_boundary")
    first, second, third, last = program.pattern(fold=True).split()
    assert (first, second) == ("h", "saaaasg")
    assert third.startswith("c") and third.endswith("h")  # brought to the host, then computed
    assert last.startswith("sa") and last.endswith("sg")


def test_a_fused_launch_touches_what_its_parts_do(house):
    """It has the ranges of its parts' launches, less what stays inside it, and scratch of its own
    for that, which no live tensor shares."""
    graph = house.graph(StepShape(3, 1, 256))
    few = house.lowered(fuse(graph, FUSIONS), lambda node: 512 if node.parts else 0)
    assert len(launched(few)) < len(launched(house.lowered(graph))) / 2
    for command in launched(few):
        node, scratch = command.node, command.scratch
        parts, inside = node.parts or (node,), {t.name for t in ops.interior(node)}
        own = [(t.name, n) for t, _, n in ops.writes(node)]
        of_parts = [(t.name, n) for part in parts for t, _, n in ops.writes(part)]
        assert sorted(own) == sorted(one for one in of_parts if one[0] not in inside)
        assert [r.nbytes for r in command.writes[: len(own)]] == [n for _, n in own]
        made = {part.output.storage for part in parts}
        assert not any(t in made for t, _, _ in ops.reads(node))
        assert (scratch is not None) == bool(node.parts)
        if scratch is not None:
            assert scratch.nbytes == 512
            assert scratch in command.reads and scratch in command.writes
            for r in (*command.reads, *command.writes):
                if r.buffer is scratch.buffer and r is not scratch:
                    assert r.offset >= scratch.offset + 512 or r.offset + r.nbytes <= scratch.offset


def test_launches_are_programmatic_where_their_kernels_wait(house):
    """Only the device's, only those that declare it, and none without the toggle."""
    graph = house.graph(DECODE)
    assert not any(c.programmatic for c in launched(house.lowered(graph)))
    program = house.lowered(graph, early=lambda node: node.op != "attention")
    for c in launched(program):
        assert c.programmatic == (c.stream.backend == cmd.DEVICE and c.node.op != "attention")
    shown = [c for c in program_as_json(program)["commands"] if c.get("programmatic")]
    assert len(shown) == sum(c.programmatic for c in launched(program)) > 0
