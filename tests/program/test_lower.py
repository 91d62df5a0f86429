"""Programs: the patterns of #17795 letter for letter, commands and their ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
import workbench.program
from workbench.backend.null import NullBackend
from workbench.config import SyncMode
from workbench.engine.engine import Engine
from workbench.graph import ops
from workbench.program import commands as cmd
from workbench.program.as_json import program_as_json
from workbench.program.first_cell import at_cell, first_cell
from workbench.program.letters import LETTERS, legend
from workbench.program.plans import with_plans
from workbench.program.sync_modes import RULES

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
def engine(tiny_model) -> Iterator[Engine]:
    """Its fused nodes want scratch, and all kernels but attention's may begin early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullBackend, "scratch_bytes", lambda self, node: 512 if node.parts else 0)
        patch.setattr(NullBackend, "begins_early", lambda self, node: node.op != "attention")
        path = tiny_model("tiny-llama", "Q8_0")
        with wb.Engine.load(path, device="null", unsafe=True, toggles=wb.Toggles()) as made:
            able: Any = made.backend
            able.capabilities = replace(able.capabilities, programmatic=True)
            yield made


def lowered(engine: Engine, sync="copy_boundary", of=(1, 1), **toggles: str) -> cmd.Program:
    """The program of a step of so many tokens and outputs."""
    some = {"copy_stream": "own", "graph_reuse": "set_rows"} | toggles
    with engine.variant(wb.Toggles(sync=sync, **some)) as variant:
        return variant.program(*of)


def inputs(program: cmd.Program) -> list[cmd.Copy]:
    return [c for c in program.commands if isinstance(c, cmd.Copy) and c.split != cmd.RESULT]


def launched(program: cmd.Program) -> list[cmd.Launch]:
    return [c for c in program.commands if isinstance(c, cmd.Launch)]


def plain(c: cmd.Command) -> tuple:
    """A command with its ranges by name, so that two programs' commands compare equal."""
    return c.kind, c.split, *([(r.buffer.name, *r[1:]) for r in rs] for rs in (c.reads, c.writes))


@pytest.mark.parametrize(
    ("sync", "copy_stream"),
    [
        pair
        for pair in product(RULES, ("own", "compute"))
        if pair != (SyncMode.EVENT_GUARDED, "compute")
    ],
)
def test_patterns_are_those_of_the_thread(engine, sync, copy_stream):
    program = lowered(engine, sync, copy_stream=copy_stream)
    whole, folded, waits = PATTERNS[sync]
    assert program.pattern() == f"h {whole}"
    assert program.pattern(fold=True) == f"h {folded}"
    assert program.counts()["waits"] == waits
    written = {"waits": len(re.findall("[sc]", whole)), "copies": len(re.findall("[ac]", whole))}
    assert program.counts(lettered=True).items() >= written.items()
    rides = {c.stream.id for c in inputs(program)}
    assert rides == {int(copy_stream == "own")}
    kinds = [type(c) for c in program.commands]
    assert kinds[:6] == [cmd.Write] * 6 and kinds[-2:] == [cmd.Sync, cmd.Read]
    for command in program.commands:
        for r in (*command.reads, *command.writes):
            assert r.offset >= 0 and r.offset + r.nbytes <= r.buffer.nbytes, command


