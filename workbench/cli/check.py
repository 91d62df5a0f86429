"""The command that proves a program free of races, and says which of its waits are superfluous."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

from workbench.cli import flags as f
from workbench.cli.common import app, load
from workbench.config import BASELINE

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.graph.ir import Node
    from workbench.program.check.hazards import CommandAt, Findings
    from workbench.program.commands import Program

RACES = 3  # exit status where commands race


@app.command
def check(
    *,
    model: f.ModelPath,
    n_tokens: Annotated[
        f.Whole, f.flag("tokens of a prompt; 1: a decode", validator=f.AT_LEAST_1)
    ] = 1,
    n_decoded: Annotated[
        f.Whole, f.flag("single tokens after each prompt", validator=f.AT_LEAST_0)
    ] = 0,
    as_json: f.AsJson = False,
    config: f.EngineFlags = f.DEFAULT_CONFIG,
    toggles: f.ToggleFlags = f.DEFAULT_TOGGLES,
) -> None:
    """Prove steps free of races; list superfluous waits.

    The steps are a decode, or prompts with tokens after each. Nothing is computed. Orderings that
    an engine refuses without --unsafe can be checked too. Exit status 3 where commands race."""
    from workbench.engine.cache.room import Room
    from workbench.program.check import hazards

    if config.n_ctx:  # else the model says how much there is
        Room(config.n_ctx).check(0, n_tokens + n_decoded)
    unsafe = dataclasses.replace(config, unsafe=True)
    with load(model, unsafe, toggles, start=BASELINE, computes=False) as engine:
        cycle = engine.cycle(n_tokens, n_decoded)
        backend = engine.backend
        found = hazards.check_cycle(
            cycle, one_order=backend.capabilities.one_order, declared=_declared(backend)
        )
        period = engine.period
    if as_json:
        patterns = [program.pattern() for program in cycle]
        print(json.dumps({"patterns": patterns, **found.to_dict()}, indent=1))
    else:
        n_ubatches = -(-n_tokens // config.n_ubatch)
        print("\n".join(lines(cycle, found)))
        if 1 < n_ubatches <= period and not cycle[0].waited:  # a train
            print(
                f"note         of prompts of {n_ubatches} ubatches; the next would overwrite what "
                f"the first used: ask for --n-tokens {period * config.n_ubatch + 1} or more"
            )
    if not found.safe:
        raise SystemExit(RACES)


def _declared(backend: Any) -> Callable[[Node], bool]:
    """Whether the kernels of a node declare their wait for the launch before them. Asked is each
    kernel itself, where a backend names its kernels, and not the rule by which programs are
    lowered."""

    def declared(node: Node) -> bool:
        kernels = backend.kernels_of(node)
        return backend.begins_early(node) if kernels is None else all(k.waits for k in kernels)

    return declared


def lines(cycle: list[Program], found: Findings) -> list[str]:
    """The lines that report findings."""
    from workbench.program.letters import once

    laps = len(found.steps) // len(cycle)
    patterns = [p.pattern(fold=True, result=len(cycle) > 1) for p in cycle]
    lengths = {id(program): len([*program.singly()]) for program in cycle}
    n_commands = laps * sum(lengths[id(program)] for program in cycle)
    n_programs = len(lengths)
    what = _n(n_programs, "program")
    if n_programs < len(cycle):
        what = f"{_n(len(cycle), 'step')} of {what}"
    out = [
        f"pattern      {' | '.join(once(patterns))}",
        f"checked      {what}, {laps} times: {_n(n_commands, 'command')}",
        f"races        {found.n_races or 'none'}",
    ]
    for race in found.races:
        first, second = race.first.where, race.second.where
        where = f"{race.buffer.name} bytes {race.offset} to {race.offset + race.nbytes - 1}"
        kind = f"may {race.kind}" if race.may else race.kind
        alike = "" if race.count == 1 else f" ({race.count} times)"
        out.append(f"  {first} and {second}, {kind} of {where}: {race.missing}{alike}")
    if found.more:
        out.append(f"  and {found.more} more, of other commands")
    for at in found.refused:
        out.append(
            f"  {at.where} is launched programmatically, and its kernel "
            f"declares no griddepcontrol.wait: {_words(found, at)}; use pdl=off"
        )
    waits = _n(len(found.waits), "wait")
    alone, together = "each can go alone", "with these the others can go together"
    if found.races:
        alone, together = "without it nothing else races", "with these alone nothing else races"
    for name, named, what in (
        ("superfluous", found.superfluous, alone),
        ("sufficient", found.sufficient, together),
    ):
        out.append(f"{name:<13}{len(named)} of {waits}: {what}")
        out += [f"  {at.where} {_words(found, at)}" for at in named]
    return out


def _words(found: Findings, at: CommandAt) -> str:
    return at.describe(found.steps[at.step].backends)


def _n(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
