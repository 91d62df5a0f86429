"""Which sources a recorded run of the GPU tests speaks for."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def source_hash() -> str:
    """SHA-256 over names and contents of kernels/ and workbench/backend/. A recorded result is
    stale where this differs."""
    files = [*(ROOT / "kernels").glob("*.cu*"), *(ROOT / "workbench" / "backend").rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
