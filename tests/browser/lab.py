"""JupyterLab and Chromium on this machine, and what a person does with a notebook in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import nbformat
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

NAMES = ("chromium", "chromedriver")
MISSING = "no browser: install chromium and chromedriver (Debian: chromium, chromium-driver)"
TOKEN = "of-this-test-alone"
FLAGS = (
    "--headless=new", "--disable-gpu", "--window-size=1400,1500", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-quic", "--disable-dev-shm-usage",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0  # imports and first-use compilation are in it


def installed() -> bool:
    return all(map(shutil.which, NAMES))


def versions() -> dict[str, str]:
    """Browser and driver, as they name themselves."""
    found = {}
    for name in NAMES:
        said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        found[name] = said.stdout.split("(")[0].strip()
    return found


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first value of `condition` that is true; asked again and again."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except StaleElementReferenceException:
            pass  # the page was drawn anew while it was read
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {patience_s:.0f} s")


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """JupyterLab on loopback, in an empty folder, with no settings of the user's; its address."""
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": str(ROOT)}
    config = folder / "CONFIG" / "labconfig"
    config.mkdir(parents=True)
    quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (config / "page_config.json").write_text(json.dumps(quiet))
    (folder / "notebooks").mkdir()
    command = [
        sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ip=127.0.0.1", "--port=0",
        f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder / 'notebooks'}",
        "--ServerApp.port_retries=50", *(["--allow-root"] if os.geteuid() == 0 else []),
    ]  # fmt: skip
    with open(folder / "jupyter.log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
        runtime = folder / "RUNTIME"
        try:
            (found,) = until(lambda: [*runtime.glob("jpserver-*.json")], f"JupyterLab, {log.name}")
            yield json.loads(found.read_text())["url"]
        finally:
            server.terminate()
            server.wait(30)


@contextmanager
def chromium(folder: Path) -> Iterator[WebDriver]:
    options = Options()
    options.binary_location = str(shutil.which(NAMES[0]))
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium has none for root
    driver = webdriver.Chrome(options, Service(shutil.which(NAMES[1])))
    try:
        yield driver
    finally:
        driver.quit()


class Notebook:
    """A notebook open in the browser, its cells by number."""

    def __init__(self, driver: WebDriver, url: str, path: Path, cells: list[str]):
        """Writes the notebook at `path`, which the server of `url` serves, and opens it."""
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(made, path)
        self.driver, self.url = driver, url
        driver.get(f"{url}lab/tree/{path.name}?token={TOKEN}&reset")
        until(lambda: len(self._cells()) == len(cells), "the notebook's cells")
        until(lambda: "Idle" in self._kernel(), "the kernel")

    def _cells(self) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell")

    def _kernel(self) -> str:
        (found,) = self.driver.find_elements(By.CSS_SELECTOR, ".jp-Notebook-ExecutionIndicator")
        return (found.get_attribute("data-status") or "").capitalize()

    def start(self, cell: int) -> None:
        """Runs a cell, and does not wait for its end."""
        before, pressed = self._number(cell), [0.0]

        def begun() -> bool:
            if self._number(cell) != before:
                return True
            if time.monotonic() - pressed[0] > 5:  # a page that is being drawn loses keys
                self._seen(self._cells()[cell].find_element(By.CSS_SELECTOR, ".cm-content")).click()
                keys = webdriver.ActionChains(self.driver).key_down(Keys.CONTROL)
                keys.send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
                pressed[0] = time.monotonic()
            return False

        until(begun, f"the start of cell {cell}")

    def close(self) -> None:
        """Leaves the page, and ends every kernel of the server."""
        self.driver.get("about:blank")
        headers = {"Authorization": f"token {TOKEN}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=30) as http:
            for kernel in http.get("api/kernels").json():
                http.delete(f"api/kernels/{kernel['id']}")

    def run(self, cell: int) -> str:
        """Runs a cell to its end; what it printed, or its error."""
        self.start(cell)
        return self.output(cell)

    def output(self, cell: int, patience_s: float = PATIENCE_S) -> str:
        """What a cell printed, or its error, once it has ended."""
        ended = f"the end of cell {cell}"
        until(lambda: self._number(cell) not in ("[ ]:", "[*]:"), ended, patience_s)
        found = self._cells()[cell].find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output")
        return "\n".join(o.text for o in found)

    def shows(self, cell: int, pattern: str) -> None:
        """Waits until a cell that runs shows a line in which a regular expression is found."""

        def found() -> bool:
            every = self._cells()[cell].find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output")
            return any(re.search(pattern, output.text) for output in every)

        until(found, f"a line of cell {cell} with {pattern!r}")

    def heights(self, cell: int) -> list[int]:
        """The heights of a cell's outputs that take room on the page, in pixels."""
        every = self._cells()[cell].find_elements(By.CSS_SELECTOR, ".jp-OutputArea-child")
        return [height for output in every if (height := output.size["height"]) > 0]

    def in_view(self, element: WebElement) -> bool:
        """Whether an element is on the screen now, without any scrolling."""
        script = (
            "const r = arguments[0].getBoundingClientRect();"
            "return r.top >= 0 && r.bottom <= window.innerHeight"
        )
        return bool(self.driver.execute_script(script, element))

    def type(self, name: str, text: str) -> None:
        """Writes into a field of the panel, and leaves it."""
        every = self.driver.find_elements(By.CSS_SELECTOR, ".widget-text")
        (field,) = (f for f in every if f.text.splitlines()[:1] == [name])
        box = self._seen(field.find_element(By.TAG_NAME, "input"))
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(text, Keys.ENTER)

    def _number(self, cell: int) -> str:
        return self._cells()[cell].find_element(By.CSS_SELECTOR, ".jp-InputPrompt").text

    def interrupt(self) -> None:
        """Jupyter's own stop, in the notebook's toolbar."""
        stop = '[data-command="notebook:interrupt-kernel"]'
        self.driver.find_element(By.CSS_SELECTOR, stop).click()

    def interrupt_cell(self, cell: int) -> str:
        """Ends a cell that runs for ever; its output. Presses again where the cell runs on: a page
        that is being drawn loses clicks."""
        for _ in range(3):
            self.interrupt()
            with suppress(AssertionError):
                return self.output(cell, PATIENCE_S / 3)
        return self.output(cell)

    def button(self, name: str) -> WebElement:
        """A button of the panel."""
        every = self.driver.find_elements(By.CSS_SELECTOR, "button.widget-button")
        return next(b for b in every if b.text.strip() == name)

    def press(self, name: str) -> None:
        """Clicks on a button, once it can be pressed."""
        until(lambda: self.button(name).is_enabled(), f"the button {name}")
        self._seen(self.button(name)).click()

    def choose(self, name: str, value: str) -> None:
        """Sets a drop-down of the panel, by its name."""

        def found() -> WebElement | None:
            every = self.driver.find_elements(By.CSS_SELECTOR, ".widget-dropdown")
            return next((d for d in every if d.text.splitlines()[:1] == [name]), None)

        box = self._seen(until(found, f"the drop-down {name}"))
        Select(box.find_element(By.TAG_NAME, "select")).select_by_visible_text(value)

    def _seen(self, element: WebElement) -> WebElement:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'nearest'})", element)
        return element

    def says(self, pattern: str) -> str:
        """The panel's line in which a regular expression is found, once there is one."""

        def found() -> str | None:
            lines = self.driver.find_elements(By.CSS_SELECTOR, ".widget-html-content")
            return next((line.text for line in lines if re.search(pattern, line.text)), None)

        return until(found, f"a line with {pattern!r}")

    def pictures(self) -> list[WebElement]:
        """The timelines, where they are shown."""
        found = self.driver.find_elements(By.CSS_SELECTOR, "img.widget-image")
        return [picture for picture in found if picture.is_displayed()]
