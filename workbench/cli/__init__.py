"""The `workbench` command. Data goes to stdout, everything else to stderr.

Exit status: 0 done, 1 error, 2 wrong usage, 3 slower than `compare --fail-below` allows, 130
interrupted, 143 terminated, 129 the terminal closed. Every error is one line: `error: what is
wrong, where, what to do`. A standard output that is full or closed is such an error, with status 2.
Where the reader of a pipe has seen enough (`| head -1`), the command ends without a message, with
status 141, as a program that SIGPIPE ended.
"""

import sys

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    try:  # the modules of all commands take a good part of a second
        from workbench.cli.entry import run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    run(sys.argv[1:] if arguments is None else arguments)