def test_every_letter_has_a_meaning_and_the_page_has_the_same():
    page = Path(workbench.program.__file__).with_name("README.md").read_text()
    table = re.search(r"\| letter \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    assert table and dict(re.findall(r"\| `(\w)` \| (.*) \|", table[1])) == LETTERS
    assert set("".join(whole for whole, *_ in PATTERNS.values())) <= {*LETTERS}
    assert legend("h sp3").endswith(f"p: {LETTERS['p']}; a number: so many streams side by side")


@pytest.mark.parametrize("order", ["graph", "user_first"])
@pytest.mark.parametrize(("source", "space"), [("pinned", "pinned"), ("pageable", "host")])
def test_each_input_is_copied_once_from_where_it_should(engine, order, source, space):
    """The embedding, which the host computes, is the first input that the graph wants."""
    program = lowered(engine, input_order=order, host_source=source)
    names = INPUTS if order == "graph" else [*INPUTS[1:], INPUTS[0]]
    assert [c.name for c in inputs(program)] == names
    assert {c.src.buffer.space.value for c in inputs(program)} == {space}
    (read,) = [c for c in program.commands if isinstance(c, cmd.Read)]
    assert read.staging.buffer.space == cmd.Space.PINNED, "logits land in pinned memory"


def test_direct_results_need_no_copy_after_the_last_kernel(engine):
    direct = lowered(engine, "implicit", results="direct")
    assert lowered(engine, "implicit").pattern(result=True) == "h aaaaaagas"
    assert direct.pattern(result=True) == "h aaaaaags"
    (read,) = [c for c in direct.commands if isinstance(c, cmd.Read)]
    assert launched(direct)[-1].writes[0] == read.staging
    assert read.staging.buffer.space == cmd.Space.PINNED and read.staging.buffer.lands
    for n_outputs, end in ((0, "gs"), (8, "gs"), (9, "gas")):
        # kernels for many rows would wait for the host's memory
        many = lowered(engine, "implicit", of=(9, n_outputs), results="direct")
        assert many.pattern(result=True).lstrip("ha ") == end


def test_modes_move_waits_and_nothing_else(engine):
    def work(sync):
        commands = lowered(engine, sync).commands
        return [plain(c) for c in commands if not isinstance(c, cmd.Sync | cmd.Wait | cmd.Record)]

    first, *others = [work(sync) for sync, rule in RULES.items() if not rule.packed]
    assert all(other == first for other in others)


def test_packed_inputs_are_one_copy_of_the_same_bytes(engine):
    """What several copies bring, one brings too: the same bytes to the same addresses."""
    several, packed = lowered(engine), lowered(engine, "packed")
    first, *_, last = inputs(several)
    (one,) = inputs(packed)
    assert len(inputs(several)) == 6 and one.src.nbytes == one.dst.nbytes
    for begin, end, whole in ((first.src, last.src, one.src), (first.dst, last.dst, one.dst)):
        assert whole.offset == begin.offset
        assert whole.offset + whole.nbytes == end.offset + end.nbytes
    assert [*map(plain, launched(several))] == [*map(plain, launched(packed))]


@pytest.mark.parametrize("sync", list(RULES))
def test_a_train_ends_with_the_way_of_its_logits(engine, sync):
    """As the threads write it: `aaaag aaaag aaaagas`, here with the host's split before. A step
    without outputs ends without a wait."""
    every, train = (lowered(engine, sync, (4, 0), step_wait=w) for w in ("every", "outputs"))
    folded = f"h {PATTERNS[sync][1]}"
    assert every.pattern(fold=True) == train.pattern(fold=True, result=True) == folded
    assert every.counts()["waits"] == train.counts()["waits"] + 1
    assert isinstance(train.commands[-1], cmd.Launch) and isinstance(every.commands[-1], cmd.Sync)
    every, train = (lowered(engine, sync, (4, 1), step_wait=w) for w in ("every", "outputs"))
    assert train.pattern(fold=True, result=True) == f"{folded}as"
    assert every.counts() == train.counts()


def test_a_fused_launch_touches_what_its_parts_do(engine):
    """It has the ranges of its parts' launches, less what stays inside it, and scratch of its own
    for that, which no live tensor shares."""
    few = lowered(engine, of=(3, 1), **dict.fromkeys(wb.Toggles.members("fuse"), "on"))
    assert len(launched(few)) < len(launched(lowered(engine, of=(3, 1)))) / 2
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


def test_launches_are_programmatic_where_their_kernels_wait(engine):
    """Only the device's, only those that declare it, and none without the toggle."""
    assert not any(c.programmatic for c in launched(lowered(engine)))
    program = lowered(engine, pdl="on")
    for c in launched(program):
        assert c.programmatic == (c.stream.backend == cmd.DEVICE and c.node.op != "attention")
    shown = [c for c in program_as_json(program)["commands"] if c.get("programmatic")]
    assert len(shown) == sum(c.programmatic for c in launched(program)) > 0


def test_stores_in_a_plan_move_to_another_first_cell(engine):
    program = with_plans(lowered(engine, "implicit", graph_reuse="patch_pointers"), "step")
    assert [first_cell(at_cell(program, cell)) for cell in (0, 7)] == [0, 7]
