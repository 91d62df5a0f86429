"""What the races of a pipeline do on real devices: data/results/DEVICE-pipeline-races-MODEL.json.

llama.cpp #20463: two devices, and ubatches without a wait of the host, gave a perplexity of 2382.
The checker says which orderings race, and refuses them; here they run all the same (`unsafe`). A
prompt of several ubatches is computed with `step_wait=outputs` and every ordering of copies and
waits, inputs in one place of pinned memory (SOURCES) or in a ring of four.
The rows of its last ubatch are compared with those of an ordering with every wait in place:

    orderings   toggles; races, the pairs of commands that the checker finds; and of each run, how
                many logits are not bit-equal

An ordering without a race must have none in any run. One with races has some where a device was
slow or quick enough: a run with none proves nothing, and the checker needs no luck.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import workbench as wb
from data.measure.matrix import Row
from data.measure.racing_tables import NAMES, said
from data.measure.session import Session
from workbench.bench import provenance
from workbench.config import CopyStream, HostSource, StepWait, SyncMode, Toggles
from workbench.errors import UsageError
from workbench.program.check import hazards

N_UBATCH, UBATCHES, RUNS = 128, 8, 3
KEPT = {"graph_reuse": "set_rows"}
SOURCES = [HostSource.PINNED, HostSource.PINNED_RING_4]  # one place for inputs, or a ring of them


def orderings() -> Iterator[Toggles]:
    """Every ordering of a train that names what it means, `auto` in none."""
    of = {name: Toggles.values(name) for name in NAMES} | {"host_source": SOURCES}
    for values in itertools.product(*of.values()):
        wanted = dict(zip(NAMES, values, strict=True))
        if SyncMode.AUTO in values or wanted["copy_stream"] == CopyStream.AUTO:
            continue
        try:
            yield Toggles(**wanted, **KEPT, step_wait=StepWait.OUTPUTS)
        except UsageError:  # these clash
            continue


def racing(session: Session, _: None, rows: list[Row]) -> None:
    """Writes the file of each row."""
    for row in rows:
        with wb.Engine.load(
            session.path(row.model), device=session.device, n_ctx=N_UBATCH * (UBATCHES + 1),
            n_ubatch=N_UBATCH, n_seqs=1, n_devices=row.n_devices, unsafe=True,
            toggles=Toggles(**KEPT),
        ) as engine:  # fmt: skip
            found = {**provenance.collect(engine), **compared(engine, session.quick)}
        session.write(row, found)
        print(f"{session.at(row).name}: {said(found)}", flush=True)


def compared(engine: wb.Engine, quick: bool = False) -> dict[str, Any]:
    """See the module. engine: unsafe, every wait in place."""
    runs = 1 if quick else RUNS
    n, vocabulary = N_UBATCH * UBATCHES, engine.model.n_vocab
    tokens = np.random.default_rng(20463).integers(3, vocabulary, n).tolist()
    wanted = last_rows(engine, tokens)
    judged = []
    for toggles in orderings():
        with engine.variant(toggles) as variant:
            pairs = hazards.races(variant.programs(n), one_order=True)
            differing = [
                int(np.count_nonzero(last_rows(variant, tokens) != wanted)) for _ in range(runs)
            ]
        changed = {name: str(getattr(toggles, name)) for name in NAMES}
        judged.append({"toggles": changed, "races": len(pairs), "differing": differing})
    return {
        "n_tokens": n, "n_ubatch": N_UBATCH, "logits": int(wanted.size), "runs": runs,
        "orderings": judged,
    }  # fmt: skip


def last_rows(engine: wb.Engine, tokens: list[int]) -> np.ndarray:
    """The logits of the last ubatch of a prompt, whose other ubatches nobody waits for."""
    engine.reset()
    engine.prefill(tokens[:-N_UBATCH], outputs="none")
    return engine.prefill(tokens[-N_UBATCH:], outputs="all")
