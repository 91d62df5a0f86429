"""Toggles and EngineConfig: everything off by default, and refusals that say what to do."""

from __future__ import annotations

import dataclasses

import pytest

from workbench.config import EngineConfig, Toggles
from workbench.errors import UsageError


def test_default_is_the_baseline():
    assert Toggles().to_dict() == {
        "sync": "per_copy",
        "copy_stream": "own",
        "graph_reuse": "rebuild",
    }


def test_every_value_can_be_chosen_unless_it_clashes():
    for name in Toggles.names():
        for value in Toggles.values(name):
            background = Toggles(copy_stream="compute") if value == "implicit" else Toggles()
            assert getattr(dataclasses.replace(background, **{name: value}), name) == value


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sync": "sometimes"}, "sync='sometimes' does not exist; choose one of per_copy"),
        ({"graph_reuse": ""}, "graph_reuse='' does not exist"),
        ({"sync": "implicit", "copy_stream": "own"}, "sync=implicit and copy_stream=own clash"),
    ],
)
def test_impossible_toggles_are_refused_in_one_line(fields, says):
    with pytest.raises(UsageError) as refused:
        Toggles(**fields)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_toggle_names_are_refused():
    with pytest.raises(UsageError, match="'speed' does not exist; choose one of sync"):
        Toggles.values("speed")


@pytest.mark.parametrize(
    "fields", [{"device": "tpu"}, {"n_ctx": 0}, {"n_ubatch": -1}, {"n_kv_pad": 0}, {"threads": -2}]
)
def test_impossible_settings_are_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        EngineConfig(**fields)
