"""The cuda backend keeps every clause of the contract that it claims, on a real GPU."""

from __future__ import annotations

import pytest

from tests.contract.conformance.conformance import CHECKS, reads_late, run_check
from workbench.backend.cuda.device.backend import open_backend
from workbench.program.commands import Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize("check", CHECKS)
def test_clause(check):
    claimed = run_check(check, open_backend)
    assert claimed == (CHECKS[check].claim not in ("no streams", "blocking"))


def test_pinned_memory_is_read_late():
    """What makes the hazards real: a driver may stage pageable memory at the call, but not this."""
    assert reads_late(open_backend, Space.PINNED)
