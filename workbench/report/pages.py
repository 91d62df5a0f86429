"""Offline pages: executed notebooks, an index with their answers, and compared runs.

The head of a page holds its entry in the index. So the index lists every page of its folder, pages
of an earlier `make report` included.
"""

import base64
import logging
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from workbench.benchmarks.compare.compare import Compared
from workbench.benchmarks.compare.comparison import AB
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.output import write_text
from workbench.common.tables import BOX_CSS, boxed_html
from workbench.report import plots
from workbench.report.tables import Beside, in_short, speedup_table

TEMPLATES = Path(__file__).with_name("template")
INDEX = "index.html"
PREFIX = "workbench:"
PICTURE = "picture"  # the tag of the cell whose picture goes with the answer
TITLE = re.compile(r"^# +(.+?) *$", re.MULTILINE)
IMAGE = re.compile(r"!\[|<img", re.IGNORECASE)  # in the text of a cell
ENGINE = re.compile(  # what `repr(engine)` says, two lines
    r"<Engine: (?P<model>[^,]+), .*?; (?P<device>.*?) \((?:as asked|auto)\b.*\n.* on (?P<name>\w+):"
)
TAKEN = re.compile(r"commit [0-9a-f]{8}, \d{4}-\d\d-\d\d")  # in `results.taken`
# scripts that nbconvert would load from a network, by the exporter's setting
NETWORK_SETTINGS = (
    "require_js_url",
    "mathjax_url",
    "mermaid_js_url",
    "mermaid_layout_elk_js_url",
    "jquery_url",
    "jupyter_widgets_base_url",
    "widget_renderer_url",
)

COMPARED_CSS = (
    """
body{font:15px/1.45 sans-serif;color:#222;max-width:1100px;margin:24px auto;padding:0 16px}
table{border-collapse:collapse;margin:12px 0}
th,td{padding:4px 10px;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
img{max-width:100%}
"""
    + BOX_CSS
)
COMPARED = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>{{ css }}</style></head>
<body><h1>{{ title }}</h1>
{{ table | safe }}
{% if picture %}<p><img src="data:image/png;base64,{{ picture }}" alt="{{ alt }}"></p>{% endif %}
{% if unmatched %}<h2>What has no counterpart</h2>{{ unmatched | safe }}{% endif %}
<h2>What to know before believing it</h2>
<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>
</body></html>
"""


class About(NamedTuple):
    """The entry of a page in the index. file: its name. runs: folders of its comparisons, by
    name. banner: what to know of a CPU's timings. recorded: what a GPU found; may be empty."""

    file: str
    question: str
    answer: str
    device: str
    date: str
    runs: tuple[str, ...] = ()
    banner: str = ""
    recorded: str = ""

    def metadata(self) -> dict[str, str]:
        return {k: v for k, v in self._asdict().items() if k != "file"} | {
            "runs": " ".join(self.runs)
        }


def question(notebook: Any, otherwise: str) -> str:
    """The notebook's question: its first heading."""
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return next((title[1] for title in map(TITLE.search, texts) if title), otherwise)


def answer(notebook: Any) -> str:
    """The notebook's answer: the first line of its last cell's output, or an empty text."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for output in code[-1].outputs if code else ():
        if text := _text(output):
            return text.splitlines()[0]
    return ""


def _text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain") or "")


class Shown(NamedTuple):
    """A picture of a notebook: a PNG in base64, and a text for readers who cannot see it."""

    png: str
    alt: str


def picture(notebook: Any) -> Shown | None:
    """The picture of the cell tagged `picture`, else the notebook's first; None without any."""
    cells = sorted(notebook.cells, key=lambda cell: PICTURE not in cell.metadata.get("tags", ()))
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        if png := output.get("data", {}).get("image/png"):
            alt = output.get("metadata", {}).get("image/png", {}).get("alt")
            return Shown(str(png).replace("\n", ""), alt or "a picture")
    return None


class Recorded(NamedTuple):
    """What a notebook found where it ran before: the answer, the model, the GPU, and `commit
    1a2b3c4d, 2026-11-29` where its tables name one."""

    answer: str
    model: str
    device: str
    taken: str

    @property
    def where(self) -> str:
        return "; ".join(
            filter(None, [f"Recorded on {self.device}, with {self.model}", self.taken])
        )

    @property
    def said(self) -> str:
        """The answer in a line of the index."""
        card = self.device.partition(" (")[0]
        return f"{'; '.join(filter(None, [f'Recorded on {card}', self.taken]))}: {self.answer}"


