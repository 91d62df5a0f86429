"""README's tables recorded anew, by one command, of one card and one commit.

    python -m data.measure.campaign [PARTS] [--peer DIR] [--at-most-s N] [--dry-run]

PARTS are these, in the order in which they are made; without any, all but `two`:

    mechanisms   README's first table: the rows of the matrix
    streams      README's first table: branches side by side, by `tests.peer.cuda`
    attention    README's first table: what attention reads, by `data.measure.skipping`
    batched      beside llama.cpp, many sequences: `data.measure.batched`
    peer         beside llama.cpp, one sequence: `tests.peer.cuda`
    energy       joules a token of five switches
    two          README's first table: the rows of two GPUs

A run that is complete, of this commit, stays. So the whole is made by several calls: each begins no
run that would probably end after its --at-most-s, and the next call goes on. The seconds of a run
are those of the recorded one in data/results, of its models' files, and of loading; of what is
repeated until its interval is narrow, the most that it may take.

All runs are of the same cards. A call on a machine with other cards than those of the runs that are
there already is refused, unless --again makes those again. `two` has cards of its own.

Parts beside llama.cpp need --peer: a folder with llama.cpp's programs, or an archive of one. --like
takes runs with such folders alone: 'peer-cuda/*,*-8b-*'. Missing models are written, with random
weights. At the end there is a table of all runs.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from cyclopts import App

from data.measure import batched, matrix, mechanisms, peer, skipping, steps, streams
from data.measure.command import MODELS, RESULTS, Options, start
from data.measure.matrix import Row
from data.measure.session import Session, gigabytes, is_complete, parsed, path_of
from tests.peer import cuda
from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.compare.until import Until
from workbench.benchmarks.runs import provenance, results
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.progress import duration
from workbench.report.tables import markdown

TWO = "two"
QUICK = ("mechanisms", "energy", TWO)  # parts of the matrix, which has quick runs
BESIDE_LLAMA = ("peer", "batched", "streams")
WIDTHS = "1,2,4,8,16,32,64,128"
LOADED_S = 10.0  # to load a model, to compile kernels, and to warm up
WRITTEN_GB_S = 0.8  # of a model's file
UNKNOWN_S = 60.0  # of a run that was never recorded

app = App(help=__doc__, result_action="return_none")


class Call(NamedTuple):
    """What one call of the command was given.

    quick: tiny models and few repetitions.
    cards: of the machine; runs of other cards count as missing. None: all count.
    """

    out: Path
    models: Path
    device: str
    peer: Path | None
    quick: bool = False
    cards: tuple[str, ...] | None = None

    @property
    def session(self) -> Session:
        return Session(self.out, self.models, self.device, math.inf, self.quick)

    def options(self, folder: str) -> Options:
        return Options(self.device, self.out / folder, self.models, again=True)


class CampaignRun(NamedTuple):
    """One run of a campaign.

    folder: below the folder of results.
    needs: a key that `result` of a complete run has.
    measure: makes the run.
    until: how long it is repeated, where a busy host takes longer.
    """

    part: str
    folder: str
    model: str
    measure: Callable[[Call], Any]
    needs: str = ""
    until: Until | None = None

    def at(self, call: Call) -> Path:
        return call.out / self.folder

    def seconds(self, call: Call) -> float:
        """About how long it takes: as the recorded run took, and to load a model."""
        try:
            recorded = json.loads((RESULTS / self.folder / results.RUN_JSON).read_text())
            measuring = float(recorded["duration_s"])
        except (OSError, ValueError, KeyError):
            row = next((row for row in matrix.MATRIX if f"cuda-{row.folder}" == self.folder), None)
            measuring = float(row.seconds if row is not None and row.seconds else UNKNOWN_S)
        # the host can be busier than that of the recorded run
        return LOADED_S + max(measuring, self.until.at_most_s if self.until else 0.0)

    def writing_s(self, call: Call) -> float:
        """About how long it takes to write the model; 0 where its file is there."""
        there = call.quick or path_of(*parsed(self.model), call.models).is_file()
        return 0.0 if there else gigabytes(self.model) / WRITTEN_GB_S

    def is_there(self, call: Call) -> bool:
        if not is_complete(self.at(call), self.needs):
            return False
        return call.cards is None or self.cards(call) == call.cards

    def cards(self, call: Call) -> tuple[str, ...]:
        """The cards of the machine that made it."""
        return cards_of(json.loads((self.at(call) / results.RUN_JSON).read_text()))


def _of_the_matrix(part: str, rows: Sequence[Row]) -> Iterator[CampaignRun]:
    for row in rows:

        def measure(call: Call, row: Row = row) -> None:
            if failed := steps.run(call.session, [row]):
                raise WorkbenchError(f"{failed[0]} failed")

        needs = steps.KINDS[row.kind].needs
        yield CampaignRun(part, row.folder, row.model, measure, needs, row.until)


def _mechanisms(part: str, gpus: int) -> Iterator[CampaignRun]:
    """The rows of the matrix in README's first table, each once."""
    rows = dict.fromkeys(matrix.the(m.folder, m.kind) for m in mechanisms.MECHANISMS)
    yield from _of_the_matrix(part, [row for row in rows if row.n_devices == gpus])


