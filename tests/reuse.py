"""What tests of graph reuse compute on every device, and how they see a program's stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.backend.issue.args import VIEW
from workbench.backend.issue.prepared import Prepared
from workbench.engine.engine import Engine
from workbench.program.commands import Launch, Program, Replay
from workbench.program.first_cell import is_view

N_CTX, N_UBATCH, PAD = 768, 16, 256


def mixed_run(engine: Engine) -> list[np.ndarray]:
    """Logits of steps of several sequences, with cells copied, removed, shifted and stored again in
    holes. Each step finds its cells in a row, and the same cells in every way of reuse."""
    rng = np.random.default_rng(6)
    found: list[np.ndarray] = []

    def step(*entries: tuple[int, int]) -> None:
        work = [(s, rng.integers(3, 900, n).tolist(), "all") for s, n in entries]
        found.extend(engine.submit(work).each())  # type: ignore[arg-type]

    engine.reset()
    step((0, 7), (1, 1), (2, 5))
    for _ in range(4):
        step((2, 1), (0, 1), (1, 1))
    step((1, 4))
    engine.cache.copy(0, 3)
    step((3, 2), (0, 1))
    engine.cache.remove(2)  # holes of 5 and of 1
    step((4, 5))
    step((1, 1))
    engine.cache.remove(0, 4, 7)
    engine.cache.remove(3, 4, 7)
    engine.cache.shift(1, 9, 2, None)
    for n in (3, 1, 1, 1, 6):
        step((1, n))
    engine.prefill(rng.integers(3, 900, 40).tolist(), sequence=4)
    step((4, 1), (0, 1))
    engine.cache.keep(4)
    step((0, 3))
    return found


def views_of(program: Program) -> list[tuple[Any, ...]]:
    """Name, range and parameters of each store to a view, in order."""
    return [
        (c.node.name, *[(w.buffer.name, w.offset, w.nbytes) for w in c.writes], c.node.params)
        for c in program.singly()
        if isinstance(c, Launch) and is_view(c.node)
    ]


def view_addresses(prepared: Prepared) -> list[int]:
    """Where each store to a view, also in a plan, goes to on its device; not on the host."""
    found = []
    for number, issued in prepared.issued.items():
        command = prepared.program.commands[number]
        planned = isinstance(command, Replay)
        parts = zip(command.parts, issued.parts, strict=True) if planned else [(command, issued)]
        found += [i.block[VIEW] for c, i in parts if isinstance(c, Launch) and is_view(c.node)]
    return found
