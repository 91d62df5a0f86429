"""What a tool that listens to NVTX hears of runs: steps, phases, commands, replays, requests.

`python -m tests.trace.test_nvtx_runs MODEL` does what the tests look at, in a process that has a
tool from its begin: on stdout, of each scenario, its facts and what NVTX said."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import workbench as wb
from tests.trace import nvtx_injection
from tests.trace.nvtx_injection import Event
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, Toggles
from workbench.engine.slots.asks import Ask
from workbench.model.sampler import Sampling
from workbench.server.wire.messages import Finish
from workbench.server.wire.worker import WorkerSettings, start

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)
PHASES_BUILT = {"batch", "graph", "fuse", "split", "layout", "lower", "prepare"}
PROMPT = [1, 2, 3, 4, 5]
PLANS = Toggles(
    graph_reuse="set_rows", plans="ours", plan_scope="step", sync="packed_implicit",
    copy_stream="compute",
)  # fmt: skip
AHEAD = PLANS.switched("launch_ahead", "on")
BEHIND = PLANS.switched("results", "behind").switched("host_source", "pinned_ring_2")


# what the process does ----------------------------------------------------------------------------


def kinds(engine: wb.Engine, n_past: int) -> dict[str, int]:
    """How many commands of each kind a step of one token has."""
    return dict(Counter(c.kind for c in engine.program(n_past=n_past).commands))


class Scenarios:
    """Each does something with an engine, and returns facts about it."""

    def commands(self, base: wb.Engine) -> Any:
        base.prefill(PROMPT)  # three ubatches
        base.step([6])
        base.step([7])
        return kinds(base, len(PROMPT))

    def ahead(self, base: wb.Engine) -> Any:
        with base.variant(AHEAD) as engine:
            engine.generate(tokens=PROMPT, max_tokens=12, stop_at_eos=False)
            return engine.counters

    def behind(self, base: wb.Engine) -> Any:
        """Two steps under way at once, and one that is when the engine is closed."""
        with base.variant(BEHIND) as engine:
            for pending in [engine.submit([(0, [token], "last")]) for token in (1, 2)]:
                pending.wait()
            engine.submit([(0, [3], "last")])

    def stamped(self, base: wb.Engine) -> Any:
        """Stamps put calls of their own between those of the program."""
        with base.stamped() as found:
            base.step([1])
            base.step([2])
        return kinds(base, 0), len(found)

    def traced(self, base: wb.Engine) -> Any:
        with wb.profile(base) as prof:
            base.step([1])
        return dict(Counter(s.category for s in prof.recorder.spans if s.lane == "host"))

    def traced_alone(self, base: wb.Engine) -> Any:
        """The trace has ranges of its own where the engine has none."""
        with wb.Engine.load(
            base.model.path, device="embedded", n_ctx=64, threads=1, nvtx="off", toggles=Toggles()
        ) as engine:
            engine.step([1])
            return self.traced(engine)

    def failing(self, base: wb.Engine) -> Any:
        """A step that is refused in a prompt, and one whose results fail."""
        with contextlib.suppress(UsageError), base.ranges.scope("prompt", "prompt", 1):
            base.step([base.model.n_vocab])
        pending = base.submit([(0, [1], "last")])
        broken = mock.patch.object(pending.step.program, "finish", side_effect=OSError)
        with broken, contextlib.suppress(OSError):
            pending.wait()
        return base.n_past


def main(model: str) -> None:
    import sitecustomize  # the tool is there (`nvtx_injection.environment`)

    found, tool = {}, sitecustomize.tool
    with wb.Engine.load(
        model, device="embedded", n_ctx=64, n_ubatch=2, threads=1, toggles=Toggles()
    ) as base:
        for name in [name for name in vars(Scenarios) if name[0] != "_"]:
            base.reset()
            tool.events.clear()
            found[name] = getattr(Scenarios(), name)(base), tool.events[:]
    json.dump(found, sys.stdout)


# what it said -------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What was done, and what NVTX said of it."""

    facts: Any
    events: list[Event]

    @property
    def begun(self) -> list[Event]:
        return [e for e in self.events if e.kind in ("push", "start")]

    @property
    def n(self) -> Counter[str]:
        """How many ranges of each category."""
        return Counter(e.category for e in self.begun)

    def of(self, category: str) -> list[Event]:
        return [e for e in self.begun if e.category == category]

    def check_balanced(self) -> None:
        """Every range has ended, once, and no thread's range ended before it began."""
        depth, open_ones = 0, set[int]()
        for event in self.events:
            depth += {"push": 1, "pop": -1}.get(event.kind, 0)
            assert depth >= 0
            if event.kind == "start":
                open_ones.add(event.number)
            elif event.kind == "end":
                open_ones.remove(event.number)
        assert depth == 0 and not open_ones


def ran(folder: Path, *command: object, tool: bool = True) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "NVTX_INJECTION64_PATH"}
    env |= nvtx_injection.environment(folder) if tool else {}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory) -> dict[str, Told]:
    """By scenario."""
    model, folder = tiny_model("tiny-llama", "Q8_0"), tmp_path_factory.mktemp("nvtx") / "tool"
    said = json.loads(ran(folder, "-m", "tests.trace.test_nvtx_runs", model).stdout)
    return {
        name: Told(facts, [nvtx_injection.as_event(event) for event in events])
        for name, (facts, events) in said.items()
    }