def _beside_llama(
    part: str, campaign: Literal["best", "streams"], folder: str, models: Sequence[str]
) -> Iterator[CampaignRun]:
    for model in models:

        def measure(call: Call, model: str = model) -> None:
            cuda.main(model, campaign=campaign, peer=call.peer, options=call.options(folder))

        yield CampaignRun(part, f"{folder}/{model}", model, measure)


def _batched(part: str) -> Iterator[CampaignRun]:
    model, folder = batched.MODELS[0], batched.RUNS.name

    def measure(call: Call) -> None:
        batched.main(model, peer=call.peer, widths=WIDTHS, rounds=MIN_REPETITIONS,
                     options=call.options(folder))  # fmt: skip

    yield CampaignRun(part, f"{folder}/{model}", model, measure)


def _attention(part: str) -> Iterator[CampaignRun]:
    model = mechanisms.ATTENTION_MODEL
    for name in dict.fromkeys(row[1] for row in mechanisms.ATTENTION):

        def measure(call: Call, name: str = name) -> None:
            skipping.main(model, only=name, options=call.options(skipping.FOLDER))

        folder = f"{skipping.FOLDER}/{model}/{name}"
        yield CampaignRun(part, folder, model, measure, "visits", matrix.PRECISE)


PARTS: Mapping[str, Callable[[str], Iterator[CampaignRun]]] = {
    "mechanisms": partial(_mechanisms, gpus=1),
    "streams": partial(_beside_llama, campaign="streams", folder=streams.FOLDER,
                       models=[mechanisms.SIDE_BY_SIDE_MODEL]),
    "attention": _attention,
    "batched": _batched,
    "peer": partial(_beside_llama, campaign="best", folder=peer.FOLDER, models=peer.MODELS),
    "energy": lambda part: _of_the_matrix(part, matrix.rows("energy")),
    TWO: partial(_mechanisms, gpus=2),
}  # fmt: skip


def runs_of(parts: Sequence[str], prefix: str, like: str = "*") -> list[CampaignRun]:
    """The runs of some parts, in the order of PARTS. Raises UsageError for an unknown part, and
    where no folder is like that."""
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"part {part!r} does not exist; choose from {', '.join(PARTS)}")
    wanted = parts or [part for part in PARTS if part != TWO]
    every = [run for part in PARTS if part in wanted for run in PARTS[part](part)]
    of_matrix = {row.folder for row in matrix.MATRIX}
    named = [
        run._replace(folder=f"{prefix}-{run.folder}") if run.folder in of_matrix else run
        for run in every
    ]
    found = [run for run in named if any(fnmatch(run.folder, one) for one in like.split(","))]
    if not found:
        raise UsageError(f"--like {like!r} names no run; --dry-run lists all")
    return found


def cards_of(run: Mapping[str, Any]) -> tuple[str, ...]:
    """The cards of a run's machine, in order."""
    return tuple(sorted(str(gpu["card"]) for gpu in run["machine"].get("gpus") or ()))


def check_cards(runs: Sequence[CampaignRun], call: Call, here: Sequence[str]) -> None:
    """Raises UsageError where a run of this commit is of other cards than this machine's."""
    for run in runs:
        if run.is_there(call) and (there := run.cards(call)) != tuple(here):
            raise UsageError(
                f"{run.at(call)} is of card {', '.join(there) or 'none'}, and this machine has "
                f"{', '.join(here) or 'none'}; a campaign is of one card: go on where it began, or "
                "make that again with --again"
            )


def calls(seconds: Sequence[float], at_most_s: float) -> list[int]:
    """In which call each run is made, from 1: a run that does not fit into a call begins another.
    A call that has a run of more than at_most_s has no other."""
    found, call, spent = list[int](), 1, 0.0
    for one in seconds:
        if spent and spent + one > at_most_s:
            call, spent = call + 1, 0.0
        spent += one
        found.append(call)
    return found


