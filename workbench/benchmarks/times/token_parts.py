"""Where a token's time goes, by the device's clock and without a trace (`Engine.stamped`).

    token    from the first kernel of a token to the first kernel of the next
    device   from the first kernel of a token to the end of its last kernel
    gap      from the end of the last kernel to the first kernel of the next token, copies included
    host     from the arrival of the logits on the host to the first kernel of the next token
    plain    a whole token of the same turn, without stamps, by the host's clock

Plans are stamped inside, at their first and last kernels (`backend/clock/stamps.py`). A stamped
token takes longer than a plain token by the time of the stamps. Without plans a token begins when
the stream reaches its first launch, before the launch is issued (`engine/look/watch.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.benchmarks.compare import pace
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.workload import Workload, draw_tokens
from workbench.config import Toggles
from workbench.program.commands import Command, Copy, Launch, Replay

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

PARTS = ("token", "device", "gap", "host", "plain")
STAMPED = PARTS[:-1]
HOST = "the host"  # in a table's constants
WARM_UP = 2  # first tokens of each turn, not counted: caches are still another arm's


def stamped_steps(engine: Any, tokens: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Decodes tokens; returns when the logits of each were on the host, and the stamps of each,
    ns."""
    ends = []
    with engine.stamped() as stamps:
        for token in tokens:
            engine.step([token])
            ends.append(time.perf_counter_ns())
    return ends, stamps


def logits_to_launch_ns(ends: Sequence[int], stamps: Sequence[tuple[int, int]]) -> list[int]:
    """The times from each token's logits to the first kernel of the next token."""
    return [stamp[0] - end for end, stamp in zip(ends, stamps[1:], strict=False)]


def parts_us(ends: Sequence[int], stamps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The medians of STAMPED over the tokens, us."""
    begun, ended = np.array(stamps, np.int64).T
    ns = {
        "token": np.diff(begun),
        "device": ended - begun,
        "gap": begun[1:] - ended[:-1],
        "host": logits_to_launch_ns(ends, stamps),
    }
    return {part: round(float(np.median(of)) / 1e3, 3) for part, of in ns.items()}


def token_parts(
    engine: Engine, arms: Mapping[str, Toggles], rounds: int, n_tokens: int = 12
) -> dict[str, dict[str, Any]]:
    """The parts of a token by arm, each a dict with these keys:

    PARTS: a list with an entry for each round, us.
    slowdown: how many times as long as at its best the host took in each round; the same for all
        arms, and empty where the host computes, too (`benchmarks/compare/pace.py`).
    counters: of the arm's engine, in a first turn without stamps.
    nodes: kernels and copies of a token on the device.
    calls: how many calls the host makes for the nodes; a plan is one call.

    Arms take turns (`benchmarks/compare/rounds.py`), so that all arms of a round have the same
    host. A turn is half of n_tokens plain tokens, and then n_tokens stamped tokens. Rounds on a
    slow host are replaced: up to `rounds` more are run, and those with the fastest host are kept.
    """
    n_plain = WARM_UP + max(1, n_tokens // 2)
    test = Workload(0, n_plain + n_tokens)
    found: dict[str, dict[str, Any]] = {}
    told, host_us = pace.tells(engine), list[float]()  # of the host's loop, by round
    with ExitStack() as stack:
        sides = [stack.enter_context(engine.variant(toggles)) for toggles in arms.values()]

        def measure(round_: int, i: int) -> dict[str, float]:
            tokens = draw_tokens(test, engine.model.n_vocab, 0, round_).gen
            own = {"plain": plain_us(sides[i], tokens[:n_plain])}
            own |= parts_us(*stamped_steps(sides[i], tokens[n_plain:]))
            return own | ({"loop": pace.HOST.loop_us()} if told else {})

        def whole(_: int, of: dict[int, dict[str, float]]) -> None:
            if told:
                host_us.append(max(one["loop"] for one in of.values()))
            taken.append(of)

        def wanted() -> Iterator[int]:
            yield from range(rounds)
            for round_ in range(rounds, 2 * rounds if told else rounds):
                if sum(us < pace.SLOW * pace.HOST.least_us for us in host_us) >= rounds:
                    return
                yield round_

        counters = []
        for i, side in enumerate(sides):  # so that no first step is timed
            plain_us(side, draw_tokens(test, engine.model.n_vocab, 0, 0).gen)
            counters.append(side.counters)
            measure(0, i)
        taken: list[dict[int, dict[str, float]]] = []
        interleave(wanted(), len(sides), measure, whole)
        fastest = np.argsort(host_us, kind="stable")[:rounds] if told else np.arange(rounds)
        kept, least_us = sorted(fastest.tolist()), pace.HOST.least_us
        for i, (arm, side) in enumerate(zip(arms, sides, strict=True)):
            found[arm] = {part: [taken[round_][i][part] for round_ in kept] for part in PARTS}
            found[arm]["slowdown"] = [round(host_us[n] / least_us, 2) for n in kept if told]
            found[arm] |= {"counters": counters[i], **issued(side)}
    return found


def plain_us(engine: Engine, tokens: Sequence[int]) -> float:
    """Decodes tokens from an empty cache; returns the median time of a token after the warm-up, us,
    from logits to logits."""
    engine.reset()
    ends = []
    for token in tokens:
        engine.step([token])
        ends.append(time.perf_counter_ns())
    return round(float(np.median(np.diff(ends[WARM_UP - 1 :]))) / 1e3, 3)


def issued(engine: Engine) -> dict[str, int]:
    """The keys `nodes` and `calls` of `token_parts`."""

    def n_nodes(command: Command) -> int:
        """How many kernels and copies a command gives the device."""
        if isinstance(command, Launch) and not command.by_host:
            kernels = engine.backend.kernels_of(command.node)
            return 1 if kernels is None else len(kernels)
        return int(isinstance(command, Copy))

    program = engine.program()
    alone = sum(map(n_nodes, program.commands))
    return {
        "nodes": sum(map(n_nodes, program.singly())),
        "calls": alone + sum(isinstance(c, Replay) for c in program.commands),
    }


def medians_us(parts: Mapping[str, Any]) -> dict[str, float]:
    """The medians of PARTS over the rounds, us. parts: an arm's entry of `token_parts`."""
    return {part: float(np.median(parts[part])) for part in PARTS}


def slow_host(parts: Mapping[str, Any]) -> dict[str, str]:
    """What a table of tokens says of a slow host, by the word for it; empty where it was not slow.
    parts: an arm's entry of `token_parts`."""
    by = float(np.median(parts.get("slowdown") or [1.0]))
    return {HOST: f"takes {by:.2f} {pace.AS_LONG}"} if by >= pace.SLOW else {}
