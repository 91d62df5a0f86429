"""Where a token's time goes, by the device's clock and without a trace: `Engine.stamped`.

    token    from where the stream comes to the first launch of a token to the same of the next
    device   from there to the end of the last launch
    gap      from the end of the last launch to the first launch of the next token
    host     from the logits on the host to the first launch of the next token

A plan of a whole step is one launch with the copies of inputs and results in it. Its gap begins and
ends at kernels, too: it is the token without what the same kernels take as a plan of launches alone
(`medians_us`, which wants such an arm in the same run).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.bench.rounds import interleave
from workbench.bench.workload import Workload, draw_tokens
from workbench.config import PlanRule, PlanScope, Toggles
from workbench.program.commands import Command, Copy, Launch, Replay

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

PARTS = ("token", "device", "gap", "host")
WARM_UP = 2  # tokens of each turn that do not count: the arm before has left its own


def stamped_steps(engine: Any, tokens: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Decodes tokens; when each one's logits were on the host, and its stamps, in ns."""
    ends = []
    with engine.stamped() as stamps:
        for token in tokens:
            engine.step([token])
            ends.append(time.perf_counter_ns())
    return ends, stamps


def logits_to_launch_ns(ends: Sequence[int], stamps: Sequence[tuple[int, int]]) -> list[int]:
    """From each token's logits to the first launch of the next."""
    return [stamp[0] - end for end, stamp in zip(ends, stamps[1:], strict=False)]


def parts_us(ends: Sequence[int], stamps: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Medians of PARTS, us, of the tokens between the first and the last."""
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
    """By arm: its PARTS, a list with an entry for each round, us; `counters` of the arm's engine
    from its first step on; `nodes`: kernels and copies that a token gives the device, and
    `calls`: of the host for them, a plan one call.

    Arms take turns of n_tokens tokens (`bench/rounds.py`): all meet the same host in a round.
    """
    test = Workload(0, WARM_UP + n_tokens)
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        sides = [stack.enter_context(engine.variant(toggles)) for toggles in arms.values()]

        def measure(round_: int, i: int) -> dict[str, float]:
            tokens = draw_tokens(test, engine.model.n_vocab, 0, max(round_, 0)).gen
            sides[i].reset()
            for token in tokens[:WARM_UP]:
                sides[i].step([token])
            return parts_us(*stamped_steps(sides[i], tokens[WARM_UP:]))

        for i in range(len(sides)):  # whatever is made at the first step
            measure(-1, i)
        taken: list[dict[int, dict[str, float]]] = []
        interleave(range(rounds), len(sides), measure, lambda _, of: taken.append(of))
        for i, (arm, side) in enumerate(zip(arms, sides, strict=True)):
            found[arm] = {part: [of[i][part] for of in taken] for part in PARTS}
            found[arm] |= {"counters": side.counters, **issued(side)}
    return found


def issued(engine: Engine) -> dict[str, int]:
    """`nodes` and `calls` of a token; see `token_parts`."""

    def n_nodes(command: Command) -> int:
        """Kernels and copies that a command gives the device."""
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


def medians_us(
    parts: Mapping[str, Mapping[str, Any]], arm: str, toggles: Mapping[str, str], of_kernels: str
) -> dict[str, float]:
    """Medians of an arm's PARTS over the rounds, us. parts: of `token_parts`; toggles: the arm's.
    of_kernels: the arm whose plans are launches alone. With it, device and gap are of the kernels
    also where a step is one plan: its copies count to the gap."""
    own = {part: np.array(parts[arm][part], float) for part in PARTS}
    if toggles["plans"] != PlanRule.OFF and toggles["plan_scope"] == PlanScope.STEP:
        own["device"] = np.array(parts[of_kernels]["device"], float)
        own["gap"] = own["token"] - own["device"]
    return {part: float(np.median(us)) for part, us in own.items()}
