"""Requests served by slots, and the slow twin of each: the request with an engine to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from workbench.engine.engine import Engine
from workbench.engine.slots.asks import LENGTH, STOP, Ask, Ended, Logprobs, Stepped
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampler, drawn

# what a server has on a device that draws, and looks at results behind the step
BEHIND = {
    "sampling": "device", "results": "behind", "graph_reuse": "set_rows", "step_wait": "outputs",
    "sync": "packed_implicit", "copy_stream": "compute", "host_source": "pinned_ring_2",
}  # fmt: skip
APART = {"kv_cache": "per_sequence", "graph_reuse": "set_rows"}

ROUNDING = 2e-4  # of a logit of the tiny models in F32, whose spread is 1. Measured: 4e-5 at most


class Alone(NamedTuple):
    """What a request makes alone. logits: (tokens and an end, n_vocab), that each was drawn of."""

    tokens: list[int]
    reason: str
    logits: np.ndarray


def alone(engine: Engine, ask: Ask) -> Alone:
    """A step for the prompt, a step for each token, and draws on the host."""
    engine.reset()
    sampler, made, rows = Sampler(ask.sampling, ask.seed), list[int](), list[np.ndarray]()
    most = min(ask.max_tokens, engine.cache.n_ctx_seq - len(ask.tokens) + 1)
    given = ask.tokens.tolist()
    while True:
        row = engine.prefill(given)[-1].copy()
        token = sampler(row)
        rows.append(row)
        if token in ask.ends:
            return Alone(made, STOP, np.stack(rows))
        made.append(token)
        if len(made) == most:
            return Alone(made, LENGTH, np.stack(rows))
        given = [token]


def same(ask: Ask, found: list[int], wanted: Alone) -> bool:
    """Whether tokens are the twin's. Where the first that differs, or an end, stands for a draw
    that rounding decides, what comes after it is not compared, and this is False. Any other one
    fails."""
    pairs = enumerate(zip(found, wanted.tokens, strict=False))
    i = next((i for i, (ours, theirs) in pairs if ours != theirs), -1)
    if i < 0 and len(found) == len(wanted.tokens):
        return True
    ends = ask.ends if i < 0 else set()
    if i < 0:
        i = min(len(found), len(wanted.tokens))
        assert len(found) < len(wanted.tokens) or wanted.reason == STOP, (ask, found)
    assert near(ask, wanted, i) & (ends | set(found[i : i + 1])), (ask, i, found)
    return False


def near(ask: Ask, wanted: Alone, i: int) -> set[int]:
    """The tokens that draw i may give from logits which are off by as much as rounding."""
    sampler, logits = Sampler(ask.sampling, ask.seed), wanted.logits[i]
    uniform = [sampler.uniform() for _ in range(i + 1)][-1]
    noise = np.random.default_rng(0).uniform(-ROUNDING, ROUNDING, (64, len(logits)))
    return {drawn(logits + off.astype(np.float32), ask.sampling, uniform) for off in noise}


class Told:
    """What slots have told of each request, in the order of steps. Nobody is told of twice."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Logprobs | None]] = {}
        self.scores: dict[int, list[Logprobs]] = {}
        self.ended: dict[int, Ended] = {}

    def take(self, made: Stepped) -> None:
        for number, scored in made.scores.items():
            assert scored and number not in self.ended and number not in self.tokens
            self.scores.setdefault(number, []).extend(scored)
        for number, token, known in made.tokens:
            assert number not in self.ended, f"a token of {number} behind its end"
            self.tokens.setdefault(number, []).append(token)
            self.logprobs.setdefault(number, []).append(known)
        for end in made.ended:
            assert end.number not in self.ended, f"{end.number} has ended twice"
            self.ended[end.number] = end
            assert end.timings.n_made == len(self.tokens.get(end.number, ())), end


def check_cells(slots: Slots) -> None:
    """Each slot's cells are of the tokens it keeps, and all cells in use are of some slot."""
    cache = slots.engine.cache
    for slot in slots.slots:
        assert cache.length(slot.sequence) == len(slot.kept) >= slot.kept.n_known
    kept = sum(len(slot.kept) for slot in slots.slots)
    owned = {(cache.region(slot.sequence), int(cell))
             for slot in slots.slots for cell in cache.cells(slot.sequence)}  # fmt: skip
    assert cache.n_used == len(owned) <= kept
    assert cache.n_regions == 1 or cache.n_used == kept
    assert int(cache.free.n_owners.sum()) == kept


def go_on(slots: Slots, n: int, told: Told) -> None:
    """n steps."""
    for _ in range(n):
        told.take(slots.step())
        check_cells(slots)


def serve(
    slots: Slots, asks: Iterable[Ask], each: Callable[[Slots], None] = check_cells, told=None
) -> Told:
    """All of these at once, until nothing is left to do. each: called behind every step."""
    told = told or Told()
    for ask in asks:
        assert not slots.refusal(ask)
        slots.ask(ask)
    while not slots.idle:
        told.take(slots.step())
        each(slots)
    return told


def ids(n: int, seed: int = 0) -> np.ndarray:
    """A prompt of n tokens of the tiny models."""
    return np.random.default_rng(seed).integers(3, 900, n).astype(np.int32)
