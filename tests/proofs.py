"""Proves every sync mode on both copy streams: `python -m tests.proofs` writes
data/results/proofs.json, which README's table is made of and `make test` proves again.

Nothing is measured and no device is needed: programs of a llama of two layers are lowered for a
device that computes nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import workbench as wb
from workbench.model.synth import write_model
from workbench.output import write_text
from workbench.program.commands import Program
from workbench.report.proofs import FILE, by_source, cycles, proof_rows

OUT = Path(__file__).resolve().parents[1] / "data" / "results" / FILE
N_UBATCH = 8
WHAT = (
    "A llama of two layers; decode: one token after the other, each with its logits; train: "
    "prompts of three ubatches with `step_wait=outputs`, of which the last has logits. Waits: of "
    "the host and of streams. Of what races, the first pair."
)
LONG = 6  # ubatches: more than there are places in a ring, so that every place comes again
OF_SOURCES = (
    f"The same decode, and a train of {LONG} ubatches, so that every place comes again; by "
    "`host_source`, and with `n_copies` places for inputs on the device."
)


def both(engine: wb.Engine) -> dict[tuple[str, str], list[Program]]:
    """The programs of a decode and of a train under every sync mode and copy stream."""
    decode, train = cycles(engine), cycles(engine, 3 * N_UBATCH, "train")
    names = dict.fromkeys(name for name, _ in decode)
    return {key: rows[key] for name in names
            for key, rows in (((name, "decode"), decode), ((name, "train"), train))}  # fmt: skip


def proved(path: Path) -> dict:
    with wb.Engine.load(
        path, device="null", n_ctx=256, n_ubatch=N_UBATCH, unsafe=True, toggles=wb.Toggles()
    ) as engine:
        return {
            "what": WHAT,
            "rows": list(proof_rows(both(engine))),
            "of_sources": OF_SOURCES,
            "sources": by_source(engine) + by_source(engine, LONG * N_UBATCH, "train"),
        }


def main() -> int:
    path = write_model("tiny-llama", "Q8_0", Path("data/models/tiny-llama-Q8_0.gguf"))
    write_text(OUT, json.dumps(proved(path), indent=1) + "\n")
    print(f"wrote {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
