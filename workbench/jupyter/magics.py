"""`%%wb_profile`: what did the engines do while this cell ran, and who waited for whom?

    %%wb_profile --window 8,1 --as trace --out token.pftrace.gz
    eng.generate("Hello", max_tokens=16)

    %%wb_profile [ENGINE ...] [--window FIRST,N] [--as NAME] [--out FILE] [--collector C]

It is `wb.profile` around a cell. Without names it traces every engine, also an engine that the cell
makes, and a variant that the cell closes. A cell that fails or is interrupted keeps its trace:
IPython shows the exception, and the trace is bound, written and drawn.
"""

from __future__ import annotations

import ast
import html
import keyword
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError as OneLine  # IPython shows it without a traceback
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display
from matplotlib.figure import Figure

from workbench.common.errors import UsageError
from workbench.common.framed import Framed
from workbench.common.output import check_writable
from workbench.common.sizes import size
from workbench.engine.engine import OPENED, Engine
from workbench.report.timelines import timeline, timeline_pair
from workbench.trace import perfetto
from workbench.trace.profile import (
    COLLECTORS,
    TRACED,
    Profile,
    Timeline,
    origin,
    parse_window,
    profile,
)
from workbench.trace.spans import Span

EVENTS = "events"
MOST_DRAWN = 3  # steps of one engine: the spans of more are too narrow to read
Traced = list[tuple[Engine, Profile]]


