"""Steps that a server takes before its first requests, so that these find everything ready.

The first step of a shape costs more than later steps: kernels are compiled or loaded, a program is
built, memory grows, a plan is captured. A server pads its steps, so they have few shapes
(`padding.py`), which are known before any request:

    tokens    1, 2, 4, .. sequences with a token each, at every extent of a region
    prompts   tokens of a prompt beside such tokens, full ubatches first, short extents first
    copies    cells of a prompt that begins like another's

All kernels of these shapes are compiled first, many at once. Memory grows to the largest shape.
Then steps are taken, with tokens and cells that belong to nobody: as many as programs are kept, and
as the time limit allows. Where no plan is captured, a program is only built. Nothing is left in the
cache.

Where all requests have one length, the shapes are fewer: some of them begin, with their whole
prompts, while others have a token each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from workbench.common.progress import bar
from workbench.engine.batch import Entry, Work, n_tokens, size_of_copies
from workbench.engine.programs import KEPT, Key
from workbench.engine.rehearsal import empty_like, take
from workbench.engine.slots.padding import LEAST_TOKENS, Sizes, size
from workbench.engine.slots.slots import SCORED
from workbench.graph.ir import StepShape
from workbench.model.cache_graphs import copy_shape

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

AT_MOST_S, BUILDING_S = 10.0, 2.0  # time limits, with plans and without; not for compiling
MOST_KEPT = KEPT * 3 // 4  # programs; room is left for shapes that nobody foresaw
SOON = 2  # extents that any request has first


class First(NamedTuple):
    """A step to take. n_past: the cells that its first sequence has before the step."""

    work: Work
    n_past: int


def first_steps(engine: Engine, n_seqs: int, each: tuple[int, int] | None = None) -> int:
    """Makes an engine with an empty cache ready to serve n_seqs requests at once. Returns how many
    shapes have a kept program: the likeliest ones, as many as the time limit allows.

    each: tokens of the prompt and of the answer, where all requests have as many; else None."""
    draws, every = engine.can_draw, dict[StepShape, First]()
    for first in _alike(engine, n_seqs, *each) if each else _in_order(engine, n_seqs):
        cache = empty_like(engine.cache)
        if first.n_past:
            take([(0, range(first.n_past), "none")], cache)
        every.setdefault(engine.rehearsal.shape_of(first.work, cache, draws), first)
    copies = copy_shape(size_of_copies(1))
    # at every extent, because attention may split its cells by it
    engine.make_ready([*every, *([copies] if engine.cache.n_regions > 1 else [])])
    most = max(every, key=_memory)
    # a request may also ask for logits; a prompt that is scored has logits of many tokens
    scored = Sizes(most.n_tokens, most.n_seqs, min(most.n_tokens, SCORED + n_seqs))
    n_outputs = engine.steps.batches.sizes(scored, engine.config.n_ubatch).n_outputs
    for shape in {most, most._replace(draws=False, n_outputs=n_outputs)}:
        engine.bound.grow(shape, engine.period)
    kept = [*every.items()][: MOST_KEPT // engine.period]
    until = time.monotonic() + (AT_MOST_S if engine.issuer.replays else BUILDING_S)
    n_ready = 0
    with bar("first steps", len(kept), "shapes") as left:
        for shape, first in kept:
            if time.monotonic() > until:
                break
            _take(engine, shape, first, draws)
            n_ready += 1
            left.update()
    if engine.cache.n_regions > 1:
        _copy(engine, draws)
    engine.synchronize()
    engine.reset()
    return n_ready


def _copy(engine: Engine, draws: bool) -> None:
    """Takes steps of a sequence that goes on from cells of another, as when two prompts begin
    alike."""
    for _ in range(engine.period):
        engine.reset()
        take([(0, [0], "none")], engine.cache)
        engine.cache.copy(0, 1)
        engine.submit([(1, [0], "last")], draws).wait()


def _take(engine: Engine, shape: StepShape, first: First, draws: bool) -> None:
    """Takes a step in each turn of the rings, or builds its programs where no plan is captured."""
    if shape.n_tokens > shape.n_seqs and not engine.issuer.replays:
        for turn in range(engine.period):
            engine.steps.programs.get(Key(shape, turn))
        return
    under_way = []
    for _ in range(engine.period):
        engine.reset()
        if first.n_past:  # nobody reads the results, so these cells need no content
            take([(0, range(first.n_past), "none")], engine.cache)
        under_way.append(engine.submit(first.work, draws))
    for pending in under_way:
        pending.wait()


def _memory(shape: StepShape) -> tuple[int, int, int]:
    return shape.n_outputs, shape.n_tokens, shape.n_kv


def _in_order(engine: Engine, n_seqs: int) -> Iterator[First]:
    """Steps that a server may take, the likeliest first."""
    growth, n_ubatch = engine.cache.growth, engine.config.n_ubatch
    room = engine.cache.n_ctx_seq
    extents = sorted({growth.extent(n) for n in range(1, room + 1, min(growth.pad, room))})
    sizes = sorted({*_sizes(LEAST_TOKENS, n_ubatch), n_ubatch}, reverse=True)
    widths = sorted({n_seqs, *(1 << i for i in range(n_seqs.bit_length()))} - {0}, reverse=True)
    soon, later = extents[:SOON], extents[SOON:]

    def tokens(extent: int) -> Iterator[First]:
        for n in sorted({n_seqs, *_sizes(1, n_seqs)}, reverse=True):
            yield from _fitted(engine, [(i, (0,), "last") for i in range(n)], extent)

    def prompts(extent: int, n: int) -> Iterator[First]:
        for width in widths:
            others: list[Entry] = [(i, (0,), "last") for i in range(1, width)]
            for total in (n, n - 1):  # without a padding token, and with one
                if (own := total - len(others)) > 1:
                    yield from _fitted(engine, [(0, range(own), "last"), *others], extent)
        yield from _fitted(engine, [(0, range(n), "none")], extent)

    for extent in soon:
        yield from tokens(extent)
        yield from prompts(extent, n_ubatch)
    for extent in later:
        yield from tokens(extent)
    for extent in later:  # a prompt that begins beside sequences with longer caches
        yield from prompts(extent, n_ubatch)
    for n in sizes:
        for extent in soon:
            yield from prompts(extent, n)
    for n in sizes:
        for extent in later:
            yield from prompts(extent, n)


def _alike(engine: Engine, n_seqs: int, n_prompt: int, n_gen: int) -> Iterator[First]:
    """Steps that requests of one length may have. Prompts that do not fit into a step together are
    left out: they come in parts."""
    cache, shared = engine.cache, 1 if engine.cache.n_regions > 1 else n_seqs
    most = min(shared * (n_prompt + n_gen), cache.n_ctx_seq)
    for extent in sorted({cache.growth.extent(n) for n in range(n_prompt, most + 1)}):
        for n in range(n_seqs, 0, -1):
            yield from _fitted(engine, [(i, (0,), "last") for i in range(n)], extent)
        for n_begun in range(1, n_seqs + 1):
            for n in range(n_begun, n_seqs + 1):
                work: Work = [(i, range(n_prompt if i < n_begun else 1), "last") for i in range(n)]
                if n_tokens(work) <= engine.config.n_ubatch:
                    yield from _fitted(engine, work, extent)


def _sizes(least: int, most: int) -> Iterator[int]:
    """The sizes from `least` to `most` that steps are padded to."""
    n = least
    while n <= most:
        n = size(n)
        if n <= most:
            yield n
        n += 1


def _fitted(engine: Engine, work: Work, extent: int) -> Iterator[First]:
    """The step, after as many cells as bring it to an extent; nothing where it does not fit."""
    cache = engine.cache
    new = len(work[0][1]) if cache.n_regions > 1 else n_tokens(work)
    n_past = min(extent, cache.n_ctx_seq) - new
    if n_past >= 0:
        yield First([(s, [0] * len(tokens), outputs) for s, tokens, outputs in work], n_past)
