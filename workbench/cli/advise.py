"""`workbench advise`: which switches help here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from workbench.cli import flags as f
from workbench.cli.common import app, load
from workbench.cli.lists import Listed
from workbench.cli.outputs import TableFormat, check_run_name, print_frame
from workbench.common.errors import Kept
from workbench.config import BEST, TogglePreset


@app.command
def advise(
    *,
    model: f.ModelPath,
    test: Annotated[str, f.flag("one of llama-bench's tests, as tg32 or pp512")] = "tg32",
    toggle: Annotated[
        Listed | None, f.flag("ask about these only, as sync,plans; default: nearly all")
    ] = None,
    at_most: Annotated[str, f.flag("end after so much time, as 60s or 5m")] = "5m",
    until: Annotated[
        str, f.flag("a comparison ends once its intervals' half-width is that small")
    ] = "1%",
    seed: f.Seed = 0,
    out: Annotated[
        Path | None, f.flag("folder of the run folders; default: a new one in data/runs", "--out")
    ] = None,
    every: Annotated[
        bool, f.flag("print the reason of each value that was not measured", "--all")
    ] = False,
    output: Annotated[TableFormat, f.flag("format on standard output", "--output -o")] = "md",
    config: f.EngineFlags = f.DEFAULT_CONFIG,
) -> None:
    """Rank the switches that help here, on this model.

    First preset best beside everything off. Then each value with the rest of best on, and alone,
    with intervals and an A/A control. The time that is left goes where intervals are widest. The
    flags to copy come last.
    """
    from functools import partial

    from workbench.benchmarks.advise.advise import advise as advised
    from workbench.benchmarks.advise.advise import wanted
    from workbench.benchmarks.compare.until import parse_duration, parse_share
    from workbench.benchmarks.workload import long_enough, wide_enough
    from workbench.common.tables import show, show_prose

    check_run_name(out)
    at_most_s, share = parse_duration("--at-most", at_most), parse_share("--until", until)
    tests, _, _ = wanted(test, toggle or (), out)
    fit, longest = partial(long_enough, tests), max(one.n_cells_seq for one in tests)
    with load(
        model, wide_enough(tests, config), TogglePreset(BEST), fit=fit, longest=longest
    ) as engine:
        made = advised(
            engine, test, toggles=toggle or (), at_most_s=at_most_s, until=share, seed=seed, out=out
        )
    if output == "md":
        if not (table := made.table()).empty:
            show(table)
            print()
        show_prose(made.details if every else made.summary)
    else:
        print_frame(made.to_frame(), output)
    if made.interrupted:
        raise Kept if made.effects else KeyboardInterrupt
