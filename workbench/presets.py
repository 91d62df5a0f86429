"""The values of presets: sets of toggles with names (`presets.json`, `best.json`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BASELINE, BEST = "baseline", "best"  # everything off; what won on a kind of device


class Fixed(dict[str, str]):
    """The values of a fixed preset; `about` says whose they are."""

    about: str = ""


@functools.cache
def fixed_presets() -> dict[str, Fixed]:
    """Name to values, of presets that no device has to resolve (`presets.json`)."""
    found = {}
    for name, entry in json.loads(_beside("presets.json")).items():
        found[name] = Fixed(entry["toggles"])
        found[name].about = entry["about"]
    return found


@functools.cache
def best_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """`best.json`: kind of device to toggle to `value`, `by` (how it won) and `runs` (folders).
    A row with `alone` won together with the others that have it, and is nothing without them;
    there stands the row of what won by itself, None where it is as in the baseline."""
    return json.loads(_beside("best.json"))


def best_table(alone: bool = False) -> dict[str, dict[str, str]]:
    """Kind of device to toggle to what won there; alone: what won by itself."""
    return {
        kind: {
            name: chosen["value"]
            for name, row in rows.items()
            if (chosen := row["alone"] if alone and "alone" in row else row)
        }
        for kind, rows in best_rows().items()
    }


def best_together() -> dict[str, dict[str, str]]:
    """Kind of device to toggle to value, of values that won together and that a device has as a
    whole, or not at all."""
    return {
        kind: {name: row["value"] for name, row in rows.items() if "alone" in row}
        for kind, rows in best_rows().items()
    }


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def preset_names() -> list[str]:
    return [BASELINE, BEST, *(name for name in fixed_presets() if name != BASELINE)]


def preset_words() -> list[str]:
    """A line for each preset: what it is, and its values."""
    best = [f"on {kind} {_assigned(values)}" for kind, values in best_table().items()]
    return [
        f"{BEST}: what won in recorded runs on a device of the kind; {'; '.join(best)}",
        *(
            f"{name}: {values.about}" + (f"; {_assigned(values)}" if values else "")
            for name, values in fixed_presets().items()
        ),
    ]


def _assigned(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
