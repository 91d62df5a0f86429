"""draw: a device draws tokens itself. `feeding.py` has what feeds them to its next step.

`draw` sorts as `model/sampler.py` does, and compiles its function of weights, so it adds up the
same numbers. numba compiles `draw` from Python: sorting is no vector code.
That takes seconds, so only who draws imports this module.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from workbench.backend.cpu import kept  # noqa: F401 - where the loops are kept
from workbench.backend.cpu.device.atomics import load
from workbench.backend.cpu.device.loops import KERNEL
from workbench.backend.cpu.device.signals import now_ns
from workbench.graph.shapes import DRAW_SETTINGS
from workbench.model.draw_weights import weights
from workbench.model.sampler import STEEPEST

MOST_NS = 2**31 - 1


def _as_pointer(typing_context, address):
    """An address as the pointer that `carray` takes."""

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_as_pointer)


_weights: Any = njit(weights)


@njit
def _reached(each, target):
    """How many elements are added until their sum reaches the target."""
    total = np.int64(0)
    for i in range(len(each)):
        total += each[i]
        if total >= target:
            return i + 1
    return len(each)


@njit
def _drawn(own, how):
    """The token of a row of logits; -1 where a logit is NaN. how: the row's settings."""
    temperature, top_k, top_p, log_min_p, uniform = how
    n_vocab = len(own)
    best, bad = 0, False
    for i in range(n_vocab):
        bad = bad or math.isnan(own[i])
        if own[i] > own[best]:
            best = i
    if bad or math.isinf(own[best]):
        return -1
    if temperature == 0:
        return best
    order = np.argsort(-own, kind="mergesort")
    n = n_vocab if top_k == 0 else min(int(top_k), n_vocab)
    below = own[order[:n]] - own[best]
    if top_p < 1:
        each = _weights(below)
        n = _reached(each, max(np.int64(float(each.sum()) * top_p), 1))
    least = own[best] + log_min_p
    while own[order[n - 1]] < least:
        n -= 1
    each = _weights(below[:n] * min(np.float32(1) / temperature, STEEPEST))
    total = each.sum()
    return order[_reached(each, min(np.int64(float(total) * uniform) + 1, total)) - 1]


@cfunc(KERNEL, cache=True)
def draw(args, part, n_parts):
    """dst, logits, settings, n_rows, n_vocab. Parts are ranges of rows."""
    n_rows, n_vocab = load(args + 24), load(args + 32)
    drawn = carray(_pointer(load(args)), (n_rows, 2), np.int32)
    logits = carray(_pointer(load(args + 8)), (n_rows, n_vocab), np.float32)
    settings = carray(_pointer(load(args + 16)), (n_rows, DRAW_SETTINGS), np.float32)
    for row in range(n_rows * part // n_parts, n_rows * (part + 1) // n_parts):
        begun = now_ns()
        drawn[row, 0] = _drawn(logits[row], settings[row])
        drawn[row, 1] = min(now_ns() - begun, MOST_NS)
