"""A run while it is measured: the one builder of `run.json`, and the folder that grows with it.

`new_run` makes the record of every kind of run, with the keys that `results` lists. A `Draft` keeps
it together with its samples and the folder where both are saved: every 10 s on the way, and at the
end. `kept` says what an interruption leaves: Ctrl-C and a failing device save what is finished.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.bench import provenance, results
from workbench.bench.nameless import portable
from workbench.bench.results import COMPLETE, INTERRUPTED, SampleTable


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
