"""The command `workbench serve`; as `python -m tests.server.command FLAGS` with an engine process
that is none.

What that engine process is given is printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from tests.server.fake_worker import FakeWorker
from tests.server.live import texts_of
from workbench.cli import main
from workbench.server.wire import worker
from workbench.server.wire.worker import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
BEGIN_S = 60.0
NO_ENGINE = ("tests.server.command",)


@contextmanager
def served(
    tmp_path: Path, *arguments: object, module: Sequence[str] = NO_ENGINE
) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """The command, its address once it is ready, and where its stderr goes. module: what to run."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, "--port", "0", *map(str, arguments)],
            cwd=ROOT, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + BEGIN_S
        while not (found := re.search(r"ready: \S+ at (\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        yield process, found[1], log
    finally:
        process.kill()
        process.wait()


def start(settings: WorkerSettings, n_fronts: int) -> tuple[list[Connection], FakeWorker]:
    """As `workbench.server.wire.worker.start`."""
    config, n_slots, n_waiting = settings.config, settings.n_slots, settings.n_waiting
    path, changes = Path(settings.model), settings.toggles.changes
    said = (path.name, config.device, n_slots, config.n_seqs, n_waiting, changes)
    print("started", *said, file=sys.stderr)
    n_vocab = texts_of(path).tokenizer.n_vocab
    return FakeWorker(n_vocab, config.n_ctx, n_slots, n_waiting, step_s=0.005).start(n_fronts)


if __name__ == "__main__":
    worker.start = start  # type: ignore[assignment]
    main(["serve", *sys.argv[1:]])
