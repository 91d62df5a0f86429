"""Proves every sync mode on both copy streams: `python -m tests.proofs` writes
data/results/proofs.json, which README's table is made of and `make test` proves again.

Nothing is measured and no device is needed: programs of a llama of two layers are lowered for a
device that computes nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import workbench as wb
from workbench.config import CopyStream, StepWait, SyncMode, Toggles
from workbench.errors import UsageError
from workbench.model.synth import write_model
from workbench.program.commands import Program
from workbench.report.proofs import FILE, proof_rows

OUT = Path(__file__).resolve().parents[1] / "data" / "results" / FILE
N_UBATCH = 8
WHAT = (
    "A llama of two layers; decode: one token after the other, each with its logits; train: "
    "prompts of three ubatches with `step_wait=outputs`, of which the last has logits. Of what "
    "races, the first pair."
)


def cycles(path: Path) -> Mapping[tuple[str, str], list[Program]]:
    """The programs of a decode and of a train under every sync mode and copy stream."""
    found: dict[tuple[str, str], list[Program]] = {}
    with wb.Engine.load(path, device="null", n_ctx=256, n_ubatch=N_UBATCH, unsafe=True) as engine:
        for sync, stream in itertools.product(SyncMode, CopyStream):
            try:
                toggles = Toggles(sync=sync, copy_stream=stream, step_wait=StepWait.OUTPUTS)
            except UsageError:  # the two clash
                continue
            if sync == SyncMode.AUTO:
                continue
            with engine.variant(toggles) as variant:
                found[f"{sync}, {stream}", "decode"] = variant.programs(1)
                found[f"{sync}, {stream}", "train"] = variant.programs(3 * N_UBATCH)
    return found


def proved(path: Path) -> dict:
    return {"what": WHAT, "rows": list(proof_rows(cycles(path)))}


def main() -> int:
    path = write_model("tiny-llama", "Q8_0", Path("data/models/tiny-llama-Q8_0.gguf"))
    OUT.write_text(json.dumps(proved(path), indent=1) + "\n")
    print(f"wrote {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
