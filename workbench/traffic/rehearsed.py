"""The kernels of a load, compiled before the load is offered to an engine of this process.

A server does not know its requests, and takes steps of all kinds before them (`first_steps.py`). A
load is known. So its requests are served once by an engine of the null device, which computes
nothing, and the shapes of its steps are those that the load will have. They follow from the
requests, from the cache and from how slots are chosen, not from weights: a tiny model will do. What
a step needs beyond these shapes is compiled when the step comes, as ever.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import lru_cache

from workbench.config import EngineConfig, Toggles
from workbench.engine import ready
from workbench.engine.engine import Engine
from workbench.graph.ir import StepShape
from workbench.model.synth.models import ON_CPU, write_named
from workbench.server.wire.worker import OwnEngine
from workbench.traffic import load
from workbench.traffic.bench import BenchSpec
from workbench.traffic.load import CLOSED, Arrivals, Lengths
from workbench.traffic.targets import Asking, over_pipe

NULL = "null"
# the toggles that the shapes of a load's steps follow from
SHAPING = ("kv_cache", "kv_growth", "batch_sizes", "slot_choice", "defrag", "sampling")
EACH = 4  # requests for each in flight; later requests have shapes of earlier ones


def make_ready(
    engines: Sequence[Engine], n_slots: int, settings: Sequence[Arrivals], spec: BenchSpec
) -> None:
    """Compiles the kernels of a load on each of these engines, all of them together. An engine
    whose steps are traced is left out: nothing is rehearsed beside a trace.

    n_slots: requests that an engine serves together. settings, spec: as `bench.serve_bench` takes
        them. Requests that come at a rate are rehearsed with every slot in use.
    """
    ready.make_ready(
        launched
        for engine in engines
        if engine.recorder is None
        for launched in engine.unready(shapes_of(engine, n_slots, settings, spec))
    )


def shapes_of(
    engine: Engine, n_slots: int, settings: Sequence[Arrivals], spec: BenchSpec
) -> tuple[StepShape, ...]:
    """The shapes of the steps in which an engine like this one serves the load, each once."""
    config = dataclasses.replace(
        EngineConfig(NULL, threads=1), n_ctx=engine.config.n_ctx, n_seqs=engine.config.n_seqs,
        n_ubatch=engine.config.n_ubatch, n_kv_pad=engine.config.n_kv_pad,
    )  # fmt: skip
    shaping = tuple((name, str(getattr(engine.settled, name))) for name in SHAPING)
    together = tuple(dict.fromkeys(setting.in_flight or n_slots for setting in settings))
    lengths = (spec.n_prompt, spec.n_gen)
    return _rehearsed(config, shaping, n_slots, together, lengths, spec.n_shared, spec.seed)


@lru_cache(64)
def _rehearsed(
    config: EngineConfig,
    shaping: tuple[tuple[str, str], ...],
    n_slots: int,
    together: tuple[int, ...],
    lengths: tuple[Lengths, Lengths],
    n_shared: int,
    seed: int,
) -> tuple[StepShape, ...]:
    toggles = Toggles(graph_reuse="set_rows", **dict(shaping))
    with (
        tempfile.TemporaryDirectory(prefix="workbench-") as folder,
        Engine.load(write_named(folder, *ON_CPU), config=config, toggles=toggles) as engine,
    ):
        ids = load.id_range(None, engine.model.n_vocab)
        target = over_pipe(OwnEngine(engine, n_slots))
        for row, n in enumerate(together):
            requests = load.draw(
                Arrivals(CLOSED, n), EACH * n, *lengths, ids, n_shared=n_shared, seed=seed, row=row
            )
            for _ in target.offer(requests, Asking()):
                pass
        return engine.steps.programs.shapes
