"""A run while it is measured: the one builder of `run.json`, and the folder that grows with it.

`new_run` makes the record of every kind of run, with the keys that `results` lists. A `Draft` keeps
it together with its samples and the folder where both are saved: every 10 s on the way, and at the
end. `kept` says what an interruption leaves: Ctrl-C and a failing device save what is finished.

A run goes on where it ended: what its folder holds is kept, and only what is missing is measured.
`ab`, `bench` and `perplexity` resume alike. The folder must hold a run of the same kind, of the
same arms, tests, seed, model, engine, device and commit (`check_same`); else it is refused, with
the first difference. How many repetitions are wanted may be another number.
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
from workbench.common.errors import UsageError
from workbench.common.output import check_folder


def new_arm(
    name: str,
    toggles: dict[str, str],
    is_control: bool = False,
    sync_mode: str = "",
    program: dict[str, Any] | None = None,
    counters: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One of `arms` in run.json. What is only known later is empty, and filled in then."""
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
    """The run.json of a run that begins now. It counts as interrupted until it is complete.

    found: what `provenance.collect` says of the machine, the model and the engine. `result` is
    empty: its keys belong to the kind.
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
    """A run while it is measured. run: its run.json. samples: every timed token so far."""

    def __init__(
        self,
        run: dict[str, Any],
        out: Path | None,
        complete: Callable[[], Mapping[str, pd.DataFrame]] = dict,
        earlier: pd.DataFrame | None = None,
        new: bool = False,
    ):
        """out: the run folder, None for a run that nobody keeps. complete: called before each
        saving; it completes `run`, and returns what else the folder has, by file name. earlier:
        samples of a run that is resumed, and `run` has the seconds it took. new: saving raises
        UsageError where the folder has another run, that was quicker."""
        self.run, self.out, self._complete, self._new = run, out, complete, new
        self.samples = SampleTable(run["run_id"], earlier)
        self.seconds_before: float = run["duration_s"]
        self.begun = self.saved = time.monotonic()

    def save(self, status: str) -> None:
        """Writes what there is so far to the run folder, where there is one."""
        tables = self._complete()
        seconds = self.seconds_before + time.monotonic() - self.begun
        self.run |= {"status": status, "duration_s": round(seconds, 3)}
        if self.out is not None:
            results.write_run(self.out, self.run, self.samples.frame(), tables, new=self._new)
        self.saved = time.monotonic()

    def checkpoint(self) -> None:
        """Saves what is finished, where the last time was long ago."""
        late = time.monotonic() - self.saved > results.CHECKPOINT_SECONDS
        if self.out is not None and late:
            self.save(INTERRUPTED)


@contextmanager
def kept(*drafts: Draft, raises: bool = False) -> Iterator[None]:
    """In the body `drafts` are measured; at its end they are saved.

    Ctrl-C ends the body, and the drafts are saved as interrupted. It is raised again where nothing
    was finished, and with `raises`. A failure saves what is finished and is raised.
    """
    try:
        yield
    except BaseException as error:
        finished = [draft for draft in drafts if draft.samples.n_cells]
        for draft in finished:
            draft.save(INTERRUPTED)
        if raises or not finished or not isinstance(error, KeyboardInterrupt):
            raise
    else:
        for draft in drafts:
            draft.save(COMPLETE)


# a run that goes on -------------------------------------------------------------------------------


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
