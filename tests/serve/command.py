"""`workbench serve` with an engine process that is none: `python -m tests.serve.command FLAGS`.

What the engine process is given is printed. With a context of 16 tokens it dies at once.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tests.serve.fake_worker import FakeWorker
from tests.serve.texts import texts_of
from workbench.cli import main
from workbench.server.wire import worker
from workbench.server.wire.worker import WorkerSettings


def start(settings: WorkerSettings, n_fronts: int) -> tuple[list[Connection], FakeWorker]:
    """As `workbench.server.wire.worker.start`."""
    config, n_slots, n_waiting = settings.config, settings.n_slots, settings.n_waiting
    name = Path(settings.model).name
    said = (name, config.device, n_slots, config.n_seqs, n_waiting, settings.toggles.changes)
    print("started", *said, file=sys.stderr)
    n_vocab = texts_of(Path(settings.model)).tokenizer.n_vocab
    fake = FakeWorker(n_vocab, config.n_ctx, n_slots, n_waiting, step_s=0.005)
    fake.killed = config.n_ctx == 16  # dies before it has loaded
    return fake.start(n_fronts)


if __name__ == "__main__":
    worker.start = start  # type: ignore[assignment]
    main(["serve", *sys.argv[1:]])
