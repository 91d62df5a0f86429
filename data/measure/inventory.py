"""What a checkout has, and what another one has of it: kept, moved, renamed, dropped, new.

    python -m data.measure.inventory take [CHECKOUT] --out FILE
    python -m data.measure.inventory compare BEFORE AFTER [--all]

Listed are:

    tests       functions and methods, as pytest collects them, of every mark: file::Class::name
    cases       the tests with their parameters: file::Class::name[parameters]
    toggles     name=value, with whether the answer is exact or may round; presets with their values
    commands    the command line: `bench`, and `bench --n-gen` for each flag and alias
    names       what `workbench` exports, the public members of those classes, and their parameters
    json        keys of run.json and of what commands print as JSON, from runs of a tiny model
    errors      the texts of errors that are raised, with {} for what is filled in
    docstrings  modules, classes and functions that have one, and a hash of what it says

Errors and docstrings are taken from the package, data/measure, notebooks and tests: what leaves
the package for one of these has moved. A docstring has moved where a definition of the same name,
or one that says the same, is elsewhere.

What `renamed.json` lists is renamed: for each kind, patterns of old names, what they are now, and
why. A test of the same name in one other file has moved; so has a case. `compare` exits with 1
where something is dropped.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RENAMED = Path(__file__).with_name("renamed.json")
# needs the package: run with the checkout's own
PROBE = Path(__file__).with_name("inventory_probe.py")
# whose errors and docstrings are listed
FOLDERS = ("workbench", "data/measure", "notebooks", "tests")
# dropped there is an error; of the others it is a line to read
BINDING = ("tests", "toggles", "commands", "names", "json")


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout)}


def cases_of(checkout: Path) -> list[str]:
    """Every test as pytest collects it, with its parameters. Raises SystemExit where it fails."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
               "-o", "addopts=--strict-markers"]  # fmt: skip
    done = subprocess.run(
        command, cwd=checkout, env=environment(checkout), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"pytest could not collect the tests of {checkout}:\n{done.stdout[-2000:]}"
        )
    return [line for line in done.stdout.splitlines() if "::" in line]


def probed(checkout: Path) -> dict[str, list[str]]:
    """What takes the package of the checkout to see."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", str(PROBE.resolve()), str(checkout.resolve())]
        done = subprocess.run(
            command, cwd=folder, env=environment(checkout.resolve()), capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(f"the package of {checkout} could not be asked:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


# the sources -------------------------------------------------------------------------------------


def template(node: ast.expr) -> str:
    """The text of a string expression, {} for what is filled in; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return ""


def errors_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = node.exc.func
            name = called.id if isinstance(called, ast.Name) else "?"
            text = " ".join(filter(None, map(template, node.exc.args)))
            yield f"{name}: {text}"


