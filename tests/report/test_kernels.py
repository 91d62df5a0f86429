"""Kernels that start before their notebooks, and end without anybody waiting."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_core.utils import run_sync

from workbench.report import render
from workbench.report.kernels import Kernels


def kernels() -> list[psutil.Process]:
    """The kernels of this process that run."""
    children = psutil.Process().children()
    running = (p for p in children if p.status() != psutil.STATUS_ZOMBIE)
    return [p for p in running if "ipykernel_launcher" in " ".join(p.cmdline())]


def said(manager: Any, code: str) -> str:
    client = manager.client()
    client.start_channels()
    run_sync(client.wait_for_ready)(timeout=60)
    found: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        found.append(message["content"].get("text", ""))

    run_sync(client.execute_interactive)(code, output_hook=hear, timeout=60)
    client.stop_channels()
    return "".join(found)


@pytest.mark.long
def test_a_kernel_starts_before_its_notebook(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with Kernels() as handing_out:
        handing_out.start(tmp_path)
        handing_out.start(tmp_path)
        (early,) = kernels()
        with handing_out.taken(other) as manager:
            here = said(manager, "import os, sys; print(os.getcwd(), 'workbench' in globals())")
            assert here == f"{other} False\n"
            assert said(manager, "print('workbench.report.plots' in sys.modules)") == "True\n"
        with handing_out.taken(tmp_path) as manager:
            assert said(manager, "import os; print(os.getpid(), end='')") == f"{early.pid}"
            handing_out.start(tmp_path)
            os.kill(early.pid, signal.SIGKILL)  # as a cell may end its kernel
    assert kernels() == []


@pytest.mark.long
@pytest.mark.parametrize("device", ["embedded", "cuda"])
def test_other_kernels_take_no_time_from_a_cpu_that_measures(tmp_path, monkeypatch, device):
    """On a GPU the next starts while a notebook runs, and the last one may still end; else the next
    starts while the page is written, and the last one has ended."""
    own, seen = list[int](), list[set[int]]()

    def execute(source, executed, parameters, timeout_s, left, kernel):
        own.append(kernel.provisioner.pid)
        seen.append({process.pid for process in kernels()})
        executed.parent.mkdir(exist_ok=True)
        executed.write_text(source.read_text())

    monkeypatch.setattr(render, "execute_notebook", execute)
    books = [tmp_path / f"{name}.ipynb" for name in "abc"]
    for book in books:
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), book)
    export = render.export_html
    waiting = list[int]()

    def exported(*given: Any) -> str:
        waiting.append(len(kernels()))
        return export(*given)

    monkeypatch.setattr(render, "export_html", exported)
    render.render_all(books, tmp_path / "out", device=device, runs_dir=tmp_path / "runs")
    a, b, c = own
    if device == "cuda":
        assert seen[0] == {a, b} and {b, c} <= seen[1] <= {a, b, c}
        assert {c} <= seen[2] <= {a, b, c}, "after the last there is none"
    else:
        assert seen == [{a}, {b}, {c}]
    assert all(1 <= count <= 3 for count in waiting[:-1])
    assert kernels() == []


def test_no_kernel_is_left_where_the_body_fails(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), Kernels() as handing_out:
        handing_out.start(tmp_path)
        assert len(kernels()) == 1
        raise KeyboardInterrupt
    assert kernels() == []
