"""The `workbench` command. Data goes to stdout, everything else to stderr.

Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted. Every error is one line: `error: what
is wrong, where, what to do`.
"""

from __future__ import annotations

import os
import sys

from cyclopts import CycloptsError

from workbench.cli import check, generate, measure, models, profile  # noqa: F401 - their commands register
from workbench.cli.common import app, say
from workbench.cli.interrupts import heeded
from workbench.errors import WorkbenchError
from workbench.progress import shown_on


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    try:
        with heeded(), shown_on(sys.stderr):
            app(
                sys.argv[1:] if arguments is None else arguments,
                exit_on_error=False, print_error=False,
            )  # fmt: skip
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
