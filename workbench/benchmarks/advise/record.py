"""An advice on disk: `advice.json`, beside the run folders of its comparisons.

It is written after each comparison, so that an advice whose process was killed can be read as one
that was interrupted. Numbers are kept as they were shown: later versions may judge the same run
folders otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from workbench.benchmarks.advise.advice import ORDER, Advice, Effect, Reason
from workbench.benchmarks.advise.candidates import Candidate, Reading
from workbench.benchmarks.advise.chunks import Asked
from workbench.benchmarks.compare.stats import Band, Ratio
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.nameless import portable
from workbench.benchmarks.runs.results import ADVICE_JSON
from workbench.common.errors import UsageError
from workbench.common.output import write_text
from workbench.config import Toggles

# fields of `Advice` that JSON takes as they are
PLAIN = (
    "model", "device", "test", "changes", "left_alone", "interrupted", "seconds", "at_most_s",
    "rebuilding",
)  # fmt: skip


def write(advice: Advice) -> None:
    """Writes `advice.json` into the advice's folder. Raises UsageError where it cannot be
    written."""
    content: dict[str, Any] = {
        "schema": results.TOGETHER_SCHEMAS[ADVICE_JSON],
        **{name: getattr(advice, name) for name in PLAIN},
        "best": _changes(advice.best),
        "start": _changes(advice.start),
        "asked": advice.asked,
        "readings": [
            {"of": of, **one._asdict(), "before": _changes(one.before),
             "after": _changes(one.after)} for of, one in advice.readings.items()
        ],
        "effects": [{"of": of, **one._asdict()} for of, one in advice.effects.items()],
        "reasons": [{"of": of, **one._asdict()} for of, one in advice.reasons.items()],
    }  # fmt: skip
    text = json.dumps(
        results.finite(portable(content)), indent=1, ensure_ascii=False, allow_nan=False
    )
    write_text(advice.folder / ADVICE_JSON, text + "\n", parents=True)


def load(folder: str | Path) -> Advice:
    """Reads the folder of an advice, of any machine. Raises UsageError, in one line, where it holds
    none, or one that is damaged or of a newer schema."""
    folder = Path(folder)
    found = results.read_together(folder, ADVICE_JSON, "advice")
    try:
        return Advice(
            **{name: found[name] for name in PLAIN},
            folder=folder,
            best=_toggles(found["best"]),
            start=_toggles(found["start"]),
            asked=[Candidate(*one) for one in found["asked"]],
            readings={_asked(one["of"]): _reading(one) for one in found["readings"]},
            effects={_asked(one["of"]): _effect(one) for one in found["effects"]},
            reasons={_asked(one["of"]): Reason(one["kind"], one["why"])
                     for one in found["reasons"]},
        )  # fmt: skip
    except UsageError as error:
        raise UsageError(f"{folder}: {ADVICE_JSON}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder}: {ADVICE_JSON} has no valid {error}") from error


assert {*PLAIN, "folder", "best", "start", "asked", "readings", "effects", "reasons"} == {
    field.name for field in fields(Advice)
}


def _changes(toggles: Toggles) -> dict[str, str]:
    """What differs from everything off."""
    off = Toggles().to_dict()
    return {name: value for name, value in toggles.to_dict().items() if value != off[name]}


def _toggles(changes: Mapping[str, str]) -> Toggles:
    return Toggles().changed_by(changes)


def _asked(of: Any) -> Asked:
    one, kind = of
    return (None if one is None else Candidate(*one)), kind


def _reading(found: Mapping[str, Any]) -> Reading:
    return Reading(
        _toggles(found["before"]), _toggles(found["after"]), found["beside"], found["added"],
        tuple(found["gone"]),
    )  # fmt: skip


def _effect(found: Mapping[str, Any]) -> Effect:
    ratio, band = Ratio(*map(_number, found["ratio"])), Band(*map(_number, found["band"]))
    if (verdict := found["verdict"]) not in ORDER:
        raise KeyError(verdict)
    return Effect(ratio, band, verdict, found["answer"], found["holds"])


def _number(value: Any) -> Any:
    return math.nan if value is None else value
