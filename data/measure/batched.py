"""Sequences side by side, and llama.cpp's batched bench: on one card and file, in turn.

    python -m data.measure.batched [MODELS] [--peer DIR] [--widths 1,8,32,128] [--rounds N]

For each model a run folder `data/results/batched/MODEL/`. A test is llama-batched-bench's: so many
sequences have a prompt each, and then a token each in every step. Token ids are drawn before, the
cache is empty, nothing is sampled, and every step's logits reach the host. `--peer` names a folder
with llama.cpp's programs (or an archive of it, as `make peer-cuda` takes it); without it our side
runs alone.

* A round runs every arm once, all widths of it, in an order that turns. The last arm is our first
  once more: the A/A control.
* llama.cpp's turn is one process, `llama-batched-bench`. Of its steps it says the sum.
* Ours are what `workbench bench -npl WIDTHS -p 1024 -n 128` runs: preset `best`, for one sequence
  or for several.

`result`: `rates` of the device (`served_costs.py`), `launches` of a generating step by arm and
test, `cell_bytes` of K and V in all layers, `answers` of our arms beside our first.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App

import workbench as wb
from data.measure import served_costs
from data.measure.batched_tables import FOLDER, MODELS, shown
from data.measure.peer import LLAMA, OURS
from data.measure.session import parsed, toggles_of
from tests.peer.cuda import compared, is_there, model_file
from tests.peer.llama_bench import LlamaBench, find, last_line
from workbench.backend.base import open_backend
from workbench.bench import provenance
from workbench.bench import workload as w
from workbench.bench.draft import Draft, kept, new_arm, new_run
from workbench.bench.rounds import interleave
from workbench.config import BEST, Toggles
from workbench.devices import is_gpu
from workbench.engine.batch import Entry
from workbench.errors import UsageError, WorkbenchError
from workbench.sizes import round_up

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "llama-batched-bench"
WIDTHS, N_PROMPT, N_GEN, N_UBATCH, PAD = "1,2,4,8,16,32,64,128", 1024, 128, 512, 256

app = App(help=__doc__, result_action="return_none")


class Wanted(NamedTuple):
    """What is measured of a model. ours: settings of ours, as rows of the campaign say them.
    at_most_s: no round begins later."""

    widths: Sequence[int]
    ours: Sequence[str] = (BEST,)
    n_prompt: int = N_PROMPT
    n_gen: int = N_GEN
    n_ubatch: int = N_UBATCH
    rounds: int = 3
    device: str = "cuda"
    seed: int = 0
    at_most_s: float = math.inf
    quick: bool = False

    @property
    def tests(self) -> list[w.Workload]:
        return [w.Workload(self.n_prompt, self.n_gen, 0, n) for n in self.widths]

    @property
    def n_ctx(self) -> int:
        """Cells of all sequences; of each a step more than a test has, and a multiple of PAD."""
        each = round_up(self.n_prompt + self.n_gen + 1, PAD)
        return max(self.widths) * each


class Own:
    """An arm of ours: an engine for each set of toggles that its tests have. setting: as rows of
    the campaign say it."""

    def __init__(self, opened: wb.Engine, config: wb.EngineConfig, setting: str, wanted: Wanted):
        self._of = {test: toggles_of(setting, opened, test.width) for test in wanted.tests}
        self.toggles = self._of[max(wanted.tests, key=lambda test: test.width)]
        self.engines: dict[Toggles, wb.Engine] = {}
        try:
            for toggles in dict.fromkeys(self._of.values()):
                self.engines[toggles] = wb.Engine(opened._open, config, toggles)
        except BaseException:
            self.close()
            raise

    def of(self, test: w.Workload) -> wb.Engine:
        return self.engines[self._of[test]]

    @property
    def widest(self) -> wb.Engine:
        """The engine of the test with the most sequences."""
        return self.engines[self.toggles]

    @property
    def counters(self) -> dict[str, int]:
        found = Counter[str]()
        for engine in self.engines.values():
            found.update(engine.counters)
        return dict(found)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


class Turns:
    """The arms of a run, by name; each takes every test in its turn."""

    def __init__(
        self, bench: LlamaBench | None, path: Path, engines: Mapping[str, Own], draft: Draft,
        wanted: Wanted,
    ):  # fmt: skip
        self._bench, self._path, self._engines = bench, path, engines
        self._draft, self._wanted = draft, wanted

    def take(self, round_: int, number: int) -> None:
        arm = self._draft.run["arms"][number]
        own = self._engines.get(arm["name"])
        for test, ns, n in self._theirs() if own is None else self._ours(own, round_):
            self._draft.samples.add(arm["name"], arm["is_control"], test.name, round_, ns, n)
        self._draft.checkpoint()

    def _ours(self, own: Own, round_: int) -> Iterator[tuple[w.Workload, np.ndarray, np.ndarray]]:
        bos = w.bos_token(own.widest)
        for test in self._wanted.tests:
            engine = own.of(test)
            tokens = w.draw_tokens(test, engine.model.n_vocab, self._wanted.seed, round_, bos)
            sample = w.take_sample(engine, test, tokens)
            yield test, sample.token_ns, sample.token_n

    def _theirs(self) -> Iterator[tuple[w.Workload, np.ndarray, np.ndarray]]:
        assert self._bench is not None
        rows = batched_rows(self._bench, self._path, self._wanted)
        for test, row in zip(self._wanted.tests, rows, strict=True):
            ns = np.array([row["t_pp"], row["t_tg"]]) * 1e9
            n = np.array([test.n_prompt_tokens, test.width * test.n_gen])
            yield test, ns.round().astype(np.int64), n


def about_peer(bench: LlamaBench | None) -> dict[str, Any] | None:
    """What a run says of llama.cpp's programs."""
    return None if bench is None else bench.about | {"program": PROGRAM}


