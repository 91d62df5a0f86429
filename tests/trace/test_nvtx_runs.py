"""What a tool that listens to NVTX hears of runs: steps, phases, commands, replays, requests.

NVTX looks for its tool once, at a process's first call: what is looked at is done in children."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
from workbench.engine.look.nvtx_ranges import ranges_of
from workbench.engine.slots.asks import Ask
from workbench.model.sampler import Sampling
from workbench.server.wire import worker
from workbench.server.wire.messages import Finish

pytestmark = [pytest.mark.long, pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)]  # fmt: skip
TOOL = "NVTX_INJECTION64_PATH"
PROMPT = [1, 2, 3, 4, 5]
PLANS = Toggles(
    graph_reuse="set_rows", plans="ours", plan_scope="step", sync="packed_implicit",
    copy_stream="compute",
)  # fmt: skip
AHEAD = PLANS.switched("launch_ahead", "on")
BEHIND = PLANS.switched("results", "behind").switched("host_source", "pinned_ring_2")


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

    def served(self, base: wb.Engine) -> Any:
        """As the engine process of a server does."""
        ours, theirs = multiprocessing.Pipe()
        for number in range(3):
            tokens = np.arange(1, 6 + number, dtype=np.int32)
            ours.send(Ask(number, tokens, 4, Sampling(), 0))
        ours.send(Finish())
        config = EngineConfig(device="embedded", n_ctx=128, n_seqs=2, n_ubatch=32, threads=1)
        worker.main([theirs], worker.WorkerSettings(str(base.model.path), config, 2))


def listened(model: Path, library: Path) -> dict[str, tuple[Any, list[Event]]]:
    """Of each scenario its facts and what NVTX said."""
    os.environ[TOOL] = str(library)
    found, tool = {}, nvtx_injection.Counter(library)
    with wb.Engine.load(
        model, device="embedded", n_ctx=64, n_ubatch=2, threads=1, toggles=Toggles()
    ) as base:
        for name in [name for name in vars(Scenarios) if name[0] != "_"]:
            base.reset()
            tool.events.clear()
            found[name] = getattr(Scenarios(), name)(base), tool.events[:]
    return found


def without_the_package() -> list[str]:
    os.environ.pop(TOOL, None)
    sys.modules["nvtx"] = None  # type: ignore[assignment]
    said = [ranges_of(setting).words for setting in ("off", "auto")]
    with pytest.raises(UsageError) as error:
        ranges_of("on")
    return [*said, str(error.value)]


def in_a_child(function: Callable[..., Any], *given: object) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result(300)


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


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory) -> dict[str, Told]:
    """By scenario."""
    library = tmp_path_factory.mktemp("nvtx") / "libnvtxtool.so"
    nvtx_injection.write_library(library)
    found = in_a_child(listened, tiny_model("tiny-llama", "Q8_0"), library)
    return {name: Told(*one) for name, one in found.items()}


def test_every_range_ends_and_has_a_registered_name(told):
    """Once, and no thread's range before it began."""
    for name, one in told.items():
        depth, open_ones = 0, set[int]()
        for event in one.events:
            depth += {"push": 1, "pop": -1}.get(event.kind, 0)
            assert depth >= 0, name
            if event.kind == "start":
                open_ones.add(event.number)
            elif event.kind == "end":
                open_ones.remove(event.number)
        assert depth == 0 and not open_ones, name
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
    built = {"batch", "graph", "fuse", "split", "layout", "lower", "prepare"}
    assert {(e.name, e.payload) for e in last.of("build")} == {(name, 4) for name in built}
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


def test_a_served_request_is_a_range_over_steps(told):
    requests, servers = (told["served"].of(category) for category in ("request", "server"))
    assert [(e.name, e.payload) for e in requests] == [("request", n) for n in range(3)]
    assert {e.number for e in requests} < {e.number for e in told["served"].events}
    assert len(servers) >= 4 and {e.name for e in servers} == {"server step"}
    assert max(e.payload for e in servers) == 2  # that run when it begins


def test_without_a_tool_there_are_no_ranges():
    said = [ranges_of(setting).words for setting in ("off", "auto", "on")]
    assert said == ["off", "off", "on, no tool listens"]
    missing = "nvtx=on: the package nvtx is not installed here; use nvtx=off"
    assert in_a_child(without_the_package) == ["off", "off", missing]
