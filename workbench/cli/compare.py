"""The command that holds run folders against each other."""

from pathlib import Path
from typing import Annotated

from cyclopts.validators import Number

from workbench.cli import flags as f
from workbench.cli.common import app, say
from workbench.cli.runs import OneRun
from workbench.cli.traces import are_traces, compare_traces
from workbench.common.errors import BelowLimit, UsageError, WorkbenchError
from workbench.common.output import check_extension, check_writable, write_text

PAGE = Path("reports/compare.html")


@app.command
def compare(
    *runs: Annotated[
        OneRun,
        f.flag(
            "run folders of ab or bench (or their names in `runs ls`), or files of llama-bench "
            "(json, jsonl, csv, sql, SQLite), or two traces; the first is the baseline"
        ),
    ],
    out: Annotated[Path, f.flag("the HTML page to write")] = PAGE,
    across: Annotated[
        bool, f.flag("judge runs on another card or driver, or of another day")
    ] = False,
    fail_below: Annotated[
        float | None,
        f.flag(
            "exit status 3 where a row's whole interval lies below this ratio, as 0.97",
            validator=Number(gt=0),
        ),
    ] = None,
    step: Annotated[
        str | None,
        f.flag("of a foreign trace: name of the ranges or calls that are steps (cudaGraphLaunch)"),
    ] = None,
) -> None:
    """Compare recorded runs, across commits and machines.

    Two traces (of profile, nsys export, torch.profiler) are compared by op and layer, or kernel.

    Rows match by test, model and toggles; what does not match is listed. Runs on another card,
    processor or driver, or of another day, are history: shown without a verdict.
    """
    from workbench.benchmarks.compare import compare as folders
    from workbench.common.tables import show, show_prose
    from workbench.report.pages import compared_page

    check_extension(out, ".html")
    if are_traces(runs):
        if across or fail_below is not None:
            raise UsageError("--across and --fail-below judge run folders; traces have no verdict")
        compare_traces(runs, out, step)
        return
    if step is not None:
        raise UsageError(
            "--step is of traces of other tools; run folders have none, so leave it out"
        )
    check_writable(out, parents=True)
    found = folders.compare(*runs, across=across)
    write_text(out, compared_page(found), parents=True)
    for table in found.tables():
        show(table)
        print()
    show_prose("\n".join(found.lines))
    say(f"page: {out}")
    if fail_below is None:
        return
    if not any(row.is_judged for row in found.rows):
        raise WorkbenchError(
            "--fail-below has nothing to judge: no row has a verdict (see above; --across judges "
            "history, too)"
        )
    if slower := found.below(fail_below):
        said = ", ".join(f"{row.run_id} {row.sides.after.test} {row.ratio.value:.3f}x "
                         f"(at most {row.ratio.high:.3f})" for row in slower)  # fmt: skip
        raise BelowLimit(f"slower than {fail_below:g}x: {said}")
