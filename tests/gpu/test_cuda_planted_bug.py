"""The planted bug of tests/program/test_planted_bug.py on a GPU: pinned memory, real streams."""

from __future__ import annotations

import pytest

from tests.program.test_planted_bug import (  # noqa: F401 - collected here, run on cuda
    MODELS,
    right,
    step,
    test_launch_before_its_copy_has_landed,
    test_staging_overwritten_before_the_copy,
    test_the_write_is_what_harms,
)

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize(("preset", "quant"), MODELS)]


@pytest.fixture
def device() -> str:
    return "cuda"
