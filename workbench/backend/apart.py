"""Compiles kernels in processes of their own, several at a time.

A compiler lets one thread of a process in at a time: llvmlite into LLVM, NVRTC into its front end.
So threads gain little. A process keeps what it compiles in the user's cache, where whoever wants a
kernel finds it. Where a process fails, its kernels are missing, and whoever wants one compiles it
himself, and has the error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from workbench.common.cores import usable_cores

EACH = 2  # kernels of a process, at least: it takes as long to start as to compile one
_ROOT = Path(__file__).resolve().parents[2]  # where `python -m` finds the package


def compiled_apart(module: str, wanted: Sequence[Any]) -> Iterator[None]:
    """Compiles on half of this process's cores at most, and yields once for each kernel. Does
    nothing where that would be less than two processes.

    module: its name; run with `python -m`, it calls `compile_given`.
    wanted: what each kernel is, in terms of JSON.
    """
    n = min(len(wanted) // EACH, usable_cores() // 2)
    if n < 2 or not sys.executable:
        return
    said: SimpleQueue[bool] = SimpleQueue()  # False: a process has ended
    with ExitStack() as stack:
        running = 0
        with suppress(OSError):  # where no process is to be had, the caller compiles
            for i in range(n):
                lines = _started(module, wanted[i::n], stack)
                threading.Thread(target=_listen, args=(lines, said), daemon=True).start()
                running += 1
        while running:
            if said.get():
                yield
            else:
                running -= 1


def _started(module: str, wanted: Sequence[Any], stack: ExitStack) -> IO[bytes]:
    """What a new process prints. `stack` ends the process."""
    quiet, ask = subprocess.DEVNULL, [sys.executable, "-m", module, json.dumps(wanted)]
    process = subprocess.Popen(ask, cwd=_ROOT, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None, "it is a pipe"
    return process.stdout


def _listen(lines: IO[bytes], said: SimpleQueue[bool]) -> None:
    with lines:
        for _ in lines:
            said.put(True)
    said.put(False)


def compile_given(one: Callable[[Any], Any]) -> None:
    """What a process does: `one` for each kernel that its argument names, and a line after it."""
    for kernel in json.loads(sys.argv[1]):
        one(kernel)
        print(flush=True)
