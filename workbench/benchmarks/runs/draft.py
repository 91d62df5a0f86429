"""A run while it is measured: the one builder of `run.json`, and the folder that grows with it.

`new_run` makes the record of every kind of run, with the keys that `results` lists. A `Draft` holds
the record, the samples, and the folder where both are saved: every 10 s on the way, and at the end.
`kept` saves the finished part of a run after Ctrl-C or a failure of the device.

A resumed run keeps the samples of its folder, and measures only the missing ones. `ab`, `bench` and
`perplexity` resume alike. The folder must hold a run of the same kind, arms, tests, seed, model,
engine, device and commit (`check_same`). Otherwise the run is refused, with the first difference.
The number of repetitions may differ.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.runs.nameless import portable
from workbench.benchmarks.runs.results import COMPLETE, INTERRUPTED, SampleTable
from workbench.common.errors import Kept, UsageError
from workbench.common.output import check_folder
from workbench.config import folded

MOST_NAMED = 4  # in a line on what differs


def new_arm(
    name: str,
    toggles: dict[str, str],
    is_control: bool = False,
    sync_mode: str = "",
    program: dict[str, Any] | None = None,
    counters: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An entry of `arms` in run.json. Keys that are not known yet are empty, and filled in
    later."""
    return {
        "name": name,
        "is_control": is_control,
        "toggles": toggles,
        "sync_mode": sync_mode,
        "program": program or {},
        "counters": counters or {},
    }


def new_run(
    kind: str,
    run_id: str,
    name: str,
    found: Mapping[str, Any],
    arms: Sequence[dict[str, Any]],
    tests: Sequence[str],
    repetitions: int,
    seed: int,
) -> dict[str, Any]:
    """The run.json of a run that begins now. Its status is interrupted until it is complete.

    found: the machine, the model and the engine, from `provenance.collect`. `result` is empty: its
    keys belong to the kind.
    """
    return {
        "schema": results.SCHEMA,
        "run_id": run_id,
        "kind": kind,
        "name": name,
        "status": INTERRUPTED,
        "started": provenance.utc_now(),
        "duration_s": 0.0,
        **portable(found),
        "seed": seed,
        "tests": list(tests),
        "repetitions": repetitions,
        "arms": list(arms),
        "result": {},
    }


class Draft:
    """A run while it is measured.

    run: its run.json.
    samples: every timed token so far.
    """

    def __init__(
        self,
        run: dict[str, Any],
        out: Path | None,
        complete: Callable[[], Mapping[str, pd.DataFrame]] = dict,
        earlier: pd.DataFrame | None = None,
        new: bool = False,
    ):
        """out: the run folder; None: the run is not saved.
        complete: called before each saving; it completes `run`, and returns further tables of the
            folder, by file name.
        earlier: samples of a resumed run; `run` then holds the seconds of its earlier sessions.
        new: saving raises UsageError where another process has put a run into the folder.
        """
        self.run, self.out, self._complete, self._new = run, out, complete, new
        self.samples = SampleTable(run["run_id"], earlier)
        self.seconds_before: float = run["duration_s"]
        self.begun = self.saved = time.monotonic()

    def save(self, status: str) -> None:
        """Writes the run so far to the run folder, if there is one."""
        tables = self._complete()
        seconds = self.seconds_before + time.monotonic() - self.begun
        self.run |= {"status": status, "duration_s": round(seconds, 3)}
        if self.out is not None:
            results.write_run(self.out, self.run, self.samples.frame(), tables, new=self._new)
        self.saved = time.monotonic()

    def checkpoint(self) -> None:
        """Saves the run so far if the last save is more than CHECKPOINT_SECONDS ago."""
        late = time.monotonic() - self.saved > results.CHECKPOINT_SECONDS
        if self.out is not None and late:
            self.save(INTERRUPTED)


@contextmanager
def kept(*drafts: Draft, raises: bool = False) -> Iterator[None]:
    """Measures `drafts` in the body, and saves them at its end.

    Ctrl-C ends the body, and drafts with samples are saved as interrupted. The interrupt is raised
    again with `raises`, or where no draft has samples. A failure saves them as well, and is raised.
    """
    try:
        yield
    except BaseException as error:
        finished = [draft for draft in drafts if draft.samples.n_cells]
        for draft in finished:
            draft.save(INTERRUPTED)
        if not isinstance(error, KeyboardInterrupt):
            raise
        if raises and any(draft.out for draft in finished):
            raise Kept from error
        if raises or not finished:
            raise
    else:
        for draft in drafts:
            draft.save(COMPLETE)


# a run that goes on -------------------------------------------------------------------------------


def open_out(out: Path | None, resume: bool) -> results.Run | None:
    """The run to continue; None for a new run. Raises UsageError for a folder that exists without
    `resume`, and for a missing folder or None with `resume`."""
    return open_outs([out], resume)[0]


def open_outs(outs: Sequence[Path | None], resume: bool) -> list[results.Run | None]:
    """As `open_out`, for a command with several runs. With `resume`, runs that have a folder go on,
    and the other runs begin. Raises UsageError where no run has a folder."""
    if not resume:
        for out in filter(None, outs):
            check_folder(out)
            if out.exists():
                raise UsageError(f"{out} exists already; resume it, or choose another folder")
        return [None] * len(outs)
    given = [out for out in outs if out is not None]
    if len(given) < len(outs):
        raise UsageError("resume needs the run folder to continue; give it as out")
    some = any(out.exists() for out in given)
    found = [results.load_run(out) if out.exists() or not some else None for out in given]
    for out in given:
        check_folder(out)
    return found


def check_same(
    old: Mapping[str, Any], new: Mapping[str, Any], out: Path | None, of_result: Sequence[str] = ()
) -> None:
    """Raises UsageError, with the first difference, where `old` is not the same measurement as
    `new`. of_result: keys of `result` that must be equal, too."""
    was, now = _identity(old, of_result), _identity(new, of_result)
    for key, value in was.items():
        if now.get(key) != value:
            old_words, new_words = _differing(value, now.get(key))
            raise UsageError(
                f"{out} cannot be resumed: its {key} is {old_words}, and now it would be "
                f"{new_words}"
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Two values in words. Of two dicts only what differs, at most MOST_NAMED names of it."""
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        return str(was), str(now)
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    more = f", {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    old_words, new_words = (
        ", ".join(f"{name}={side.get(name, 'unknown')}" for name in names[:MOST_NAMED]) + more
        for side in (was, now)
    )
    return old_words, new_words


def _identity(run: Mapping[str, Any], of_result: Sequence[str]) -> dict[str, Any]:
    return {
        "kind": run["kind"],
        "arms": " | ".join(arm["name"] for arm in run["arms"] if not arm["is_control"]),
        **{f"arm {arm['name']}": folded(arm["toggles"]) for arm in run["arms"]},
        "tests": run["tests"],
        "seed": run["seed"],
        "model": run["model"].get("hash"),
        "engine": run["engine"]["config"],
        "device": run["engine"]["device_description"],
        "commit": run["commit"]["hash"],
    } | {key: run["result"].get(key) for key in of_result}


def take_over(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    """Copies the name, first start, duration and sessions of the resumed run `old` to `new`."""
    new |= {key: old[key] for key in ("run_id", "name", "started", "duration_s")}
    before = old["result"].get("sessions") or [session_of(old)]
    new["result"]["sessions"] = [*before, *new["result"]["sessions"]]


def session_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The start of one session of a run, and its commit."""
    return {"started": run["started"], "commit": run["commit"]}
