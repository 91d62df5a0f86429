"""The `workbench` command. Data goes to stdout, everything else to stderr.

Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted. Every error is one line: `error: what
is wrong, where, what to do`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from workbench import __version__
from workbench.config import FAMILIES, EngineConfig, Toggles
from workbench.errors import UsageError, WorkbenchError

app = App(
    name="workbench",
    version=__version__,
    help="Where the time between tokens goes: an LLM engine in which scheduling is a switch.",
    result_action="return_none",
    suppress_keyboard_interrupt=False,  # `main` says in one line what an interruption left
)
model_app = App(name="model", help="Write and inspect model files.")
app.command(model_app)

ModelPath = Annotated[Path, Parameter(name=["--model", "-m"], help="GGUF file")]
EngineFlags = Annotated[EngineConfig, Parameter(name="*")]
ToggleFlags = Annotated[Toggles, Parameter(name="*")]
Ids = Annotated[str | None, Parameter(help="token ids, as 1,2,3")]
DEFAULT_CONFIG, DEFAULT_TOGGLES = EngineConfig(), Toggles()
NOTEBOOKS, MODELS, RUNS = Path("notebooks"), Path("data/models"), Path("data/runs")
DEFAULT_NOTEBOOKS = ("00_tour", "02_sync_modes", "10_fusion")


def say(line: str) -> None:
    print(line, file=sys.stderr)


def load(model: Path, config: EngineConfig, toggles: Toggles) -> Any:
    from workbench.engine.engine import Engine

    engine = Engine.load(model, config=config, toggles=toggles)
    say(f"device: {engine.backend.description} ({engine.device_reason}); sync={engine.sync_mode}")
    return engine


def parse_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--tokens {text!r} is no list of token ids; write them as 1,2,3"
        ) from None


@app.command
def run(
    *,
    model: ModelPath,
    prompt: Annotated[str | None, Parameter(name=["--prompt", "-p"])] = None,
    tokens: Ids = None,
    n_predict: Annotated[int, Parameter(name=["--n-predict", "-n"])] = 32,
    temperature: Annotated[float, Parameter(name=["--temperature", "--temp"])] = 0.0,
    top_k: int = 40,
    top_p: float = 0.95,
    seed: int = 0,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Continue a prompt, or token ids; text appears as it is made (with --tokens: ids)."""
    from workbench.model.sampler import Sampling

    ids, sampling = parse_ids(tokens), Sampling(temperature, top_k, top_p)
    if (prompt is None) == (ids is None):
        raise UsageError("give either a prompt (-p) or token ids (--tokens)")
    with load(model, config, toggles) as engine:
        made = engine.generate(
            prompt,
            tokens=ids,
            max_tokens=n_predict,
            sampling=sampling,
            seed=seed,
            on_text=None if prompt is None else lambda s: print(s, end="", flush=True),
        )
        print("" if prompt is not None else ",".join(map(str, made.tokens)))
        say(
            f"prompt {made.prefill_us / 1e3:.1f} ms; {len(made.tokens)} tokens, "
            f"{made.tokens_per_second:.1f} t/s; {engine.counters['programs_built']} programs "
            f"built, {engine.counters['programs_reused']} reused"
        )
    if made.interrupted:
        raise KeyboardInterrupt


@app.command
def logits(
    *,
    model: ModelPath,
    tokens: Annotated[str, Parameter(help="token ids, as 1,2,3")],
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="file to write (.npy)")],
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Write the logits of every token: float32, one row per token, vocabulary wide."""
    import numpy as np

    if not out.parent.is_dir():
        raise UsageError(f"the folder {out.parent} does not exist; make it first")
    with load(model, config, toggles) as engine:
        rows = engine.prefill(parse_ids(tokens), outputs="all")
    part = out.with_name(out.name + ".part")  # never a half-written file under the real name
    with open(part, "wb") as f:
        np.save(f, rows)
    os.replace(part, out)
    say(f"wrote {rows.shape[0]} x {rows.shape[1]} float32 to {out}")


@app.command
def program(
    *,
    model: ModelPath,
    n_tokens: int = 1,
    n_past: int = 0,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Print the program of one step: its pattern, and per token its waits, copies and launches."""
    with load(model, config, toggles) as engine:
        made = engine.program(n_tokens, 1, n_past)
    if as_json:
        print(json.dumps(made.to_dict(), indent=1))
        return
    print(f"pattern   {made.pattern()}")
    print(f"folded    {made.pattern(fold=True)}")
    for name, n in made.counts().items():
        print(f"{name:<15}{n:>10}")


