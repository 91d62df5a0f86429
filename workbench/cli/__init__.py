"""The `workbench` command. Data goes to stdout, everything else to stderr.

Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted. Every error is one line: `error: what
is wrong, where, what to do`.
"""

from __future__ import annotations

import inspect
import os
import sys

from cyclopts import CycloptsError

from workbench.cli import check, generate, measure, models  # noqa: F401 - their commands register
from workbench.cli.common import app, say
from workbench.cli.interrupts import heeded
from workbench.config import FAMILIES, Toggles
from workbench.errors import UsageError, WorkbenchError

SHORT = {"-ngl": "--n-gpu-layers", "-ot": "--override-tensor"}  # as llama.cpp has them


def long_names(arguments: list[str]) -> list[str]:
    """Flags of llama.cpp with one dash and several letters, which are no clusters of short ones."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    out = []
    for argument in arguments[:end]:
        flag, equals, value = argument.partition("=")
        out.append(SHORT.get(flag, flag) + equals + value)
    return out + arguments[end:]


def spell_out(arguments: list[str]) -> list[str]:
    """`--fuse on` (or `--fuse=on`) written out as one flag for each toggle of the family that is
    not given itself, in any order; unchanged where the command takes no toggles.

    Raises UsageError for a family given twice, with no value, or with one it does not have.
    """
    if not _takes_toggles(arguments):
        return arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = {a.partition("=")[0].replace("_", "-") for a in arguments[:end]}
    out: list[str] = []
    seen: set[str] = set()
    left = iter(arguments[:end])
    for argument in left:
        flag, equals, value = argument.partition("=")
        family = flag.removeprefix("--")
        if family == flag or family not in FAMILIES:
            out.append(argument)
            continue
        value, known = value if equals else next(left, ""), Toggles.values(family)
        if value not in known:
            raise UsageError(f"{flag} {value!r} does not exist; choose one of {', '.join(known)}")
        if family in seen:
            raise UsageError(f"{flag} is given twice; give it once")
        seen.add(family)
        members = [f"--{member.replace('_', '-')}" for member in Toggles.members(family)]
        out += [word for m in members if m not in given for word in (m, value)]
    return out + arguments[end:]


def _takes_toggles(arguments: list[str]) -> bool:
    """Whether the command that `arguments` name has the flags of toggles."""
    command = app.parse_commands(arguments)[1][-1].default_command
    return command is not None and "toggles" in inspect.signature(command).parameters


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    try:
        arguments = spell_out(long_names(sys.argv[1:] if arguments is None else arguments))
        with heeded():
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
