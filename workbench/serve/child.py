"""A server that is begun for a measurement and stopped behind it, and what its file says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from workbench.errors import UsageError, WorkbenchError
from workbench.model.gguf import open_gguf
from workbench.model.inspect import summary
from workbench.serve.targets import without_proxy

NORMAL = 1  # of `tokenizer.ggml.token_type`
DEFAULT_IDS = (100, 10_000)  # what llama.cpp's server-bench.py draws prompts from
# a thread of the server waits for the end of its standard input, which ends with this process,
# even where that is killed
ENDS_WITH_US = (
    "import os, signal, threading; threading.Thread(daemon=True, target=lambda: "
    "os.read(0, 1) or os.kill(os.getpid(), signal.SIGTERM)).start()"
)
POLL_S, STOP_S = 0.1, 30.0
BEGIN_S = 900.0  # a large model comes from a slow disk


@contextmanager
def served(arguments: Sequence[str], begin_s: float = BEGIN_S) -> Iterator[str]:
    """`workbench serve` with these arguments on a free port of this machine; gives its address once
    it is healthy. The body's end, or an error in it, stops the server.

    Raises WorkbenchError where the server ends before it is healthy, with its last line, or takes
    longer than begin_s.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        child = _start([*arguments, "--port", str(port)], log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, child, log, time.monotonic() + begin_s)
            yield url
        finally:
            _stop(child)


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _start(arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A session of its own keeps Ctrl-C from it: it is stopped when the measuring has ended."""
    code = f"{ENDS_WITH_US}; from workbench.cli import main; main({['serve', *arguments]!r})"
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def _wait(url: str, child: subprocess.Popen[bytes], log: IO[bytes], until: float) -> None:
    while not _healthy(url):
        if child.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            said = lines[-1].removeprefix("error: ") if lines else f"status {child.returncode}"
            raise WorkbenchError(f"the server did not begin: {said}")
        if time.monotonic() > until:
            raise WorkbenchError(f"{url}/health does not answer; begin the server, and give --url")
        time.sleep(POLL_S)


def _healthy(url: str) -> bool:
    try:
        with without_proxy().open(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # nobody listens yet, or 503 while the model is loaded
        return False


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Asks it to end, and ends it with all its processes where it does not."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the session is its own
        child.wait()
    if child.stdin is not None:
        child.stdin.close()


def normal_ids(path: str | Path) -> np.ndarray:
    """The ids of a file's normal tokens, int32: no control tokens, no unknown ones, no bytes.

    Raises ModelFileError for a file without a vocabulary.
    """
    with open_gguf(path) as file:
        types = np.asarray(file.get("tokenizer.ggml.token_type", list))
    return np.flatnonzero(types == NORMAL).astype(np.int32)


def id_range(text: str | None, n_vocab: int | None) -> np.ndarray:
    """Token ids from `100-10000`, int32, both ends included, and below n_vocab where that is known.

    None: DEFAULT_IDS, as far as they are there. Raises UsageError for anything else.
    """
    if text is None:
        high = DEFAULT_IDS[1] if n_vocab is None else min(DEFAULT_IDS[1], n_vocab - 1)
        return np.arange(min(DEFAULT_IDS[0], high // 2), high + 1, dtype=np.int32)
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UsageError(f"--ids {text!r} is no range of token ids; write it as 100-10000")
    if n_vocab is not None and int(last) >= n_vocab:
        raise UsageError(f"--ids {text} goes beyond the vocabulary of {n_vocab} tokens")
    return np.arange(int(first), int(last) + 1, dtype=np.int32)


def model_facts(path: str | Path) -> dict[str, Any]:
    """`model` of run.json, as far as the file says it."""
    found = summary(path)
    return {
        "file": Path(path).name,
        "hash": found.hash,
        "architecture": found.architecture,
        "name": found.name,
        "quant": found.types[0].dtype if found.types else None,
        "n_params": found.parameters,
        "file_bytes": found.file_bytes,
        "weight_bytes_per_token": found.weight_bytes_per_token,
    }