def batched_rows(bench: LlamaBench, path: Path, wanted: Wanted) -> list[dict[str, Any]]:
    """What llama-batched-bench says of every width. Raises RuntimeError where it says less."""
    command = [
        str(bench.program.with_name(PROGRAM)), "-m", str(path), "-ngl", "99", "-fa", "on",
        "-c", str(wanted.n_ctx), "-b", "2048", "-ub", str(wanted.n_ubatch),
        "-npp", str(wanted.n_prompt), "-ntg", str(wanted.n_gen),
        "-npl", ",".join(map(str, wanted.widths)), "--output-format", "jsonl",
    ]  # fmt: skip
    done = bench.call(command)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in lines]
    if done.returncode or [row["pl"] for row in rows] != list(wanted.widths):
        raise RuntimeError(
            f"{PROGRAM} ended with {done.returncode} and {len(rows)} of {len(wanted.widths)} "
            f"widths: {last_line(done)}"
        )
    return rows


def bench_of(peer: Path | None) -> LlamaBench | None:
    """llama.cpp's programs at `peer`, llama-batched-bench among them; None without a path. Raises
    UsageError where it is missing."""
    if peer is None:
        return None
    bench = find(peer)
    if not bench.program.with_name(PROGRAM).is_file():
        raise UsageError(f"{bench.program.parent}: no {PROGRAM} beside {bench.program.name}")
    return bench


def measured(bench: LlamaBench | None, path: Path, out: Path, wanted: Wanted) -> None:
    """Both sides on the file at `path`, into the run folder `out`, which is emptied first."""
    shutil.rmtree(out, ignore_errors=True)
    begun = time.monotonic()
    with ExitStack() as stack:
        # an engine that only has the weights: the arms' caches fill the memory
        engine = stack.enter_context(
            wb.Engine.load(
                path, device=wanted.device, n_ctx=PAD, n_seqs=1, n_ubatch=1, n_kv_pad=PAD,
                toggles=wb.Toggles(graph_reuse="set_rows"),
            )
        )  # fmt: skip
        config = dataclasses.replace(
            engine.config, n_ctx=wanted.n_ctx, n_seqs=max(wanted.widths), n_ubatch=wanted.n_ubatch
        )
        settings = {f"{OURS} {s}": s for s in wanted.ours}
        first = next(iter(settings))
        every = settings | {f"{first} (A/A)": settings[first]}
        engines = {
            name: stack.enter_context(closing(Own(engine, config, setting, wanted)))
            for name, setting in every.items()
        }
        toggles = {name: own.toggles for name, own in engines.items()}
        draft = Draft(_new_run(bench, engines[first].widest, toggles, out, wanted), out)
        turns = Turns(bench, path, engines, draft, wanted)
        result = draft.run["result"]

        def rounds() -> Iterator[int]:
            for round_ in range(wanted.rounds):
                if round_ and time.monotonic() - begun > wanted.at_most_s:
                    return
                yield round_

        def whole(round_: int, _: dict[int, None]) -> None:
            draft.run["repetitions"] = round_ + 1
            spent = time.monotonic() - begun
            print(f"  {path.stem}: round {round_ + 1}/{wanted.rounds}, {spent:.0f} s", flush=True)

        with kept(draft, raises=True):
            for name, own in engines.items():
                result["launches"][name] = _warm_up(own, wanted)
                _arm(draft, name)["sync_mode"] = own.widest.sync_mode
                result["sides"] = {test.name: own.of(test).chosen for test in wanted.tests}
            last = engines[first].widest
            result["rates"] = served_costs.device_rates(last, wanted.quick)
            widest = [own.widest for own in engines.values()]
            ours = {name: toggles[name] for name in settings}
            result["answers"] = compared(ours, widest, wanted.seed)
            interleave(rounds(), len(draft.run["arms"]), turns.take, whole)
            for name, own in engines.items():
                _arm(draft, name)["counters"] = own.counters


