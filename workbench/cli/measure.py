"""Commands that measure, and write their results to run folders and reports."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from workbench.cli import flags as f
from workbench.cli.common import MODELS, RUNS, app, load, say, say_ranges, say_replays
from workbench.cli.lists import (
    DEFAULT_BENCH,
    DEFAULT_BENCH_TOGGLES,
    BenchFlags,
    BenchToggles,
    Listed,
    numbers,
    once,
)
from workbench.cli.notebooks import NOTEBOOKS, shipped_notebooks
from workbench.cli.outputs import RowFormat, TableFormat, check_run_name, print_frame
from workbench.common.devices import AUTO
from workbench.common.errors import Kept, ModelFileError, UsageError, WorkbenchError
from workbench.common.nearest import choices
from workbench.common.output import check_folder
from workbench.common.sizes import counted
from workbench.config import BASELINE, EngineConfig, Toggles

if TYPE_CHECKING:
    from workbench.benchmarks.llama.llama_bench import BenchRow

PROMPTS, GENS, DEPTHS = ["512"], ["128"], ["0"]  # llama-bench's


@app.command
def bench(
    *,
    model: f.ModelPaths,
    n_prompt: Annotated[
        Listed, f.flag("tokens of a prompt, as 512,1024; 0: none", "--n-prompt -p")
    ] = PROMPTS,
    n_gen: Annotated[
        Listed, f.flag("tokens to generate, as 128,256; 0: none", "--n-gen -n")
    ] = GENS,
    n_depth: Annotated[
        Listed, f.flag("tokens cached before a test, as 0,4096", "--n-depth -d")
    ] = DEPTHS,
    pg: Annotated[
        Listed | None, f.flag("a prompt and tokens after it, as 512,128", "--pg -pg")
    ] = None,
    n_parallel: Annotated[
        Listed | None,
        f.flag(
            "sequences that do both together, as 1,8,32: llama-batched-bench's tests",
            "--n-parallel -npl",
        ),
    ] = None,
    shared: Annotated[
        bool, f.flag("with -npl: one prompt for all", "--shared-prompt -pps")
    ] = False,
    repetitions: Annotated[
        f.Whole,
        f.flag(
            "runs of each test; with --until the least", "--repetitions -r", validator=f.AT_LEAST_1
        ),
    ] = 5,
    seed: f.Seed = 0,
    build: Annotated[str | None, f.flag("build_commit, to tell two files apart")] = None,
    output: Annotated[RowFormat, f.flag("format on standard output", "--output -o")] = "md",
    out: Annotated[
        Path | None, f.flag("run folder to write, too; OUT-1, OUT-2, ... for several engines")
    ] = None,
    resume: f.Resume = False,
    energy: f.EnergyFlag = False,
    repeat: f.RepeatFlags = f.DEFAULT_REPEAT,
    config: BenchFlags = DEFAULT_BENCH,
    toggles: BenchToggles = DEFAULT_BENCH_TOGGLES,
) -> None:
    """Time prompts and tokens, as llama-bench does.

    Tests, names and lists are llama-bench's. A list is 512,1024, 1-8, 128-512+128 or 1-8*2. A row
    for each test, model, and combination of -ngl, -t, -ub, -b, -fa and toggles, which take lists,
    too: --sync per_copy,packed. With -npl the tests and the table are llama-batched-bench's.
    """
    from workbench.benchmarks.llama import batched, llama_bench
    from workbench.benchmarks.runs.draft import open_outs
    from workbench.benchmarks.workload import long_enough, wide_enough
    from workbench.common.tables import known_columns

    check_run_name(out)
    prompts, gens, depths = numbers("-p", n_prompt), numbers("-n", n_gen), numbers("-d", n_depth)
    pairs, together = [_pair(text) for text in pg or ()], numbers("-npl", n_parallel or ())
    once("-pg", list(pg or ()))
    if n_parallel and (pairs or depths != [0]):
        raise UsageError("-npl goes with -p and -n alone; leave -d and -pg out")
    if shared and not n_parallel:
        raise UsageError("-pps shares a prompt among sequences; give their numbers with -npl")
    line: Callable[[BenchRow], str]
    formatted: Callable[..., str]
    if n_parallel:
        tests = batched.workloads(prompts, gens, together, shared)
        line, formatted = batched.line, batched.format_rows
    else:
        tests = llama_bench.workloads(prompts, gens, depths, pairs)
        line, formatted = llama_bench.BenchRow.line, llama_bench.format_rows
    sets = toggles.each()
    engines = list(product(model, config.each(), sets))
    longest = max(test.n_cells_seq for test in tests)
    until = repeat.arguments(len(engines))
    folders = _folders(out, len(engines))
    earlier = open_outs(folders, resume)
    rows: list[BenchRow] = []
    for (path, settings, wanted), folder, held in zip(engines, folders, earlier, strict=True):
        fit = partial(long_enough, tests)  # as llama-bench: the context is what the tests need
        # `sets`: what the device refuses is refused before the first engine is measured
        with load(
            path, wide_enough(tests, settings), wanted, sets, fit=fit, longest=longest
        ) as engine:
            told = partial(_say_row, line, engine.toggles)
            rows += llama_bench.measured(
                engine, tests, repetitions, seed=seed, build=build, out=folder,
                resume=held is not None, energy=energy, on_row=told, on_end=say_replays, **until,
            )  # fmt: skip
    print(formatted(rows, output, known_columns()), end="")


def _say_row(line: Callable[[BenchRow], str], of_engine: Toggles, row: BenchRow) -> None:
    """Prints the line of a row, with the toggles that the engine of its test has of its own: best
    for one sequence is another set than best for several."""
    was = of_engine.to_dict()
    own = [f"{name}={value}" for name, value in row.toggles.items() if value != was[name]]
    say(f"{line(row)} ({', '.join(own)})" if own else line(row))


def _folders(out: Path | None, n: int) -> list[Path | None]:
    """The run folders of n engines."""
    if out is None or n == 1:
        return [out] * n
    return [out.with_name(f"{out.name}-{i}") for i in range(1, n + 1)]


def _pair(text: str) -> tuple[int, int]:
    sizes = numbers("-pg", text, twice=True)
    if len(sizes) != 2:
        raise UsageError(f"-pg {text!r} is no pair of sizes; write it as 512,128")
    return sizes[0], sizes[1]


@app.command
def ab(
    *,
    model: f.ModelPath,
    toggle: Annotated[
        str, f.flag("as sync=per_copy,copy_boundary; or sets: 'plans=off | plans=ours pdl=on'")
    ],
    test: Annotated[str, f.flag("as tg32 or pp64,tg32")] = "tg32",
    rounds: Annotated[
        f.Whole, f.flag("runs of each arm, interleaved; 5 or more; with --until the least")
    ] = 10,
    seed: f.Seed = 0,
    output: Annotated[TableFormat, f.flag("format on standard output", "--output -o")] = "md",
    out: Annotated[Path | None, f.flag("run folder to write")] = None,
    resume: f.Resume = False,
    energy: f.EnergyFlag = False,
    repeat: f.RepeatFlags = f.DEFAULT_REPEAT,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Compare values of a toggle, or sets of toggles.

    All are measured in turn, and an A/A control tells the noise."""
    from workbench.benchmarks.compare.ab import ab as interleaved
    from workbench.benchmarks.compare.arms import ComparisonSpec, comparison_spec
    from workbench.benchmarks.compare.forms import named_twice
    from workbench.benchmarks.runs.draft import open_out
    from workbench.benchmarks.workload import long_enough, parse_tests, wide_enough
    from workbench.common.tables import show, show_prose

    check_run_name(out)
    until = repeat.arguments()
    wanted, specs = toggles.wanted(BASELINE), list[ComparisonSpec]()
    if compared := named_twice(toggle, wanted.changes):
        raise UsageError(
            f"--{compared.replace('_', '-')} is what is compared; leave it out, and put the "
            f"baseline first in --toggle {compared}=..."
        )

    def switched(background: Toggles) -> list[Toggles]:
        specs.append(comparison_spec(toggle, None, test, rounds, background))
        return [arm.toggles for arm in specs[-1].arms]

    if not wanted.of_device:  # then all of it is known before a model is opened
        switched(wanted.toggles())
    open_out(out, resume)
    tests = parse_tests(test)
    with load(
        model, wide_enough(tests, config), wanted, switched,
        lambda opened, _: specs[-1].check_arms(opened.config), fit=partial(long_enough, tests),
    ) as engine:  # fmt: skip
        result = interleaved(
            engine,
            toggle,
            tests=test,
            rounds=rounds,
            seed=seed,
            out=out,
            resume=resume,
            energy=energy,
            **until,
        )
    if output == "md":
        show(result.table())
        print()
        show_prose(result.verdict)
    else:
        print_frame(result.to_frame(), output)
    if result.interrupted:
        raise Kept


