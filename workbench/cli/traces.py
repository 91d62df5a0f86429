"""`compare` on trace files: what takes longer, and what bounds a step."""

from collections.abc import Sequence
from pathlib import Path

from workbench.cli.common import say
from workbench.common.errors import UsageError
from workbench.common.output import check_writable, write_text


def are_traces(paths: Sequence[Path]) -> bool:
    """Whether `compare` compares traces: all paths are trace files.

    Raises UsageError where some are traces and others are not; for a file the message says why.
    """
    from workbench.trace.imports.files import is_trace, read

    traces = [path for path in paths if path.is_file() and is_trace(path)]
    if traces and len(traces) < len(paths):
        other = next(path for path in paths if path not in traces)
        if not other.exists():
            raise UsageError(f"{other} does not exist; name two traces, or two run folders")
        what = "none"
        if _is_of_llama_bench(other):
            what = "a file of llama-bench"
        elif other.is_file():
            read(other)
        raise UsageError(
            f"{traces[0]} is a trace and {other} is {what}; compare traces with traces, and run "
            "folders or files of llama-bench with each other"
        )
    return bool(traces)


def _is_of_llama_bench(path: Path) -> bool:
    """Whether a path is a whole file of llama-bench. A cut one is none: the reader of traces says
    that it is cut."""
    from workbench.benchmarks.llama.llama_files import llama_rows

    try:
        return path.is_file() and bool(llama_rows(path))
    except UsageError:
        return False


def compare_traces(paths: Sequence[Path], out: Path, step: str | None = None) -> None:
    """Prints what takes longer in the second trace than in the first, the largest change first, and
    the critical path of each; writes all rows to the page `out`.

    step: as in `Profile.load`, for files of other tools.

    Raises UsageError unless there are two traces that can be compared.
    """
    from workbench.common.tables import show, show_prose
    from workbench.report import differences
    from workbench.trace.diff import FOREIGN, diff
    from workbench.trace.profile import Profile

    if len(paths) != 2:
        raise UsageError(f"{len(paths)} traces were given; give two, the first is the baseline")
    check_writable(out, parents=True)
    profiles = [Profile.load(path, step) for path in paths]
    if step is not None and not any(one.collector in FOREIGN for one in profiles):
        raise UsageError(
            f"--step {step!r} is of traces of other tools, and these two have steps of their own; "
            "leave it out"
        )
    found = diff(profiles[0], profiles[1])
    found.attrs["names"] = [path.name for path in paths]
    lines = []
    for side, path, trace in zip(("before", "after"), paths, profiles, strict=True):
        lines.append(f"{side}: {path.name}: {trace.note}")
        if len(trace.to_frame()):
            lines.append(f"{side}: critical path of {trace.critical_path().attrs['line']}")
    write_text(out, differences.page_of(found, lines), parents=True)
    show_prose(found.attrs["line"])
    print()
    show(differences.table_of(found, short=True))
    if len(found) > differences.SHOWN:
        say(f"{len(found) - differences.SHOWN} more rows are on the page")
    print()
    show_prose("\n".join(lines))
    say(f"page: {out}")