def _arm(draft: Draft, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(arm for arm in draft.run["arms"] if arm["name"] == name)
    return found


def _warm_up(own: Own, wanted: Wanted) -> dict[str, int]:
    """Every test once, untimed; then how many launches a generating step of it has. The widest goes
    first: it takes the most memory, and where that grows programs are made anew."""
    found, bos = dict[str, int](), w.bos_token(own.widest)
    for test in sorted(wanted.tests, key=lambda test: -test.width):
        engine = own.of(test)
        w.warm_up([engine], test, wanted.seed, bos, once=True)
        work: list[Entry] = [(i, [0], "last") for i in range(test.width)]
        steps = [work[i : i + wanted.n_ubatch] for i in range(0, len(work), wanted.n_ubatch)]
        found[test.name] = sum(served_costs.launches_of(engine, steps))
    return found


def _new_run(
    bench: LlamaBench | None, engine: wb.Engine, ours: Mapping[str, Toggles], out: Path,
    wanted: Wanted,
) -> dict[str, Any]:  # fmt: skip
    arms = [new_arm(LLAMA, {})] if bench is not None else []
    arms += [new_arm(n, one.to_dict(), n.endswith("(A/A)")) for n, one in ours.items()]
    made = new_run(
        "batched", out.name, f"{LLAMA}'s batched bench beside {OURS}", provenance.collect(engine),
        arms, [test.name for test in wanted.tests], wanted.rounds, wanted.seed,
    )  # fmt: skip
    cells = 256
    cache = sum(t.nbytes for pair in engine.model.caches(cells) for t in pair) // cells
    made["result"] |= {
        "peer": about_peer(bench), "cell_bytes": cache, "n_vocab": engine.model.n_vocab,
        "launches": {}, "rates": {}, "answers": {},
    }  # fmt: skip
    return made


@app.default
def main(
    *models: str,
    peer: Path | None = None,
    widths: str = WIDTHS,
    rounds: int = 3,
    ours: str = BEST,
    n_prompt: int = N_PROMPT,
    n_gen: int = N_GEN,
    n_ubatch: int = N_UBATCH,
    device: str = "cuda",
    out: Path = ROOT / "data" / "results" / FOLDER,
    files: Path = ROOT / "data" / "models",
    again: bool = False,
    quick: bool = False,
    at_most_s: float = math.inf,
) -> None:
    """Measures each model, and prints its table.

    Parameters
    ----------
    models: as folders name them; without any, llama-3.2-1b-q4_k_m.
    peer: a folder with llama.cpp's programs, or an archive of one.
    widths: numbers of sequences.
    rounds: how often each arm has its turn.
    ours: settings of ours with commas between them: best, or best skip_masked_kv=off, or serving.
    n_prompt, n_gen: tokens of each sequence.
    n_ubatch: tokens computed at once, on both sides.
    out: where the run folders go.
    files: where model files are, and where missing ones are written.
    again: measure what was measured, too.
    quick: little is read and copied to find the device's rates; no figures.
    at_most_s: no round of a model begins after so many seconds.
    """
    wanted = Wanted(
        [int(n) for n in widths.split(",")], ours.split(","), n_prompt, n_gen, n_ubatch, rounds,
        device, at_most_s=at_most_s, quick=quick,
    )  # fmt: skip
    if min(*wanted.widths, rounds, n_prompt, n_gen) < 1:
        raise UsageError("widths, rounds, --n-prompt and --n-gen are 1 or more")
    names = models or MODELS[:1]
    for name in names:
        parsed(name)
    open_backend(device).close()
    bench = bench_of(peer)
    if bench is None and is_gpu(device):
        print("no --peer: ours alone", file=sys.stderr)
    for name in names:
        if is_there(out / name) and not again:
            print(f"{name}: there already, of this commit", flush=True)
            continue
        begin = time.monotonic()
        measured(bench, model_file(name, files), out / name, wanted)
        print(shown(out / name), flush=True)
        print(f"== {name}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        app()
    except (RuntimeError, WorkbenchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
