"""Engines whose steps compute on several streams: the same logits, other programs (#16991)."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from tests.oracles.adversary import search
from workbench.common.errors import DeviceError, UsageError
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import Launch, Record, Wait

MODELS = [("tiny-llama", "Q8_0"), ("tiny-llama-bias", "F32"), ("tiny-qwen3", "Q8_0")]
PROMPT, DECODED = [5, 900, 17, 403, 77, 8, 31], 6
KEPT = {"graph_reuse": "set_rows"}
STEP = {
    "plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute",
    "results": "direct",
}  # fmt: skip
SETTINGS: dict[str, dict[str, str]] = {
    "qkv": {"streams": "3"},
    "qkv on two": {"streams": "2"},
    "three_way": {"streams": "3", "fork": "three_way"},
    "any": {"streams": "8", "fork": "any"},
    "any on two": {"streams": "2", "fork": "any"},
    "any, halved norms": {"streams": "4", "fork": "any", "defer_norm": "on"},
    "copies on their own": {"streams": "3", "sync": "event_guarded", "copy_stream": "own"},
    "a plan for each split": {"streams": "3", "plans": "ours", "plan_scope": "split"},
    "a plan for the step": {"streams": "8", "fork": "any"} | STEP,
    "launched ahead": {"streams": "3", "launch_ahead": "on", "plan_end": "word"} | STEP,
    "stores by pointer": {"streams": "3", "graph_reuse": "patch_pointers"},
    "validated": {"streams": "3", "validate": "all"},
}
# within one stream fused nodes are the same ones
FUSED = {"fuse": "on", "branch_fusion": "inside"}


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def engine(request, tiny_model):
    with wb.Engine.load(
        tiny_model(*request.param), device="embedded", n_ctx=512, n_ubatch=4, toggles=wb.Toggles()
    ) as engine:
        yield engine


def logits(engine: wb.Engine, settings: dict[str, str]) -> np.ndarray:
    """Of every token of PROMPT, computed in ubatches, and of some behind it."""
    with engine.variant(wb.Toggles(**KEPT | settings)) as one:
        found = [one.prefill(PROMPT, outputs="all")]
        for token in range(DECODED):
            found.append(one.step([100 + 7 * token]))
    return np.concatenate(found)


def serial(settings: dict[str, str]) -> dict[str, str]:
    kept = ("defer_norm", "graph_reuse", "fuse", "branch_fusion")
    return {name: value for name, value in settings.items() if name in kept}


@pytest.mark.parametrize("name", SETTINGS)
def test_programs_with_branches_race_in_nothing(engine, name):
    with engine.variant(wb.Toggles(**KEPT | SETTINGS[name])) as one:
        found = check_cycle(one.cycle(9, 2), one_order=True)
    assert found.safe, found.races[:1]


@pytest.mark.parametrize("name", ["qkv", "any", "any on two", "a plan for the step"])
def test_no_schedule_of_200_reads_anything_wrong(engine, name):
    with engine.variant(wb.Toggles(**KEPT | SETTINGS[name])) as one:
        assert search(one.programs(5, 2)) == []


def streams_of(program) -> set[int]:
    return {c.stream.id for c in program.singly() if isinstance(c, Launch) and not c.by_host}


def test_a_step_of_one_token_forks_in_every_layer(engine):
    with engine.variant(wb.Toggles(**KEPT, streams="3", copy_stream="compute")) as one:
        decode, prompt = one.program(), one.program(n_tokens=4)
        n_layer = one.model.n_layer
    assert streams_of(decode) == {0, 2, 3} and streams_of(prompt) == {0}
    forks = [c for c in decode.commands if isinstance(c, Record | Wait) and c.forks]
    waits = [c for c in forks if isinstance(c, Wait)]
    assert len(waits) == 4 * n_layer  # two streams fork, and are joined
    assert decode.pattern().split()[-1].endswith("g3") and prompt.pattern().endswith("g")
    assert decode.counts()["stream_waits"] == 4 * n_layer


# what is refused ---------------------------------------------------------------------------------


def test_lifetimes_that_race_are_refused_in_one_line(engine):
    toggles = wb.Toggles(**KEPT, streams="3", lifetimes="serial")
    with pytest.raises(UsageError, match="lifetimes=serial and streams=3 race: launch") as refused:
        engine.variant(toggles)
    assert "use lifetimes=visibility, or unsafe" in str(refused.value)
    assert "\n" not in str(refused.value)
    logits(engine, SETTINGS["qkv"])  # and the weights are still there


def test_a_device_with_fewer_streams_refuses(tiny_model):
    with pytest.raises(DeviceError, match=r"streams=2: it offers 1; use streams=1"):
        wb.Engine.load(
            tiny_model("tiny-llama", "Q8_0"), device="host", toggles=wb.Toggles(streams="2")
        )