class CellTrace(Framed):
    """The trace of a cell, of all engines together. It has the methods of a Profile, and `wb.diff`
    takes it where it is of one engine.

    engines: from the name of each engine that made a step to the numbers of its steps. The steps of
        a single engine keep their numbers. Steps of several engines are numbered in the order in
        which they began, and their spans are named after the engine.
    profiles: by the same names, the Profile of each engine alone.
    """

    def __init__(self, parts: Mapping[str, tuple[Engine, Profile]], failed: bool = False):
        """failed: the cell ended with an exception. Then the last step is drawn."""
        worked = {name: part for name, part in parts.items() if _steps(part[1].timeline.spans)}
        spans = {name: part.timeline.spans for name, (_, part) in worked.items()}
        if len(spans) > 1:
            spans = _numbered(spans)
        every = [s for own in spans.values() for s in own]
        self.timeline = Timeline(sorted(every, key=lambda s: s.end_ns))
        self.engines = {name: _steps(own) for name, own in spans.items()}
        self.profiles = {name: part for name, (_, part) in worked.items()}
        self.failed = failed
        self._labels = {name: f"{name}: {part[0].toggles}" for name, part in worked.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per span; see `trace.profile.Timeline.to_frame`."""
        return self.timeline.to_frame()

    def summary(self) -> pd.DataFrame:
        """One row per step; see `trace.profile.Timeline.summary`."""
        return self.timeline.summary()

    def kernels(self, by: str = "op", read_gbps: float | None = None) -> pd.DataFrame:
        """A row per op, node or kernel; see `analysis.kernels`. Of several engines the rows of
        each, with its name in a first column, engine."""
        return self._of_each(lambda part: part.kernels(by, read_gbps))

    def phases(self) -> pd.DataFrame:
        """The host's time in a step; see `analysis.phases`. Of several engines as `kernels`."""
        return self._of_each(lambda part: part.phases())

    def gaps(self) -> pd.DataFrame:
        """A row for each time in which no kernel ran; see `analysis.gaps`. Of several engines as
        `kernels`."""
        return self._of_each(lambda part: part.gaps())

    def critical_path(self, step: int | None = None) -> pd.DataFrame:
        """What bounds each part of a step; see `critical.critical_path`. Of one engine: where
        there are several, ask one of `profiles`."""
        return self.single("critical_path").critical_path(step)

    def single(self, what: str) -> Profile:
        """The only profile. Raises UsageError where there is none, or several. what: asks for it,
        for the error."""
        if not self.profiles:
            raise UsageError(f"{self}; let the cell make one")
        if len(self.profiles) > 1:
            raise UsageError(
                f"{what} takes one engine's trace, and this one is of {', '.join(self.profiles)}; "
                f"give one, as trace.profiles[{next(iter(self.profiles))!r}]"
            )
        return next(iter(self.profiles.values()))

    def _of_each(self, table: Callable[[Profile], pd.DataFrame]) -> pd.DataFrame:
        """A table of each engine's own trace; with a column for the engine where there are
        several. Raises UsageError where no engine made a step."""
        if not self.profiles:
            raise UsageError(f"{self}; let the cell make one")
        found = {name: table(part) for name, part in self.profiles.items()}
        if len(found) == 1:
            return next(iter(found.values()))
        for name, part in found.items():
            part.insert(0, "engine", name)
        return pd.concat(found.values(), ignore_index=True)

    def save(self, path: str | PathLike[str]) -> int:
        """Writes a trace as `Profile.save` does: for Perfetto, or Chrome's JSON."""
        about = {name: part.about for name, part in self.profiles.items()}
        return perfetto.write(self.timeline.spans, path, about | origin(self.note))

    @property
    def note(self) -> str:
        """A line for each engine: where its device spans come from, and what tracing cost."""
        return "\n".join(f"{name}: {part.note}" for name, part in self.profiles.items())

    def figures(self) -> list[Figure]:
        """A timeline of each engine's typical step, or of its last step where the cell failed; of
        all steps where there are few. Two engines are drawn as a pair, on one time axis."""
        frame = self.to_frame()
        drawn = {name: self._drawn(frame, steps) for name, steps in self.engines.items()}
        if len(drawn) == 2:
            before, after = (frame[frame["step"] == steps[-1]] for steps in drawn.values())
            return [timeline_pair(before, after, list(self._labels.values()))]
        return [
            timeline(frame, steps, title=f"{self._labels[name]}; {_of(steps, self.engines[name])}")
            for name, steps in drawn.items()
        ]

    def _drawn(self, frame: pd.DataFrame, steps: list[int]) -> list[int]:
        """Which steps of an engine are drawn. For a pair only the last of them is."""
        if len(steps) <= MOST_DRAWN and len(self.engines) == 1:
            return steps
        if self.failed:
            return steps[-1:]
        own = frame[(frame["category"] == "step") & frame["step"].isin(steps)]
        times = own.set_index("step")["dur_us"]
        return [int((times - times.median()).abs().idxmin())]

    def __str__(self) -> str:
        if not self.engines:
            return "no engine that was traced made a step in this cell, or in the window"
        steps = ", ".join(
            f"{len(numbers)} step{'s' * (len(numbers) > 1)} of {name}"
            for name, numbers in self.engines.items()
        )
        return f"{'the cell failed after ' * self.failed}{steps} ({TRACED})"

    def _repr_html_(self) -> str:
        lines = [str(self), *self.note.splitlines()]
        said = "<br>".join(html.escape(line) for line in lines)
        return f"{self.timeline._repr_html_()}<p>{said}</p>"


@magics_class
class WorkbenchMagics(Magics):
    """What `%load_ext workbench` adds."""

    @magic_arguments()
    @argument("engines", nargs="*", metavar="ENGINE", help="names; by default every engine")
    @argument("--window", "-w", metavar="FIRST,N", help="keep N steps of each engine, from FIRST")
    @argument("--as", "-a", dest="name", metavar="NAME", help="bind the trace to this name")
    @argument(
        "--out",
        "-o",
        metavar="FILE",
        help="write a trace: t.pftrace.gz, or t.json for Chrome",
    )
    @argument("--collector", "-c", choices=COLLECTORS, help="of device spans; see wb.profile")
    @cell_magic
    def wb_profile(self, line: str, cell: str) -> None:
        """Trace what engines do in this cell, and draw it."""
        args = parse_argstring(self.wb_profile, line)
        name, window, out = _name(args.name), _window(args.window), _out(args.out)
        engines = [self._engine(n) for n in args.engines] if args.engines else [*OPENED]
        # CUPTI sees all that a process does: what several engines do it cannot tell apart
        collector = args.collector or ("auto" if len(engines) == 1 else EVENTS)
        shell, found = self._shell, list[tuple[Engine, Profile]]()
        nodes, source = _parsed(shell, cell)
        # IPython looks for the last semicolon in the magic's line, and would show the value
        silent = DisplayHook.semicolon_at_end_of_expression(cell)
        shown = "none" if silent else shell.ast_node_interactivity
        with _tracing(found, engines, window, collector, also_new=not args.engines):
            failed = not _run(shell, nodes, source, shown)
        try:
            self._keep(found, name, out, failed)
        except OneLine as problem:
            if not failed:
                raise
            print(problem, file=sys.stderr)  # of the two the cell's failure is the cell's end

    def _engine(self, name: str) -> Engine:
        names = self._shell.user_ns
        found = names.get(name)
        if not isinstance(found, Engine) or found not in OPENED:
            wrong = "is closed" if isinstance(found, Engine) else "is no engine"
            raise OneLine(f"{name} {wrong}; there {_are(_open_in(names))}")
        return found

    @property
    def _shell(self) -> InteractiveShell:
        assert self.shell is not None, "magics are registered with a shell"
        return self.shell

    def _keep(
        self, found: Traced, name: str | None, out: Path | None, failed: bool = False
    ) -> None:
        """Binds, writes and shows the trace. It is bound first, so that it is kept where writing
        fails. Raises OneLine where it cannot be written."""
        trace = CellTrace(_by_name(found, self._shell.user_ns), failed)
        if name is not None:
            self._shell.user_ns[name] = trace
        problem, written = "", ""
        if out is not None:
            try:
                written = f"; wrote {out} ({size(trace.save(out))})"
            except UsageError as error:
                problem = f"--out {error}"
        for figure in trace.figures():
            display(figure)
        print(f"{trace}{written}", trace.note, sep="\n" if trace.note else "")
        if problem:
            raise OneLine(problem)


# the line ----------------------------------------------------------------------------------------


def _name(text: str | None) -> str | None:
    if text is not None and (not text.isidentifier() or keyword.iskeyword(text)):
        raise OneLine(f"--as {text!r} cannot be bound: it is no name; write it as --as trace")
    return text


def _window(text: str | None) -> tuple[int, int] | None:
    try:
        return parse_window(text)
    except UsageError as error:
        raise OneLine(str(error)) from None


def _out(text: str | None) -> Path | None:
    """The path of --out. Refused before the cell runs where it cannot be written."""
    if text is None:
        return None
    path = Path(text.strip("\"'")).expanduser()
    try:
        check_writable(path)
    except UsageError as error:
        raise OneLine(f"--out {error}") from None
    return path


def _open_in(namespace: Mapping[str, Any]) -> list[str]:
    """The names of open engines; IPython's own names (`_`, `_3`) are left out."""
    names = (name for name in namespace if not name.startswith("_"))
    return [n for n in names if isinstance(namespace[n], Engine) and namespace[n] in OPENED]


def _are(engines: list[str]) -> str:
    match engines:
        case []:
            return "are none here yet: load one with workbench.Engine.load(...)"
        case [one]:
            return f"is {one}"
    return f"are {', '.join(engines)}"


# the engines -------------------------------------------------------------------------------------


@contextmanager
def _tracing(
    found: Traced,
    engines: list[Engine],
    window: tuple[int, int] | None,
    collector: str,
    also_new: bool,
) -> Iterator[None]:
    """Traces `engines` in the body, and adds the trace of each to `found`. also_new: also engines
    that are made in the body, with device spans from events."""
    with ExitStack() as stack:

        def trace(engine: Engine, collector: str = EVENTS) -> None:
            traced = profile(engine, window, collector=collector)
            found.append((engine, stack.enter_context(traced)))

        for engine in engines:
            trace(engine, collector)
        if also_new:
            stack.enter_context(OPENED.told(trace))
        yield


def _by_name(found: Traced, namespace: Mapping[str, Any]) -> dict[str, tuple[Engine, Profile]]:
    """The traced engines by their names in the notebook; those without one are counted."""
    names = [name for name in namespace if not name.startswith("_")]
    named = {id(namespace[name]): name for name in reversed(names)}  # the first of several counts
    return {
        named.get(id(engine), f"engine {i}"): (engine, part)
        for i, (engine, part) in enumerate(found, 1)
    }


def _steps(spans: list[Span]) -> list[int]:
    return sorted({s.args["step"] for s in spans if s.category == "step"})


def _numbered(spans: Mapping[str, list[Span]]) -> dict[str, list[Span]]:
    """The spans of several engines, with steps numbered across all of them."""
    begun = sorted(
        (s.start_ns, name, s.args["step"])
        for name, own in spans.items() for s in own if s.category == "step"
    )  # fmt: skip
    numbers = {(name, step): number for number, (_, name, step) in enumerate(begun)}

    def renumbered(name: str, span: Span) -> Span:
        args = dict(span.args)
        number = numbers.get((name, args.pop("step", None)))
        if number is not None:
            args["step"] = number
        if args.get("event") is not None:  # engines call theirs the same
            args["event"] = f"{name}: {args['event']}"
        if span.category != "step":
            return span._replace(args=args)
        return span._replace(name=f"{name}: step {number}", args=args)

    return {name: [renumbered(name, s) for s in own] for name, own in spans.items()}


def _of(drawn: list[int], steps: list[int]) -> str:
    """Which steps a picture shows, of how many."""
    if len(drawn) == len(steps) > 1:
        return f"all {len(steps)} steps"
    return f"step {drawn[0]}" + (f", one of {len(steps)}" if len(steps) > 1 else "")


# the cell ----------------------------------------------------------------------------------------


def _parsed(shell: InteractiveShell, cell: str) -> tuple[list[ast.stmt], str]:
    """The cell as IPython reads it, its magics translated; and what tracebacks call it. Raises
    SyntaxError."""
    source = shell.transform_cell(cell)
    # the number of the cell that is running; the shell's own count may be at the next already
    running = getattr(shell.displayhook.exec_result, "execution_count", None)
    name = shell.compile.cache(source, running or shell.execution_count, raw_code=cell)
    return shell.transform_ast(shell.compile.ast_parse(source, filename=name)).body, name


def _run(shell: InteractiveShell, nodes: list[ast.stmt], name: str, shown: str) -> bool:
    """Runs the nodes of `_parsed` as IPython runs any cell. Returns whether that succeeded.

    shown: which values are shown, as in `ast_node_interactivity`.

    IPython shows a failure as the failure of the cell with the magic. Without such a cell the
    failure is raised. Raises SyntaxError for a cell that awaits something.
    """
    whole = shell.displayhook.exec_result
    result = ExecutionResult(None) if whole is None else whole
    awaits, shell.autoawait = shell.autoawait, False  # there is a loop already, and it is busy
    try:
        with suppress(StopIteration):  # nothing is awaited, so the first step is the whole run
            shell.run_ast_nodes(nodes, name, shown, shell.compile, result).send(None)
    finally:
        shell.autoawait = awaits
    if whole is None:
        result.raise_error()
    return result.success


def load(shell: InteractiveShell) -> None:
    """Adds the magics to an IPython shell: what `%load_ext workbench` calls."""
    shell.register_magics(WorkbenchMagics)


def unload(shell: InteractiveShell) -> None:
    """Removes the magics: what `%unload_ext workbench` calls."""
    shell.magics_manager.magics["cell"].pop("wb_profile", None)
