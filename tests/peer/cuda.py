"""llama.cpp with CUDA and this engine on the same card and files, in turn in one run: how fast?

`make peer-cuda` runs `python -m tests.peer.cuda [MODELS]`. It takes llama-bench from `--peer`, or
builds one (`build-cuda.sh`: needs a CUDA toolkit, half an hour once). It writes a run folder for
each model, `data/results/peer-cuda/MODEL/`:

* An arm is a setting of one side. llama.cpp's are switched by variables, which a process reads
  once: CUDA graphs on (its default), off, with its streams (GGML_CUDA_GRAPH_OPT=1), and without
  reuse of its graph (LLAMA_GRAPH_REUSE_DISABLE=1). Ours are toggles: `best`, and `best` with
  plans of whole steps, launched ahead, that tell the host of their ends. Our first arm is there
  twice: the A/A control.
* Round i runs each arm once; the order turns from round to round (`benchmarks/compare/rounds.py`).
* llama.cpp's turn is a process of its own: it loads the file and repeats each test. Ours is in this
  process, where the engine stays loaded and idle while llama.cpp computes.
* The first repetition of a test in a turn is kept apart and not counted, on both sides. In it
  llama.cpp captures its graphs, and clocks rise. Every other one is a row of the samples.

Both sides count the same: random tokens from an empty cache, without sampling, until the logits are
on the host.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cyclopts import App

import workbench as wb
from data.measure import peer as recorded
from data.measure import streams
from data.measure.command import USUAL, Call, Options, Recording, same_answers, start
from data.measure.matrix import ANY, WORD
from data.measure.peer import LLAMA, MODELS, OURS, SWITCHES, TESTS, PeerRun, theirs
from data.measure.recorded import spread
from data.measure.session import parsed, toggles_of
from tests.peer.llama_bench import LlamaBench, arguments, build, find, name_of
from workbench.backend.base import open_backend
from workbench.benchmarks import workload as w
from workbench.benchmarks.compare.ab import describe
from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.runs import provenance, results
from workbench.benchmarks.times.gaps import CONTROL
from workbench.benchmarks.times.overlap import measure_overlap
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError, WorkbenchError
from workbench.config import Toggles

SETTINGS = ("best", f"best {ANY} {WORD}")
SWITCHED = ("default", "graphs=off", "graph_opt=1", "reuse=off")
# models, settings of ours, what is switched in llama.cpp, the folder of data/results, settings of
# which the overlap of kernels is measured
CAMPAIGNS: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str], str, Sequence[str]]] = {
    "best": (MODELS, SETTINGS, SWITCHED, recorded.FOLDER, ()),
    "streams": (
        streams.MODELS, streams.SETTINGS, streams.SWITCHED, streams.FOLDER,
        tuple(streams.OVERLAPS.values()),
    ),
}  # fmt: skip
N_CTX, N_UBATCH, SEED = 1024, 512, 0  # llama-bench's own ubatch
OVERLAP_TOKENS = 8
SAME = (
    "build_commit", "build_number", "gpu_info", "backends", "n_gpu_layers", "flash_attn", "type_k",
    "type_v", "n_batch", "n_ubatch", "n_threads",
)  # fmt: skip
CLOCKS = ("clock_mhz", "power_w", "temperature_c", "throttle_reasons")

app = App(help=__doc__, result_action="return_none")


class Wanted(NamedTuple):
    """What is measured of a model. settings: of ours, as rows of the campaign say them. switched:
    names in SWITCHES. repetitions: of a test in a turn, the first of which does not count.
    overlapped: settings of which the overlap of kernels is measured, after all turns."""

    device: str
    tests: Sequence[str]
    settings: Sequence[str]
    switched: Sequence[str]
    rounds: int
    repetitions: int
    overlapped: Sequence[str] = ()

    def check(self) -> None:
        """Raises UsageError for what cannot be compared."""
        for test in w.parse_tests(list(self.tests)):
            if test != w.Workload(test.n_prompt, test.n_gen) or (test.n_prompt and test.n_gen):
                raise UsageError(f"test {test}: give ppN and tgN, which both sides name alike")
        if unknown := [name for name in self.switched if name not in SWITCHES]:
            raise UsageError(f"switch {unknown[0]!r} is not one of {', '.join(SWITCHES)}")
        if self.rounds < MIN_REPETITIONS or self.repetitions < 2:
            raise UsageError(
                f"rounds={self.rounds}, repetitions={self.repetitions}: "
                f"give {MIN_REPETITIONS} and 2, or more"
            )


def check_card(program: Path, row: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises RuntimeError where llama.cpp computed elsewhere: without a GPU it says nothing."""
    card = row.get("gpu_info") or ""
    if is_gpu(ours["device"]) and not (card and card in ours["device_description"]):
        raise RuntimeError(
            f"llama-bench computed on {card or 'no GPU'}, and the engine on "
            f"{ours['device_description']}; see `{program} --list-devices`"
        )


