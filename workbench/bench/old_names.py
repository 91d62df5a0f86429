"""What runs of earlier commits call things, and what they leave unsaid, in today's words.

A recorded run folder is never rewritten. `results.load_run` passes every run.json through
`in_todays_words`: all readers know one set of names. Who renames a toggle, a value or a key of
run.json adds a row to RENAMED. A test reads each committed folder and finds names nobody knows.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from workbench.config import EngineConfig, Toggles


class Renamed(NamedTuple):
    """A name that changed. where: the part of run.json, a key of `_parts`. values: of the old name
    to today's; all others stay."""

    where: str
    old: str
    new: str
    values: Mapping[str, str] = {}


class Reworded(NamedTuple):
    """Words inside texts that changed. where: as of Renamed. key: of the text. old: a regular
    expression. new: today's words, with its groups."""

    where: str
    key: str
    old: str
    new: str


# One row for each name that changed, the oldest first: a row may rename what one above it made.
RENAMED: tuple[Renamed, ...] = ()

REWORDED = (
    Reworded("engine", "device_description", r"^(embedded device, \d+) lanes\b", r"\1 workers"),
    Reworded("engine", "waiting", r"\bidle lanes\b", "idle workers"),
)

CONFIG = {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in dataclasses.fields(EngineConfig)
    if field.name not in ("device", "n_ctx", "n_ubatch", "n_kv_pad", "threads")  # runs always say
}


def in_todays_words(
    run: dict[str, Any], renamed: tuple[Renamed, ...] | None = None
) -> dict[str, Any]:
    """A run.json with today's names, changed in place. renamed: RENAMED where None.

    What a run leaves unsaid: before a toggle or a setting existed, engines did what its default
    does now. A perplexity run computed as many tokens at once as its engine's n_ubatch. (One toggle
    is otherwise: attention on a GPU shared out its cells, kv_parts=parallel_blocks, before anybody
    could say so. Such a run is read as what its pages call it, with everything off.)
    """
    for row in RENAMED if renamed is None else renamed:
        for part in _parts(run, row.where):
            if row.old in part:
                value = part.pop(row.old)
                part[row.new] = row.values.get(value, value) if row.values else value
    for text in REWORDED:
        for part in _parts(run, text.where):
            if isinstance(part.get(text.key), str):
                part[text.key] = re.sub(text.old, text.new, part[text.key])
    config = run["engine"].get("config")
    if run["kind"] == "kernels" or not isinstance(config, dict):
        return run
    for name, value in CONFIG.items():
        config.setdefault(name, value)
    for toggles in filter(None, _parts(run, "toggles")):  # an arm of another engine has none
        for name, value in Toggles().to_dict().items():
            toggles.setdefault(name, value)
    if run["kind"] == "perplexity":
        run["result"].setdefault("n_ubatch", config.get("n_ubatch"))
    return run


def _parts(run: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The objects of a run.json that a row is about; KeyError for a part that does not exist."""
    arms = [arm for arm in run["arms"] if isinstance(arm, dict)]
    found: dict[str, list[Any]] = {
        "run": [run],
        "engine": [run["engine"]],
        "config": [run["engine"].get("config")],
        "model": [run["model"]],
        "result": [run["result"]],
        "arms": arms,
        "toggles": [arm.get("toggles") for arm in arms],
        "counters": [arm.get("counters") for arm in arms],
        "counts": [
            program.get("counts")
            for arm in arms
            if isinstance(arm.get("program"), dict)
            for program in arm["program"].values()
            if isinstance(program, dict)
        ],
    }
    yield from (part for part in found[where] if isinstance(part, dict))
