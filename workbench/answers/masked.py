"""The blocks of a cache that attention visits: masks drawn, blocks counted, a prompt traced.

Nothing is timed here; `skipped.py` measures times."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import workbench as wb
from workbench.benchmarks.compare.arms import switched
from workbench.common.tables import Table
from workbench.config import Toggles
from workbench.engine.cache.extent import WAYS
from workbench.engine.cache.visits import CELLS, groups, visited
from workbench.engine.look.watch import Watch
from workbench.model.inputs import MASK, REGIONS
from workbench.trace.profile import Profile, profile

OFF, IN_LOOP, TAIL, CLASSES = (f"skip_masked_kv={way}" for way in WAYS)
ALWAYS = "skip_gate=always"
# arms of one sequence by name: tail with the gate of #14924, and ways with an open gate
PROMPTS = {
    "off": OFF, "in_loop": IN_LOOP, "tail": TAIL, "tail, gate open": f"{TAIL} {ALWAYS}",
    "classes, gate open": f"{CLASSES} {ALWAYS}",
}  # fmt: skip
REGIONS_EACH, ONE_REGION = "kv_cache=per_sequence", "kv_cache=unified"
# arms of several sequences: a region for each, and one for all
TOGETHER: dict[str, str] = {
    **{way: f"{REGIONS_EACH} skip_masked_kv={way}" for way in WAYS},
    "unified tail": f"{ONE_REGION} skip_masked_kv=tail",
}
DRAWN = ("off", "tail")  # ways of the traces
DEPTHS = (30, 300, 80, 150, 60, 480, 120, 220)  # of 8 sequences, cells
Begun = list[tuple[int, int]]  # sequences and their tokens


class Scene(NamedTuple):
    """A step: the tokens in the cache before it, and the tokens it computes."""

    name: str
    cache: str
    before: Begun
    work: Begun


def scenes() -> list[Scene]:
    """Steps with different kinds of masks."""
    each = [*enumerate(DEPTHS)]
    token = [(i, 1) for i in range(len(DEPTHS))]
    three, more = [(0, 100), (1, 180), (2, 60)], [(0, 40), (1, 40), (2, 40)]
    return [
        Scene("128 of a prompt", ONE_REGION, [(0, 192)], [(0, 128)]),
        Scene("3 prompts", ONE_REGION, three, more),
        Scene("3 prompts", REGIONS_EACH, three, more),
        Scene("a token of 8", ONE_REGION, each, token),
        Scene("a token of 8", REGIONS_EACH, each, token),
    ]


def _take(engine: wb.Engine, tokens: Begun) -> None:
    """Computes some tokens of each sequence in one step."""
    engine.submit([(i, _ids(engine, n), "last") for i, n in tokens]).wait()


def _ids(engine: wb.Engine, n: int) -> list[int]:
    return (np.arange(n) % (engine.model.n_vocab - 1) + 1).tolist()


def _fill(engine: wb.Engine, begun: Begun) -> None:
    engine.reset()
    for sequence, n in begun:
        engine.prefill(_ids(engine, n), sequence=sequence)


class _Masks(Watch):
    """Keeps mask, regions and sequences of the last step."""

    looks_at_batches = True

    def batch(self, batch: Any, program: Any) -> None:
        regions = batch.values.get(REGIONS)
        self.mask = batch.values[MASK].copy()
        self.firsts = None if regions is None else regions[:, 0].copy()
        self.sequences = batch.sequences.copy()


def mask_frames(engine: wb.Engine) -> dict[str, pd.DataFrame]:
    """For `plots.kv_blocks`: the blocks that each way visits in the masks of some steps, as if its
    gate were open."""
    frames = {}
    for scene in scenes():
        with engine.variant(switched(engine.toggles, scene.cache)) as side:
            _fill(side, scene.before)
            masks, before = _Masks(), side.untraced
            side.look(None, masks)
            _take(side, scene.work)
            side.look(None, before)
        frames[f"{scene.name}\n{scene.cache.partition('=')[2]}"] = _blocks(masks)
    return frames


def _blocks(masks: _Masks) -> pd.DataFrame:
    mask = masks.mask
    firsts = groups(len(mask), masks.firsts)
    ends = np.append(firsts[1:], len(mask))
    begins = np.arange(0, mask.shape[1], CELLS)
    seen = mask != -np.inf
    some, every = (
        kind.reduceat(kind.reduceat(seen, firsts, axis=0), begins, axis=1)
        for kind in (np.logical_or, np.logical_and)
    )
    what = np.where(every, "all", np.where(some, "some", "none"))
    group, block = (at.ravel() for at in np.indices(some.shape))
    parts = [
        pd.DataFrame(
            {
                "way": way, "token": firsts[group], "n_tokens": (ends - firsts)[group],
                "cell": begins[block], "n_cells": CELLS, "seen": what.ravel(),
                "visited": visited(mask, way, masks.firsts).ravel(),
                "sequence": masks.sequences[firsts[group]],
            }
        )
        for way in WAYS
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def visits_table(engine: wb.Engine, most: int) -> pd.DataFrame:
    """The share of blocks that each way visits with an open gate, counted as the steps are taken,
    and whether the gate of #14924 is open. most: tokens of a prompt that is computed at once."""
    whole = Scene(f"{most:,} of a prompt", ONE_REGION, [], [(0, most)])
    opened = {"in_loop": IN_LOOP, "tail": f"{TAIL} {ALWAYS}", "classes": f"{CLASSES} {ALWAYS}"}
    rows: list[dict[str, Any]] = []
    for scene in [*scenes(), whole]:
        row: dict[str, Any] = {
            "step": scene.name,
            "cache": scene.cache.partition("=")[2],
            "gate": "closed" if _visits(engine, scene, TAIL)[0] == "off" else "open",
        }
        row |= {way: f"{_visits(engine, scene, arm)[1]:.0%}" for way, arm in opened.items()}
        rows.append(row)
    return Table(rows).shown(keys=["step", "cache"])


def _visits(engine: wb.Engine, scene: Scene, arm: str) -> tuple[str, float]:
    """The way that a step takes with an arm, and the share of blocks that it visits."""
    with engine.variant(switched(engine.toggles, f"{scene.cache} {arm}")) as side:
        _fill(side, scene.before)
        with wb.kv_visits(side) as counted:
            _take(side, scene.work)
    return str(counted[0].way), counted.visited / (counted.visited + counted.skipped)


def prompt_traces(engine: wb.Engine, background: Toggles, n_tokens: int) -> dict[str, Profile]:
    """Traces of a prompt of n_tokens, computed at once, by way; the gate is open."""
    found = {}
    for way in DRAWN:
        toggles = switched(background, f"skip_masked_kv={way} {ALWAYS}")
        with engine.variant(toggles) as side:
            _fill(side, [(0, n_tokens)])
            with profile(side, window=(3, 3)) as found[f"skip_masked_kv={way}"]:
                for _ in range(6):
                    side.reset()
                    _take(side, [(0, n_tokens)])
    return found
