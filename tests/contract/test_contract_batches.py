"""Each sequence's logits in any batch are those it has alone, as the class of its toggles says.

Hypothesis draws the batches: which sequences, how many tokens of each, in which order, how often.
On the devices of a CPU a row of a product does not depend on the rows beside it. So with cells of
its own, in one part, a sequence has alone what it has in a batch, to the bit. In a unified cache it
has other cells than alone, and where cells are dealt out, n_kv says into how many shares: then
attention adds the same terms in another order, which rounds. With the very same cells, a step for
each entry of the batch, it is exact again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots.draws import FED

N_SEQS, N_UBATCH, MOST = 6, 24, 60  # MOST: tokens of a sequence
TEXTS = np.random.default_rng(18).integers(3, 900, (N_SEQS, MOST)).tolist()
# NMSE against the sequence alone, by the types of weights and cache: of sums in another order, of
# values of the cache that round the other way, and of 8-bit activations that do (one gives 2e-5)
TOLERANCE = {("F32", "f32"): 1e-11, ("F32", "f16"): 1e-6, ("Q8_0", "f16"): 2e-4}
NAMES = ("kv_cache", "batch_sizes", "kv_parts", "skip_masked_kv", "results")
EVERY = [*itertools.product(*(Toggles.values(name) for name in NAMES))]
PLAIN = ("per_sequence", "exact", "off", "off", "copy")
BEHIND = {"sync": "packed_implicit", "copy_stream": "compute", "host_source": "pinned_ring_2"}

Entry = tuple[int, int, str]  # sequence, tokens, outputs
Room = Callable[..., Engine]


@pytest.fixture(
    scope="module", params=[(d, *of) for d in ("embedded", "host") for of in TOLERANCE],
    ids="-".join,
)  # fmt: skip
def room(request, tiny_model) -> Iterator[tuple[Room, str, float]]:
    """An empty engine of these toggles; the device; and the tolerance."""
    device, quant, cache = request.param
    variants: dict[str, Engine] = {}
    with wb.Engine.load(
        tiny_model("tiny-llama", quant), device=device, n_ctx=N_SEQS * 64, n_seqs=N_SEQS,
        n_kv_pad=32, n_ubatch=N_UBATCH, threads=2, toggles=Toggles(),
        cache_type_k=cache, cache_type_v=cache,
    ) as first:  # fmt: skip

        def get(*values: str, **more: str) -> Engine:
            more |= dict(zip(NAMES, values, strict=True))
            more |= BEHIND if more["results"] == "behind" else {}
            toggles = Toggles(graph_reuse="set_rows", skip_gate="always", **more)
            if str(toggles) not in variants:
                variants[str(toggles)] = first.variant(toggles)
            variants[str(toggles)].reset()
            return variants[str(toggles)]

        yield get, device, TOLERANCE[quant, cache]
        for variant in variants.values():
            variant.close()


@st.composite
def batches(draw: st.DrawFn) -> list[list[Entry]]:
    """Steps of several sequences that fit n_ubatch and the context: prompts, parts of prompts and
    single tokens, mixed; or a token of each."""
    left, found = [MOST] * N_SEQS, []
    for _ in range(draw(st.integers(1, 5))):
        some = draw(st.permutations(range(N_SEQS)))[: draw(st.integers(1, N_SEQS))]
        singly, room, step = draw(st.booleans()), N_UBATCH, []
        for sequence in some:
            if most := min(1 if singly else 12, room, left[sequence]):
                n = draw(st.integers(1, most))
                step.append((sequence, n, draw(st.sampled_from(["last", "all", "none"]))))
                room, left[sequence] = room - n, left[sequence] - n
        found.append(step)
    return found


def together(engine: Engine, steps: list[list[Entry]]) -> dict[int, np.ndarray]:
    """Logits of each sequence, whose entries take its text in turn. Each step is submitted before
    anybody waits for the one before."""
    at, pending = [0] * N_SEQS, []
    for step in steps:
        work = []
        for sequence, n, outputs in step:
            work.append((sequence, TEXTS[sequence][at[sequence] : at[sequence] + n], outputs))
            at[sequence] += n
        pending.append((step, engine.submit(work)))
    found: dict[int, list[np.ndarray]] = {}
    for step, submitted in pending:
        for (sequence, *_), rows in zip(step, submitted.each(), strict=True):
            found.setdefault(sequence, []).append(rows)
    return {sequence: np.concatenate(rows) for sequence, rows in found.items()}


@given(st.sampled_from(EVERY), batches())
@settings(max_examples=examples(150))
def test_each_sequence_is_answered_as_alone(room, values, steps):
    get, device, tolerance = room
    if device == "host" and values[-1] == "behind":
        with pytest.raises(DeviceError, match="cannot honour results=behind"):
            get(*values)
        values = *values[:-1], "copy"
    kv_cache, _, kv_parts, *_ = values
    found = together(get(*values), steps)
    assert {*found} == {sequence for step in steps for sequence, *_ in step}
    for sequence, rows in found.items():
        own = [[entry] for step in steps for entry in step if entry[0] == sequence]
        wanted = together(get(*values), own)[sequence]
        assert rows.shape == wanted.shape
        if kv_cache == "per_sequence" and kv_parts == "off":
            assert np.array_equal(rows, wanted), sequence
        elif len(rows):
            answer = compare_logits(wanted, rows, "rounding", tolerance)
            assert answer.holds, (sequence, str(answer))
    if kv_parts == "off":  # each token has the cell that it has together
        singly = together(get(*values), [[entry] for step in steps for entry in step])
        assert all(np.array_equal(found[sequence], rows) for sequence, rows in singly.items())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=N_SEQS), st.integers(1, 5))
@settings(max_examples=examples(40))
def test_tokens_that_the_device_draws_are_those_of_the_logits(room, lengths, n):
    """Greedily, of prompts of these lengths, n tokens each, which the device goes on with."""
    get, device, _ = room
    if device == "host":  # which refuses
        return
    drawing, drawn = get(*PLAIN, sampling="device"), []
    work = [(s, TEXTS[s][:length], "last") for s, length in enumerate(lengths)]
    for _ in range(n):
        drawn.append(drawing.submit(work, True).wait()[:, 0])
        work = [(s, [FED], "last") for s in range(len(lengths))]
    host = get(*PLAIN)
    for s, length in enumerate(lengths):
        text = TEXTS[s][:length]
        for row in drawn:
            text = [int(host.step(text, "last", s).argmax())]
            assert text == [row[s]]