@pytest.mark.long
def test_every_range_ends_and_has_a_registered_name(told):
    for name, one in told.items():
        one.check_balanced()
        assert {e.domain for e in one.events} == {"workbench"}, name
        assert all(e.registered and e.category and e.payload is not None for e in one.begun), name
    assert len(told["failing"].of("step")) == 2 and told["failing"].facts == 0


def test_each_command_of_a_step_is_a_range(told):
    one = told["commands"]
    assert [(e.name, e.payload) for e in one.of("prompt")] == [("prompt", 5)]
    # number, tokens, and the cells that are in use before it
    steps = [(0, 2, 0), (1, 2, 2), (2, 1, 4), (3, 1, 5), (4, 1, 6)]
    assert [e.payload for e in one.of("step")] == steps and one.of("step")[0].kind == "start"
    begin = one.events.index(one.of("step")[-1])
    end = next(i for i, e in enumerate(one.events) if i > begin and e.kind == "end")
    last = Told({}, one.events[begin:end])
    assert {kind: last.n[kind] for kind in one.facts} == one.facts
    splits = [(e.name, e.payload) for e in last.of("split")]
    assert splits == [("split 0 (host)", 0), ("split 1 (embedded)", 1)]
    assert {(e.name, e.payload) for e in last.of("build")} == {(name, 4) for name in PHASES_BUILT}
    # bytes of copies: a token's id is int32, its row of the cache int64
    sizes = {e.name: e.payload for e in last.of("copy")}
    assert (sizes["inp_pos"], sizes["attn_inp_k_idxs"]) == (4, 8)
    depth = deepest = 0
    for event in one.events:  # prompt, split, command: a command is never outside of its split
        depth += {"push": 1, "pop": -1}.get(event.kind, 0)
        deepest = max(deepest, depth)
        assert event.kind != "push" or event.category != "launch" or depth >= 2, event
    assert deepest == 3


def test_a_replay_is_one_range_also_ahead_of_its_step(told):
    one = told["ahead"]
    assert {(e.name, e.payload) for e in one.of("replay")} == {("plan", 0)}
    assert len(one.of("replay")) == one.facts["steps"]
    assert {e.name for e in one.of("launch")} == {"inp_embd"}  # the host's, outside of the plan
    assert [e.payload[0] for e in one.of("step")] == list(range(one.facts["steps"]))
    assert len(one.of("launch ahead")) >= one.facts["plans_ahead"] > 0


def test_steps_that_overlap_end_in_their_order(told):
    one = told["behind"]
    told_of = [(e.kind, e.number) for e in one.events if e.kind in ("start", "end")]
    first, second = told_of[0][1], told_of[1][1]
    assert told_of[:4] == [("start", first), ("start", second), ("end", first), ("end", second)]
    # the third was under way when its engine was closed, and has ended, too
    assert [e.payload[0] for e in one.of("step")] == [0, 1, 2] and len(told_of) == 6


def test_stamped_and_traced_steps_have_the_same_ranges(told):
    """A traced command is one range and not two."""
    counts, n_stamps = told["stamped"].facts
    assert n_stamps == 2
    assert {k: told["stamped"].n[k] for k in counts} == {k: 2 * n for k, n in counts.items()}
    assert told["traced"].n == Counter(told["traced"].facts)
    alone = Counter(told["traced_alone"].facts)
    del alone["build"]  # the phases are the engine's own ranges, and it has none
    assert told["traced_alone"].n == alone


# the setting --------------------------------------------------------------------------------------

# Runs in a process of its own: NVTX looks for its tool once, at its first call.
PROGRAM = """
import sys
if sys.argv[2:]:
    sys.modules["nvtx"] = None
from workbench.engine.look.nvtx_ranges import ranges_of
try:
    ranges = ranges_of(sys.argv[1])
    print(ranges.on, ranges.words, sep=": ")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("setting", "tool", "said"),
    [
        (["off"], True, "False: off"),
        (["auto"], False, "False: off"),
        (["on"], False, "True: on, no tool listens"),
        (["auto", "no package"], False, "False: off"),
        (["on", "no package"], False, "UsageError nvtx=on: the package nvtx is not installed"),
    ],
)
def test_without_a_tool_there_are_no_ranges(tmp_path, setting, tool, said):
    assert ran(tmp_path, "-c", PROGRAM, *setting, tool=tool).stdout.startswith(said)
    assert not nvtx_injection.logged(tmp_path)


@pytest.mark.slow
def test_a_served_request_is_a_range_over_steps(tiny_model, tmp_path, monkeypatch):
    """The engine process of a server has the setting, and hears of the tool by itself."""
    for name, value in nvtx_injection.environment(tmp_path / "tool").items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(device="embedded", n_ctx=128, n_seqs=2, n_ubatch=32, threads=1)
    (pipe,), process = start(WorkerSettings(str(tiny_model("tiny-llama", "Q8_0")), config, 2))
    for number in range(3):
        pipe.send(Ask(number, np.arange(1, 6 + number, dtype=np.int32), 4, Sampling(), 0))
    pipe.send(Finish())
    process.join(120)
    assert process.exitcode == 0
    (events,) = nvtx_injection.logged(tmp_path / "tool")  # of the one process that said anything
    one = Told({}, events)
    one.check_balanced()
    requests, servers = one.of("request"), one.of("server")
    assert [(e.name, e.payload) for e in requests] == [("request", n) for n in range(3)]
    assert {e.number for e in requests} < {e.number for e in one.events if e.kind == "end"}
    assert len(servers) >= 4 and {e.name for e in servers} == {"server step"}
    assert max(e.payload for e in servers) == 2  # that run when it begins


if __name__ == "__main__":
    main(sys.argv[1])
