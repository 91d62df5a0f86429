"""Replays cases with the package of one checkout: `python -P replay.py TREE CASES MODELS OUT
[DEVICE]`.

Imports nothing but the package and NumPy, and of the package only what both commits have:
`Engine.load`, `variant`, `step`, `prefill`, `reset`, `close`, `Toggles` and `Engine.model.n_vocab`.
CASES is a JSON list of cases as `cases.unpacked` gives them; OUT has a line of JSON for each:

    {"case": "cpu 3", "arrays": [["3fa4...", rows, values, finite], ...]}     or
    {"case": "cpu 3", "refused": ["DeviceError", "..."]}

With `failed` beside them the arrays are those before a call that raised.

A hash is the SHA-256 of the bytes of what a call returned, float32. Token ids are drawn from a seed
that is the number of the sequence in its case. DEVICE replaces the device of every case.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import workbench
from workbench import Engine, Toggles

SEED = 20261121


def arrays(engine: Any, sequences: list[Any]) -> Iterator[np.ndarray]:
    """What each call of each sequence returns, on an empty cache each time."""
    for number, sequence in enumerate(sequences):
        engine.reset()
        rng = np.random.default_rng([SEED, number])
        for what, tokens, outputs, times in sequence:
            for _ in range(times):
                ids = rng.integers(0, engine.model.n_vocab, tokens).tolist()
                yield (engine.prefill if what == "prefill" else engine.step)(ids, outputs)


def summary(array: np.ndarray) -> list[Any]:
    assert array.dtype == np.float32
    data = np.ascontiguousarray(array)
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    return [digest, len(array), array.size, bool(np.isfinite(array).all())]


def said(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


class Group:
    """The cases of one model and one configuration: one engine's weights serve them all."""

    def __init__(self, path: Path, fields: dict[str, Any]):
        self.path, self.fields = path, fields
        self.base: Any = None

    def engine(self, toggles: Any) -> Any:
        if self.base is None:
            self.base = Engine.load(self.path, toggles=toggles, **self.fields)
        return self.base.variant(toggles)

    def close(self) -> None:
        if self.base is not None:
            self.base.close()


def replay(case: dict[str, Any], group: Group) -> dict[str, Any]:
    try:
        engine = group.engine(Toggles(**case["toggles"]))
    except Exception as error:
        return {"case": case["case"], "refused": said(error)}
    found: list[list[Any]] = []
    with engine:
        try:
            found.extend(summary(array) for array in arrays(engine, case["sequences"]))
        except Exception as error:
            return {"case": case["case"], "arrays": found, "failed": said(error)}
    return {"case": case["case"], "arrays": found}


def main(tree: str, cases_file: str, models: str, out: str, device: str = "") -> None:
    if Path(workbench.__file__).resolve().parents[1] != Path(tree).resolve():
        sys.exit(f"the package of {tree} is wanted, and {workbench.__file__} was imported")
    cases = json.loads(Path(cases_file).read_text())
    start = time.perf_counter()

    def group_of(case: dict[str, Any]) -> tuple[str, str]:
        fields = case["config"] | {"device": device or case["device"]}
        return case["model"], json.dumps(fields, sort_keys=True)

    done = 0
    with open(out, "w") as file:
        for (model, text), members in itertools.groupby(sorted(cases, key=group_of), group_of):
            fields = json.loads(text)
            fields["override_tensor"] = tuple(fields.get("override_tensor", ()))
            group = Group(Path(models) / model, fields)
            try:
                for case in members:
                    file.write(json.dumps(replay(case, group)) + "\n")
                    file.flush()
                    done += 1
            finally:
                group.close()
            if sys.stderr.isatty():
                spent = time.perf_counter() - start
                print(f"\r{done} of {len(cases)} cases, {spent:.0f} s", end="", file=sys.stderr)
    print(
        f"{Path(tree).name}: {done} cases in {time.perf_counter() - start:.1f} s", file=sys.stderr
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
