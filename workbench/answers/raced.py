"""Orderings that race, run all the same: how many prompts get wrong tokens.

A prompt of several ubatches is computed with no wait between them. The host writes the next
ubatch's inputs into the same staging memory, and a copy that has not run yet takes those. The
checker says so without a run (`proofs.py`); here the embedded device shows it, on any machine. It
has the contract of a GPU, so what goes wrong here may go wrong there. What goes right proves
nothing: a race is lost only where the host is fast enough.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from workbench.common.errors import WorkbenchError
from workbench.common.tables import Table
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.model.synth.models import write_model
from workbench.program.check import hazards

# of a prompt, and of each of its parts. The one worker computes a part for longer than the host
# prepares the next part, however many cores the machine has.
N_TOKENS, N_UBATCH, THREADS = 128, 32, 1
N_NEXT = 4  # tokens generated behind a prompt
# where waits are, where the host writes inputs
ORDERINGS: dict[str, dict[str, str]] = {
    "copy_boundary": {"sync": "copy_boundary"},
    "implicit": {"sync": "implicit"},
    "implicit, pageable": {"sync": "implicit", "host_source": "pageable"},
    "implicit, a ring of 2": {"sync": "implicit", "host_source": "pinned_ring_2"},
    "event_guarded": {"sync": "event_guarded", "copy_stream": "own"},
}


def wrong_table(n_prompts: int = 20, seed: int = 0) -> Table:
    """A row for each of ORDERINGS: `pairs that race`, by the checker, of commands of a prompt of
    several ubatches; and `wrong`, how many of n_prompts random prompts gave other tokens than with
    a wait after every step (or no finite logits), `of` n_prompts. On the embedded device, with a
    tiny model of random weights that is written for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model("tiny-llama", "Q8_0", Path(folder, "tiny-llama-Q8_0.gguf"))
        with Engine.load(
            path, device="embedded", n_ctx=256, n_ubatch=N_UBATCH, threads=THREADS, unsafe=True,
            toggles=Toggles(graph_reuse="set_rows"),
        ) as engine:  # fmt: skip
            rng = np.random.default_rng(seed)
            prompts = rng.integers(1, engine.model.n_vocab, (n_prompts, N_TOKENS))
            right = _generated(engine, engine.toggles, prompts)
            return Table(
                {
                    "ordering": name,
                    "pairs that race": _n_races(engine, toggles),
                    "wrong": sum(
                        a != b
                        for a, b in zip(_generated(engine, toggles, prompts), right, strict=True)
                    ),
                    "prompts": n_prompts,
                }
                for name, toggles in _arms(engine.toggles).items()
            )


def _arms(base: Toggles) -> Mapping[str, Toggles]:
    shared = base.changed() | {"step_wait": "outputs"}
    return {name: Toggles(**(shared | own)) for name, own in ORDERINGS.items()}


def _n_races(engine: Engine, toggles: Toggles) -> int:
    with engine.variant(toggles) as side:
        return hazards.check_cycle(hazards.apart(side.cycle(N_TOKENS))).n_races


def _generated(engine: Engine, toggles: Toggles, prompts: np.ndarray) -> list[tuple[int, ...]]:
    """The tokens behind each prompt; none where the logits are not finite."""
    found = list[tuple[int, ...]]()
    with engine.variant(toggles) as side:
        for prompt in prompts.tolist():
            side.reset()
            try:
                found.append(tuple(side.generate(tokens=prompt, max_tokens=N_NEXT).tokens))
            except WorkbenchError:
                found.append(())
    return found
