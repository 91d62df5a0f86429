"""Which sources a recorded run of the GPU tests speaks for."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ("args", "cuda", "cuda_driver", "kernels")


def source_hash() -> str:
    """SHA-256 over names and contents of kernels/ and the backend files the GPU runs on: `BACKEND`
    of workbench/backend. A recorded result is stale where this differs."""
    files = sorted((ROOT / "kernels").glob("*.cu*"))
    files += [ROOT / "workbench" / "backend" / f"{name}.py" for name in BACKEND]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
