"""What the tests of the embedded device share: open devices, closed at the end."""

from __future__ import annotations

import pytest

from workbench.backend.embedded import open_backend


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} lanes")
def device(request):
    """The embedded device with one, two and three lanes."""
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


@pytest.fixture
def two():
    """The embedded device with two lanes."""
    backend = open_backend(threads=2)
    yield backend
    backend.close()
