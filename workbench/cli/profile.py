"""The command that reports where the time of a token goes, and writes the trace that shows it."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from workbench.cli import flags as f
from workbench.cli.common import app, load, say
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.common.output import check_extension, check_writable

if TYPE_CHECKING:
    from workbench.engine.cache.room import Room
    from workbench.engine.load import Loaded

KERNEL, EVENTS = "kernel", "events"


@app.command
def profile(
    *,
    model: f.ModelPath,
    test: Annotated[str, f.flag("as tg8, pp512, tg8@d512 or pp64+tg8")] = "tg8",
    out: Annotated[
        Path | None,
        f.flag("trace to write: t.pftrace.gz for Perfetto, t.json for Chrome's JSON"),
    ] = None,
    window: Annotated[
        str | None,
        f.flag("FIRST,N: trace N steps from step FIRST; default: the test's last 8 steps"),
    ] = None,
    by: Annotated[
        str, f.flag("a row for each: op, node (of a layer) or kernel (CUPTI's name)")
    ] = "op",
    repetitions: Annotated[
        f.Whole, f.flag("untraced runs", "--repetitions -r", validator=f.AT_LEAST_1)
    ] = 5,
    collector: Annotated[
        str, f.flag("of device spans: cupti, events, or auto (cupti on a GPU)")
    ] = "auto",
    seed: f.Seed = 0,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Say where a token's time goes; write the trace.

    By kernel, by phase of the host, and by gap.

    The times of a token and of its gap come from untraced steps, by the device's own stamps.
    Figures of traced steps are labelled so: they attribute time, and do not measure it.
    """
    from workbench.benchmarks.times import profiling
    from workbench.benchmarks.workload import long_enough, parse
    from workbench.common.tables import show, terminal_columns
    from workbench.report import profiles
    from workbench.trace.analysis import BY
    from workbench.trace.cupti import collector as cupti
    from workbench.trace.profile import COLLECTORS, TRACES, parse_window

    workload, asked = parse(test), parse_window(window)
    for flag, value, known in (("--by", by, BY), ("--collector", collector, COLLECTORS)):
        if value not in known:
            raise UsageError(f"{flag} {value!r} does not exist; {choices(value, known)}")
    steps = profiling.window_of(workload, config.n_ubatch, asked)
    if out is not None:
        check_writable(out)
        check_extension(out, *TRACES, bare=False)
    fit = partial(long_enough, [workload])  # as bench: the context is what the test needs

    def check(opened: Loaded, _: Room) -> None:
        if by == KERNEL and (collector == EVENTS or not is_gpu(opened.device)):
            whose = "collector events" if collector == EVENTS else f"the {opened.device} device"
            raise UsageError(
                f"--by kernel takes CUPTI's names of kernels, and {whose} has none; use --by op or "
                "--by node"
            )

    with load(model, config, toggles, check=check, fit=fit, longest=workload.n_cells_seq) as engine:
        if by == KERNEL:
            cupti.probe(cupti.load())  # before anything is measured
        found = profiling.profile_test(
            engine, workload, steps, repetitions=repetitions, seed=seed, collector=collector
        )
        m = engine.model
        found.trace.about["model"]["hash"] = m.hash
        about = f"{m.name} {m.quant} on {engine.backend.description}; toggles: {engine.chosen}"
    if out is not None:  # before what is printed, which nobody may read to its end
        size = found.trace.save(out)
        say(f"wrote {out} ({size / 1e3:,.1f} kB); open it in ui.perfetto.dev")
    width = terminal_columns()
    print(textwrap.fill(about, width))
    for title, table in profiles.lines(found, by):
        print("", textwrap.fill(title, width), "", sep="\n")
        if len(table):
            show(table)
    print("", textwrap.fill(found.trace.note, width), sep="\n")
