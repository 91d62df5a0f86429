"""Pages in Chromium at 800 and 1280 pixels: nothing reaches past the window, and whatever is wider
than its place has a scroll bar that the reader sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.made_runs import write
from tests.browser.lab import MISSING, ROOT, chromium, installed
from workbench.benchmarks.compare import compare
from workbench.report import differences, pages
from workbench.report.pages import About
from workbench.trace.diff import diff
from workbench.trace.profile import Profile

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

RESULTS, TRACES = ROOT / "data" / "results", ROOT / "tests" / "trace" / "files"
WIDTHS = (800, 1280)
HEIGHT = 900
# what is wrong with a page, in words: elements past the window's edge outside of a box that
# scrolls; boxes that cut what is in them off; boxes whose scroll bar is not in the window with them
FAULTS = """
const edge = document.documentElement.clientWidth, found = [];
const named = e => `${e.tagName} ${e.className} "${e.textContent.trim().slice(0, 30)}"`;
const across = e => getComputedStyle(e).overflowX;
const scrolls = e => e && e !== document.body && (['auto', 'scroll'].includes(across(e)) ||
                                                  scrolls(e.parentElement));
document.querySelectorAll('details').forEach(e => { e.open = true; });
if (document.documentElement.scrollWidth > innerWidth) found.push('the document is wider');
for (const e of document.body.querySelectorAll('*')) {
  if (e.getBoundingClientRect().right > edge + 1 && !scrolls(e.parentElement))
    found.push('past the edge: ' + named(e));
  if (e.scrollWidth <= e.clientWidth + 1 || !e.clientWidth) continue;
  if (across(e) === 'hidden' && !scrolls(e.parentElement)) found.push('cut off: ' + named(e));
  if (!['auto', 'scroll'].includes(across(e))) continue;
  if (e.offsetHeight <= e.clientHeight) found.push('no scroll bar: ' + named(e));
  if (e.offsetHeight > innerHeight) found.push('its scroll bar is out of sight: ' + named(e));
}
return found;
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if not installed():
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("pages") / "profile") as driver:
        yield driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Each notebook as it was saved, the index with every comparison of a notebook, compared runs,
    and compared traces."""
    made = tmp_path_factory.mktemp("reports")
    names = sorted(
        path.name for path in RESULTS.glob("notebook-*") if (path / "run.json").is_file()
    )
    for n, notebook in enumerate(sorted((ROOT / "notebooks").glob("*.ipynb"))):
        about = About(f"{notebook.stem}.html", notebook.stem, "An answer.", "a GPU", "2026-11-27",
                      tuple(names) if n == 0 else ())  # fmt: skip
        (made / about.file).write_text(pages.export_html(notebook, about))
    pages.write_index(made, RESULTS)
    tests = {f"pp{n}+tg{n}@d{n * 1000}": 100.0 for n in range(1, 60)}
    runs = [write(made / "runs", f"a-long-name-of-a-run-{n}", tests, n=5) for n in (1, 2)]
    (made / "compared.html").write_text(pages.compared_page(compare.compare(*runs)))
    traces = [Profile.load(TRACES / name) for name in ("nsys-llama-graph.sqlite.gz",) * 2]
    found = diff(*traces)
    found.attrs["names"] = ["before", "after"]
    (made / "traces.html").write_text(differences.page_of(found, []))
    return made


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_its_window(driver, folder, width, request):
    every = sorted(folder.glob("*.html"))
    assert len(every) > 10
    shots, wrong = request.config.getoption("--shots"), {}
    for page in every:
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page.as_uri())
        if found := driver.execute_script(FAULTS):
            wrong[page.name] = found[:5]
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
            driver.save_screenshot(str(shots / f"{page.stem}-{width}.png"))
    assert not wrong
