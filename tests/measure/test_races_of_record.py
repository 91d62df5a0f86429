"""The races of record: found before each fix with the pair the case names, and gone after it."""

from __future__ import annotations

import json

import pytest

from data.measure.races_of_record import CASES, N_COPIES, Named, Script, named, two_devices
from tests.oracles import adversary
from workbench.common.errors import UsageError
from workbench.graph import ops
from workbench.graph.ir import F32
from workbench.graph.ops import make
from workbench.program.as_json import program_as_json
from workbench.program.check import hazards
from workbench.program.commands import RESULT, Copy, Launch, Program, Sync

BY_NAME = {case.name: case for case in CASES}
case_by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# pattern of every step before and after the fix
PATTERNS = {
    "asynchronous_copies": ("h wasagr warwsagr", "h saasg sarwasg"),
    "split_without_inputs": ("h saag h sag", "h saag sh sag"),
    "reused_inputs": ("g", "sg"),
    "reused_copy": ("h wscscgr warwscgr", "ssh wscscgr warwscgr"),
    "bumped_copy_index": ("scscgr", "scscgr"),
    "host_source": ("h wagr", "h wscgr"),
    "unguarded_copy": ("h wcgr", "h wscgr"),
}


def racing(steps: list[Program]) -> set[tuple[Named, Named]]:
    found = hazards.races(steps)
    return {tuple(named(at.step, at.command) for at in race[:2]) for race in found}


def commands(steps: list[Program]):
    return [(n, command) for n, step in enumerate(steps) for command in step.commands]


@case_by_case
def test_each_case_races_before_its_fix_and_not_after(case):
    """On the named pair, which is there once and in host order; the adversary reads wrong values.
    Before and after differ in waits and records, and in where and how a copy goes."""
    first, second = case.expected
    race = next(
        r for r in hazards.races(case.before)
        if named(r.first.step, r.first.command) == first
        and named(r.second.step, r.second.command) == second
    )  # fmt: skip
    assert not race.may and race.nbytes > 0
    assert racing(case.after) == set()
    assert adversary.search(case.before) and adversary.search(case.after) == []
    every = [named(step, command) for step, command in commands(case.before)]
    assert [every.count(name) for name in case.expected] == [1, 1]
    assert every.index(first) < every.index(second)

    def work(steps):
        moved = ("write", "copy", "launch", "read")
        return [named(n, c) for n, c in commands(steps) if c.kind in moved]

    assert work(case.before) == work(case.after)
    patterns = ({step.pattern() for step in steps} for steps in (case.before, case.after))
    assert tuple(patterns) == tuple({pattern} for pattern in PATTERNS[case.name])


def test_every_thread_of_record_has_a_case():
    assert {case.thread for case in CASES} == {"#20463", "#26040", "#20927", "#14855", "#8897"}
    assert len(BY_NAME) == len(CASES) and all(case.title and case.models for case in CASES)
    within = {case.name for case in CASES if case.expected[0].step == case.expected[1].step}
    assert within == {"split_without_inputs"}, "all others are between steps"


def test_pipeline_gets_the_pattern_that_its_thread_writes():
    """#20793 writes `saaasg` for what a pipeline's splits became."""
    cpu, first, _ = BY_NAME["asynchronous_copies"].after[0].pattern(fold=True).split()
    assert (cpu, first) == ("h", "saaaasg")


def test_split_without_inputs_overwrites_what_a_copy_reads():
    """Two tensors share the bytes, as #26167's sanitizer reports them."""
    (race,) = [r for r in hazards.races(BY_NAME["split_without_inputs"].before) if not r.first.step]
    assert (race.kind, race.buffer.name) == ("read-write", "Vulkan_Host")
    assert (race.offset, race.nbytes) == (0, 256)


def test_bumped_copy_index_is_a_stale_read_before_it_is_a_race():
    """Until the index has come round nothing races, though three evaluations read old inputs."""
    first_turn = BY_NAME["bumped_copy_index"].before[:N_COPIES]
    assert racing(first_turn) == set()
    for n, step in enumerate(first_turn):
        written = {c.dst.buffer.name for c in step.commands if isinstance(c, Copy)}
        (launch,) = [c for c in step.commands if isinstance(c, Launch)]
        assert (written >= {r.buffer.name for r in launch.reads}) == (n == 0)


def test_a_ring_only_moves_the_unordered_copy_away():
    """With reuse off the same pair is N_COPIES ubatches apart, and still in no order."""
    assert racing(two_devices(N_COPIES, N_COPIES, drained=False)) == set()
    apart = Named(0, 2, "launch", "result_output"), Named(N_COPIES, 2, "copy", "l_out-0")
    assert racing(two_devices(N_COPIES + 1, N_COPIES, drained=False)) == {apart}
    assert racing(two_devices(N_COPIES + 1, N_COPIES, drained=True)) == set()


def test_programs_written_by_hand_are_programs():
    """Launches read and write what their ops declare, buffers are the same in every step, and all
    of it can be told as JSON."""
    for case in CASES:
        for steps in (case.before, case.after):
            for _, c in commands(steps):
                if isinstance(c, Launch):
                    assert [r.nbytes for r in c.reads] == [n for _, _, n in ops.reads(c.node)]
                    assert [r.nbytes for r in c.writes] == [n for _, _, n in ops.writes(c.node)]
            buffers = {r.buffer for _, c in commands(steps) for r in (*c.reads, *c.writes)}
            assert len({b.name for b in buffers}) == len(buffers)
            told = json.loads(json.dumps([program_as_json(step) for step in steps]))
            assert [len(step["commands"]) for step in told] == [len(s.commands) for s in steps]
    blocked = [
        c for _, c in commands(BY_NAME["host_source"].after)
        if isinstance(c, Sync) and c.blocks is not None
    ]  # fmt: skip
    assert len(blocked) == N_COPIES + 1
    assert all(c.stream == c.blocks.stream and c.stream.id == 1 for c in blocked)


def test_a_script_keeps_memory_and_refuses_what_is_not_there():
    s = Script("CPU", "CUDA0", "CUDA1")
    for _ in range(2):
        s.step()
        s.write("CPU#x#0", F32, (1, 8))
        s.resident("CPU#h#0", F32, (1, 8))
        s.split("CUDA0")
        s.sync_event("used")
        s.blocking_copy("CUDA0#x#0", "CPU#x#0")
        s.launch("CUDA0#y#0", make("rms_norm", "y", s.tensor("CUDA0#x#0"), eps=1e-5))
        s.record("used", "CUDA0")
        s.copy("CUDA1#y#0", "CUDA0#y#0")  # on the stream of the source
    s.result("CUDA0#y#0")
    one, two = s.run()
    for a, b in zip(one.commands, two.commands, strict=False):
        assert (a.kind, a.split, a.reads, a.writes) == (b.kind, b.split, b.reads, b.writes)
    assert [c.kind for c in two.commands[-4:]] == ["copy", "record", "sync", "read"]
    assert {c.split for c in two.commands[-4:]} == {RESULT}
    peer = next(c for c in one.commands if isinstance(c, Copy) and c.dst.buffer.name[:5] == "CUDA1")
    assert peer.stream.backend == 1
    for wrong, says in (
        (lambda: s.copy("CUDA0#z#0", "CPU#z#0"), "CPU#z#0 is read before anything is put there"),
        (lambda: s.sync("CUDA2"), "no backend 'CUDA2'; there are CPU, CUDA0"),
    ):
        with pytest.raises(UsageError, match=says):
            wrong()
