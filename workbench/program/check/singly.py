"""The commands of a program by number, the parts of plans in place of the plans."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.program.commands import Command, CommandAt, Program, Replay


class Singly:
    """A program's commands one by one, in host order; a plan is worked out once."""

    __slots__ = ("_located", "commands")

    def __init__(self, program: Program):
        self.commands: Sequence[Command] = program.commands
        self._located: list[CommandAt] | None = None  # None: no plans, numbers are indices
        if Replay in set(map(type, program.commands)):
            self._located = list(program.located())
            self.commands = [at.command for at in self._located]

    def at(self, step: int, number: int) -> CommandAt:
        """Where command `number` is when step number `step` issues the program."""
        if self._located is None:
            return CommandAt(step, number, self.commands[number])
        return self._located[number]._replace(step=step)
