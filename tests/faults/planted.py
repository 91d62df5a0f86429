"""Faults that somebody could make, as data: what each means, and the change that makes it.

A room of the package has a file in `rooms/`, a list of tables:

    [[fault]]
    name = "reuse-keeps-a-refusing-program"
    means = "A kept program whose inputs refuse the step is used all the same."
    at = "workbench/engine/programs.py::KeepByShape.get"
    old = "if kept is None or kept.refusing:"
    new = "if kept is None:"

`old` is text of the function, class or module (`file.py` alone) at `at`, and is there exactly once.
Where code moves, a fault is anchored again: its `at`, `old` and `new` change, its name and what it
means do not. `tests`, where it is given, are paths of tests to run first. They see the fault, and
coverage does not show that they touch the function (a kernel that was compiled before, say), or so
many tests touch it that a minute is over before.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = Path(__file__).with_name("rooms")


class FaultError(Exception):
    """A fault that cannot be planted: which one, and why."""


class Fault(NamedTuple):
    """A change to one place. path: from the root of the checkout. function: its qualified name, ""
    for the module. tests: paths to run first."""

    name: str
    means: str
    path: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    def planted(self, source: str) -> str:
        """The module's source with the fault. Raises FaultError where `old` is not there once."""
        begin, end = span(source, self.function, self.name)
        lines = source.splitlines(keepends=True)
        before, inside, after = (
            "".join(part) for part in (lines[: begin - 1], lines[begin - 1 : end], lines[end:])
        )
        n = inside.count(self.old)
        if n != 1:
            raise FaultError(
                f"{self.name}: {self.path}::{self.function} has {n} times {self.old!r}; "
                "anchor the fault again"
            )
        changed = before + inside.replace(self.old, self.new) + after
        try:
            tree = ast.parse(changed)
        except SyntaxError as error:
            raise FaultError(f"{self.name}: with it, {self.path} is no Python: {error}") from None
        if ast.dump(tree) == dumped(source):
            raise FaultError(f"{self.name}: it changes nothing but text")
        return changed


@cache
def dumped(source: str) -> str:
    """What a module says, without its layout. Many faults are of one module, so it is kept."""
    return ast.dump(ast.parse(source))


@cache
def functions(source: str) -> dict[str, tuple[int, int, int]]:
    """Of each function and class of a module, by qualified name: its first line, decorators
    included; the first line of its body; its last line."""
    found: dict[str, tuple[int, int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                assert child.end_lineno is not None
                name = prefix + child.name
                found[name] = first, child.body[0].lineno, child.end_lineno
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def span(source: str, function: str, name: str) -> tuple[int, int]:
    """First and last line of a function. Raises FaultError where it is gone."""
    if not function:
        return 1, len(source.splitlines())
    known = functions(source)
    if function not in known:
        raise FaultError(f"{name}: {function} is not in its file; anchor the fault again")
    first, _, last = known[function]
    return first, last


def every(only: Sequence[str] = ()) -> Iterator[Fault]:
    """The faults of all rooms, or those of `only`: a room, or a room and how a name begins,
    `engine/reuse-`. Raises FaultError for a name that is there twice."""
    seen: set[str] = set()
    for path in sorted(ROOMS.glob("*.toml")):
        if only and not any(one.partition("/")[0] == path.stem for one in only):
            continue
        for row in tomllib.loads(path.read_text())["fault"]:
            at, _, function = row["at"].partition("::")
            name = row["name"]
            if name in seen:
                raise FaultError(f"{name}: is there twice; a name is one fault's")
            seen.add(name)
            if not only or f"{path.stem}/{name}".startswith(tuple(only)):
                tests = tuple(row.get("tests", ()))
                yield Fault(name, row["means"], at, function, row["old"], row["new"], tests)


def problems(only: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """A line for each fault that cannot be planted."""
    found = []
    for fault in every(only):
        try:
            fault.planted((root / fault.path).read_text())
        except OSError as error:
            found.append(f"{fault.name}: {error}; anchor the fault again")
        except FaultError as error:
            found.append(str(error))
    return found
