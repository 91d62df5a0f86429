"""What takes the package to see: `python -P inventory_probe.py CHECKOUT` prints it as JSON.

Runs in a process whose package is the checkout's; see `inventory.py` for what is listed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import workbench
from workbench.cli import main
from workbench.cli.common import app
from workbench.config import Toggles
from workbench.config.presets import best_sets, fixed_presets
from workbench.model.synth.models import write_tiny

SMALL = ["--device", "embedded", "--n-ctx", "64", "--n-ubatch", "8", "--threads", "1"]
# a name, and a command that prints JSON or writes a run folder; {} is the model, OUT the folder
RUNS: dict[str, list[str]] = {
    "model inspect": ["model", "inspect", "{}", "--json"],
    "toggles": ["toggles", "--json"],
    "program": ["program", "-m", "{}", "--json", *SMALL],
    "check": ["check", "-m", "{}", "--json", "--n-tokens", "9", "--n-decoded", "1", *SMALL],
    "bench json": ["bench", "-m", "{}", "-p", "8", "-n", "2", "-r", "2", "-o", "json", *SMALL],
    "bench": ["bench", "-m", "{}", "-p", "8", "-n", "2", "-r", "2", "--out", "OUT", *SMALL],
    "ab": ["ab", "-m", "{}", "--toggle", "sync=per_copy,packed", "--test", "tg2",
           "--rounds", "5", "--out", "OUT", *SMALL],
    "perplexity": ["perplexity", "-m", "{}", "--tokens-from", "sample:40", "--against",
                   "activations=float", "--out", "OUT", *SMALL],
}  # fmt: skip
PROTOCOL = ("__init__", "__enter__", "__exit__", "__call__", "_repr_html_")


def names() -> Iterator[str]:
    """`ab`, `ab(rounds)`, `Engine.step`, `Engine.step(outputs)`."""
    for name in dir(workbench):
        if name.startswith("_") or name not in (*workbench.__all__, "lab"):
            continue
        yield name
        value = getattr(workbench, name)
        if inspect.isclass(value):
            for member in dir(value):
                if member.startswith("_") and member not in PROTOCOL:
                    continue
                yield f"{name}.{member}"
                yield from parameters(f"{name}.{member}", inspect.getattr_static(value, member))
        else:
            yield from parameters(name, value)
    lab = workbench.jupyter
    for name in getattr(lab, "__all__", [n for n in dir(lab) if not n.startswith("_")]):
        yield f"lab.{name}"


def parameters(name: str, value: Any) -> Iterator[str]:
    function = getattr(value, "__func__", value)
    if not callable(function):
        return
    with contextlib.suppress(TypeError, ValueError):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in ("self", "cls"):
                yield f"{name}({parameter.name})"


def commands(command: Any = app, path: str = "") -> Iterator[str]:
    """`bench`, `bench --n-gen`: every command with every flag and alias."""
    for name in command:
        if name.startswith("-"):
            yield f"{path} {name}".strip()
            continue
        own = f"{path} {name}".strip()
        yield own
        if command[name].default_command:
            for argument in command[name].assemble_argument_collection():
                yield from (f"{own} {flag}" for flag in argument.names if flag != "*")
        yield from commands(command[name], own)


def toggles() -> Iterator[str]:
    for name in Toggles.names():
        for value in Toggles.values(name):
            yield f"{name}={value} ({Toggles.answer_class(name)})"
    for name, values in fixed_presets().items():
        yield f"preset {name}: {json.dumps(values, sort_keys=True)}"
    for kind, wanted, best in best_sets():
        assigned = json.dumps(best.values, sort_keys=True)
        yield f"preset best for {wanted} on {kind}: {assigned}"


def keys(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}"
            yield from keys(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, f"{path}[]")


def json_keys(folder: Path) -> Iterator[str]:
    """`bench run.json: .commit.hash`: the keys of what commands print and write."""
    model = write_tiny(folder, "tiny-llama", "Q8_0")
    for name, command in RUNS.items():
        out = folder / name.replace(" ", "-")
        filled = [str(model) if a == "{}" else str(out) if a == "OUT" else a for a in command]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            main(filled)
        if "OUT" in command:
            for path in sorted(out.rglob("run.json")):
                yield from keys(json.loads(path.read_text()), f"{name} run.json: ")
        else:
            yield from keys(json.loads(printed.getvalue()), f"{name}: ")


def probe(checkout: Path) -> dict[str, list[str]]:
    if Path(workbench.__file__).resolve().parents[1] != checkout:
        sys.exit(f"the package of {checkout} is wanted, and {workbench.__file__} was imported")
    return {
        "toggles": sorted(set(toggles())),
        "commands": sorted(set(commands())),
        "names": sorted(set(names())),
        "json": sorted(set(json_keys(Path.cwd()))),
    }


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]).resolve())))
