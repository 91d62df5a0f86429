"""What it saves to leave masked cells unread (llama.cpp #14924): one command, for one GPU.

    python -m data.measure.skipping [MODEL] [--ubatches 1,..,8192] [--rounds N] [--only ub]

Run folders of `wb.ab` in `data/results/skipping/MODEL/`, each with an A/A control:

    ub512          pp8192 of one sequence, computed 512 tokens at once: each way to skip. Below 64
                   tokens at once a prompt takes seconds, so there are fewer ways
    together-512   8 sequences, prompts of 1024 tokens and then a token each: each way to skip, with
                   a region of the cache for each sequence, and with one region, which closes the
                   gate
    parts          the same with each kv_parts, with skipping and without
    depth          one sequence, pp8192, and tokens after it: kv_parts alone

Each is repeated N times or more, until its intervals are narrow (`matrix.PRECISE`); below 64 tokens
at once, N times.

The background is that of `workbench serve`, except for `kv_growth=step`. `result` of a run has
`n_ubatch`, and `visits`: the blocks that attention visits and skips, by arm and test, for prompts
and for generated tokens (`workbench.engine.cache.visits`). They are counted on the null device,
which computes nothing.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from cyclopts import App

import workbench as wb
from data.measure.command import PAD, USUAL, Call, Options, numbers, start
from data.measure.matrix import PRECISE
from data.measure.recorded import PHASES, Arms, Recorded, Share, complete_runs, spread
from data.measure.session import add_to_result, toggles_of
from data.measure.tables import Line, Part, Table, as_text
from workbench.benchmarks import workload as w
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.compare.until import AT_MOST_S, Until
from workbench.benchmarks.workload import gen_steps, prompt_steps
from workbench.common.errors import UsageError
from workbench.common.sizes import round_up
from workbench.config import Toggles
from workbench.engine.cache.extent import WAYS
from workbench.graph.attend import PARTS

FOLDER = "skipping"
UBATCHES = ",".join(str(1 << i) for i in range(14))
# with llama.cpp's extents of the cache: a server's own extents would make reading all longer
BACKGROUND, LEAST_GATED = "serving kv_growth=step", 1024
SMALL = 64  # tokens at once; with fewer a long prompt takes seconds
OFF, IN_LOOP, TAIL, CLASSES = (f"skip_masked_kv={way}" for way in WAYS)
ALWAYS = "skip_gate=always"

app = App(help=__doc__, result_action="return_none")


class Compared(NamedTuple):
    """A run folder.

    arms: sets of toggles, the baseline first.
    n_seqs: regions of its cache.
    rounds: repetitions of each arm; where the arms are quick the least number of them.
    """

    folder: str
    arms: Sequence[str]
    tests: Sequence[w.Workload]
    n_ubatch: int
    n_seqs: int = 1
    rounds: int = MIN_REPETITIONS

    @property
    def until(self) -> Until | None:
        """How narrow the intervals become; None where one round takes too long."""
        enough = self.rounds >= MIN_REPETITIONS and self.n_ubatch >= SMALL
        return PRECISE if enough else None

    @property
    def n_ctx(self) -> int:
        each = max(-(-test.n_cells // max(1, test.n_seqs)) for test in self.tests)
        return self.n_seqs * round_up(each, PAD)


def comparisons(n_prompt: int, ubatches: Sequence[int], n_gen: int, rounds: int) -> list[Compared]:
    """All run folders. n_prompt: tokens of the long prompt, which 8 sequences share among them."""
    alone, n_seqs, most = w.Workload(n_prompt), 8, max(ubatches)
    together = w.Workload(max(1, n_prompt // n_seqs), n_gen, 0, n_seqs)
    own, one = "kv_cache=per_sequence", "kv_cache=unified"
    regions = [f"{own} {way}" for way in (OFF, IN_LOOP, TAIL, CLASSES)]
    regions += [f"{one} {way}" for way in (OFF, IN_LOOP, TAIL)]
    parts = [f"kv_parts={kind} {way}" for way in (OFF, TAIL) for kind in PARTS]
    usual, found = min(512, most), []
    for n in sorted(ubatches, reverse=True):
        ways = [OFF, IN_LOOP, TAIL, *([CLASSES] if n >= 16 else [])]
        if SMALL <= n < LEAST_GATED:  # from there on the gate of the reference is open
            ways += [f"{TAIL} {ALWAYS}", f"{CLASSES} {ALWAYS}"]
        found.append(Compared(f"ub{n}", ways, [alone], n, rounds=rounds))
    for n in sorted({usual, min(2048, most)}):
        found.append(Compared(f"together-{n}", regions, [together], n, n_seqs, rounds))
    depth, deep = [f"kv_parts={kind}" for kind in PARTS], [alone, w.Workload(0, n_gen, n_prompt)]
    return [
        *found,
        Compared("parts", parts, [together], usual, n_seqs, rounds),
        Compared("depth", depth, deep, usual, rounds=rounds),
    ]


def measured(engine: wb.Engine, null: wb.Engine, one: Compared, out: Path) -> None:
    """Makes a comparison in its folder, and adds the blocks that each arm visits."""
    config = dataclasses.replace(
        engine.config, n_ubatch=one.n_ubatch, n_seqs=one.n_seqs, n_ctx=one.n_ctx
    )
    toggles = toggles_of(BACKGROUND, engine)
    half_width, at_most_s = one.until or (None, AT_MOST_S)
    shutil.rmtree(out, ignore_errors=True)
    with wb.Engine(engine._open, config, switched(toggles, one.arms[0])) as own:
        found = wb.ab(
            own, " | ".join(one.arms), tests=[*one.tests], rounds=one.rounds, background=toggles,
            out=out, name=one.folder, smoke=one.rounds < MIN_REPETITIONS,
            until=half_width, at_most_s=at_most_s,
        )  # fmt: skip
    if found.interrupted:
        raise KeyboardInterrupt
    on_null = dataclasses.replace(config, device="null")
    visits = {arm: visited(null, on_null, arm, one.tests) for arm in one.arms}
    add_to_result(out, visits=visits, n_ubatch=one.n_ubatch)


def visited(
    null: wb.Engine, config: wb.EngineConfig, arm: str, tests: Sequence[w.Workload]
) -> dict[str, dict[str, list[int]]]:
    """The blocks that an arm visits and skips in each test, in all layers, by test and phase.
    null: an engine of the null device with the model. config: of the steps."""
    kept = Toggles(graph_reuse="set_rows", kv_cache="per_sequence", batch_sizes="padded")
    found: dict[str, dict[str, list[int]]] = {}
    with wb.Engine(null._open, config, switched(kept, arm)) as own:
        for test in tests:
            own.reset()
            tokens = w.draw_tokens(test, own.model.n_vocab, 0)
            if tokens.depth:
                own.prefill(tokens.depth)
            prompts = prompt_steps(test, tokens.prompt, config.n_ubatch)
            if not test.n_seqs:  # every ubatch of a prompt of one sequence has logits here
                prompts = [[(0, part, "last")] for ((_, part, _),) in prompts]
            made = [work for of in gen_steps(test, tokens.gen, config.n_ubatch) for work in of]
            found[test.name] = {}
            for phase, works in zip(PHASES, (prompts, made), strict=True):
                with wb.kv_visits(own) as visits:
                    for work in works:
                        own.submit(work).wait()
                found[test.name][phase] = [visits.visited, visits.skipped]
    return found


@app.default
def main(
    model: str = "llama-3.2-1b-q4_k_m",
    *,
    ubatches: str = UBATCHES,
    n_prompt: int = 8192,
    n_gen: int = 32,
    rounds: int = MIN_REPETITIONS,
    only: str = "",
    options: Options = USUAL,
) -> None:
    """Measures every comparison, large ubatches first, and prints the tables.

    Parameters
    ----------
    model: as folders name it.
    ubatches: tokens computed at once.
    n_prompt: tokens of the prompt.
    n_gen: tokens that are generated after prompts.
    rounds: how often each arm is measured, at least.
    only: measure only folders whose names begin so.
    """
    sizes = sorted(set(numbers("--ubatches", ubatches)))
    if sizes[0] < 1 or n_prompt < 8 or n_gen < 1 or rounds < 1:
        raise UsageError("ubatches, --n-gen and --rounds are 1 or more, --n-prompt 8 or more")
    call = Call(FOLDER, options)
    path, kept = call.model_file(model), wb.Toggles(graph_reuse="set_rows")
    config = wb.EngineConfig(device=options.device, n_ctx=PAD, n_ubatch=1, n_kv_pad=PAD, n_seqs=1)
    on_null = dataclasses.replace(config, device="null")
    every = comparisons(n_prompt, [n for n in sizes if n <= n_prompt], n_gen, rounds)
    with (
        wb.Engine.load(path, config=config, toggles=kept) as engine,
        wb.Engine.load(path, config=on_null, toggles=kept) as null,
    ):
        # prompts in small ubatches take long, so they come last
        for one in sorted(every, key=lambda one: one.n_ubatch < SMALL):
            folder = call.out / model / one.folder
            if one.folder.startswith(only):
                call.make(one.folder, folder, partial(measured, engine, null, one, folder))
    print(shown(call.out), flush=True)
    print(f"== {call.seconds:.0f} s in all", flush=True)


# what the runs say --------------------------------------------------------------------------------

# a column for each way to skip
COLUMNS = {
    "in_loop": IN_LOOP, "tail": TAIL, "classes": CLASSES,
    "tail, gate open": f"{TAIL} {ALWAYS}", "classes, gate open": f"{CLASSES} {ALWAYS}",
}  # fmt: skip


class SkipRun(Arms):
    """A comparison, as read, with the rates of prompts and of generated tokens apart."""

    def skipped(self, test: str, phase: str, arm: str) -> Share | None:
        """The share of blocks that an arm leaves unread; None where they were not counted."""
        visited, skipped = self.run["result"]["visits"][arm][test][phase]
        return Share(skipped / (visited + skipped)) if visited + skipped else None


def runs(recorded: Recorded, model: str) -> dict[str, SkipRun]:
    """The complete runs of a model by folder, large ubatches last."""
    every = complete_runs(recorded.folder / FOLDER / model)
    counted = [found for found in every if "visits" in found.run["result"]]
    counted.sort(key=lambda found: found.run["result"]["n_ubatch"])
    return {found.folder.name: SkipRun(found) for found in counted}


def every(recorded: Recorded, start: str = "") -> list[SkipRun]:
    """The runs whose folders begin so, of small models first."""
    models = (path.name for path in (recorded.folder / FOLDER).glob("*"))
    found = [list(runs(recorded, model).items()) for model in models]
    found = sorted(filter(None, found), key=lambda of: of[0][1].run["model"]["n_params"])
    return [run for of in found for folder, run in of if folder.startswith(start)]


def by_ubatch(recorded: Recorded) -> Iterator[Line]:
    """A line for each ubatch size: t/s without skipping, the gain of each way, and the share of
    skipped blocks."""
    for run in every(recorded, "ub"):
        (test,), baseline, *_ = run.run["tests"], run.names[0]
        values: dict[str, Any] = {
            "model": run.model, "test": test, "n": run.run["result"]["n_ubatch"],
            "off": float(run.rates(test)[baseline].median()),
        }  # fmt: skip
        for name, arm in COLUMNS.items():
            there = arm in run.names
            values[name] = spread(run.ratio(test, baseline, arm)) if there else None
            values[f"{name} blocks"] = run.skipped(test, PHASES[0], arm) if there else None
        most = max(filter(run.names.__contains__, COLUMNS.values()),
                   key=lambda arm: run.skipped(test, PHASES[0], arm) or 0.0)  # fmt: skip
        values["verdict"] = run.between(test, baseline, most).verdict
        yield Line(values, [run])


def side_by_side(recorded: Recorded) -> Iterator[Line]:
    """A line for each arm of `together-...`, beside the same cache without skipping."""
    for run in every(recorded, "together-"):
        for arm in run.names:
            cache, _, way = arm.partition(" ")
            named = {"cache": cache, "way": way}
            yield _line(run, arm, f"{cache} {OFF}", named, run.run["tests"][0])


def parts(recorded: Recorded) -> Iterator[Line]:
    """A line for each kv_parts, beside `off` with the same skipping; then one sequence at depth."""
    for run in (*every(recorded, "parts"), *every(recorded, "depth")):
        for test, arm in product(run.run["tests"], run.names):
            kind, _, way = arm.partition(" ")
            yield _line(run, arm, f"kv_parts=off {way}".strip(), {"cache": kind, "way": way}, test)


def _line(run: SkipRun, arm: str, before: str, named: dict[str, str], test: str) -> Line:
    """The line of an arm in a test, beside another arm. Phases that the test does not have are
    empty."""
    n_ubatch = run.run["result"]["n_ubatch"]
    values: dict[str, Any] = {"model": run.model, "test": test, "n": n_ubatch, **named}
    for phase in PHASES:
        cells = dict.fromkeys((phase, f"{phase} gain", f"{phase} blocks", f"{phase} verdict"))
        if phase in run.phases(test):
            found = run.between(test, before, arm, phase)
            gain = spread(found.ratio) if arm != before else None
            cells = dict(zip(cells, (found.after, gain, run.skipped(test, phase, arm),
                                     found.verdict), strict=True))  # fmt: skip
        values |= cells
    return Line(values, [run])


BY_UBATCH = {
    "Model": "{model}", "Test": "{test}", "ubatch": "{n}", "t/s off": "{off:.0f}",
    **{name: f"{{{name}}}" for name in COLUMNS},
    **{f"{name} skips %": f"{{{name} blocks:.0f}}" for name in COLUMNS},
    "verdict of most skipped": "{verdict}",
}  # fmt: skip
BESIDE = {
    "Model": "{model}", "Test": "{test}", "ubatch": "{n}", "Cache": "{cache}", "Skipping": "{way}",
    "pp t/s": "{prompts:.0f}", "gain": "{prompts gain}", "skips %": "{prompts blocks:.0f}",
    "tg t/s": "{generated:.0f}", "tg gain": "{generated gain}",
    "tg skips %": "{generated blocks:.0f}", "tg": "{generated verdict}",
}  # fmt: skip
BY_PARTS = {("Parts" if k == "Cache" else k): v for k, v in BESIDE.items()}
TABLES = (
    Table("Prompts by ubatch size, skipping masked cells", by_ubatch, BY_UBATCH, "rounds: {n}"),
    Table("Sequences side by side, skipping masked cells", side_by_side, BESIDE, "rounds: {n}"),
    Table("Parts of the cells, apart from skipping", parts, BY_PARTS, "rounds: {n}"),
)


def shown(folder: Path) -> str:
    """The tables of a folder of runs, as text."""
    recorded = Recorded(folder.parent)
    every = ((table, list(table.lines(recorded))) for table in TABLES)
    return "\n\n".join(as_text(lines, table.cells) for table, lines in every if lines)


BLOCKS: dict[str, list[Part]] = {
    "skipping": [
        TABLES[0],
        "A gain is the speed over that of the same ubatch size without skipping. The gate of the "
        "proposal is open from 1024 tokens at once on, or where a step has several regions. Blocks "
        "of 16 cells for 8 tokens, counted from the masks of all steps.",
        TABLES[1],
        "With one region for all sequences the gate stays closed to steps of fewer than 1024 "
        "tokens. A gain is over the same cache without skipping.",
        TABLES[2],
        "A gain is over kv_parts=off with the same skipping.",
    ],
}

if __name__ == "__main__":
    start(app)