# bench -------------------------------------------------------------------------------------------


@app.command
def bench(
    *,
    model: ModelPath,
    n_prompt: Annotated[str, Parameter(name=["--n-prompt", "-p"])] = "512",
    n_gen: Annotated[str, Parameter(name=["--n-gen", "-n"])] = "128",
    n_depth: Annotated[str, Parameter(name=["--n-depth", "-d"])] = "0",
    pg: Annotated[str | None, Parameter(name=["--pg", "-pg"], help="as 512,128")] = None,
    repetitions: Annotated[int, Parameter(name=["--repetitions", "-r"])] = 5,
    seed: int = 0,
    build: Annotated[str | None, Parameter(help="build_commit, to tell two files apart")] = None,
    output: Annotated[str, Parameter(name=["--output", "-o"])] = "md",
    out: Annotated[Path | None, Parameter(help="run folder to write, too")] = None,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """llama-bench's tests under its names: md, csv, json, jsonl or sql (lists as 512,1024)."""
    from workbench.bench import llama_bench

    if output not in llama_bench.FORMATS:
        raise UsageError(f"-o {output!r}: choose one of {', '.join(llama_bench.FORMATS)}")
    prompts, gens = parse_sizes("-p", n_prompt), parse_sizes("-n", n_gen)
    depths = parse_sizes("-d", n_depth)
    pairs = [_pair(pg)] if pg else []
    needed = max(depths) + max(prompts + gens + [sum(pair) for pair in pairs])
    if needed > config.n_ctx:  # as llama-bench: the context is what the tests need
        config = dataclasses.replace(config, n_ctx=needed)
    with load(model, config, toggles) as engine:
        rows = llama_bench.bench(
            engine, prompts, gens, depths, repetitions, pairs, seed=seed, build=build, out=out,
            on_row=lambda row: say(f"{row.workload.name}: {row.values()['avg_ts']:.2f} t/s"),
        )  # fmt: skip
    print(llama_bench.format_rows(rows, output), end="")


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
    seed: int = 0,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="run folder to write")] = None,
    resume: Annotated[bool, Parameter(negative="", help="continue the run in --out")] = False,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Compare the values of one toggle, interleaved, with an A/A control; prints the table."""
    from workbench.bench.ab import ab as compare
    from workbench.report.tables import markdown

    with load(model, config, toggles) as engine:
        result = compare(
            engine, toggle, tests=test, rounds=rounds, seed=seed, out=out, resume=resume
        )
    print(markdown(result.table()))
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
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="run folder to write")] = None,
    config: EngineFlags = DEFAULT_CONFIG,
    toggles: ToggleFlags = DEFAULT_TOGGLES,
) -> None:
    """Score tokens in windows of n_ctx, alone or against other toggles; keeps every token's NLL."""
    from workbench.bench import perplexity as ppl
    from workbench.bench.token_source import open_source

    if check and against is None:
        raise UsageError("--check needs a reference; add --against activations=float")
    other = None if against is None else ppl.parse_against(against)
    with load(model, config, toggles) as engine:
        source = open_source(engine, file, tokens_from)
        made = ppl.perplexity(
            engine, source, against=other, out=out,
            progress=lambda done, total: say(f"{done} of {total} tokens"),
        )  # fmt: skip
        dtype = engine.model.quant
    print("\n".join(made.lines()))
    say(f"run folder: {made.folder}")
    if made.interrupted:
        raise KeyboardInterrupt
    outside = made.agreement.outside(dtype) if check and made.agreement else None
    if outside is not None:
        raise WorkbenchError(outside)


