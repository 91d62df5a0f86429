"""Renders notebooks: papermill runs them, `pages` writes each as one HTML file.

A report is one file that opens offline, prints, and stays below 5 MB. Pictures are data URIs. The
scripts that nbconvert would load from the network (MathJax, RequireJS, Mermaid, widgets) are left
out.
"""

from __future__ import annotations

import ast
import base64
import gzip
import html
import json
import logging
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from workbench.benchmarks.runs import provenance, results
from workbench.common.devices import DEVICES, is_gpu
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.output import check_writable, held, write_text
from workbench.common.progress import HIDDEN, SHARE, Bar, bar
from workbench.common.sizes import size
from workbench.report.kernels import NAME, Kernels
from workbench.report.pages import (
    INDEX,
    About,
    Recorded,
    answer,
    export_html,
    question,
    recorded,
    write_index,
)

MOST_REPORT_BYTES = 5_000_000
MOST_TRACE_BYTES = 8_000_000  # of gzipped trace inside a page
CPU_BANNER = "CPU timings say nothing of GPU speed"


def render_notebook(
    path: str | PathLike[str],
    out_html: str | PathLike[str],
    parameters: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    runs_dir: str | PathLike[str] = "data/runs",
    trace: str | PathLike[str] | None = None,
    timeout_s: int = 600,
    left: Bar = HIDDEN,
    kernels: Kernels | None = None,
    following: Path | None = None,
) -> Path:
    """Runs a notebook with `parameters` and writes it as a page; returns the page's path.

    The page begins with the notebook's answer. A page of a CPU also says what the outputs that the
    notebook was saved with say of a GPU.

    The notebook runs in its own directory, as in JupyterLab: relative paths in parameters start
    there. The executed notebook is kept under runs_dir.

    device: the device of the run; a page with a CPU's timings has a banner. Default: the parameter
        of that name.
    trace: a Perfetto file, which the page offers as a download.
    left: called for every cell; `cell_seconds` in all.
    kernels: that its kernel is taken from; None: one of its own.
    following: the next notebook. Its kernel starts while this page is written; on a GPU, which
        leaves the host cores to spare, while this notebook runs.

    Raises UsageError for a notebook that does not exist, and WorkbenchError with the cell and its
    error where a cell fails; the page then shows everything up to that cell.
    """
    import nbformat

    source, target = Path(path), Path(out_html)
    if not source.is_file():
        raise UsageError(
            f"notebook {source} does not exist; `workbench notebooks copy notebooks` writes them"
        )
    parameters = dict(parameters or {})
    executed = Path(runs_dir) / f"{target.stem}.ipynb"
    for path in (executed, target):
        check_writable(path, parents=True)
    known = set(results.runs(Path(runs_dir))["folder"])
    device = device if device is not None else parameters.get("device")
    on_gpu = device is not None and is_gpu(device)

    with _or_own(kernels) as handing_out:
        with handing_out.taken(source.resolve().parent, spare=on_gpu) as kernel:
            connection = Path(kernel.connection_file).name
            if following is not None and on_gpu:
                handing_out.start(following.resolve().parent)
            failure = execute_notebook(source, executed, parameters, timeout_s, left, kernel)
        if following is not None:
            handing_out.start(following.resolve().parent)
    new = (f for f in results.runs(Path(runs_dir))["folder"] if f not in known)
    made = [found.folder for found in map(_readable, new) if found and _of(found, connection)]
    before = None if on_gpu else recorded(nbformat.read(source, as_version=4))
    tail = "" if trace is None else trace_download_html(trace)
    about = _about(target, executed, device, made, Path(runs_dir), failure, before)
    page = export_html(executed, about, banner_html(device), tail, before)
    write_text(target, page, parents=True)
    n_bytes = len(page.encode())
    if n_bytes > MOST_REPORT_BYTES:
        print(
            f"{target} has {size(n_bytes)}; reports should stay below "
            f"{size(MOST_REPORT_BYTES)}: draw fewer or smaller pictures",
            file=sys.stderr,
        )
    if failure is not None:
        raise WorkbenchError(f"{source.name}: {failure}; see {target}")
    return target


