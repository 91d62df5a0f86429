"""One JupyterLab and one Chromium for all tests of the panel; each has a notebook and a kernel of
its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.lab import MISSING, Notebook, chromium, installed, jupyterlab

SETUP = """import workbench as wb
eng = wb.Engine.load({model!r}, toggles=wb.Toggles(), device="embedded", n_ctx=256)"""
SHOW = "panel = wb.lab.panel(eng, {test!r}, rounds={rounds})\npanel"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="session")
def page(folder):
    """The address of JupyterLab, and the browser."""
    if not installed():
        pytest.skip(MISSING)
    with jupyterlab(folder) as url, chromium(folder / "profile") as driver:
        yield url, driver


@pytest.fixture
def panel(page, folder, tiny_model, request) -> Callable[..., Notebook]:
    """Opens a notebook whose second cell shows a panel; `cells` follow it, from number 2."""
    url, driver = page
    model = str(tiny_model("tiny-llama", "Q8_0"))
    notebooks: list[Notebook] = []

    def opened(*cells: str, test: str = "tg16", rounds: int = 500) -> Notebook:
        path = folder / "notebooks" / f"{len(list(folder.glob('notebooks/*')))}.ipynb"
        first = [SETUP.format(model=model), SHOW.format(test=test, rounds=rounds)]
        notebook = Notebook(driver, url, path, [*first, *cells])
        notebooks.append(notebook)
        assert not notebook.run(0), "loading says nothing"
        notebook.run(1)
        return notebook

    yield opened
    shots = request.config.getoption("--shots")
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(shots / f"{request.node.name}.png"))
    for notebook in notebooks:
        notebook.close()


def pytest_addoption(parser):
    parser.addoption("--shots", type=Path, help="a folder for a screenshot at each test's end")