def settings_of(engine: wb.Engine, wanted: Wanted) -> dict[str, Toggles]:
    """Our arms by name. One that has another's toggles is left out, and said."""
    found: dict[str, Toggles] = {}
    for spec in wanted.settings:
        toggles = engine.resolve(toggles_of(spec, engine))
        same = [name for name, other in found.items() if other == toggles]
        if same:
            print(f"{OURS} {spec}: has the toggles of {same[0]}, left out", flush=True)
        else:
            found[f"{OURS} {spec}"] = toggles
    return found


def compare(bench: LlamaBench, path: Path, out: Path, wanted: Wanted) -> None:
    """Both sides on the file at `path`, into the run folder `out`, which is emptied first."""
    tests, n = w.parse_tests(list(wanted.tests)), wanted.repetitions
    names, env = [test.name for test in tests], {theirs(s): SWITCHES[s] for s in wanted.switched}
    with ExitStack() as stack:
        kept = Toggles(graph_reuse="set_rows")
        engine = stack.enter_context(
            wb.Engine.load(path, device=wanted.device, n_ctx=N_CTX, n_ubatch=N_UBATCH, toggles=kept)
        )
        settings = settings_of(engine, wanted)
        first = next(iter(settings))
        engines = {
            name: stack.enter_context(closing(engine.variant(toggles)))
            for name, toggles in (settings | {first + CONTROL: settings[first]}).items()
        }
        # an arm of llama.cpp has variables, no toggles
        arms: dict[str, dict[str, str]] = {arm: {} for arm in env}
        arms |= {name: one.toggles.to_dict() for name, one in engines.items()}
        about = provenance.collect(engine)
        recording = Recording(
            "peer", out, about, arms, names, wanted.rounds, f"{LLAMA} beside {OURS}"
        )
        result = recording.result
        result |= {
            "peer": bench.about | {"arguments": arguments("FILE", names, n)}, "env": env,
            "processes": "llama.cpp: one for each arm and round; ours: one, the engine stays "
            "loaded", "repetitions_of_a_turn": n, "turns": [], "answers": {},
            "first_ns": {},  # by arm and test: of the repetitions that do not count
        }  # fmt: skip
        for name, one in engines.items():
            program = {test.name: describe(one, test) for test in tests}
            recording.arm(name).update(sync_mode=one.sync_mode, program=program)

        def of_llama(name: str) -> dict[str, list[int]]:
            rows = bench.run(path, names, n, env[name])
            check_card(bench.program, rows[0], recording.run["engine"])
            result["peer"]["says"] = {key: rows[0].get(key) for key in SAME}
            return {name_of(row): list(row["samples_ns"]) for row in rows}

        def of_ours(name: str, round_: int) -> dict[str, list[int]]:
            one, found = engines[name], dict[str, list[int]]()
            of, bos = (one.model.n_vocab, SEED), w.bos_token(one)
            for test in tests:
                every = (w.draw_tokens(test, *of, round_ * n + i, bos) for i in range(n))
                found[test.name] = [w.take_sample(one, test, each).ns_total for each in every]
            return found

        def take(round_: int, name: str) -> None:
            """Every test of an arm, of which the first repetition does not count; the clocks."""
            begun = time.monotonic()
            taken = of_ours(name, round_) if name in engines else of_llama(name)
            for test in tests:
                uncounted, *counted = taken[test.name]
                recording.add(name, test.name, round_, counted, [test.n_tokens] * len(counted))
                of_arm = result["first_ns"].setdefault(name, {})
                of_arm.setdefault(test.name, []).append(uncounted)
            result["turns"].append({
                "round": round_, "arm": name, "seconds": round(time.monotonic() - begun, 3),
                "gpus": [{key: gpu[key] for key in CLOCKS} for gpu in provenance.gpus()],
            })  # fmt: skip

        def whole(round_: int, _: dict[str, None]) -> None:
            print(f"  {path.stem}: round {round_ + 1}/{wanted.rounds}", file=sys.stderr, flush=True)

        with recording.kept():
            for one, test in itertools.product(engines.values(), tests):
                w.warm_up([one], test, SEED, w.bos_token(one), once=True)
            result["answers"] = same_answers(engines, SEED)
            recording.take(take, whole=whole)
            for name, one in engines.items():
                recording.arm(name)["counters"] = one.counters
            result["state_after"] = provenance.state()
            if wanted.overlapped:
                result["overlap"] = overlaps(engine, wanted.overlapped)


