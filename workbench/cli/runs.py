"""Commands about run folders: list, show, remove, export."""

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from workbench.cli import flags as f
from workbench.cli.common import RUNS, app, say
from workbench.common.errors import UsageError

if TYPE_CHECKING:
    from workbench.common.tables import Table

# columns of `runs ls`: a narrow terminal does without the first ones
NEEDED_LEAST = ("took s", "device", "started")
SHORTENED, SHORT = ("model", "tests"), 20  # before a column is left out; letters of a cell

runs_app = App(name="runs", help="List, show, remove and export run folders.")
app.command(runs_app)


def listed_run(_: object, tokens: Any) -> Path:
    """The path of a run folder; a name that `runs ls` prints stands for the folder in RUNS."""
    path = Path(str(tokens[0].value))
    inside = RUNS / path
    return inside if not path.exists() and inside.is_dir() else path


OneRun = Annotated[Path, Parameter(converter=listed_run)]
RunPath = Annotated[OneRun, f.flag("run folder, or its name in `runs ls`")]


@runs_app.command(name="ls")
def list_runs(
    root: Annotated[Path, f.flag("folder that holds run folders, at any depth")] = RUNS,
    /,
    *,
    as_json: f.AsJson = False,
) -> None:
    """List run folders, oldest first.

    A folder that cannot be read, or has a newer schema, says so as its status. A sweep and an
    advice have a line each; `ls FOLDER` lists their runs.
    """
    from workbench.benchmarks.runs import folders, results
    from workbench.common.tables import Table, show_prose, terminal_columns

    if root != RUNS and not root.is_dir():
        raise UsageError(f"{root} is no folder; name a folder that holds run folders")
    found = results.runs(root)
    if as_json:
        print(found.to_json(orient="records", indent=1))
        return
    if found.empty:
        say(f"no runs in {root}; bench, ab, sweep and others write them with --out")
        return
    found = folders.runs_together(found, root)
    for name in ("started", "model"):  # where no run can be read, these are no columns of text
        found[name] = found[name].astype(object).fillna("")
    reasons = found["status"].str.partition(": ")
    table = Table(
        {
            "folder": [str(Path(folder).relative_to(root)) for folder in found["folder"]],
            "status": reasons[0],
            "started": found["started"].str[:16].str.replace("T", " "),
            "kind": found["kind"],
            "device": found["device"],
            "model": found["model"].str.replace(" with random weights", ""),
            "tests": found["tests"],
            "took s": found["duration_s"],
        }
    ).shown(digits={"took s": 1})
    text, left_out = _fitted(table, terminal_columns())
    print(text)
    show_prose("\n".join(reason for reason in reasons[2] if reason))
    if left_out:
        say(f"no room for {', '.join(left_out)}: a wider terminal or --json shows them")


def _fitted(table: "Table", width: int) -> tuple[str, list[str]]:
    """The runs as text that is no wider than `width`, and the columns without room. The name of a
    folder stays whole, so that it can be copied: where names are long, a run has lines of its own.
    """
    from workbench.common.tables import markdown

    def is_wide() -> bool:
        return max(map(len, markdown(table).splitlines())) > width

    every = table.to_dict("records")
    for column in SHORTENED:
        if is_wide():
            table[column] = [_shortened(text) for text in table[column].fillna("")]
    left_out: list[str] = []
    for column in NEEDED_LEAST:
        if is_wide():
            left_out.append(column)
            table = table.drop(columns=column).shown(**table.attrs)
    if is_wide():
        return "\n".join(line for row in every for line in _lines(row, width)), []
    return markdown(table), left_out


def _shortened(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."


def _lines(row: dict[str, Any], width: int) -> list[str]:
    """The name of a run, and below it everything else."""
    known = {name: value for name, value in row.items() if value and value == value}
    if "took s" in known:
        known["took s"] = f"{known['took s']:.1f}\xa0s"  # stays together
    name, *rest = map(str, known.values())
    said = textwrap.fill("; ".join(rest), width, initial_indent="  ", subsequent_indent="  ",
                         break_on_hyphens=False)  # fmt: skip
    return [name, said.replace("\xa0", " ")]


@runs_app.command
def show(folder: RunPath, /, *, as_json: f.AsJson = False) -> None:
    """Print what a run, a sweep or an advice was and found (--json: run.json of a run)."""
    from workbench.benchmarks.compare import pace
    from workbench.benchmarks.compare.comparison import AB
    from workbench.benchmarks.runs import folders, loading, results
    from workbench.common.tables import show, show_prose, terminal_columns
    from workbench.traffic.bench import SERVED, load_served

    if kind := results.together(folder):
        if as_json:
            raise UsageError(f"{folder} is a result of {kind}; --json takes a run below it")
        print(loading.load(folder))
        return
    found = results.load_run(folder)
    if as_json:
        print(json.dumps(results.finite(found.run), indent=1))
        return
    width = terminal_columns()
    for name, text in folders.facts(found.run).items():
        print(textwrap.fill(f"{name:<9} {text}", width, subsequent_indent=" " * 10))
    if found.run["kind"] == SERVED:  # samples are requests, several at a time
        print()
        show(load_served(folder).table())
    elif found.run["kind"] == "gaps":  # samples of gaps and of kernels are no times of tokens
        print(f"\n{loading.load(folder)}")
    elif found.run["kind"] == "kernels":
        from workbench.report import roofline

        print()
        show(roofline.table(found.run))
    elif len(found.samples):
        print()
        show(folders.measured(pace.counted(found.run, found.samples)))
    if found.run["kind"] == "ab" and len(found.samples):
        comparison = AB(found.run, found.samples)
        print()
        show(comparison.table())
        print()
        show_prose(comparison.verdict)


@runs_app.command
def rm(
    *runs: RunPath,
    yes: Annotated[bool, f.flag("do not ask", "--yes -y")] = False,
) -> None:
    """Remove run folders, after a question.

    Nothing but run folders (and sweeps and advices) is removed, and no half of a folder stays.
    """
    from workbench.benchmarks.runs.folders import parted, remove_runs, run_folder
    from workbench.common.sizes import sizes

    if not runs:
        raise UsageError("no run folder is named; `workbench runs ls` lists them")
    found = [run_folder(path) for path in dict.fromkeys(runs)]
    (size,) = sizes(sum(one.n_bytes for one in found))
    what = f"{len(found)} run folder{'s' * (len(found) > 1)} ({size})"
    for line in parted(found):
        say(line)
    if not yes and not _agreed(f"remove {what}? [y/N] "):
        say("nothing is removed")
        return
    remove_runs(found)
    say(f"removed {what}")


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask; give --yes to remove without a question")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@runs_app.command
def export(
    folder: RunPath,
    /,
    *,
    out: Annotated[
        Path,
        f.flag("x.csv, x.parquet, x.json or x.jsonl: a table; x.zip, or a new folder: all of it"),
    ],
    table: Annotated[
        Literal["samples", "tokens", "requests"],
        f.flag("which table; tokens of perplexity, requests of serve-bench"),
    ] = "samples",
) -> None:
    """Copy a run for another place: a tidy table, or all.

    A row is a timed token or prompt, with its run, model, device and toggles.
    """
    from workbench.benchmarks.runs import folders

    say(f"wrote {folders.export(folder, out, table)}")