@app.default
def main(
    *parts: str,
    like: str = "*",
    peer: Path | None = None,
    out: Path = RESULTS,
    files: Path = MODELS,
    device: str = "cuda",
    at_most_s: float = math.inf,
    again: bool = False,
    dry_run: bool = False,
    quick: bool = False,
) -> None:
    """Makes the missing runs, and prints a table of all.

    Parameters
    ----------
    parts: some parts, by name.
    like: runs with such folders alone; several patterns with commas between them.
    peer: a folder with llama.cpp's programs, or an archive of one.
    out: folder of the results.
    files: folder with model files; a missing file is written there.
    device: cuda, or a device of the CPU to try the command out.
    at_most_s: no run begins that would probably end later; with --dry-run, the length of a call.
    again: make runs of other cards again.
    dry_run: say what would be made, in which call, and how long it takes; make nothing.
    quick: tiny models and few repetitions of the matrix' rows; no figures.
    """
    here = cards_of({"machine": provenance.state()})
    call = Call(out, files, device, peer, quick, here if again else None)
    runs = runs_of(parts, call.session.prefix, like)
    if dry_run:
        print(planned(runs, call, at_most_s))
        return
    _check(runs, call, here)
    begun, states = time.monotonic(), dict[str, tuple[str, float | None]]()
    try:
        for run in runs:
            states[run.folder] = _made(run, call, begun + at_most_s)
    finally:
        print(summary(runs, call, states, time.monotonic() - begun), flush=True)
    if failed := [folder for folder, (state, _) in states.items() if state == FAILED]:
        raise WorkbenchError(f"{len(failed)} failed: {', '.join(failed)}")


THERE, MISSING, MADE, LEFT, FAILED = "there already", "missing", "made", "left", "failed"


def _check(runs: Sequence[CampaignRun], call: Call, here: Sequence[str]) -> None:
    """Refuses, before anything is made, what cannot become a campaign."""
    beside = list(dict.fromkeys(run.part for run in runs if run.part in BESIDE_LLAMA))
    if beside and call.peer is None:
        others = ", ".join(part for part in PARTS if part not in (*BESIDE_LLAMA, TWO))
        raise UsageError(
            f"{', '.join(beside)} need --peer DIR with llama.cpp's programs; or take other parts: "
            f"{others}"
        )
    if call.quick and (slow := [run.part for run in runs if run.part not in QUICK]):
        raise UsageError(f"part {slow[0]} has no quick runs; take {', '.join(QUICK)}")
    if call.device == "cuda" and provenance.commit()["dirty"]:
        raise UsageError("the tree has changes that are not committed; a run names its commit")
    check_cards(runs, call, here)


def _made(run: CampaignRun, call: Call, deadline: float) -> tuple[str, float | None]:
    """Makes a run, unless it is there or would end too late. Returns its state, and the seconds
    that it took."""
    if run.is_there(call):
        return THERE, None
    begun, seconds = time.monotonic(), run.seconds(call) + run.writing_s(call)
    if begun + seconds > deadline:
        return LEFT, None
    print(f"== {run.folder}: about {seconds:.0f} s", flush=True)
    try:
        run.measure(call)
    except Exception:
        traceback.print_exc()
        return FAILED, time.monotonic() - begun
    return MADE if run.is_there(call) else FAILED, time.monotonic() - begun


def planned(runs: Sequence[CampaignRun], call: Call, at_most_s: float) -> str:
    """A table of the runs, each with its state, seconds and call; then the sums by part."""
    left = [run for run in runs if not run.is_there(call)]
    first = {run.model: run.folder for run in reversed(left)}  # writes the model
    seconds = {run.folder: run.seconds(call) + run.writing_s(call) * (run.folder in first.values())
               for run in left}  # fmt: skip
    numbers = dict(zip(seconds, calls(list(seconds.values()), at_most_s), strict=True))
    rows = [
        {
            "part": run.part, "run": run.folder, "state": MISSING if run in left else THERE,
            "about s": f"{seconds[run.folder]:.0f}" if run in left else "",
            "call": str(numbers.get(run.folder, "")),
        }
        for run in runs
    ]  # fmt: skip
    sums = {part: sum(seconds[r.folder] for r in left if r.part == part)
            for part in dict.fromkeys(run.part for run in runs)}  # fmt: skip
    said = ", ".join(f"{part} {s:.0f} s" for part, s in sums.items())
    n_calls = max(numbers.values(), default=0)
    whole = duration(sum(sums.values())) if left else "nothing"
    return f"{markdown(pd.DataFrame(rows))}\n\n{said}; {whole} in all, {n_calls} calls"


def summary(
    runs: Sequence[CampaignRun], call: Call,
    states: Mapping[str, tuple[str, float | None]], spent_s: float,
) -> str:  # fmt: skip
    """A table of the runs, each with its state, the seconds that it took, card and commit."""
    rows = list[dict[str, str]]()
    for run in runs:
        state, took = states.get(run.folder, (LEFT, None))
        row = {"part": run.part, "run": run.folder, "state": state,
               "s": "" if took is None else f"{took:.0f}", "card": "", "commit": ""}  # fmt: skip
        if state in (THERE, MADE):
            found = json.loads((run.at(call) / results.RUN_JSON).read_text())
            row |= {"card": ", ".join(cards_of(found)), "commit": found["commit"]["hash"][:8]}
        rows.append(row)
    n = sum(row["state"] in (THERE, MADE) for row in rows)
    said = f"{n} of {len(rows)} runs are there; {spent_s:.0f} s in this call"
    more = "" if n == len(rows) else "; call again for the others"
    return f"{markdown(pd.DataFrame(rows))}\n\n{said}{more}"


if __name__ == "__main__":
    start(app)
