"""Kernels of notebooks, which may start before their notebooks.

A kernel takes seconds to start and to import the package, and a second to end. A kernel that was
asked to start early has done so while another notebook's page was written, or while that notebook
ran on a GPU, where the host has cores to spare. A kernel that is no longer needed ends meanwhile,
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAME = "python3"
IMPORTS = (
    "import workbench.answers.conclusions, workbench.report.plots, scipy.stats; "
    "del workbench, scipy"
)
ARGUMENTS = (
    "--IPKernelApp.log_level=CRITICAL",  # a kernel that is stopped in a cell is no error
    f"--IPKernelApp.exec_lines={IMPORTS}",  # every notebook waits for these
)


class Kernels:
    """Hands out one kernel for each notebook (`taken`), and ends them all with its body.

    A kernel has no names but IPython's. Errors of a kernel that does not start are raised where the
    notebook needs it, by its client.
    """

    def __init__(self) -> None:
        self._early: dict[Path, Any] = {}
        self._ending: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for manager in self._early.values():
            _sync(manager.shutdown_kernel)(now=True)
        self._early.clear()
        self._end()

    def start(self, folder: Path) -> None:
        """Begins to start a kernel that runs in `folder`, for the next notebook there."""
        if folder not in self._early:
            self._early[folder] = started(folder)

    @contextmanager
    def taken(self, folder: Path, spare: bool = False) -> Iterator[Any]:
        """The `AsyncKernelManager` of a kernel that runs in `folder`; its start may be under way.
        After the body the kernel is asked to end, which nobody waits for.

        spare: the host has cores to spare. Where it has none, a kernel that still ends would take
        time from this one, so its end is waited for first."""
        if not spare:
            self._end()
        manager = self._early.pop(folder, None) or started(folder)
        try:
            yield manager
        finally:
            if manager.has_kernel:
                _sync(manager.request_shutdown)()
                self._ending.append(manager)

    def _end(self) -> None:
        """Waits for kernels that were asked to end; kills those that do not."""
        while self._ending:
            manager = self._ending.pop()
            _sync(manager.finish_shutdown)()
            _sync(manager.cleanup_resources)()


def started(folder: Path) -> Any:
    """The `AsyncKernelManager` of a kernel whose start has begun."""
    from jupyter_client import AsyncKernelManager

    manager = AsyncKernelManager(kernel_name=NAME)
    _sync(manager.start_kernel)(extra_arguments=[*ARGUMENTS], cwd=str(folder))
    return manager


def _sync(asynchronous: Any) -> Any:
    from jupyter_core.utils import run_sync

    return run_sync(asynchronous)
