"""The values of presets: sets of toggles with names (`presets.json`, `best.json`).

Also what a server adds to `best`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workbench.common import devices
from workbench.config.table import ROWS

BASELINE, BEST = "baseline", "best"  # everything off; what won on a kind of device
ONE, SEVERAL = "one", "several"  # how many sequences a set of `best` is for
FOR = {ONE: "for one sequence", SEVERAL: "for several sequences"}


class Fixed(dict[str, str]):
    """The values of a fixed preset. about: where the values come from, in words."""

    about: str = ""


class BestSet(NamedTuple):
    """A set of `best`: for one sequence or for several, on a kind of device.

    values: the value of each toggle that won.
    together: those of `values` that won together. A device has all of them, or none.
    alone: as `values`, but each toggle of `together` has the value that won by itself, if any.
    """

    values: dict[str, str]
    alone: dict[str, str]
    together: dict[str, str]


@functools.cache
def fixed_presets() -> dict[str, Fixed]:
    """The presets that no device has to resolve, by name (`presets.json`)."""
    found = {}
    for name, entry in json.loads(_beside("presets.json")).items():
        found[name] = Fixed(entry["toggles"])
        found[name].about = entry["about"]
    return found


@functools.cache
def best_rows() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """`best.json`: a row for each toggle, by kind of device and then by `one` or `several`.

    A row has `value`, `by` (how the value won) and `runs` (folders). Values of rows that also have
    `alone` won together, and hold only together. Their `alone` is the row of the value that won by
    itself; None where that is the baseline's value.
    """
    return json.loads(_beside("best.json"))


def set_for(n_seqs: int) -> str:
    """The set of `best` for an engine with this number of sequences."""
    return ONE if n_seqs == 1 else SEVERAL


def best_set(kind: str, wanted: str) -> BestSet:
    """The set of `best` of a kind of device; empty where none is recorded. wanted: `one` or
    `several`."""
    rows = best_rows().get(kind, {}).get(wanted, {})
    alone = {n: row.get("alone", row) for n, row in rows.items()}
    return BestSet(
        {name: row["value"] for name, row in rows.items()},
        {name: row["value"] for name, row in alone.items() if row},
        {name: row["value"] for name, row in rows.items() if "alone" in row},
    )


def best_sets() -> Iterator[tuple[str, str, BestSet]]:
    """Every set of `best`, after its kind of device and `one` or `several`."""
    for kind, sets in best_rows().items():
        for wanted in sets:
            yield kind, wanted, best_set(kind, wanted)


def served(device: str) -> dict[str, str]:
    """What a server adds to `best` on a kind of device. device: as EngineConfig names it."""
    on_host = device == devices.HOST
    return {row.name: value for row in ROWS.values() if (value := row.served(on_host))}


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def preset_names() -> list[str]:
    return [BASELINE, BEST, *(name for name in fixed_presets() if name != BASELINE)]


def served_words() -> list[str]:
    """What a server adds to `best` for several sequences, a line for each kind of device."""
    able = [name for name in devices.names() if devices.computes(name)]
    others = ", ".join(name for name in able if name != devices.HOST)
    return [f"on {kind}: {_assigned(served(of))}" for kind, of in (
        (others, devices.AUTO), (devices.HOST, devices.HOST),
    )]  # fmt: skip


class Described(NamedTuple):
    """A preset, or a set of `best`: its name, what it is in words, and its values."""

    preset: str
    about: str
    toggles: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.preset}: {'; '.join(filter(None, (self.about, _assigned(self.toggles))))}"


def described(name: str) -> list[Described]:
    """What there is to say about a preset: about `best` an entry for each of its sets, too."""
    if name != BEST:
        return [Described(name, fixed_presets()[name].about, fixed_presets()[name])]
    about = (
        "what won in recorded runs on a device of the kind, for the number of sequences that an "
        "engine is opened for (--n-seqs, -npl, --slots)"
    )
    sets = [
        Described(f"{BEST} {FOR[wanted]} on {kind}", "", found.values)
        for kind, wanted, found in best_sets()
    ]
    return [Described(BEST, about, {}), *sets]


def preset_words() -> list[str]:
    """A line for each preset, and for each set of `best`: what it is, and its values."""
    return [str(one) for name in (BEST, *fixed_presets()) for one in described(name)]


def _assigned(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
