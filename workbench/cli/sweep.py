"""`workbench sweep`: a matrix of cells, from flags or a TOML file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from workbench.cli import flags as f
from workbench.cli.common import app, say
from workbench.cli.lists import (
    DEFAULT_BENCH,
    DEFAULT_BENCH_TOGGLES,
    LISTED,
    BenchFlags,
    BenchToggles,
    Listed,
    SeveralSettings,
    as_numbers,
    numbers,
)
from workbench.cli.outputs import TableFormat, check_run_name, print_frame
from workbench.common.devices import AUTO
from workbench.common.errors import Kept, UsageError
from workbench.config import EngineConfig


@app.command
def sweep(
    *,
    model: f.ModelPaths | None = None,
    matrix: Annotated[Path | None, f.flag("TOML file of axes; flags win over it")] = None,
    test: Annotated[Listed | None, f.flag("as tg32 or pp512,tg128; default tg32")] = None,
    n_depth: Annotated[
        Listed | None, f.flag("tokens cached before a test, as 0,4096", "--n-depth -d")
    ] = None,
    n_parallel: Annotated[
        Listed | None, f.flag("sequences computed together, as 1,8,32", "--n-parallel -npl")
    ] = None,
    set: Annotated[
        list[str] | None,
        f.flag("toggles that go together, as 'plans=ours pdl=on'; each use is a value of one axis"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        f.flag("cells to leave out, as 'sync=packed n_ubatch=16,32'; can be given again"),
    ] = None,
    repetitions: Annotated[
        f.Whole | None, f.flag("of every cell; default 5", "--repetitions -r")
    ] = None,
    seed: Annotated[f.Whole | None, f.flag("seed of everything that is drawn; default 0")] = None,
    out: Annotated[
        Path | None, f.flag("folder of the sweep; default: a new one in data/runs")
    ] = None,
    resume: Annotated[bool, f.flag("go on with the sweep in --out; give its matrix again")] = False,
    dry_run: Annotated[
        bool,
        f.flag(
            "say how many cells there are and, with --calibrate, how long they take; measure none"
        ),
    ] = False,
    calibrate: Annotated[bool, f.flag("with --dry-run: time a repetition of each test")] = False,
    scheduler: Annotated[
        str | None,
        f.flag("address of a dask.distributed scheduler whose workers have a device each"),
    ] = None,
    energy: f.EnergyFlag = False,
    output: Annotated[TableFormat, f.flag("format on standard output", "--output -o")] = "md",
    config: BenchFlags = DEFAULT_BENCH,
    toggles: BenchToggles = DEFAULT_BENCH_TOGGLES,
) -> None:
    """Measure a matrix of models, tests, settings and toggles.

    Toggles and -ub, -t, -ngl take lists. Cells that differ in toggles are interleaved, with an A/A
    control. A sweep that was killed goes on with --resume.
    """
    from workbench.benchmarks.sweep.sweep import sweep as measured
    from workbench.common.tables import show, show_prose

    check_run_name(out)
    if calibrate and not dry_run:
        raise UsageError("--calibrate times a dry run; add --dry-run")
    given = toggles.given()
    presets = given.pop("preset", None)
    models = [AUTO if one == f.AUTO_MODEL else str(one) for one in model or ()] or None
    made = measured(
        models, test, toggles=given or None, sets=set, presets=presets,
        n_depth=None if n_depth is None else numbers("-d", n_depth),
        n_parallel=None if n_parallel is None else numbers("-npl", n_parallel),
        exclude=exclude, repetitions=repetitions, seed=seed, matrix=matrix, out=out, resume=resume,
        dry_run=dry_run, calibrate=calibrate, scheduler=scheduler, energy=energy,
        **_settings(config),
    )  # fmt: skip
    if output == "md":
        if not dry_run:
            show(made.table())
            print()
        show_prose(made.summary)
    else:
        print_frame(made.to_frame(), output)
        say(made.summary)
    if made.interrupted:
        raise Kept if made.to_frame()["n"].notna().any() else KeyboardInterrupt


def _settings(config: SeveralSettings) -> dict[str, Any]:
    """The settings that were given, each with its values: axes of the sweep."""
    every: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)
    }
    found: dict[str, Any] = {}
    for field in dataclasses.fields(EngineConfig):
        value = every[field.name]
        if field.name in LISTED and value is not None:
            flag = f"--{field.name.replace('_', '-')}"
            found[field.name] = numbers(flag, as_numbers(value))
        elif field.name not in LISTED and value != field.default:
            found[field.name] = value
    if "threads" in found:
        found["threads"] = [max(n, 0) for n in found["threads"]]  # -1: every core, as 0
    others = [name for name in ("n_batch", "flash_attn") if getattr(config, name) is not None]
    if others:
        raise UsageError(f"{others[0]} changes no cell of a sweep; give n_ubatch, or leave it out")
    return found
