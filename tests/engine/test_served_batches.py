"""Batches as a server has them: padded, a region for each sequence, its toggles all on.

A sequence is answered as alone: rounding, since a step of several has other kernels and parts of
the cells. Between batches that are padded to the same shape these are the same. So whoever stands
beside a sequence, it has the same logits: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import workbench as wb
from tests.engine.test_sequences import QUANTISED, ROUNDING
from tests.profiles import share
from tests.served import ids, serve
from workbench.benchmarks.compare.answers import MARGIN_IN_RMS, compare_logits
from workbench.config import BEST, TogglePreset
from workbench.engine.batch import Entry
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.slots import Slots
from workbench.graph.ir import StepShape
from workbench.model.sampler import Sampling
from workbench.server.serving import serving

N_SEQS, ROOM, N_UBATCH = 8, 512, 64
OWN = 2  # the sequence that is looked at
PAST = 288  # its cells before it has company: all of its steps look at 512, in several parts
N_TOKENS = 4  # steps of a token of each, between prompts in one step and prompts beside tokens
MODELS = [("tiny-llama", "F32"), ("tiny-qwen3", "BF16"), ("tiny-llama-bias", "Q8_0"),
          ("tiny-qwen3", "Q4_K")]  # fmt: skip


class Company(NamedTuple):
    """prompts: of each sequence its tokens in the first step, in the order of all steps. Between 33
    and 48 of 5 to 7 sequences are padded to 48 of 8. past: cells that a sequence has before."""

    prompts: dict[int, int]
    past: dict[int, int]
    seed: int


FIRST = Company({0: 3, 1: 9, OWN: 7, 3: 1, 4: 5, 5: 11, 6: 4}, {}, 1)
OTHERS = {
    "others": Company({0: 6, 1: 2, OWN: 7, 3: 8, 4: 1, 5: 10, 6: 3}, {1: 250, 4: 30}, 2),
    "fewer": Company({0: 12, 1: 5, OWN: 7, 3: 8, 6: 2}, {0: 3}, 3),
    "another place": Company({5: 4, 7: 9, 0: 1, 3: 12, OWN: 7}, {7: 190}, 4),
}


def load(path: Path, device: str) -> Engine:
    return wb.Engine.load(
        path, device=device, n_ctx=N_SEQS * ROOM, n_seqs=N_SEQS, n_ubatch=N_UBATCH, threads=2,
        toggles=serving(device, TogglePreset(BEST)),
    )  # fmt: skip


def steps(company: Company) -> Iterator[list[Entry]]:
    """Prompts in one step, a token of each, and a prompt beside a token of the others."""
    yield [(s, tokens_of(company, s, n), "last") for s, n in company.prompts.items()]
    for i in range(N_TOKENS):
        yield [(s, tokens_of(company, s, 1, 20 + i), "last") for s in company.prompts]
    longer = next(iter(company.prompts))
    yield [(s, tokens_of(company, s, 13 if s == longer else 1, 40), "last")
           for s in company.prompts]  # fmt: skip


def tokens_of(company: Company, sequence: int, n: int, turn: int = 0) -> list[int]:
    """OWN has the same tokens in any company."""
    return ids(n, 1000 * (0 if sequence == OWN else company.seed) + 100 * sequence + turn).tolist()


def begin(engine: Engine, company: Company, sequences: list[int]) -> None:
    engine.reset()
    for s in sequences:
        if n := PAST if s == OWN else company.past.get(s, 0):
            engine.prefill(tokens_of(company, s, n, 99), "none", sequence=s)


def together(engine: Engine, company: Company) -> tuple[list[StepShape], dict[int, np.ndarray]]:
    """The shape of each step, and each sequence's logits behind each of them."""
    begin(engine, company, [*company.prompts])
    shapes, found = [], dict[int, list[np.ndarray]]()
    for work in steps(company):
        pending = engine.submit(work)
        shapes.append(pending.step.batch.shape)
        for (s, _, _), rows in zip(work, pending.each(), strict=True):
            found.setdefault(s, []).append(rows.copy())
    return shapes, {s: np.concatenate(rows) for s, rows in found.items()}


def alone(engine: Engine, company: Company, sequence: int) -> np.ndarray:
    """The same tokens with the engine to itself."""
    begin(engine, company, [sequence])
    own = [entry[1] for work in steps(company) for entry in work if entry[0] == sequence]
    return np.concatenate([engine.step(tokens, "last", sequence) for tokens in own])


# checks, for any device ---------------------------------------------------------------------------


def check_each_is_answered_as_alone(path: Path, device: str, allowed: float) -> None:
    """allowed: NMSE."""
    with load(path, device) as engine:
        for company in (FIRST, *OTHERS.values()):
            shapes, found = together(engine, company)
            assert [s.n_seqs for s in shapes] == [N_SEQS] * len(shapes)
            assert len(company.prompts) < N_SEQS
            for s, rows in found.items():
                answer = compare_logits(alone(engine, company, s), rows, "rounding", allowed)
                assert answer.holds, (company, s, str(answer))


def check_company_changes_no_bit(path: Path, device: str) -> None:
    """In batches of the same shape: with others, fewer, and in another place among them."""
    with load(path, device) as engine:
        shapes, wanted = together(engine, FIRST)
        assert {s.n_kv for s in shapes} == {ROOM}
        assert [s.n_tokens for s in shapes] == [48, *[N_SEQS] * N_TOKENS, 24]
        for name, company in OTHERS.items():
            shapes_there, found = together(engine, company)
            assert shapes_there == shapes, name
            assert np.array_equal(found[OWN], wanted[OWN]), name
        # and others are others
        assert not np.array_equal(found[0], wanted[0])


def check_served_tokens_are_those_of_each_alone(path: Path, device: str, allowed: float) -> None:
    """Greedy requests through slots, more than there are, with draws where a server has them.

    Each token is the best of the logits that its request has alone behind the same tokens. Where
    rounding may decide, one is as good that is off by as much. allowed: NMSE of logits.
    """
    with load(path, device) as engine:
        assert device == "host" or (engine.can_draw and engine.issuer.is_ahead)
        slots, rng = Slots(engine, N_SEQS - 1), np.random.default_rng(7)
        sizes = rng.integers((1, 4), (90, 16), (12, 2)).tolist()
        asks = [Ask(i, ids(n, i), most, Sampling(), i) for i, (n, most) in enumerate(sizes)]
        made = serve(slots, asks).tokens
        n_best = 0
        for ask in asks:
            engine.reset()
            given = ask.tokens.tolist()
            assert len(made[ask.number]) == ask.max_tokens
            for token in made[ask.number]:
                row = engine.prefill(given)[-1].astype(np.float64)
                off = MARGIN_IN_RMS * np.sqrt(allowed * np.mean(row**2))
                assert row[token] >= row.max() - off, (ask, token)
                n_best += int(row.argmax()) == token
                given = [token]
        assert n_best >= 0.9 * sum(map(len, made.values()))


@pytest.mark.parametrize(("preset", "quant"), share(MODELS, every=3))
def test_company_changes_no_bit_and_each_is_as_alone(tiny_model, preset, quant):
    allowed = QUANTISED if quant.startswith("Q") else ROUNDING
    check_each_is_answered_as_alone(tiny_model(preset, quant), "embedded", allowed)
    check_company_changes_no_bit(tiny_model(preset, quant), "embedded")


def test_served_tokens_are_those_of_each_alone(tiny_model):
    path = tiny_model("tiny-llama", "F32")
    check_served_tokens_are_those_of_each_alone(path, "embedded", ROUNDING)
