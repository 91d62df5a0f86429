"""Where results go: `-o FORMAT` prints them in a format, `--out PATH` writes a file or a folder.

`-o` takes a format, as in llama-bench. Any other value of `-o` is taken as `--out`, with a line on
stderr that says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from workbench.cli.common import app, say
from workbench.common.errors import UsageError
from workbench.common.nearest import nearest
from workbench.common.output import named

if TYPE_CHECKING:
    import pandas as pd

TableFormat = Literal["md", "csv", "json"]
RowFormat = Literal["md", "csv", "json", "jsonl", "sql"]  # llama-bench's
# of a name that promises a file: .json, .mp4, .CSV; not the ends of llama-3.2, tiny.Q4
EXTENSION = re.compile(r"\.([a-z]{2,8}\d?|[A-Z]{3,8})")


def with_out(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `--out PATH` in place of `-o PATH` where PATH is no format of the
    command. Prints a line for each."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    given = [i for i in range(end) if words[i] == "-o" or words[i].startswith("-o=")]
    if not given:
        return words
    command = app.parse_commands(words)[1][-1]
    if command.default_command is None:
        return words
    by_name = {name: one for one in command.assemble_argument_collection() for name in one.names}
    if "--out" not in by_name:
        return words
    formats = [] if "-o" not in by_name else list(map(str, get_args(by_name["-o"].hint)))
    for i in reversed(given):
        joined = words[i] != "-o"
        values = [words[i].removeprefix("-o=")] if joined else words[i + 1 : i + 2]
        if not values or values[0] in formats or (not joined and values[0].startswith("-")):
            continue
        words[i : i + 2 - joined] = ["--out", values[0]]
        say(f"-o {values[0]} is taken as --out {values[0]}{_formats_in_words(values[0], formats)}")
    return words


def _formats_in_words(value: str, formats: Sequence[str]) -> str:
    if not formats:
        return ""
    meant = nearest(value, formats)
    asked = "" if meant is None else f" (did you mean -o {meant}?)"
    return f"; formats that -o prints are {', '.join(formats)}{asked}"


def check_run_name(folder: Path | None) -> None:
    """Raises UsageError for the name of a new run folder that promises a file, as `rows.json`."""
    if folder is None or folder.is_dir() or not EXTENSION.fullmatch(folder.suffix):
        return
    raise UsageError(
        f"--out {named(folder)} would be a run folder; name it without {folder.suffix} (-o prints "
        "rows to standard output)"
    )


def print_frame(frame: pd.DataFrame, output: str) -> None:
    """Prints rows as csv, or as json: a list of objects, with null for a number that is missing."""
    from workbench.benchmarks.runs.results import finite

    if output == "csv":
        print(frame.to_csv(index=False), end="")
        return
    rows: list[dict[str, Any]] = frame.astype(object).to_dict("records")
    print(json.dumps([finite(row) for row in rows], indent=1, default=_plain))


def _plain(value: Any) -> Any:
    """A NumPy scalar as a plain number."""
    return value.item()
