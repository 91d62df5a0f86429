"""What it saves to leave masked cells unread (llama.cpp #14924): one command, for one GPU.

    python -m data.measure.skipping [MODEL] [--ubatches 1,..,8192] [--rounds N] [--only ub]

Run folders of `wb.ab` in `data/results/skipping/MODEL/`, each with an A/A control:

    ub512          pp8192 of one sequence, computed 512 tokens at once: each way to skip. Below 64
                   tokens a prompt takes seconds, so there are fewer ways
    together-512   8 sequences, prompts of 1024 tokens and then a token each: skipping with a region
                   for each sequence, and with one for all, where the gate is closed to them
    parts          the same with kv_parts off and on, with skipping and without
    depth          one sequence, pp8192 and tokens behind it: kv_parts alone

Background: what `workbench serve` has, but for `kv_growth=step`. `result` of a run has `n_ubatch`,
and `visits`: by arm and test, the blocks that attention visits and skips
(`workbench.engine.kv_visits`), of prompts and of generated tokens. They are counted on the null
device, which computes nothing.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cyclopts import App

import workbench as wb
from data.measure.session import add_to_result, toggles_of
from data.measure.skipping_tables import FOLDER, shown
from tests.peer.cuda import is_there, model_file
from workbench.bench import workload as w
from workbench.bench.arms import switched
from workbench.bench.stats import MIN_REPETITIONS
from workbench.bench.workload import gen_steps, prompt_steps
from workbench.config import Toggles
from workbench.engine.batch import Work
from workbench.engine.kv_extent import WAYS
from workbench.errors import UsageError, WorkbenchError
from workbench.graph.attend import PARTS
from workbench.sizes import round_up

ROOT = Path(__file__).resolve().parents[2]
UBATCHES = ",".join(str(1 << i) for i in range(14))
# with llama.cpp's extents: with a server's own, reading all would read more than there
BACKGROUND, PAD, LEAST_GATED = "serving kv_growth=step", 256, 1024
OFF, IN_LOOP, TAIL, CLASSES = (f"skip_masked_kv={way}" for way in WAYS)
ALWAYS = "skip_gate=always"

app = App(help=__doc__, result_action="return_none")


class Compared(NamedTuple):
    """A run folder: its arms, the first the baseline, and tests. n_seqs: regions of its cache."""

    folder: str
    arms: Sequence[str]
    tests: Sequence[w.Workload]
    n_ubatch: int
    n_seqs: int = 1
    rounds: int = MIN_REPETITIONS

    @property
    def n_ctx(self) -> int:
        each = max(-(-test.n_cells // max(1, test.n_seqs)) for test in self.tests)
        return self.n_seqs * round_up(each, PAD)


def ways(n_ubatch: int) -> list[str]:
    """What is compared at a ubatch size. The reference gate is open from LEAST_GATED tokens on."""
    found = [OFF, IN_LOOP, TAIL, *([CLASSES] if n_ubatch >= 16 else [])]
    if 64 <= n_ubatch < LEAST_GATED:
        found += [f"{TAIL} {ALWAYS}", f"{CLASSES} {ALWAYS}"]
    return found


def comparisons(n_prompt: int, ubatches: Sequence[int], n_gen: int, rounds: int) -> list[Compared]:
    """Every run folder. n_prompt: tokens of the long prompt; 8 sequences share as many."""
    alone, n_seqs = w.Workload(n_prompt), 8
    together = w.Workload(max(1, n_prompt // n_seqs), n_gen, 0, n_seqs)
    behind = w.Workload(0, n_gen, n_prompt)
    own, one = "kv_cache=per_sequence", "kv_cache=unified"
    regions = [f"{own} {way}" for way in (OFF, IN_LOOP, TAIL, CLASSES)]
    regions += [f"{one} {way}" for way in (OFF, IN_LOOP, TAIL)]
    kinds = [str(kind) for kind in PARTS]
    parts = [f"kv_parts={kind} {way}" for way in (OFF, TAIL) for kind in kinds]
    usual = min(512, max(ubatches))
    return [
        *(Compared(f"ub{n}", ways(n), [alone], n, rounds=rounds)
          for n in sorted(ubatches, reverse=True)),
        *(Compared(f"together-{n}", regions, [together], n, n_seqs, rounds)
          for n in sorted({usual, min(2048, max(ubatches))})),
        Compared("parts", parts, [together], usual, n_seqs, rounds),
        Compared("depth", [f"kv_parts={kind}" for kind in kinds], [alone, behind], usual,
                 rounds=rounds),
    ]  # fmt: skip


def measured(engine: wb.Engine, null: wb.Engine, one: Compared, out: Path) -> None:
    """The comparison, in its folder, with the blocks that each arm visits."""
    config = dataclasses.replace(
        engine.config, n_ubatch=one.n_ubatch, n_seqs=one.n_seqs, n_ctx=one.n_ctx
    )
    toggles = toggles_of(BACKGROUND, engine)
    with wb.Engine(engine._open, config, switched(toggles, one.arms[0])) as own:
        found = wb.ab(
            own, " | ".join(one.arms), tests=[*one.tests], rounds=one.rounds, background=toggles,
            out=out, name=one.folder, smoke=one.rounds < MIN_REPETITIONS,
        )  # fmt: skip
    if found.interrupted:
        raise KeyboardInterrupt
    on_null = dataclasses.replace(config, device="null")
    visits = {arm: visited(null, on_null, arm, one.tests) for arm in one.arms}
    add_to_result(out, visits=visits, n_ubatch=one.n_ubatch)


Counted = dict[str, dict[str, list[int]]]  # by test, of prompts and of generated tokens


def visited(
    null: wb.Engine, config: wb.EngineConfig, arm: str, tests: Sequence[w.Workload]
) -> Counted:
    """The blocks that an arm visits and skips in each test, of all layers. null: an engine of the
    null device with the model. config: of the steps."""
    toggles = switched(
        Toggles(graph_reuse="set_rows", kv_cache="per_sequence", batch_sizes="padded"), arm
    )
    found: Counted = {}
    with wb.Engine(null._open, config, toggles) as own:
        for test in tests:
            own.reset()
            tokens = w.draw_tokens(test, own.model.n_vocab, 0)
            if tokens.depth:
                own.prefill(tokens.depth)
            prompts, made = steps(test, tokens, config.n_ubatch)
            found[test.name] = {
                name: _counted(own, works)
                for name, works in (("prompts", prompts), ("generated", made))
            }
    return found


def steps(test: w.Workload, tokens: w.Tokens, n_ubatch: int) -> tuple[list[Work], list[Work]]:
    """What a repetition submits: of prompts, and of generated tokens."""
    if test.n_seqs:
        made = gen_steps(test, tokens.gen, n_ubatch)
        return prompt_steps(test, tokens.prompt, n_ubatch), [work for of in made for work in of]
    prompt = tokens.prompt
    begins = range(0, len(prompt), n_ubatch)
    return (
        [[(0, prompt[i : i + n_ubatch], "last")] for i in begins],
        [[(0, [token], "last")] for token in tokens.gen],
    )


def _counted(engine: wb.Engine, works: Sequence[Work]) -> list[int]:
    with wb.kv_visits(engine) as visits:
        for work in works:
            engine.submit(work).wait()
    return [visits.visited, visits.skipped]


@app.default
def main(
    model: str = "llama-3.2-1b-q4_k_m",
    *,
    ubatches: str = UBATCHES,
    n_prompt: int = 8192,
    n_gen: int = 32,
    rounds: int = MIN_REPETITIONS,
    only: str = "",
    device: str = "cuda",
    out: Path = ROOT / "data" / "results" / FOLDER,
    files: Path = ROOT / "data" / "models",
    again: bool = False,
    at_most_s: float = math.inf,
) -> None:
    """Measures every comparison, large ubatches first, and prints the tables.

    Parameters
    ----------
    model: as folders name it.
    ubatches: tokens computed at once.
    n_prompt: tokens of the prompt.
    n_gen: tokens that are generated behind prompts.
    rounds: how often each arm is measured.
    only: how the names of the folders begin that are measured; without it, all are.
    out: where the run folders go.
    files: where model files are, and where missing ones are written.
    again: measure what was measured, too.
    at_most_s: no comparison begins after so many seconds.
    """
    sizes = sorted({int(n) for n in ubatches.split(",")})
    if sizes[0] < 1 or n_prompt < 8 or n_gen < 1 or rounds < 1:
        raise UsageError("ubatches, --n-gen and --rounds are 1 or more, --n-prompt 8 or more")
    begun, path = time.monotonic(), model_file(model, files)
    usable = [n for n in sizes if n <= n_prompt]
    kept, config = (
        wb.Toggles(graph_reuse="set_rows"),
        wb.EngineConfig(device=device, n_ctx=PAD, n_ubatch=1, n_kv_pad=PAD, n_seqs=1),
    )
    on_null = dataclasses.replace(config, device="null")
    with (
        wb.Engine.load(path, config=config, toggles=kept) as engine,
        wb.Engine.load(path, config=on_null, toggles=kept) as null,
    ):
        for one in _urgent(comparisons(n_prompt, usable, n_gen, rounds)):
            if not one.folder.startswith(only):
                continue
            folder, begin = out / model / one.folder, time.monotonic()
            if is_there(folder) and not again:
                print(f"{one.folder}: there already, of this commit", flush=True)
            elif begin - begun > at_most_s:
                print(f"{one.folder}: left, {at_most_s:.0f} s are over; call again", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
                measured(engine, null, one, folder)
                print(f"== {one.folder}: {time.monotonic() - begin:.1f} s", flush=True)
    print(shown(out), flush=True)
    print(f"== {time.monotonic() - begun:.0f} s in all", flush=True)


def _urgent(every: list[Compared]) -> list[Compared]:
    """What takes long comes last: prompts in small ubatches."""
    return sorted(every, key=lambda one: one.n_ubatch < 64)


if __name__ == "__main__":
    try:
        app()
    except (RuntimeError, WorkbenchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
