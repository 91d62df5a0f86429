"""All commands, and how one of them is run: its exit status, and its error in one line."""

import sys
from pathlib import Path

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from workbench.cli import (  # noqa: F401 - commands
    advise,
    check,
    compare,
    doctor,
    generate,
    measure,
    models,
    notebooks,
    profile,
    runs,
    serve,
    serve_bench,
    streams,
    sweep,
    toggles,
)  # fmt: skip
from workbench.cli.common import app, say
from workbench.cli.flags import GIVE_MODEL, two_words
from workbench.cli.interrupts import Stop, heeded
from workbench.cli.outputs import with_out
from workbench.cli.screen import asked
from workbench.common.errors import WorkbenchError
from workbench.common.extras import refusal_of
from workbench.common.output import NO_ROOM, refusal
from workbench.common.progress import shown_on


def run(arguments: list[str]) -> None:
    """Runs a command. Exits unless its status is 0."""
    status, message = _end_of(arguments)
    try:
        streams.hand_over()
    except streams.Lost as lost:
        if not message:
            status, message = lost.end
    if message:
        fail(message, status)
    if status:
        sys.exit(status)


def _end_of(arguments: list[str]) -> tuple[int, str]:
    """Runs a command. Returns its exit status, and the error to print, if there is one."""
    stop = Stop()
    try:
        streams.prepare()
        with heeded(stop), shown_on(sys.stderr):
            words, app.help_formatter = asked(arguments)
            app(with_out(words), exit_on_error=False, print_error=False)
    except WorkbenchError as error:
        return error.exit_status, str(error)
    except MissingArgumentError as error:
        return 2, f"{error} {_given_right(error)}".rstrip()
    except UnusedCliTokensError as error:
        return 2, _meant(arguments, error.unused_tokens or []) or str(error)
    except CycloptsError as error:
        cause = error.__cause__
        return 2, str(cause if isinstance(cause, WorkbenchError) else error)
    except ModuleNotFoundError as error:
        if not (refused_for := refusal_of(error)):
            raise
        return 1, refused_for
    except KeyboardInterrupt as interrupt:
        return stop.status, stop.words(interrupt)
    except SystemExit as error:
        return int(error.code or 0), ""
    except streams.Lost as lost:
        return lost.end
    except BrokenPipeError as error:  # of an output that is a descriptor of this process
        return streams.Lost(error.errno, "").end
    except OSError as error:  # of a file that a library writes, as numba its cache
        if error.errno not in NO_ROOM:
            raise
        refused = refusal(Path(str(error.filename or "a file")), error)
        return refused.exit_status, str(refused)
    return 0, ""


def _given_right(error: MissingArgumentError) -> str:
    """How to write the argument that is missing; empty where the error says all."""
    named = () if error.argument is None else error.argument.names
    if "--model" in named:
        return GIVE_MODEL
    if "--parameter" in named and error.tokens_so_far:
        return f"Give {two_words(error.tokens_so_far[-1])}"
    unused = error.unused_tokens or []
    if len(unused) == 1 and not unused[0].startswith("-"):
        return f"Write {named[0]} {unused[0]}"
    return ""


# the flags of `sweep` for a file that was given without one
FLAGS_OF_FILES = {".toml": "--matrix", ".gguf": "--model"}


def _meant(arguments: list[str], unused: list[str]) -> str:
    """What to write in place of a file that no parameter took; empty where that is unknown."""
    flag = FLAGS_OF_FILES.get(Path(unused[0]).suffix) if unused else None
    if flag is None or arguments[:1] != ["sweep"]:
        return ""
    return f"sweep takes {unused[0]} by its flag; write {flag} {unused[0]}"


def fail(message: str, status: int) -> None:
    say("error: " + " ".join(message.split()))
    sys.exit(status)
