"""What a tool that listens to NVTX hears of runs: steps, phases, commands, replays, requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "unit"))
import nvtx_injection  # noqa: E402
from nvtx_injection import Event  # noqa: E402

from workbench.config import EngineConfig  # noqa: E402
from workbench.engine.look.nvtx_ranges import OFF  # noqa: E402
from workbench.engine.look.phases import PhaseClock  # noqa: E402
from workbench.engine.look.watch import PLAIN  # noqa: E402
from workbench.engine.slots.asks import Ask  # noqa: E402
from workbench.model.sampler import Sampling  # noqa: E402
from workbench.server.wire.messages import Finish  # noqa: E402
from workbench.server.wire.worker import WorkerSettings, start  # noqa: E402

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


def ran(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=os.environ | nvtx_injection.environment(folder),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
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


def test_every_range_ends_is_in_one_domain_and_has_a_registered_name(told):
    for name, one in told.items():
        assert nvtx_injection.balanced(one.events), name
        assert {e.domain for e in one.events} == {"workbench"}, name
        assert all(e.registered and e.category and e.payload is not None for e in one.begun), name


def test_each_command_of_a_step_is_a_range(told):
    one = told["commands"]
    assert [(e.name, e.payload) for e in one.of("prompt")] == [("prompt", 5)]
    # number, tokens, and the cells that are in use before it
    steps = [(0, 2, 0), (1, 2, 2), (2, 1, 4), (3, 1, 5), (4, 1, 6)]
    assert [e.payload for e in one.of("step")] == steps and one.of("step")[0].kind == "start"
    begin = one.events.index(one.of("step")[-1])
    end = next(i for i, e in enumerate(one.events) if i > begin and e.kind == "end")
    last = Told({}, one.events[begin:end])
    for kind, n in one.facts["kinds"].items():
        assert last.n[kind] == n, kind
    assert [e.payload for e in last.of("split")] == [0, 1]
    assert {e.name for e in last.of("split")} == {"split 0 (host)", "split 1 (embedded)"}
    assert {e.name for e in last.of("build")} == PHASES_BUILT
    assert {e.payload for e in last.of("build")} == {4}
    # bytes of copies: a token's id is int32, its row of the cache int64
    sizes = {e.name: e.payload for e in last.of("copy")}
    assert (sizes["inp_pos"], sizes["attn_inp_k_idxs"]) == (4, 8)
    assert "wait logits" in {e.name for e in last.of("sync")}


def test_ranges_are_nested_by_thread(told):
    """prompt, split, command: no deeper, and a command is never outside of its split."""
    depth, deepest = 0, 0
    for event in told["commands"].events:
        if event.kind == "push":
            depth += 1
            deepest = max(deepest, depth)
            if event.category == "launch":
                assert depth >= 2, event
        elif event.kind == "pop":
            depth -= 1
    assert deepest == 3


def test_a_replay_is_one_range(told):
    one = told["replays"]
    found = one.of("replay")
    assert len(found) == one.facts["plans_replayed"] + one.facts["plans_issued"] > 0
    assert {(e.name, e.payload) for e in found} == {("plan", 0)}
    assert {e.name for e in one.of("launch")} == {"inp_embd"}  # the host's, outside of the plan


def test_a_launch_ahead_is_a_range_and_so_is_the_step_that_it_is_for(told):
    one = told["ahead"]
    assert len(one.of("step")) == len(one.of("replay")) == one.facts["steps"]
    assert [e.payload[0] for e in one.of("step")] == list(range(one.facts["steps"]))
    assert one.facts["plans_ahead"] > 0
    assert len(one.of("launch ahead")) >= one.facts["plans_ahead"]


def test_steps_that_overlap_end_in_their_order(told):
    one = told["behind"]
    told_of = [(e.kind, e.number) for e in one.events if e.kind in ("start", "end")]
    assert told_of[:4] == [("start", told_of[0][1]), ("start", told_of[1][1]),
                           ("end", told_of[0][1]), ("end", told_of[1][1])]  # fmt: skip
    # the third was under way when its engine was closed, and has ended, too
    assert [e.payload[0] for e in one.of("step")] == [0, 1, 2] and len(told_of) == 6


def test_stamped_steps_have_the_same_ranges(told):
    one = told["stamped"]
    assert one.facts["n_stamps"] == 2
    assert {kind: one.n[kind] for kind in one.facts["kinds"]} == {
        kind: 2 * n for kind, n in one.facts["kinds"].items()
    }


def test_a_traced_command_is_one_range_and_not_two(told):
    for name in ("traced", "traced_alone"):
        one = told[name]
        wanted = Counter(one.facts["categories"])
        if name == "traced_alone":  # the phases are the engine's own ranges, and it has none
            del wanted["build"]
        assert one.n == wanted, name
    assert set(told["traced_without"].n) == {"build"}


def test_what_fails_leaves_no_range_open(told):
    one = told["failing"]
    assert len(one.of("step")) == 2 and one.facts["n_past"] == 0


def test_without_a_tool_nothing_is_in_the_way(engine):
    """The watch of a step and the clock of its phases are those of an engine without ranges."""
    assert engine.config.nvtx == "auto" and engine.ranges is OFF
    assert engine.issuer._watch_of(0) is PLAIN and type(engine._spent) is PhaseClock


# commands -----------------------------------------------------------------------------------------


def heard(folder: Path) -> Told:
    """Of the one process that said anything."""
    (events,) = nvtx_injection.logged(folder) or [[]]
    return Told({}, events)


LISTENS = "NVTX ranges: on, a tool listens; they take time (--nvtx off leaves them out)"
SMALL = ("--device", "embedded", "-t", "1", "--n-seqs", "1")


@pytest.mark.slow
def test_bench_says_that_a_tool_listens(tiny_model, tmp_path):
    model = tiny_model("tiny-llama", "Q8_0")
    bench = ("-m", "workbench", "bench", "-m", model, "-p", "8", "-n", "4", "-r", "2", *SMALL)
    done = ran(tmp_path / "on", *bench, "--out", tmp_path / "run")
    assert done.stderr.splitlines().count(LISTENS) == 1
    one = heard(tmp_path / "on")
    # a warm-up and two repetitions of a prompt, and of four tokens
    prompts = [e for e in one.of("prompt") if e.payload == 8]
    steps = [e for e in one.of("step") if e.payload[1] == 1]
    assert len(prompts) >= 3 and len(steps) >= 12 and nvtx_injection.balanced(one.events)
    assert {"split", "launch", "build", "sync", "write", "read"} <= set(one.n)
    made = json.loads((tmp_path / "run" / "run.json").read_text())["engine"]
    assert (made["nvtx"], made["config"]["nvtx"]) == ("on, a tool listens", "auto")

    off = ran(tmp_path / "off", *bench, "--nvtx", "off", "--out", tmp_path / "plain")
    assert "NVTX" not in off.stderr and not heard(tmp_path / "off").events
    made = json.loads((tmp_path / "plain" / "run.json").read_text())["engine"]
    assert (made["nvtx"], made["config"]["nvtx"]) == ("off", "off")


@pytest.mark.slow
def test_ab_and_prompts_of_several_sequences(tiny_model, tmp_path):
    model = tiny_model("tiny-llama", "Q8_0")
    done = ran(
        tmp_path / "ab", "-m", "workbench", "ab", "-m", model, "--toggle", "sync=packed", "--test",
        "tg4", "--rounds", "5", *SMALL,
    )  # fmt: skip
    assert done.stderr.splitlines().count(LISTENS) == 1
    assert len(heard(tmp_path / "ab").of("step")) >= 3 * 5 * 4  # both arms, and the control
    ran(
        tmp_path / "npl", "-m", "workbench", "bench", "-m", model, "-npl", "2", "-p", "8", "-n",
        "2", "-r", "1", "--device", "embedded", "-t", "1",
    )  # fmt: skip
    one = heard(tmp_path / "npl")
    assert 16 in {e.payload for e in one.of("prompt")} and nvtx_injection.balanced(one.events)


@pytest.mark.slow
def test_a_served_request_is_a_range_over_steps(
    tiny_model: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert len(one.of("step")) >= 4 and nvtx_injection.balanced(one.events)


@pytest.mark.slow
def test_each_measurement_of_a_kernel_is_a_range(tmp_path):
    done = ran(
        tmp_path / "tool", "-m", "workbench", "bench-kernels", "--device", "host", "--types",
        "Q4_0", "--shapes", "8b.o", "--quick", "-t", "1", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.stderr.splitlines().count(LISTENS) == 1
    one = heard(tmp_path / "tool")
    assert {e.name for e in one.of("case")} == {"Q4_0 8b.o b1 plain"}
    assert [e.payload for e in one.of("case")] == [0, 1]  # rounds
    made = json.loads((tmp_path / "run" / "run.json").read_text())["engine"]
    assert made["nvtx"] == "on, a tool listens"