def _readable(folder: str) -> results.Run | None:
    """A run; None for a folder that is being written, or was removed."""
    try:
        return results.load_run(folder)
    except UsageError:
        return None


def _of(found: results.Run, connection: str) -> bool:
    """Whether a run was made in the kernel with this connection file. Others may be measuring into
    the same folder."""
    return connection in (Path(word).name for word in found.run["command"])


def _or_own(kernels: Kernels | None) -> AbstractContextManager[Kernels]:
    return Kernels() if kernels is None else nullcontext(kernels)


def render_all(
    notebooks: Sequence[str | PathLike[str]],
    out_dir: str | PathLike[str] = "reports",
    parameters: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    runs_dir: str | PathLike[str] = "data/runs",
) -> list[Path]:
    """Renders each notebook to `<out_dir>/<name>.html` and prints where the reports are.

    A notebook gets only the parameters that it has. Raises UsageError for a notebook that does not
    exist, and where another process renders into out_dir or runs_dir, before any notebook runs.
    Raises WorkbenchError as `render_notebook` does, after the pages of earlier notebooks have been
    written and printed.
    """
    check_pages(notebooks, out_dir)
    with held(out_dir, runs_dir):  # which runs a notebook made is told by what is new there
        return _rendered(notebooks, out_dir, parameters, device, runs_dir)


def _rendered(
    notebooks: Sequence[str | PathLike[str]],
    out_dir: str | PathLike[str],
    parameters: Mapping[str, Any] | None,
    device: str | None,
    runs_dir: str | PathLike[str],
) -> list[Path]:
    """As `render_all`, in folders that this process holds."""
    pages: list[Path] = []
    known = [parameters_of(path) for path in notebooks]
    seconds = sum(sum(cell_seconds(Path(path), runs_dir).values()) for path in notebooks)
    try:
        with bar("report", seconds, SHARE) as left, Kernels() as kernels:
            for number, (path, names) in enumerate(zip(notebooks, known, strict=True), 1):
                chosen = {k: v for k, v in (parameters or {}).items() if k in names}
                following = Path(notebooks[number]) if number < len(notebooks) else None
                page = render_notebook(
                    path, page_of(path, out_dir), chosen, device=device, runs_dir=runs_dir,
                    left=left, kernels=kernels, following=following,
                )  # fmt: skip
                pages.append(page)
    finally:
        for page in pages:
            print(page.resolve())
        if pages:
            print(f"index: {write_index(out_dir, runs_dir).resolve()}")
    return pages


def _about(
    page: Path,
    executed: Path,
    device: str | None,
    folders: Sequence[Path],
    runs_dir: Path,
    failure: str | None,
    before: Recorded | None,
) -> About:
    """The entry of a page in the index. folders: the runs that the notebook made. before: what it
    found elsewhere."""
    import nbformat

    notebook = nbformat.read(executed, as_version=4)
    runs = [results.load_run(folder).run for folder in folders]
    named = (run["engine"].get("device_description") for run in runs)  # a server's run has none
    devices = dict.fromkeys(filter(None, named))
    return About(
        file=page.name,
        question=question(notebook, page.stem),
        answer=failure or answer(notebook),
        device="; ".join(devices) or device or "not named",
        date=provenance.utc_now()[:10],
        runs=tuple(
            str(folder.relative_to(runs_dir))
            for folder, run in zip(folders, runs, strict=True)
            if run["kind"] == "ab"
        ),
        banner=banner(device),
        recorded="" if before is None else before.said,
    )


def page_of(notebook: str | PathLike[str], out_dir: str | PathLike[str]) -> Path:
    """The path of a notebook's page."""
    return Path(out_dir) / f"{Path(notebook).stem}.html"


