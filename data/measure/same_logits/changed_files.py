"""The model files that `changed.py` asks about: a tiny model, and five that differ from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.edited import edited, retyped

SOURCE = "tiny-llama-F32.gguf"


def write(models: Path, folder: Path) -> None:
    """Writes into `folder` what is made of SOURCE in `models`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = models / SOURCE
    edited(source, folder / "whole.gguf")
    retyped(source, folder / "q4_1.gguf", lambda name: "Q4_1" if "ffn_up" in name else None)
    unused = np.ones(256, np.float32)
    edited(source, folder / "unused.gguf", tensors={"blk.0.attn_sinks.weight": (unused, "F32")})
    edited(source, folder / "scaled.gguf", keys={"llama.rope.scaling.factor": 2.0})
    norm = np.full(256, np.nan, np.float32)
    edited(source, folder / "damaged.gguf", tensors={"output_norm.weight": (norm, "F32")})
