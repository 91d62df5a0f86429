"""Findings as lines for a person: races, refused launches, and the waits that can go."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.program.check.findings import Findings
from workbench.program.commands import CommandAt, Program
from workbench.program.letters import legend, once


def lines(cycle: Sequence[Program], found: Findings) -> list[str]:
    """The lines that report findings. cycle: the programs that were checked, once each."""
    laps = len(found.steps) // len(cycle)
    patterns = once(p.pattern(fold=True, result=len(cycle) > 1) for p in cycle)
    lengths = {id(program): len([*program.singly()]) for program in cycle}
    n_commands = laps * sum(lengths[id(program)] for program in cycle)
    n_programs = len(lengths)
    what = _n(n_programs, "program")
    if n_programs < len(cycle):
        what = f"{_n(len(cycle), 'step')} of {what}"
    out = [
        f"folded       {' | '.join(patterns)}",
        f"letters      {legend(' '.join(patterns))}",
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
