"""What the tests of the embedded device share: open devices and an engine, closed at the end."""

from __future__ import annotations

import sys

import pytest

from workbench.backend.cpu.device.embedded import open_backend
from workbench.config import Toggles
from workbench.engine.engine import Engine


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} workers")
def device(request):
    """The embedded device with one, two and three workers."""
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


@pytest.fixture
def two():
    """The embedded device with two workers."""
    backend = open_backend(threads=2)
    yield backend
    backend.close()


@pytest.fixture
def no_handover():
    """Python keeps the GIL unless it asks for something that gives it up."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, toggles=Toggles()
    ) as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    """An engine on the embedded device, at the beginning of a sequence; modules of tests that want
    another have their own."""
    loaded.reset()
    yield loaded
    assert loaded.recorder is None, "whatever happened, tracing has ended"
