"""Commands that measure, and write what they found to run folders and reports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from workbench.cli.common import (
    AT_LEAST_1,
    DEFAULT_CONFIG,
    DEFAULT_TOGGLES,
    MODELS,
    RUNS,
    EngineFlags,
    ModelPath,
    Seed,
    ToggleFlags,
    app,
    check_new,
    load,
    parse_sizes,
    say,
)
from workbench.cli.repeat import DEFAULT_REPEAT, RepeatFlags
from workbench.config import BASELINE, Toggles
from workbench.errors import UsageError, WorkbenchError

NOTEBOOKS = Path("notebooks")
DEFAULT_NOTEBOOKS = ("00_tour", "02_sync_modes", "10_fusion")


@app.command
def bench(
    *,
    model: ModelPath,
    n_prompt: Annotated[str, Parameter(name=["--n-prompt", "-p"])] = "512",
    n_gen: Annotated[str, Parameter(name=["--n-gen", "-n"])] = "128",
    n_depth: Annotated[str, Parameter(name=["--n-depth", "-d"])] = "0",
    pg: Annotated[str | None, Parameter(name=["--pg", "-pg"], help="as 512,128")] = None,
    repetitions: Annotated[int, Parameter(name=["--repetitions", "-r"], validator=AT_LEAST_1)] = 5,
    seed: Seed = 0,
    build: Annotated[str | None, Parameter(help="build_commit, to tell two files apart")] = None,
    output: Annotated[str, Parameter(name=["--output", "-o"])] = "md",
    out: Annotated[Path | None, Parameter(help="run folder to write, too")] = None,
    repeat: RepeatFlags = DEFAULT_REPEAT,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """llama-bench's tests under its names: md, csv, json, jsonl or sql (lists as 512,1024)."""
    from workbench.bench import llama_bench
    from workbench.frames import known_columns

    if output not in llama_bench.FORMATS:
        raise UsageError(f"-o {output!r}: choose one of {', '.join(llama_bench.FORMATS)}")
    until = repeat.arguments()
    prompts, gens = parse_sizes("-p", n_prompt), parse_sizes("-n", n_gen)
    depths = parse_sizes("-d", n_depth)
    pairs = [_pair(pg)] if pg else []
    needed = max(test.n_cells for test in llama_bench.workloads(prompts, gens, depths, pairs))
    check_new(out)
    if needed > config.n_ctx:  # as llama-bench: the context is what the tests need
        config = dataclasses.replace(config, n_ctx=needed)
    with load(model, config, toggles) as engine:
        rows = llama_bench.bench(
            engine, prompts, gens, depths, repetitions, pairs, seed=seed, build=build, out=out,
            on_row=lambda row: say(row.line()), **until,
        )  # fmt: skip
    print(llama_bench.format_rows(rows, output, known_columns()), end="")


def _pair(text: str) -> tuple[int, int]:
    sizes = parse_sizes("-pg", text)
    if len(sizes) != 2:
        raise UsageError(f"-pg {text!r} is no pair of sizes; write it as 512,128")
    return sizes[0], sizes[1]


@app.command
def ab(
    *,
    model: ModelPath,
    toggle: Annotated[str, Parameter(help="as sync=per_copy,copy_boundary")],
    test: Annotated[str, Parameter(help="as tg32 or pp64,tg32")] = "tg32",
    rounds: int = 10,
    seed: Seed = 0,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="run folder to write")] = None,
    resume: Annotated[bool, Parameter(negative="", help="continue the run in --out")] = False,
    repeat: RepeatFlags = DEFAULT_REPEAT,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Compare the values of one toggle, interleaved, with an A/A control; prints the table."""
    from workbench.bench import ab as interleaved
    from workbench.frames import show

    until = repeat.arguments()
    wanted, plans = toggles.wanted(BASELINE), list[interleaved.Plan]()

    def switched(background: Toggles) -> list[Toggles]:
        plans.append(interleaved.plan(toggle, None, test, rounds, background))
        return [arm.toggles for arm in plans[-1].arms]

    if not wanted.of_device:  # then all of it is known before a model is opened
        switched(wanted.toggles())
    interleaved.open_out(out, resume)
    with load(
        model, config, wanted, switched, lambda opened: plans[-1].check(opened)
    ) as engine:  # fmt: skip
        result = interleaved.ab(
            engine, toggle, tests=test, rounds=rounds, seed=seed, out=out, resume=resume, **until
        )
    show(result.table())
    print()
    print(result.verdict)
    if result.interrupted:
        raise KeyboardInterrupt


@app.command
def perplexity(
    *,
    model: ModelPath,
    file: Annotated[Path | None, Parameter(name=["--file", "-f"], help="UTF-8 text")] = None,
    tokens_from: Annotated[
        str | None, Parameter(help="ids: a .npy, .jsonl or text file, or sample:N[:SEED]")
    ] = None,
    against: Annotated[
        str | None, Parameter(help="compare with: base, or toggles as activations=float")
    ] = None,
    check: Annotated[
        bool, Parameter(negative="", help="fail where the two differ more than the type's bound")
    ] = False,
    sizes: Annotated[
        str | None, Parameter(help="tokens computed at once, as 512,1: a run OUT-ubN for each")
    ] = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="run folder to write")] = None,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Score tokens in windows of n_ctx, alone or against other toggles; keeps every token's NLL.

    Kernels differ by how many tokens are computed at once (--sizes, default n_ubatch): 1 is decode.
    """
    from workbench.bench import perplexity as ppl
    from workbench.bench import results
    from workbench.bench.token_source import ask

    if check and against is None:
        raise UsageError("--check needs a reference; add --against activations=float")
    other = None if against is None else ppl.parse_against(against)
    at_once = [config.n_ubatch] if sizes is None else parse_sizes("--sizes", sizes)
    source = ask(file, tokens_from)
    folder = out or results.new_run_folder(RUNS, f"ppl-{source.label}")
    folders = ppl.folders_of(folder, at_once)
    ppl.check_folders(folders, config.n_ubatch)
    variants = [] if other is None else [other]
    with load(model, config, toggles, variants, source.check) as engine:
        runs = ppl.perplexity_by_size(engine, source.open(engine), folders, against=other)
        dtype = engine.model.quant
    for made in runs:
        print("\n".join(made.lines()))
        say(f"run folder: {made.folder}")
    if any(made.interrupted for made in runs):
        raise KeyboardInterrupt
    found = [made.agreement.outside(dtype, made.n_ubatch) for made in runs if made.agreement]
    if check and any(found):
        raise WorkbenchError("; ".join(filter(None, found)))