def check_pages(notebooks: Sequence[str | PathLike[str]], out_dir: str | PathLike[str]) -> None:
    """Raises UsageError for a page that cannot be written, before a notebook is run."""
    for path in (*(page_of(path, out_dir) for path in notebooks), Path(out_dir) / INDEX):
        check_writable(path, parents=True)


def banner(device: str | None) -> str:
    """What to know of a CPU's timings; empty for a GPU."""
    if device is not None and is_gpu(device):
        return ""
    what = f"the {device} device" if device in DEVICES else f"device {device or 'not named'}"
    return f"Ran on {what}: {CPU_BANNER}."


def banner_html(device: str | None) -> str:
    """That as the red line on a page."""
    said = banner(device)
    return f'<div class="wb-banner">{html.escape(said)}</div>' if said else ""


def trace_download_html(path: str | PathLike[str]) -> str:
    """A Perfetto trace inside a page: a download, and a button that hands it to ui.perfetto.dev.

    The page embeds a trace of at most MOST_TRACE_BYTES when gzipped; else it links to the file
    beside the page. The button opens Perfetto's page and posts the trace to its window. The trace
    stays in the browser; only the viewer comes from the network.
    """
    path = Path(path)
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        data = gzip.compress(data, mtime=0)
    name = html.escape(path.name if path.suffix == ".gz" else path.name + ".gz", quote=True)
    if len(data) > MOST_TRACE_BYTES:
        return f'<p class="wb-trace">Timeline: <a href="{name}">{name}</a> ({size(len(data))})</p>'
    text = base64.b64encode(data).decode()
    return TRACE_HTML.replace("%NAME%", name).replace("%DATA%", text)


# Perfetto takes a trace by message: PING until it answers PONG, then the buffer.
TRACE_HTML = """<p class="wb-trace">Timeline <b>%NAME%</b>: <a id="wb-trace-save">Download</a>
<button id="wb-trace-open">Open in Perfetto</button> (the trace stays in this browser; the viewer
comes from the network)</p>
<script type="application/octet-stream" id="wb-trace-data">%DATA%</script>
<script>(() => {
  const $ = id => document.getElementById(id);
  const bytes = Uint8Array.from(atob($("wb-trace-data").textContent), c => c.charCodeAt(0));
  const packed = new Blob([bytes], {type: "application/gzip"});
  $("wb-trace-save").href = URL.createObjectURL(packed);
  $("wb-trace-save").download = "%NAME%";
  $("wb-trace-open").onclick = async () => {
    const viewer = window.open("https://ui.perfetto.dev");
    const stream = packed.stream().pipeThrough(new DecompressionStream("gzip"));
    const buffer = await new Response(stream).arrayBuffer();
    const ping = setInterval(() => viewer.postMessage("PING", "*"), 100);
    window.addEventListener("message", e => {
      if (e.source !== viewer || e.data !== "PONG") return;
      clearInterval(ping);
      const perfetto = {buffer, title: "%NAME%", fileName: "%NAME%"};
      viewer.postMessage({perfetto}, "https://ui.perfetto.dev");
    });
  };
})();</script>"""


def cell_seconds(notebook: Path, runs_dir: str | PathLike[str]) -> dict[str, float]:
    """The expected time of each code cell of a notebook, s, by its source: the time of the last run
    under runs_dir, or 1 s where there is none."""
    import nbformat

    executed, known = Path(runs_dir) / notebook.name, {}
    if executed.is_file():
        for cell in nbformat.read(executed, as_version=4).cells:
            known[cell.source] = cell.metadata.get("papermill", {}).get("duration") or 1.0
    cells = nbformat.read(notebook, as_version=4).cells
    return {c.source: known.get(c.source, 1.0) for c in cells if c.cell_type == "code"}