def docstrings_of(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """`file:Class.name` and a hash of what is said there; empty where there is no docstring."""

    def said(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        words = " ".join((ast.get_docstring(node) or "").split())
        return hashlib.sha256(words.encode()).hexdigest()[:12] if words else ""

    def inside(body: Iterable[ast.stmt], path: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path}.{node.name}".strip(".")
                yield f"{module}:{name}", said(node)
                yield from inside(node.body, name)

    yield f"{module}:", said(tree)
    yield from inside(tree.body, "")


def of_sources(checkout: Path) -> dict[str, Any]:
    errors: set[str] = set()
    docstrings: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((checkout / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            errors.update(errors_of(tree))
            docstrings |= docstrings_of(tree, path.relative_to(checkout).as_posix())
    return {"errors": sorted(errors), "docstrings": docstrings}


def take(checkout: Path) -> dict[str, Any]:
    cases = cases_of(checkout)
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    package = [*(checkout / "workbench").rglob("*.py")]
    return {
        "commit": commit or "unknown",
        "lines": sum(len(path.read_text().splitlines()) for path in package),
        "tests": sorted({case.partition("[")[0] for case in cases}),
        "cases": sorted(cases),
        **probed(checkout),
        **of_sources(checkout),
    }


# comparing ---------------------------------------------------------------------------------------


class Change(NamedTuple):
    kept: list[str]
    moved: list[tuple[str, str, str]]  # old, new, why
    dropped: list[str]
    new: list[str]


def tail(name: str) -> str:
    """A name without its file: what stays the same where it moves."""
    return name.partition("::")[2] or name.partition(":")[2] or name


def renamed(name: str, rules: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """What rules make of a name, one at a time and all together, and why. Rules hold together where
    a file was renamed and a test in it, too."""
    whole, reasons = name, list[str]()
    for rule in rules:
        own = re.sub(rule["old"], rule["new"], name)
        if own != name:
            yield own, rule["why"]
        further = re.sub(rule["old"], rule["new"], whole)
        if further != whole:
            whole = further
            reasons.append(rule["why"])
    if len(reasons) > 1:
        yield whole, "; ".join(reasons)


def change(
    before: Iterable[str], after: Iterable[str], rules: Iterable[Mapping[str, str]] = ()
) -> Change:
    old, new = set(before), set(after)
    free = defaultdict(list)  # by what stays: names that only the new one has
    for name in sorted(new - old):
        free[tail(name)].append(name)
    moved, dropped = [], []
    gone = Counter(tail(name) for name in old - new)
    listed = list(rules)
    for name in sorted(old - new):
        found = next(((n, why) for n, why in renamed(name, listed) if n in new), None)
        if found:
            moved.append((name, *found))
        elif len(free[tail(name)]) >= gone[tail(name)] and tail(name) != "":
            moved.append((name, free[tail(name)].pop(0), "the same name in another file"))
            gone[tail(name)] -= 1
        else:
            dropped.append(name)
    taken = {n for _, n, _ in moved}
    return Change(sorted(old & new), moved, dropped, sorted(new - old - taken))


def docstring_change(
    before: Mapping[str, str], after: Mapping[str, str], rules: Iterable[Mapping[str, str]] = ()
) -> Change:
    """What became of each docstring; of one whose definition stays, `dropped` says so."""
    said = {name: text for name, text in after.items() if text}
    found = change((name for name, text in before.items() if text), said, rules)
    by_text = defaultdict(list)
    for name, text in said.items():
        by_text[text].append(name)
    moved, dropped = list(found.moved), list[str]()
    for name in found.dropped:
        same = by_text[before[name]]
        if same:
            moved.append((name, same[0], "the same words elsewhere"))
        else:
            bare = name in after or any(tail(n) == tail(name) != "" for n in after)
            dropped.append(f"{name} ({'the definition stays' if bare else 'with its definition'})")
    return Change(found.kept, moved, dropped, found.new)


def shown(kind: str, found: Change, everything: bool, tell: Callable[[str], None]) -> None:
    tell(f"{kind}: {len(found.kept)} kept, {len(found.moved)} moved or renamed, "
         f"{len(found.dropped)} dropped, {len(found.new)} new")  # fmt: skip
    for old, new, why in found.moved if everything else []:
        tell(f"  moved    {old} -> {new} ({why})")
    for name in found.dropped:
        tell(f"  dropped  {name}")
    for name in found.new if everything else []:
        tell(f"  new      {name}")


def compare(before: Mapping[str, Any], after: Mapping[str, Any], everything: bool) -> int:
    """Prints what became of each kind; 1 where something of BINDING is dropped."""
    rules = json.loads(RENAMED.read_text())
    grown = after["lines"] - before["lines"]
    print(f"{before['commit'][:8]} -> {after['commit'][:8]}; lines of workbench/: "
          f"{before['lines']} -> {after['lines']} ({grown:+d})")  # fmt: skip
    lost = 0
    for kind in (k for k, v in before.items() if isinstance(v, list)):
        own = rules.get("tests" if kind == "cases" else kind, [])
        found = change(before[kind], after[kind], own)
        shown(kind, found, everything, print)
        lost += len(found.dropped) if kind in BINDING else 0
    found = docstring_change(before["docstrings"], after["docstrings"], rules["docstrings"])
    shown("docstrings", found, everything, print)
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.measure.inventory",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("take")
    one.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.add_argument("--all", action="store_true", help="also what moved, and what is new")
    args = parser.parse_args()
    if args.command == "compare":
        before, after = (json.loads(path.read_text()) for path in (args.before, args.after))
        return compare(before, after, args.all)
    found = take(args.checkout.resolve())
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print({k: len(v) if isinstance(v, list | dict) else v for k, v in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
