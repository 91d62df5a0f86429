"""Batches as a server has them: padded, a region for each sequence, its toggles all on.

A step of several has other kernels and parts of the cells than a sequence alone. Between batches
that are padded to the same shape these are the same: whoever stands beside a sequence, it has the
same logits, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

import workbench as wb
from tests.profiles import share
from tests.served import ids
from workbench.config import BEST, TogglePreset
from workbench.engine.batch import Entry
from workbench.engine.engine import Engine
from workbench.graph.ir import StepShape
from workbench.server.serving import serving

N_SEQS, ROOM = 8, 512
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


COMPANIES = {
    "first": Company({0: 3, 1: 9, OWN: 7, 3: 1, 4: 5, 5: 11, 6: 4}, {}, 1),
    "others": Company({0: 6, 1: 2, OWN: 7, 3: 8, 4: 1, 5: 10, 6: 3}, {1: 250, 4: 30}, 2),
    "fewer": Company({0: 12, 1: 5, OWN: 7, 3: 8, 6: 2}, {0: 3}, 3),
    "another place": Company({5: 4, 7: 9, 0: 1, 3: 12, OWN: 7}, {7: 190}, 4),
}


def tokens_of(company: Company, sequence: int, n: int, turn: int = 0) -> list[int]:
    """OWN has the same tokens in any company."""
    return ids(n, 1000 * (0 if sequence == OWN else company.seed) + 100 * sequence + turn).tolist()


def steps(company: Company) -> Iterator[list[Entry]]:
    """Prompts in one step, a token of each, and a prompt beside a token of the others."""
    yield [(s, tokens_of(company, s, n), "last") for s, n in company.prompts.items()]
    for i in range(N_TOKENS):
        yield [(s, tokens_of(company, s, 1, 20 + i), "last") for s in company.prompts]
    longer = next(iter(company.prompts))
    yield [(s, tokens_of(company, s, 13 if s == longer else 1, 40), "last")
           for s in company.prompts]  # fmt: skip


def answered(engine: Engine, company: Company) -> tuple[list[StepShape], dict[int, np.ndarray]]:
    """The shape of each step, and each sequence's logits behind each of them."""
    engine.reset()
    for s in company.prompts:
        if n := PAST if s == OWN else company.past.get(s, 0):
            engine.prefill(tokens_of(company, s, n, 99), "none", sequence=s)
    shapes, found = [], dict[int, list[np.ndarray]]()
    for work in steps(company):
        pending = engine.submit(work)
        shapes.append(pending.step.batch.shape)
        for (s, _, _), rows in zip(work, pending.each(), strict=True):
            found.setdefault(s, []).append(rows.copy())
    return shapes, {s: np.concatenate(rows) for s, rows in found.items()}


@pytest.mark.parametrize(("preset", "quant"), share(MODELS, every=3))
def test_company_changes_no_bit_in_batches_of_a_shape(tiny_model, preset, quant):
    """With others, with fewer, and in another place among them."""
    with wb.Engine.load(
        tiny_model(preset, quant), device="embedded", n_ctx=N_SEQS * ROOM, n_seqs=N_SEQS,
        n_ubatch=64, threads=2, toggles=serving("embedded", TogglePreset(BEST)),
    ) as engine:  # fmt: skip
        shapes, wanted = answered(engine, COMPANIES["first"])
        assert {s.n_kv for s in shapes} == {ROOM} and {s.n_seqs for s in shapes} == {N_SEQS}
        assert [s.n_tokens for s in shapes] == [48, *[N_SEQS] * N_TOKENS, 24]
        for name, company in COMPANIES.items():
            shapes_there, found = answered(engine, company)
            assert shapes_there == shapes, name
            assert np.array_equal(found[OWN], wanted[OWN]), name
        assert not np.array_equal(found[0], wanted[0])  # and others are others