@app.command
def bench_kernels(
    *,
    device: str = "auto",
    threads: Annotated[int, Parameter(help="of a CPU device; 0: every core")] = 0,
    types: Annotated[str, Parameter(help="as Q4_0,F16, or all")] = "all",
    shapes: Annotated[str, Parameter(help="as 8b.o, or 8b for all of a model, or all")] = "all",
    batch: Annotated[str, Parameter(help="tokens, as 1,2,4,8 or 1-8")] = "1",
    seed: int = 0,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="run folder to write")] = None,
    quick: Annotated[bool, Parameter(negative="", help="see that it works; no figures")] = False,
) -> None:
    """Time the products of real shapes, cold, against the read bandwidth; writes a run folder."""
    from workbench.backend.base import choose_device, open_backend
    from workbench.bench import kernel_bench, kernel_cases, results
    from workbench.report import roofline
    from workbench.report.tables import markdown

    plan = kernel_bench.Plan(
        kernel_cases.parse_types(types), kernel_cases.parse_shapes(shapes),
        kernel_cases.parse_batches(batch), quick, seed,
    )  # fmt: skip
    folder = out or results.new_run_folder(RUNS, "bench-kernels")
    chosen, reason = choose_device(device)
    backend = open_backend(chosen, threads)
    say(f"device: {backend.description} ({reason})")
    try:
        made = kernel_bench.bench_kernels(
            backend, plan, folder, reason=reason, on_row=lambda row: say(str(row)), on_note=say
        )
    finally:
        backend.close()
    print(markdown(roofline.table(made.run)))
    print(roofline.caption(made.run))
    roofline.save(made.run, folder)
    say(f"wrote {folder}")
    if made.interrupted:
        raise KeyboardInterrupt


def parse_sizes(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text!r} is no list of sizes; write them as 512,1024") from None


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
    from workbench.report.render import render_all
    from workbench.report.tables import markdown, speedup_table

    chosen, reason = choose_device(device)
    say(f"device: {chosen} ({reason})")
    write_tiny_models(MODELS)
    before = set(results.runs(RUNS)["folder"])
    pages = render_all(
        [NOTEBOOKS / f"{Path(name).stem}.ipynb" for name in notebooks or DEFAULT_NOTEBOOKS],
        out,
        {"device": chosen} | {name: _literal(text) for name, text in parameter or []},
        device=chosen,
        runs_dir=RUNS,
    )
    made = results.runs(RUNS)
    fresh = made[(made["kind"] == "ab") & ~made["folder"].isin(before)]["folder"]
    comparisons = [AB.load(folder) for folder in fresh]
    if comparisons:
        print(markdown(speedup_table(*comparisons)))
        print(comparisons[-1].caption)
    print(f"{len(pages)} reports in {out.resolve()}")


def _literal(text: str) -> str | int | float:
    """A notebook parameter as a number where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# model files -------------------------------------------------------------------------------------


@model_app.command
def synth(
    preset: str,
    quant: str,
    out: Path,
    /,
    *,
    head: str | None = None,
    seed: int = 0,
    force: bool = False,
) -> None:
    """Write a model of a real shape with random weights (--head TYPE sets the head's type)."""
    from workbench.model.synth import write_model

    say(f"wrote {write_model(preset, quant, out, head=head, seed=seed, force=force)}")


@model_app.command
def tiny(out: Path = MODELS, /) -> None:
    """Write the tiny models that tests and notebooks use."""
    from workbench.model.synth import write_tiny_models

    say(f"{len(write_tiny_models(out))} tiny models in {out}")


@model_app.command
def inspect(
    file: Path,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Print shapes, types, sizes, and the bytes of weights read per token."""
    from workbench.model.inspect import summary

    found = summary(file)
    print(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))


def spell_out(arguments: list[str]) -> list[str]:
    """`--fuse on` (or `--fuse=on`) written out as one flag for each toggle of the family."""
    flags, out = {f"--{name}": Toggles.members(name) for name in FAMILIES}, []
    left = iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag not in flags:
            out.append(argument)
            continue
        value = value if equals else next(left, "")
        for member in flags[flag]:
            out += [f"--{member.replace('_', '-')}", value]
    return out


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    try:
        arguments = spell_out(sys.argv[1:] if arguments is None else arguments)
        app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except WorkbenchError as error:
        fail(str(error), error.exit_status)
    except CycloptsError as error:
        cause = error.__cause__
        message = cause if isinstance(cause, WorkbenchError) else error
        fail(str(message), 2)
    except KeyboardInterrupt:
        fail("interrupted; what was finished is kept", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second complaint
        sys.exit(1)


def fail(message: str, status: int) -> None:
    say("error: " + " ".join(message.split()))
    sys.exit(status)


if __name__ == "__main__":
    main()
