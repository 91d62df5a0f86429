"""Fixtures that all tests share: tiny models, the command, embedded devices, an engine."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import profiles
from workbench.model.synth.models import write_named, write_tiny_models

profiles.register()
# A shell that runs us behind a `&` ignores the one, and nohup the other. Children that tests
# interrupt would inherit it.
HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
for number, handler in HANDLERS.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
MODELS = Path(__file__).resolve().parents[1] / "data" / "models"


ELSEWHERE = {"browser": "tests/browser/test_panel_*", "gpu": "tests/gpu/test_cuda_*"}  # by mark


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all deselected by their mark are not read, which takes seconds."""
    chosen = config.getoption("markexpr")
    left = [path for mark, path in ELSEWHERE.items() if f"not {mark}" in chosen]
    return any(collection_path.match(path) for path in left) or None


def pytest_collection() -> None:
    """Thousands of tests and all modules stay to the end: the collector need not look at them while
    they come, nor again and again behind that."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """The process ends, and looks for no garbage before: that takes ten seconds after all tests."""
    gc.disable()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_models() -> Path:
    """`data/models`, holding every model of `synth.TINY`; written where missing or out of date."""
    write_tiny_models(MODELS)
    return MODELS


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str, str], Path]:
    """`tiny_model(preset, quant)`: the path of one tiny model, written if missing."""
    return lambda preset, quant: write_named(MODELS, preset, quant)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; returns (exit status, stdout, stderr)."""
    from workbench.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        status = 0
        try:
            main([str(a) for a in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run


def embedded(threads: int):
    from workbench.backend.cpu.device.embedded import open_backend

    backend = open_backend(threads=threads)
    yield backend
    backend.close()


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} workers")
def device(request):
    """The embedded device with one, two and three workers."""
    yield from embedded(request.param)


@pytest.fixture
def two():
    """The embedded device with two workers."""
    yield from embedded(2)


@pytest.fixture(scope="module")
def loaded(tiny_model):
    from workbench.config import Toggles
    from workbench.engine.engine import Engine

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
