"""A run that goes on: what is in its folder is kept, and only what is missing is measured.

`ab`, `bench` and `perplexity` resume alike. The folder must hold a run of the same kind, of the
same arms, tests, seed, model, engine, device and commit (`check_same`); else it is refused, with
the first difference. How many repetitions are wanted may be another number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.bench import results
from workbench.errors import UsageError
from workbench.output import check_folder


def open_out(out: Path | None, resume: bool) -> results.Run | None:
    """The run to continue, None for a new one. Raises UsageError for a folder that is there and not
    to be resumed, and for one to be resumed that is not."""
    return open_outs([out], resume)[0]


def open_outs(outs: Sequence[Path | None], resume: bool) -> list[results.Run | None]:
    """As `open_out`, of a command with several runs, one after another: those that have a folder
    go on, and the others begin. Raises UsageError where none has."""
    if not resume:
        for out in filter(None, outs):
            _check_new(out)
        return [None] * len(outs)
    given = [out for out in outs if out is not None]
    if len(given) < len(outs):
        raise UsageError("resume needs the run folder to continue; give it as out")
    some = any(out.exists() for out in given)
    found = [results.load_run(out) if out.exists() or not some else None for out in given]
    for out in given:
        check_folder(out)
    return found


def _check_new(out: Path) -> None:
    check_folder(out)
    if out.exists():
        raise UsageError(f"{out} exists already; resume it, or choose another folder")


def check_same(
    old: Mapping[str, Any], new: Mapping[str, Any], out: Path | None, of_result: Sequence[str] = ()
) -> None:
    """Raises UsageError, naming the difference, where `old` measured something else.

    of_result: keys of `result` that must be equal, too.
    """
    was, now = _identity(old, of_result), _identity(new, of_result)
    for key, value in was.items():
        if now[key] != value:
            raise UsageError(
                f"{out} cannot be resumed: its {key} is {value}, and now it would be {now[key]}"
            )


def _identity(run: Mapping[str, Any], of_result: Sequence[str]) -> dict[str, Any]:
    return {
        "kind": run["kind"],
        "arms": [(arm["name"], arm["toggles"]) for arm in run["arms"]],
        "tests": run["tests"],
        "seed": run["seed"],
        "model": run["model"].get("hash"),
        "engine": run["engine"]["config"],
        "device": run["engine"]["device_description"],
        "commit": run["commit"]["hash"],
    } | {key: run["result"].get(key) for key in of_result}


def take_over(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    """What a resumed run has from before: its name, its first start, its time, its sessions."""
    new |= {key: old[key] for key in ("run_id", "name", "started", "duration_s")}
    before = old["result"].get("sessions") or [session_of(old)]
    new["result"]["sessions"] = [*before, *new["result"]["sessions"]]


def session_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """When one session of a run began, and its commit."""
    return {"started": run["started"], "commit": run["commit"]}
