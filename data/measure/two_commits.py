"""Decode of this checkout beside an earlier commit's: on one device, in one run, in turn.

    python -m data.measure.two_commits --old FOLDER --model FILE [--model FILE ...] --out FILE.json

Each side is a process of its own that keeps the model loaded: `old` and a second `old` (the A/A
control) run the package of FOLDER, `new` runs this checkout. In every round each side decodes once
(tg128: from an empty cache, random tokens, logits on the host), in an order that alternates. The
toggles are written out, and the same on all sides. A second part stamps the steps: the host's time
from the logits of one token to the first launch of the next.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from data.measure.recorded import Recorded
from data.measure.tables import Line, Part, Table
from workbench.benchmarks.times.token_parts import logits_to_launch_ns, stamped_steps

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("old", "control", "new")  # the package of the old folder, the same again, and ours
N_TOKENS = 128
# what a worker runs: also a package of an earlier commit, which has no module of ours
SHARED = "\n".join(inspect.getsource(made) for made in (stamped_steps, logits_to_launch_ns))
WORKER = f"""
from __future__ import annotations
import json, sys, time
import numpy as np
import workbench as wb
{SHARED}
path, device, toggles, n_ctx = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
engine = wb.Engine.load(path, device=device, n_ctx=n_ctx, toggles=wb.Toggles(**toggles))
tokens = np.random.default_rng(1).integers(0, engine.model.n_vocab, n_ctx).tolist()
print(json.dumps({{"file": wb.__file__, "device": engine.backend.description}}), flush=True)
def decode(n):
    engine.reset()
    start = time.perf_counter_ns()
    for token in tokens[:n]:
        engine.step([token])
    return (time.perf_counter_ns() - start) / n / 1e3
decode(n_ctx)
for line in sys.stdin:
    what, n = line.split()
    if what == "decode":
        found = {{"us_per_token": decode(int(n))}}
    else:
        engine.reset()
        gaps = logits_to_launch_ns(*stamped_steps(engine, tokens[: int(n)]))
        found = {{"logits_to_launch_us": float(np.median(gaps)) / 1e3}}
    print(json.dumps(found), flush=True)
"""


class Side:
    """A process that decodes when it is told to."""

    def __init__(self, name: str, folder: Path, arguments: Sequence[str]):
        self.name = name
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments], cwd=folder, text=True,
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.about = self._answer()

    def ask(self, what: str, n: int) -> float:
        """The figure that the process answers with."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {n}\n")
        self._process.stdin.flush()
        (figure,) = self._answer().values()
        return figure

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} side ended; its error stands above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def measured(old: Path, model: Path, device: str, toggles: dict[str, str], rounds: int) -> Any:
    """What every side took in every round, for one model: us a token, and us to the launch."""
    arguments = [str(model), device, json.dumps(toggles), str(N_TOKENS)]
    sides = [Side(name, ROOT if name == "new" else old, arguments) for name in SIDES]
    samples: dict[str, dict[str, list[float]]] = {}
    try:
        for what in ("decode", "stamp"):
            found: dict[str, list[float]] = {name: [] for name in SIDES}
            for i in range(rounds):
                for side in sides[:: 1 if i % 2 else -1]:
                    found[side.name].append(side.ask(what, N_TOKENS))
            samples[what] = found
    finally:
        for side in sides:
            side.close()
    about = {side.name: Path(side.about["file"]).parent.parent.name for side in sides}
    return {
        "model": model.name,
        "device": sides[0].about["device"],
        "folders": about,
        "us_per_token": samples["decode"],
        "logits_to_launch_us": samples["stamp"],
    }


FIGURES = {
    "us_per_token": "us a token",
    "logits_to_launch_us": "us from logits to the first launch",
}
NAME = "two-commits"


def lines(recorded: Recorded) -> Iterator[Line]:
    """A line for each model and figure: the old commit, its control, and the new one."""
    for run in (recorded.alone(NAME) or {"runs": ()})["runs"]:
        for name, words in FIGURES.items():
            found = run[f"{name}_judged"]
            yield Line({
                "model": run["model"].removesuffix(".gguf"),
                "figure": words,
                **{side: f"{us:.2f}" for side, us in found["median_us"].items()},
                "speedup": f"{found['speedup']:.3f} ({found['low']:.3f}..{found['high']:.3f})",
                "A/A band": "{:.3f}..{:.3f}".format(*found["band"]),
                "verdict": found["verdict"],
            })  # fmt: skip


def said(recorded: Recorded) -> str:
    """Commits, device and date."""
    found = recorded.alone(NAME) or {}
    return (
        f"Commit {found['old'][:8]} beside commit {found['new']['commit']['hash'][:8]}, "
        f"{found['test']}, in turn in one run; {found['runs'][0]['device']}; {found['date'][:10]}."
    )


BLOCKS: dict[str, list[Part]] = {NAME: [Table("Decode of an earlier commit", lines, said=said)]}


def judged(samples: dict[str, list[float]]) -> dict[str, Any]:
    """The new side against the old one: ratio of medians (above 1: the new one is faster), its
    interval, the A/A band of the control, and the verdict."""
    from workbench.benchmarks.compare import stats

    def ratio(name: str) -> Any:
        return stats.speedup(1 / np.array(samples["old"]), 1 / np.array(samples[name]))

    band, new = stats.aa_band(ratio("control")), ratio("new")
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    return {
        "median_us": medians,
        "speedup": new.value, "low": new.low, "high": new.high,
        "band": [band.low, band.high], "verdict": stats.verdict(new, band),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    from data.measure.same_logits import trees
    from workbench.benchmarks.runs import provenance
    from workbench.common.output import write_text

    say = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    say.add_argument("--old", type=Path, required=True)
    say.add_argument("--old-commit", default="dcb7d40")
    say.add_argument("--model", type=Path, action="append", required=True)
    say.add_argument("--device", default="cuda")
    say.add_argument("--toggles", default="", help="NAME=VALUE,... of both sides; empty: all off")
    say.add_argument("--rounds", type=int, default=20)
    say.add_argument("--out", type=Path, required=True)
    asked = say.parse_args()
    toggles = dict(pair.split("=") for pair in asked.toggles.split(",") if pair)
    runs = [
        measured(asked.old.resolve(), model.resolve(), asked.device, toggles, asked.rounds)
        for model in asked.model
    ]
    for run in runs:
        for name in ("us_per_token", "logits_to_launch_us"):
            run[f"{name}_judged"] = judged(run[name])
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "old": asked.old_commit,
        "new": {"commit": trees.commit_of(ROOT), "sources": trees.sources(ROOT)},
        "machine": provenance.machine(),
        "python": platform.python_version(),
        "test": f"tg{N_TOKENS}",
        "toggles": toggles,
        "rounds": asked.rounds,
        "runs": runs,
    }
    write_text(asked.out, json.dumps(found, indent=1) + "\n")
    for run in runs:
        for name in ("us_per_token", "logits_to_launch_us"):
            print(run["model"], name, json.dumps(run[f"{name}_judged"]))


if __name__ == "__main__":
    main()
