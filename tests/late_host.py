"""A host that is late at the gate of a plan launched ahead (`workbench/backend/plan/gate.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from workbench.backend.plan import gate
from workbench.backend.plan.gate import LIMIT_NS

LATE = 3 * LIMIT_NS / 1e9  # seconds, behind which the limit has passed


@pytest.fixture(autouse=True)
def never_passed(monkeypatch):
    """However late a busy machine makes the host, every step is launched ahead that can be."""
    monkeypatch.setattr(gate, "MOST_PASSED", 0)


@contextmanager
def late_looks(engine: Any, every: int) -> Iterator[list[int]]:
    """The host is late behind the first of so many looks at the engine's gate: its plan still stood
    there. Yields the numbers of the launches that were looked at."""
    own, looked = engine.issuer.gate, list[int]()
    looks = own._went

    def look(number: int) -> int:
        looked.append(number)
        found = looks(number)
        if len(looked) % every == 1:
            time.sleep(LATE)
        return found

    own._went = look
    try:
        yield looked
    finally:
        del own._went