def overlaps(engine: wb.Engine, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How much of a token has two kernels or more in flight in each setting: what `Overlap.record`
    says, and the seconds it took, or why it `failed`. After all turns: what a trace leaves in the
    process meets none of them."""
    found: dict[str, dict[str, Any]] = {}
    for spec in settings:
        begun = time.monotonic()
        try:
            with engine.variant(engine.resolve(toggles_of(spec, engine))) as used:
                made = measure_overlap(used, OVERLAP_TOKENS)
        except WorkbenchError as error:
            print(f"{spec}: overlap not measured: {error}", flush=True)
            found[spec] = {"failed": str(error)}
            continue
        print(f"{spec}: {made}", flush=True)
        found[spec] = made.record() | {"seconds": round(time.monotonic() - begun, 3)}
    return found


def shown(folder: Path) -> str:
    """A line for each arm and test of a run folder, and the ratio of the fastest ones."""
    peer = PeerRun(results.load_run(folder))
    lines = [f"{peer.model}: {peer.run['result']['peer']['version']}"]
    for test in peer.run["tests"]:
        for arm in peer.rates(test):
            middle, low, high = peer.interval(test, arm)
            lines.append(f"  {test:6} {arm:32} {middle:9.1f} t/s ({low:.1f}..{high:.1f})")
        best = peer.best(test)
        lines.append(
            f"  {test:6} ours / theirs {spread(best.beside.ratio, 3)}, {best.beside.verdict}: "
            f"{best.arm_ours} / {best.arm_theirs}"
        )
        for one in peer.savings(test) if test.startswith("tg") else ():
            lines.append(f"  {test:6} reuse saves llama.cpp {one.us:.1f} us, with {one.with_}")
    return "\n".join(lines)


@app.default
def main(
    *models: str,
    campaign: Literal["best", "streams"] = "best",
    peer: Path | None = None,
    tests: str = ",".join(TESTS),
    ours: str = "",
    theirs: str = "",
    rounds: int = MIN_REPETITIONS,
    repetitions: int = 3,
    options: Options = USUAL,
) -> None:
    """Compares both sides on each model, prints a table, and writes a run folder.

    A model that has a complete run of this commit is left out: a call that was cut off goes on
    where it was.

    Parameters
    ----------
    models: as folders name them, llama-3-8b-q4_0; without any, all of the campaign's.
    campaign: what models, settings and folder are where none are given: the README's, or one stream
        against several (`data/measure/streams.py`).
    peer: llama-bench, a folder or an archive that holds it; it is built where none is given.
    tests: ppN and tgN.
    ours: settings of ours, a background and changes to it: best, or best plans=ours pdl=off.
    theirs: what is switched in llama.cpp: default, graphs=off, graph_opt=1, reuse=off, or both.
    rounds: how often each arm has its turn; at least 5.
    repetitions: of a test in a turn, the first of which does not count.
    """
    its_models, settings, switched, folder, overlapped = CAMPAIGNS[campaign]
    wanted = Wanted(
        options.device, tests.split(","), ours.split(",") if ours else settings,
        theirs.split(",") if theirs else switched, rounds, repetitions, overlapped,
    )  # fmt: skip
    wanted.check()
    names, call = models or its_models, Call(folder, options)
    for name in names:
        parsed(name)
    if peer is None:
        build(check=True)  # before anything takes long
    open_backend(options.device).close()
    bench = find(peer)
    for name in names:
        out = call.out / name

        def measured(name: str = name, out: Path = out) -> None:
            compare(bench, call.model_file(name), out, wanted)

        call.make(name, out, measured, shown)


if __name__ == "__main__":
    start(app)