@app.command
def perplexity(
    *,
    model: f.ModelPath,
    file: Annotated[Path | None, f.flag("UTF-8 text", "--file -f")] = None,
    tokens_from: Annotated[
        str | None, f.flag("ids: a .npy, .jsonl or text file, or sample:N[:SEED]")
    ] = None,
    against: Annotated[
        str | None, f.flag("compare with: base, a preset, or toggles as activations=float")
    ] = None,
    check: Annotated[bool, f.flag("fail where the two differ more than the type's bound")] = False,
    sizes: Annotated[
        str | None, f.flag("tokens computed at once, as 512,1: a run OUT-ubN for each")
    ] = None,
    out: Annotated[Path | None, f.flag(f"run folder; default: a new one in {RUNS}")] = None,
    resume: Annotated[bool, f.flag("continue the run in --out")] = False,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Score tokens, alone or against other toggles.

    Tokens are scored in windows of n_ctx, and every token's NLL is kept. Kernels differ by how many
    tokens are computed at once (--sizes, default n_ubatch): 1 is decode.
    """
    from workbench.benchmarks.runs import results
    from workbench.benchmarks.runs.draft import open_out
    from workbench.benchmarks.scores import perplexity as ppl
    from workbench.benchmarks.scores.token_source import ask

    check_run_name(out)
    if check and against is None:
        raise UsageError("--check needs a reference; add --against activations=float")
    other = None if against is None else ppl.parse_against(against)
    at_once = [config.n_ubatch] if sizes is None else numbers("--sizes", sizes)
    source = ask(file, tokens_from)
    if out is None:
        open_out(out, resume)
    folder = out or results.new_run_folder(RUNS, f"ppl-{source.label}")
    folders = ppl.folders_of(folder, at_once)
    ppl.check_folders(folders, config.n_ubatch, resume)
    variants = [] if other is None else [other]
    with load(
        model, config, toggles, variants, lambda opened, _: source.check_tokens(opened)
    ) as engine:
        runs = ppl.perplexity_by_size(
            engine, source.open(engine), folders, against=other, resume=resume
        )
        dtype = engine.model.main_weight.dtype.name
    for made in runs:
        print("\n".join(made.lines()))
        say(f"run folder: {made.folder}")
    if any(made.interrupted for made in runs):
        raise Kept
    found = [made.agreement.outside(dtype, made.n_ubatch) for made in runs if made.agreement]
    if check and any(found):
        raise WorkbenchError("; ".join(filter(None, found)))


@app.command
def bench_kernels(
    *,
    device: f.DeviceName = "auto",
    threads: Annotated[f.Whole, f.flag("of a CPU device; 0: every core", "--threads -t")] = 0,
    types: Annotated[str, f.flag("as Q4_0,F16, or all")] = "all",
    shapes: Annotated[str, f.flag("as 8b.o, or 8b for all of a model, or all")] = "all",
    batch: Annotated[str, f.flag("tokens, as 1,2,4,8 or 1-8")] = "1",
    seed: f.Seed = 0,
    out: Annotated[Path | None, f.flag(f"run folder; default: a new one in {RUNS}")] = None,
    quick: Annotated[bool, f.flag("see that it works; no figures")] = False,
    nvtx: f.Nvtx = "auto",
) -> None:
    """Time products of real shapes against the bandwidth.

    The weights are cold. Writes a run folder."""
    from workbench.backend.base import choose_device, open_backend
    from workbench.benchmarks.kernels import kernel_bench, kernel_cases
    from workbench.benchmarks.runs import results
    from workbench.common.tables import show, show_prose
    from workbench.engine.look.nvtx_ranges import ranges_of
    from workbench.report import roofline

    check_run_name(out)
    f.check_computes(device)
    ranges = ranges_of(EngineConfig(nvtx=nvtx).nvtx)
    matrix = kernel_bench.KernelMatrix(
        kernel_cases.parse_types(types), kernel_cases.parse_shapes(shapes),
        kernel_cases.parse_batches(batch), quick, seed,
    )  # fmt: skip
    folder = out or results.new_run_folder(RUNS, "bench-kernels")
    check_folder(folder, new=True)
    chosen, reason = choose_device(device)
    backend = open_backend(chosen, threads)
    say(f"device: {backend.description} ({reason})")
    say_ranges(ranges)
    try:
        made = kernel_bench.bench_kernels(
            backend, matrix, folder, reason=reason, on_row=lambda row: say(str(row)), on_note=say,
            ranges=ranges,
        )  # fmt: skip
    finally:
        backend.close()
    roofline.save(made.run, folder)  # before what is printed, which nobody may read to its end
    say(f"wrote {folder}")
    show(roofline.table(made.run))
    print()
    show_prose(roofline.caption(made.run))
    if made.interrupted:
        raise Kept


@app.command
def report(
    *notebooks: Annotated[
        str,
        f.flag(f"names in {NOTEBOOKS}/, or paths of .ipynb files; none: all that come with it"),
    ],
    out: Annotated[Path, f.flag("folder of the pages")] = Path("reports"),
    device: f.DeviceName = "auto",
    parameter: Annotated[
        list[tuple[str, str]] | None,
        f.flag("a notebook parameter, as: -p repeats 5", "--parameter -p", negative=None),
    ] = None,
) -> None:
    """Run notebooks into HTML reports; print their answers.

    Of a single notebook the speedups are printed, too; the index of the pages has all of them.
    """
    from workbench.backend.base import choose_device
    from workbench.benchmarks.compare.comparison import AB
    from workbench.common.tables import show_prose
    from workbench.model.synth.models import write_tiny_models
    from workbench.report.pages import listed
    from workbench.report.render import check_pages, parameters_of, render_all
    from workbench.report.tables import show, speedup_table

    f.check_computes(device)
    paths = [_notebook(name) for name in notebooks or shipped_notebooks()]
    check_pages(paths, out)
    known = [parameters_of(path) for path in paths]
    given = {name: _parameter(name, text, known) for name, text in parameter or ()}
    if given.get("model", AUTO) != AUTO:
        given["model"] = _model(given["model"], paths)
    chosen, reason = choose_device(device)
    say(f"device: {chosen} ({reason})")
    write_tiny_models(MODELS)
    pages = render_all(
        paths,
        out,
        {"device": chosen} | given,
        device=chosen,
        runs_dir=RUNS,
    )
    made = {page.name for page in pages}
    own = [about for about in listed(out) if about.file in made] if pages else []
    for about in own:
        show_prose(f"{Path(about.file).stem}: {about.answer or 'no answer'}")
    if len(own) == 1 and (runs := own[0].runs):
        show(speedup_table(*(AB.load(RUNS / folder) for folder in runs)))
    print(f"{counted(len(pages), 'report')} in {out.resolve()}")


def _notebook(name: str) -> Path:
    """The notebook of that name. Raises UsageError for a name without a notebook."""
    own = Path(name)
    path = own if own.suffix == ".ipynb" and own.is_file() else NOTEBOOKS / f"{own.stem}.ipynb"
    if path.is_file():
        return path
    known = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    if not known:
        raise UsageError(
            f"there are no notebooks in {NOTEBOOKS}/; `workbench notebooks copy {NOTEBOOKS}` "
            "writes them"
        )
    raise UsageError(f"notebook {path} does not exist; {choices(own.stem, known)}")


def _parameter(name: str, text: str, known: list[dict[str, Any]]) -> Any:
    """A notebook parameter, of the type that it has in the notebooks. Raises UsageError for a name
    that no notebook has, and for text that is no number where it must be one.

    known: the parameters of each notebook, with the values that they have there.
    """
    usual = [own[name] for own in known if name in own]
    if not usual:
        every = dict.fromkeys(name for own in known for name in own)
        right = f"give {f.two_words(name)}" if "=" in name else choices(name, every)
        raise UsageError(f"-p {name}: no notebook has that parameter; {right}")
    for kind, words in ((int, "a whole number"), (float, "a number")):
        if all(type(value) is kind for value in usual):
            try:
                return kind(text)
            except ValueError:
                raise UsageError(
                    f"-p {name} {text!r} is not {words}; give one, as {usual[0]}"
                ) from None
    return text if all(isinstance(value, str) for value in usual) else _literal(text)


def _model(given: str, notebooks: Sequence[Path]) -> str:
    """The parameter for a model: a file from here by its absolute path, since a notebook's paths
    begin at its folder. A tiny model need not be written yet. Raises UsageError for an empty name,
    and ModelFileError for a file that is neither there nor here, or no model."""
    from workbench.model.gguf.file import open_gguf
    from workbench.model.gguf.walk import shown
    from workbench.model.synth.models import TINY

    if not given:
        raise UsageError('-p model "" names no file; give -p model auto, or a GGUF file')
    tiny = {(MODELS / name).resolve() for name, _, _ in TINY}
    here = Path(given)
    if isfile(here) or here.resolve() in tiny:
        given = str(here.resolve())
    for path in [notebook.parent / given for notebook in notebooks]:
        if isfile(path):  # False for a name that is too long, where `is_file` raises OSError
            with open_gguf(path):
                pass
        elif path.resolve() not in tiny:
            raise ModelFileError(
                f"-p model {shown(here)}: no such file, neither here nor in {path.parent}/; give "
                "-p model auto, or a GGUF file"
            )
    return given


def _literal(text: str) -> Any:
    """The value of a Python literal, as 3, 0.5 or False; any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
