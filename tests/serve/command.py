"""`workbench serve` with an engine process that is none: `python -m tests.serve.command FLAGS`.

What the engine process is given is printed, and `FAKE` in a flag's place changes it.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.serve.fake_worker import FakeWorker
from tests.serve.live import texts_of


def start(
    model: Path, config: Any, toggles: Any, n_slots: int, n_waiting: int
) -> tuple[Connection, FakeWorker]:
    """As `workbench.serve.worker.start`."""
    print(f"started {model.name} {config.device} {n_slots} {n_waiting}", file=sys.stderr)
    n_vocab = texts_of(model).tokenizer.n_vocab
    worker = FakeWorker(n_vocab, config.n_ctx, n_slots, n_waiting, step_s=0.02)
    worker.killed = config.n_ctx == 1  # dies before it has loaded
    return worker.start()


if __name__ == "__main__":
    module: Any = ModuleType("workbench.serve.worker")
    module.start = start
    sys.modules[module.__name__] = module
    from workbench.cli import main

    main(["serve", *sys.argv[1:]])
