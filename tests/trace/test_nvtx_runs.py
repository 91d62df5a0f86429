"""What a tool that listens to NVTX hears of runs: steps, phases, commands, replays, requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.trace import nvtx_injection
from tests.trace.nvtx_injection import Event
from workbench.common.errors import UsageError
from workbench.config import EngineConfig
from workbench.engine.look import nvtx_ranges
from workbench.engine.slots.asks import Ask
from workbench.model.sampler import Sampling
from workbench.server.wire.messages import Finish
from workbench.server.wire.worker import WorkerSettings, start

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)
PHASES_BUILT = {"batch", "graph", "fuse", "split", "layout", "lower", "prepare"}


class Told(NamedTuple):
    """What was done, and what NVTX was told of it."""

    facts: dict[str, Any]
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


def ran(folder: Path, *command: object, tool: bool = True) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "NVTX_INJECTION64_PATH"}
    env |= nvtx_injection.environment(folder) if tool else {}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory) -> dict[str, Told]:
    """By scenario."""
    model, folder = tiny_model("tiny-llama", "Q8_0"), tmp_path_factory.mktemp("nvtx") / "tool"
    said = json.loads(ran(folder, HERE / "nvtx_scenarios.py", model).stdout)
    return {
        name: Told(one["facts"], [nvtx_injection.as_event(e) for e in one["events"]])
        for name, one in said.items()
    }


def test_every_range_ends_and_has_a_registered_name(told):
    for name, one in told.items():
        assert nvtx_injection.balanced(one.events), name
        assert {e.domain for e in one.events} == {nvtx_ranges.DOMAIN}, name
        assert all(e.registered and e.category and e.payload is not None for e in one.begun), name
    assert len(told["failing"].of("step")) == 2 and told["failing"].facts["n_past"] == 0


def test_each_command_of_a_step_is_a_range(told):
    one = told["commands"]
    assert [(e.name, e.payload) for e in one.of("prompt")] == [("prompt", 5)]
    # number, tokens, and the cells that are in use before it
    steps = [(0, 2, 0), (1, 2, 2), (2, 1, 4), (3, 1, 5), (4, 1, 6)]
    assert [e.payload for e in one.of("step")] == steps and one.of("step")[0].kind == "start"
    begin = one.events.index(one.of("step")[-1])
    end = next(i for i, e in enumerate(one.events) if i > begin and e.kind == "end")
    last = Told({}, one.events[begin:end])
    assert {kind: last.n[kind] for kind in one.facts["kinds"]} == one.facts["kinds"]
    splits = [(e.name, e.payload) for e in last.of("split")]
    assert splits == [("split 0 (host)", 0), ("split 1 (embedded)", 1)]
    assert {(e.name, e.payload) for e in last.of("build")} == {(name, 4) for name in PHASES_BUILT}
    # bytes of copies: a token's id is int32, its row of the cache int64
    sizes = {e.name: e.payload for e in last.of("copy")}
    assert (sizes["inp_pos"], sizes["attn_inp_k_idxs"]) == (4, 8)
    assert "wait logits" in {e.name for e in last.of("sync")}
    depth = deepest = 0
    for event in one.events:  # prompt, split, command: a command is never outside of its split
        depth += {"push": 1, "pop": -1}.get(event.kind, 0)
        deepest = max(deepest, depth)
        assert event.kind != "push" or event.category != "launch" or depth >= 2, event
    assert deepest == 3


def test_a_replay_is_one_range_also_ahead_of_its_step(told):
    one = told["replays"]
    found = one.of("replay")
    assert len(found) == one.facts["plans_replayed"] + one.facts["plans_issued"] > 0
    assert {(e.name, e.payload) for e in found} == {("plan", 0)}
    assert {e.name for e in one.of("launch")} == {"inp_embd"}  # the host's, outside of the plan
    one = told["ahead"]
    assert len(one.of("replay")) == one.facts["steps"]
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
    one = told["stamped"]
    assert one.facts["n_stamps"] == 2
    assert {k: one.n[k] for k in one.facts["kinds"]} == {
        k: 2 * n for k, n in one.facts["kinds"].items()
    }
    for name in ("traced", "traced_alone"):
        wanted = Counter(told[name].facts["categories"])
        if name == "traced_alone":  # the phases are the engine's own ranges, and it has none
            del wanted["build"]
        assert told[name].n == wanted, name
    assert set(told["traced_without"].n) == {"build"}


# the setting --------------------------------------------------------------------------------------

# Runs in a process of its own: NVTX looks for its tool once, at its first call.
PROGRAM = """
import sys
from workbench.engine.look.nvtx_ranges import ranges_of
ranges = ranges_of(sys.argv[1])
with ranges.scope("prompt", "prompt", 512):
    ranges.stop(ranges.start("request", "request", 9))
