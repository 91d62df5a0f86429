"""What the races of a pipeline do on real devices: data/results/DEVICE-pipeline-races-MODEL.json.

llama.cpp #20463: two devices, and ubatches without a wait of the host, gave a perplexity of 2382.
The checker finds the orderings that race, and refuses them; here they run all the same (`unsafe`).
A prompt of several ubatches is computed with `step_wait=outputs` and every ordering of copies and
waits, with inputs in one place of pinned memory or in a ring of four (SOURCES). The logits of the
last ubatch are compared with those of an ordering that has every wait:

    orderings   toggles; races, the pairs of commands that the checker finds; and for each run, how
                many logits are not bit-equal

An ordering without a race must have no such logits in any run. An ordering with races has some
where a device was slow or quick enough, so a run without any proves nothing. The checker needs no
luck.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import workbench as wb
from data.measure.matrix import RACED, Row
from data.measure.recorded import Recorded, model_of
from data.measure.session import Session
from data.measure.sources import ANSWERS, age
from data.measure.tables import Line, Table, span
from workbench.benchmarks.runs import provenance
from workbench.common.errors import UsageError
from workbench.config import CopyStream, HostSource, StepWait, SyncMode, Toggles
from workbench.program.check import hazards

N_UBATCH, UBATCHES, RUNS = 128, 8, 3
FILE = f"pipeline-races-{RACED}"
KEPT = {"graph_reuse": "set_rows"}
SOURCES = [HostSource.PINNED, HostSource.PINNED_RING_4]  # one place for inputs, or a ring of them


def orderings() -> Iterator[Toggles]:
    """Every ordering of a train, each named by values other than `auto`."""
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
    """Measures each row, and writes its file."""
    for row in rows:
        with wb.Engine.load(
            session.path(row.model), device=session.device, n_ctx=N_UBATCH * (UBATCHES + 1),
            n_ubatch=N_UBATCH, n_seqs=1, n_devices=row.n_devices, unsafe=True,
            toggles=Toggles(**KEPT),
        ) as engine:  # fmt: skip
            found = {**provenance.collect(engine), **compared(engine, session.quick)}
        session.write(row, found)
        raced, safe = (
            [any(o["differing"]) for o in found["orderings"] if bool(o["races"]) == races]
            for races in (True, False)
        )
        said = (
            f"of {len(raced)} orderings that race, {sum(raced)} gave other logits; of "
            f"{len(safe)} that do not, {sum(safe)}"
        )
        print(f"{session.at(row).name}: {said}", flush=True)


def compared(engine: wb.Engine, quick: bool = False) -> dict[str, Any]:
    """The figures of the module's docstring. engine: unsafe, with every wait."""
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
    """The logits of the last ubatch of a prompt; nothing waits for its other ubatches."""
    engine.reset()
    engine.prefill(tokens[:-N_UBATCH], outputs="none")
    return engine.prefill(tokens[-N_UBATCH:], outputs="all")


NAMES = ("sync", "copy_stream", "host_source", "n_copies")  # what an ordering is recorded by


def lines(recorded: Recorded) -> Iterator[Line]:
    """A line for each sync mode and copy stream of the recorded orderings."""
    by: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in (recorded.file(FILE) or {"orderings": ()})["orderings"]:
        by.setdefault((one["toggles"]["sync"], one["toggles"]["copy_stream"]), []).append(one)
    for (sync, stream), of in by.items():
        raced = [o for o in of if o["races"]]
        yield Line({
            "sync": sync, "copy_stream": stream, "orderings": str(len(of)),
            "that race": str(len(raced)),
            "pairs that race": span(o["races"] for o in raced),
            "gave other logits": str(sum(any(o["differing"]) for o in raced)),
            "logits that differ": span(n for o in raced for n in o["differing"] if n),
            "safe ones that did": str(sum(any(o["differing"]) for o in of if not o["races"])),
        })  # fmt: skip


def where(recorded: Recorded) -> str:
    """The caption of the table; empty where nothing is recorded."""
    if not (found := recorded.file(FILE)):
        return ""
    engine = found["engine"]
    return (
        f"{engine['device_description']}, {engine['config']['n_devices']} of them; "
        f"{model_of(found)}; prompts of {found['n_tokens']} tokens, {found['n_ubatch']} at once; "
        f"the {found['logits']:,} logits of the last {found['n_ubatch']}, {found['runs']} runs of "
        f"each ordering (`host_source` by `n_copies`), `unsafe`, beside those with every wait in "
        f"place; {age(found, ANSWERS)}."
    )


RACES = Table("Races on real devices", lines, said=where)