def execute_notebook(
    source: Path,
    executed: Path,
    parameters: dict[str, Any],
    timeout_s: int = 600,
    left: Bar = HIDDEN,
    kernel: Any = None,
) -> str | None:
    """Runs the notebook and writes it as `executed`, with every cell that ended; returns the
    failure as one line. Writes no page, and does not use nbconvert. kernel: of `Kernels.taken`;
    None: one of its own."""
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder, ExitStack() as stack:
        made = Path(folder) / executed.name  # papermill rewrites it after every cell
        if kernel is None:
            own = stack.enter_context(Kernels())
            kernel = stack.enter_context(own.taken(source.resolve().parent))
        failure = _run_cells(source, made, parameters, timeout_s, left, executed.parent, kernel)
        if not made.exists():
            raise WorkbenchError(f"{source.name} cannot be run: {failure}")
        notebook = json.loads(made.read_text(encoding="utf-8"))
        notebook["metadata"]["papermill"]["output_path"] = str(executed)
        write_text(executed, json.dumps(notebook, indent=1, ensure_ascii=False), parents=True)
    return failure


def _run_cells(
    source: Path,
    made: Path,
    parameters: dict[str, Any],
    timeout_s: int,
    left: Bar,
    runs_dir: Path,
    kernel: Any,
) -> str | None:
    import papermill

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it raises the errors that it logs
    engine = _plain_engine(source.stem, left, cell_seconds(source, runs_dir))
    papermill.engines.papermill_engines.register(_ENGINE, engine)
    try:
        papermill.execute_notebook(
            str(source.resolve()),
            str(made),
            cwd=str(source.resolve().parent),
            parameters=parameters,
            engine_name=_ENGINE,
            kernel_name=NAME,
            language="python",
            progress_bar=False,
            execution_timeout=timeout_s,
            km=kernel,
        )
    except KeyboardInterrupt:  # the kernel ends papermill's task
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    except papermill.PapermillExecutionError as error:
        message = re.sub(r"\x1b\[[0-9;]*m", "", f"{error.ename}: {error.evalue}")
        return f"cell {error.cell_index + 1} failed: {message.splitlines()[0]}"
    except papermill.exceptions.PapermillException as error:
        return str(error).splitlines()[0]
    return None


_ENGINE = "workbench"


def _plain_engine(name: str, left: Bar, seconds: Mapping[str, float]) -> type:
    """A papermill engine that reports every code cell to `left`. (papermill's own progress bars
    would fill a log.)"""
    from papermill.engines import NBClientEngine

    class PlainEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> Any:
            n_cells, under_way = len(nb_man.nb.cells), [0.0]
            cell_start = nb_man.cell_start

            def start(cell: Any, cell_index: int | None = None, **more: Any) -> Any:
                if cell.cell_type == "code":
                    left.detail = f"{name} cell {(cell_index or 0) + 1} of {n_cells}"
                    left.update(under_way[0])
                    under_way[0] = seconds.get(cell.source, 0.0)  # 0: the given parameters
                return cell_start(cell, cell_index, **more)

            nb_man.cell_start = start
            done = super().execute_managed_notebook(nb_man, kernel_name, **kwargs)
            left.update(under_way[0])
            return done

    return PlainEngine


def parameters_of(path: str | PathLike[str]) -> dict[str, Any]:
    """What the notebook's cell tagged `parameters` assigns, by name: a literal, or None for other
    values. Empty without such a cell. Raises UsageError where the file is missing or no
    notebook."""
    import nbformat

    if not Path(path).is_file():
        raise UsageError(
            f"notebook {path} does not exist; `workbench notebooks copy notebooks` writes them"
        )
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(f"{path} is no notebook: {said}; give a file of Jupyter") from None
    if not (cells := notebook.cells):
        raise UsageError(f"{path} is no notebook: it has no cells; give a file of Jupyter")
    tagged = [c.source for c in cells if "parameters" in c.metadata.get("tags", ())]
    tree = ast.parse(tagged[0]) if tagged else ast.Module([], [])
    found = dict[str, Any]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            found |= {t.id: value for t in targets if isinstance(t, ast.Name)}
    return found
