"""The steps of a test of several sequences: what each of them is given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.engine.batch import Entry, Work
from workbench.engine.kv_cache import KVCache
from workbench.engine.rehearsal import Act

if TYPE_CHECKING:
    from workbench.bench.workload import Workload


def prompt_steps(workload: Workload, prompt: Sequence[int], n_ubatch: int) -> list[Work]:
    """The prompts of all sequences, one behind the other, in full ubatches. As in
    llama-batched-bench the last token of all has logits."""
    ends: list[int] = [*range(0, len(prompt), max(1, workload.n_prompt)), len(prompt)]
    steps: list[Work] = []
    for begin in range(0, len(prompt), n_ubatch):
        end, work = min(begin + n_ubatch, len(prompt)), list[Entry]()
        for sequence, (first, behind) in enumerate(itertools.pairwise(ends)):
            part = prompt[max(first, begin) : min(behind, end)]
            if part:
                work.append((sequence, part, "last" if end == behind == len(prompt) else "none"))
        steps.append(work)
    return steps


def gen_steps(workload: Workload, gen: Sequence[int], n_ubatch: int) -> list[list[Work]]:
    """A token of each sequence, so often: one step, or as many as n_ubatch asks for."""
    width, every = workload.width, list[list[Work]]()
    for begin in range(0, len(gen), width):
        row: Work = [(i, gen[begin + i : begin + i + 1], "last") for i in range(width)]
        every.append([row[i : i + n_ubatch] for i in range(0, width, n_ubatch)])
    return every


def share_prompt(workload: Workload, cache: KVCache) -> None:
    """Gives every sequence the cells of the first, where their prompt is one."""
    for sequence in range(1, workload.n_seqs if workload.shared and workload.n_prompt else 1):
        cache.copy(0, sequence)


def acts(workload: Workload, n_ubatch: int) -> list[Act]:
    """All that a repetition of a test does to an empty cache, whatever its tokens are."""
    if workload.n_seqs:
        return [
            *prompt_steps(workload, range(workload.n_prompt_tokens), n_ubatch),
            lambda cache: share_prompt(workload, cache),
            *itertools.chain(
                *gen_steps(workload, range(workload.width * workload.n_gen), n_ubatch)
            ),
        ]
    found = list[Act]()
    for n in (workload.n_depth, workload.n_prompt):
        for begin in range(0, n, n_ubatch):
            end = min(begin + n_ubatch, n)
            found.append([(0, range(begin, end), "last" if end == n else "none")])
    return found + [[(0, (0,), "last")]] * workload.n_gen