print(ranges.on, ranges.words, sep=": ")
"""


@pytest.mark.parametrize(
    ("setting", "tool", "said"),
    [("auto", True, "True: on, a tool listens"), ("off", True, "False: off"),
     ("auto", False, "False: off"), ("on", False, "True: on, no tool listens")],
)  # fmt: skip
def test_auto_tells_a_tool_that_listens(tmp_path, setting, tool, said):
    assert ran(tmp_path, "-c", PROGRAM, setting, tool=tool).stdout.strip() == said
    events = [e for of in nvtx_injection.logged(tmp_path) for e in of]
    assert len(events) == (4 if setting == "auto" and tool else 0)


def test_what_is_no_setting_or_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(nvtx_ranges, "_domain", lambda: None)
    assert nvtx_ranges.ranges_of("auto") is nvtx_ranges.OFF
    with pytest.raises(UsageError, match="nvtx=on: the package nvtx is not installed"):
        nvtx_ranges.ranges_of("on")
    with pytest.raises(UsageError, match="nvtx='yes' must be one of auto, on, off"):
        EngineConfig(nvtx="yes")


# commands -----------------------------------------------------------------------------------------


def heard(folder: Path) -> Told:
    """Of the one process that said anything."""
    (events,) = nvtx_injection.logged(folder) or [[]]
    assert nvtx_injection.balanced(events)
    return Told({}, events)


LISTENS = "NVTX ranges: on, a tool listens; they take time (--nvtx off leaves them out)"
SMALL = ("--device", "embedded", "-t", "1", "--n-seqs", "1")


@pytest.mark.slow
def test_commands_say_that_a_tool_listens(tiny_model, tmp_path):
    model = tiny_model("tiny-llama", "Q8_0")
    bench = ("-m", "workbench", "bench", "-m", model, "-p", "8", "-n", "4", "-r", "2", *SMALL)
    done = ran(tmp_path / "on", *bench, "--out", tmp_path / "run")
    assert done.stderr.splitlines().count(LISTENS) == 1
    one = heard(tmp_path / "on")
    # a warm-up and two repetitions of a prompt, and of four tokens
    assert len([e for e in one.of("prompt") if e.payload == 8]) >= 3
    assert len([e for e in one.of("step") if e.payload[1] == 1]) >= 12
    off = ran(tmp_path / "off", *bench, "--nvtx", "off", "--out", tmp_path / "plain")
    assert "NVTX" not in off.stderr and not heard(tmp_path / "off").events
    for name, said in (("run", "on, a tool listens"), ("plain", "off")):
        made = json.loads((tmp_path / name / "run.json").read_text())["engine"]
        assert made["nvtx"] == said
    ran(tmp_path / "npl", "-m", "workbench", "bench", "-m", model, "-npl", "2", "-p", "8", "-n",
        "2", "-r", "1", "--device", "embedded", "-t", "1")  # fmt: skip
    assert 16 in {e.payload for e in heard(tmp_path / "npl").of("prompt")}
    done = ran(tmp_path / "ab", "-m", "workbench", "ab", "-m", model, "--toggle", "sync=packed",
               "--test", "tg4", "--rounds", "5", *SMALL)  # fmt: skip
    assert done.stderr.splitlines().count(LISTENS) == 1
    assert len(heard(tmp_path / "ab").of("step")) >= 3 * 5 * 4  # both arms, and the control
    done = ran(tmp_path / "kernels", "-m", "workbench", "bench-kernels", "--device", "host",
               "--types", "Q4_0", "--shapes", "8b.o", "--quick", "-t", "1", "--out",
               tmp_path / "cases")  # fmt: skip
    assert done.stderr.splitlines().count(LISTENS) == 1
    cases = heard(tmp_path / "kernels").of("case")
    assert [(e.name, e.payload) for e in cases] == [("Q4_0 8b.o b1 plain", n) for n in (0, 1)]


@pytest.mark.slow
def test_a_served_request_is_a_range_over_steps(tiny_model, tmp_path, monkeypatch):
    """The engine process of a server has the setting, and hears of the tool by itself."""
    for name, value in nvtx_injection.environment(tmp_path / "tool").items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(device="embedded", n_ctx=128, n_seqs=2, n_ubatch=32, threads=1)
    (pipe,), process = start(WorkerSettings(str(tiny_model("tiny-llama", "Q8_0")), config, 2))
    for number in range(3):
        prompt = np.arange(1, 6 + number, dtype=np.int32)
        pipe.send(Ask(number, prompt, 4, Sampling(), 0))
    pipe.send(Finish())
    process.join(120)
    assert process.exitcode == 0
    one = heard(tmp_path / "tool")
    requests = one.of("request")
    assert [(e.name, e.payload) for e in requests] == [("request", n) for n in range(3)]
    assert {e.number for e in requests} < {e.number for e in one.events if e.kind == "end"}
    assert len(one.of("server")) >= 4 and {e.name for e in one.of("server")} == {"server step"}
    assert max(e.payload for e in one.of("server")) == 2  # that run when it begins
    assert len(one.of("step")) >= 4