def recorded(notebook: Any) -> Recorded | None:
    """What the outputs that a notebook was saved with say. None where they have no answer, or show
    no engine on a GPU."""
    shown = [_text(output) for cell in notebook.cells for output in cell.get("outputs", ())]
    engine = next(filter(None, map(ENGINE.search, shown)), None)
    if engine is None or not is_gpu(engine["name"]) or not (found := answer(notebook)):
        return None
    taken = next(filter(None, map(TAKEN.search, shown)), None)
    return Recorded(found, engine["model"], engine["device"], taken[0] if taken else "")


def export_html(
    executed: str | PathLike[str],
    about: About,
    head: str = "",
    tail: str = "",
    before: Recorded | None = None,
) -> str:
    """An executed notebook as one offline page: its question, its answer, its picture, its cells.

    head: HTML below the answer.
    tail: HTML after the cells.
    before: what the notebook found elsewhere.
    """
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(executed, as_version=4)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    exporter = HTMLExporter(
        template_name="workbench",
        extra_template_basedirs=[str(TEMPLATES)],
        # nbconvert then closes every HTML block by itself: <details> would hold nothing
        embed_images=any(map(IMAGE.search, texts)),
        log=logging.Logger("nbconvert", logging.ERROR),
        **dict.fromkeys(NETWORK_SETTINGS, ""),
    )
    notebook.metadata["title"] = about.question
    said = {"about": about.metadata(), "head": head, "tail": tail, "before": before,
            "picture": picture(notebook)}  # fmt: skip
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and TITLE.search(cell.source):
            cell.source = TITLE.sub("", cell.source, count=1)  # the page begins with it
            break
    page, _ = exporter.from_notebook_node(
        notebook, resources={"metadata": {"name": about.file}, "wb": said}
    )
    return str(page)


def listed(folder: Path) -> list[About]:
    """The entries of a folder's pages, by name. Other files are not read."""
    found = []
    for path in sorted(folder.glob("*.html")):
        reader = _Head()
        reader.feed(path.read_text(encoding="utf-8").partition("<body")[0])
        if path.name != INDEX and "question" in reader.found:
            runs = tuple(reader.found.pop("runs", "").split())
            found.append(About(path.name, **reader.found, runs=runs))
    return found


def write_index(folder: str | PathLike[str], runs_dir: str | PathLike[str]) -> Path:
    """Writes the page that lists a folder's pages, and compares their runs in short and in full;
    returns its path. A run folder that no longer exists is left out."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    pages = listed(Path(folder))
    found = [(p, _comparisons([Path(runs_dir) / name for name in p.runs])) for p in pages]
    every = [comparison for _, own in found for comparison in own]
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    text = environment.get_template("reports.html.j2").render(
        pages=pages,
        groups=[(page, in_short(*own)) for page, own in found if own],
        complete=Markup(boxed_html(speedup_table(*every))) if every else "",
        told=_told, box_css=Markup(BOX_CSS),
    )  # fmt: skip
    target = Path(folder) / INDEX
    write_text(target, text, parents=True)
    return target


def _told(found: Sequence[Beside]) -> str:
    """The verdicts of a page's comparisons: `3 faster, 1 slower, 2 no difference`."""
    every = [verdict for one in found for part in one.parts for verdict in part.rows["verdict"]]
    return ", ".join(f"{every.count(verdict)} {verdict}" for verdict in dict.fromkeys(every))


def _comparisons(folders: Sequence[Path]) -> list[AB]:
    found = []
    for folder in folders:
        try:
            found.append(AB.load(folder))
        except UsageError:  # removed since, or a run of another kind
            continue
    return found


class _Head(HTMLParser):
    """The `workbench:` metadata of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "meta" and name.startswith(PREFIX):
            self.found[name.removeprefix(PREFIX)] = given.get("content") or ""


def compared_page(found: Compared) -> str:
    """Compared runs as one offline page: the question, the table, a picture, and the differences.
    All text of a run folder is escaped."""
    from jinja2 import Environment, StrictUndefined

    first, *others = (side.name for side in found.sides)
    title = f"Is it faster than {first}? {', '.join(others)}"
    summary = found.summary()
    picture, alt = "", ""
    if len(summary):
        png, words = plots.speedup(summary)._repr_png_()
        picture, alt = base64.b64encode(png).decode(), words["alt"]
    table, left = found.table(), found.unmatched()
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(COMPARED).render(
        title=title, css=COMPARED_CSS, picture=picture, alt=alt, lines=found.lines,
        table=boxed_html(table) if len(table) else "",
        unmatched=boxed_html(left) if len(left) else "",
    )  # fmt: skip