@app.command
def bench_kernels(
    *,
    device: str = "auto",
    threads: Annotated[int, Parameter(help="of a CPU device; 0: every core")] = 0,
    types: Annotated[str, Parameter(help="as Q4_0,F16, or all")] = "all",
    shapes: Annotated[str, Parameter(help="as 8b.o, or 8b for all of a model, or all")] = "all",
    batch: Annotated[str, Parameter(help="tokens, as 1,2,4,8 or 1-8")] = "1",
    seed: Seed = 0,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="run folder to write")] = None,
    quick: Annotated[bool, Parameter(negative="", help="see that it works; no figures")] = False,
) -> None:
    """Time the products of real shapes, cold, against the read bandwidth; writes a run folder."""
    from workbench.backend.base import choose_device, open_backend
    from workbench.bench import kernel_bench, kernel_cases, results
    from workbench.frames import show
    from workbench.report import roofline

    plan = kernel_bench.Plan(
        kernel_cases.parse_types(types), kernel_cases.parse_shapes(shapes),
        kernel_cases.parse_batches(batch), quick, seed,
    )  # fmt: skip
    folder = out or results.new_run_folder(RUNS, "bench-kernels")
    check_new(folder)
    chosen, reason = choose_device(device)
    backend = open_backend(chosen, threads)
    say(f"device: {backend.description} ({reason})")
    try:
        made = kernel_bench.bench_kernels(
            backend, plan, folder, reason=reason, on_row=lambda row: say(str(row)), on_note=say
        )
    finally:
        backend.close()
    show(roofline.table(made.run))
    print()
    print(roofline.caption(made.run))
    roofline.save(made.run, folder)
    say(f"wrote {folder}")
    if made.interrupted:
        raise KeyboardInterrupt


@app.command
def report(
    *notebooks: str,
    out: Path = Path("reports"),
    device: str = "auto",
    parameter: Annotated[
        list[tuple[str, str]] | None,
        Parameter(name=["--parameter", "-p"], help="a notebook parameter, as: -p repeats 5"),
    ] = None,
) -> None:
    """Run notebooks into offline HTML reports, and print the speedup table."""
    from workbench.backend.base import choose_device
    from workbench.bench import results
    from workbench.bench.comparison import AB
    from workbench.model.synth import write_tiny_models
    from workbench.report.render import check_pages, render_all
    from workbench.report.tables import show, speedup_table

    paths = [NOTEBOOKS / f"{Path(name).stem}.ipynb" for name in notebooks or DEFAULT_NOTEBOOKS]
    check_pages(paths, out)
    chosen, reason = choose_device(device)
    say(f"device: {chosen} ({reason})")
    write_tiny_models(MODELS)
    before = set(results.runs(RUNS)["folder"])
    pages = render_all(
        paths,
        out,
        {"device": chosen} | {name: _literal(text) for name, text in parameter or []},
        device=chosen,
        runs_dir=RUNS,
    )
    made = results.runs(RUNS)
    fresh = made[(made["kind"] == "ab") & ~made["folder"].isin(before)]["folder"]
    comparisons = [AB.load(folder) for folder in fresh]
    if comparisons:
        show(speedup_table(*comparisons))
    print(f"{len(pages)} reports in {out.resolve()}")


def _literal(text: str) -> str | int | float:
    """A notebook parameter as a number where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
