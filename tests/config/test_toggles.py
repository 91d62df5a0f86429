"""Toggles and EngineConfig: everything off by default, and refusals that say what to do."""

from __future__ import annotations

import pytest

from workbench.common.errors import UsageError
from workbench.config import EXACT, ROUNDING, EngineConfig, Toggles, folded


def test_default_is_the_baseline():
    assert Toggles().to_dict() == {
        "sync": "per_copy",
        "copy_stream": "auto",
        "host_source": "pinned",
        "n_copies": "1",
        "input_order": "graph",
        "step_wait": "every",
        "results": "copy",
        "graph_reuse": "rebuild",
        "redo_build": "off",
        "redo_split": "off",
        "redo_layout": "off",
        "redo_lower": "off",
        "redo_bind": "off",
        "kv_growth": "step",
        "kv_cache": "unified",
        "skip_masked_kv": "off",
        "skip_gate": "reference",
        "slot_choice": "longest_prefix",
        "defrag": "off",
        "batch_sizes": "exact",
        "sampling": "host",
        "attn_kernel": "auto",
        "kv_parts": "off",
        "activations": "q8",
        "defer_norm": "off",
        "fuse_norm_mul": "off",
        "fuse_norm_quantize": "off",
        "fuse_add_norm": "off",
        "fuse_bias": "off",
        "fuse_qkv": "off",
        "fuse_rope_store": "off",
        "fuse_glu": "off",
        "fuse_epilogue_quantize": "off",
        "fuse_product_norm": "off",
        "pdl": "off",
        "plans": "off",
        "plan_scope": "split",
        "plan_warmup": "auto",
        "plan_evict": "auto",
        "plan_batch": "any",
        "launch_ahead": "off",
        "plan_end": "event",
        "streams": "1",
        "fork": "qkv",
        "branch_fusion": "auto",
        "lifetimes": "visibility",
        "validate": "off",
    }


def test_which_toggles_may_change_the_last_bits():
    """Scheduling is exact; what another kernel computes may round differently."""
    exact = {name for name in Toggles.names() if Toggles.answer_class(name) == EXACT}
    scheduling = {"sync", "copy_stream", "host_source", "n_copies", "input_order", "step_wait"}
    scheduling |= {"results", "skip_masked_kv", "skip_gate", "sampling"}
    plans = {"plans", "plan_scope", "plan_warmup", "plan_evict", "plan_batch"}
    plans |= {"launch_ahead", "plan_end"}
    redo = {"redo_build", "redo_split", "redo_layout", "redo_lower", "redo_bind"}
    streams = {"streams", "fork", "lifetimes", "validate"}
    assert exact == scheduling | {"graph_reuse", "pdl"} | plans | redo | streams
    assert Toggles.answer_class("fuse") == ROUNDING


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sync": "sometimes"}, "sync='sometimes' does not exist; choose one of per_copy"),
        ({"graph_reuse": ""}, "graph_reuse='' does not exist"),
        (
            {"sync": "event_guarded", "copy_stream": "compute"},
            "sync=event_guarded and copy_stream=compute clash",
        ),
        ({"activations": "f16"}, "activations='f16' does not exist; choose one of q8, float"),
        ({"fuse_qkv": "yes"}, "fuse_qkv='yes' does not exist; choose one of off, on"),
        (
            {"redo_lower": "on"},
            "graph_reuse=rebuild and redo_lower=on clash: every step does all of it; use "
            "graph_reuse=set_rows",
        ),
        ({"redo": "again"}, "redo='again' does not exist; choose one of off, on"),
        ({"pdl": True}, "pdl=True does not exist; choose one of off, on"),
    ],
)
def test_impossible_toggles_are_refused_in_one_line(fields, says):
    with pytest.raises(UsageError) as refused:
        Toggles(**fields)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


# families -----------------------------------------------------------------------------------------


def test_a_family_stands_for_all_of_its_toggles():
    names = [name for name in Toggles.names() if name.startswith("fuse_")]
    assert Toggles.members("fuse") == names and len(names) == 9
    assert Toggles.members("fuse_qkv") == ["fuse_qkv"]
    assert Toggles.values("fuse") == ["off", "on"]
    every = Toggles().switched("fuse", "on")
    assert {n: v for n, v in every.to_dict().items() if v == "on"} == dict.fromkeys(names, "on")
    assert every.switched("fuse", "off") == Toggles()
    one = Toggles().switched("fuse_glu", "on")
    assert (every.value_of("fuse"), one.value_of("fuse"), one.value_of("fuse_glu")) == (
        "on", "mixed", "on",
    )  # fmt: skip


def test_a_family_that_agrees_is_folded_for_reading():
    shown = folded(Toggles().switched("fuse", "on").to_dict())
    assert shown["fuse"] == "on" and not any(n.startswith("fuse_") for n in shown)
    assert shown["sync"] == "per_copy" and len(shown) == len(Toggles.names()) - 8 - 4
    mixed = Toggles(fuse_bias="on").to_dict()
    assert folded(mixed) == {n: v for n, v in mixed.items() if n[:5] != "redo_"} | {"redo": "off"}
    assert folded({"fuse_glu": "on"}) == {"fuse_glu": "on"}, "a part is not the family"


# settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"device": "tpu"}, {"n_ctx": -1}, {"n_ubatch": -1}, {"n_kv_pad": 0}, {"threads": -2}]
)
def test_impossible_settings_are_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        EngineConfig(**fields)
