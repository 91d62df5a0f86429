"""What was changed on purpose after the old commit, asked of one checkout: `python -P changed.py
TREE FOLDER OUT`.

None of it is in the cases, whose toggles and settings are written out and whose files are whole.
FOLDER has the files that `files.py` made. OUT is a JSON object: a sentence for each question, and
the SHA-256 of the logits of five tokens, or the first line of the refusal.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workbench
from workbench import Engine, Toggles

OFF: dict[str, Any] = {"device": "host", "n_ctx": 64, "n_ubatch": 8, "threads": 1}


def logits(path: Path, **asked: Any) -> str:
    with Engine.load(path, toggles=Toggles(), **OFF | asked) as engine:
        rows = engine.prefill([1, 2, 3, 4, 5], "all")
    return f"logits {hashlib.sha256(rows.tobytes()).hexdigest()[:12]}"


def toggles_of(path: Path) -> str:
    with Engine.load(path, **OFF) as engine:
        default, found = Toggles().to_dict(), engine.toggles.to_dict()
    on = [f"{name}={value}" for name, value in found.items() if value != default[name]]
    return ", ".join(on) or "everything off"


def generated(path: Path) -> str:
    with Engine.load(path, toggles=Toggles(), **OFF) as engine:
        return f"{len(engine.generate(tokens=[1, 2, 3], max_tokens=4).tokens)} tokens"


def context_of(path: Path) -> str:
    with Engine.load(path, toggles=Toggles(), **OFF | {"n_ctx": 0}) as engine:
        return f"a context of {engine.config.n_ctx}"


# a question, and what asks it; the file is one of `files.py`
QUESTIONS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "toggles of an engine that is loaded without any": ("whole", toggles_of),
    "more layers for the device than the model has": (
        "whole", lambda path: logits(path, device="embedded", n_gpu_layers=99)),
    "a context of 0 cells": ("whole", context_of),
    "weights of a type without kernels (Q4_1)": ("q4_1", logits),
    "a tensor that the architecture does not use": ("unused", logits),
    "a factor of RoPE scaling without its type": ("scaled", logits),
    "generating with weights that are not finite": ("damaged", generated),
}  # fmt: skip


def main(tree: str, folder: str, out: str) -> None:
    if Path(workbench.__file__).resolve().parents[1] != Path(tree).resolve():
        sys.exit(f"the package of {tree} is wanted, and {workbench.__file__} was imported")
    found = {}
    for question, (name, ask) in QUESTIONS.items():
        try:
            found[question] = ask(Path(folder) / f"{name}.gguf")
        except Exception as error:
            words = " ".join(str(error).replace(f"{folder}/", "").split())
            found[question] = f"{type(error).__name__}: {words}"
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
