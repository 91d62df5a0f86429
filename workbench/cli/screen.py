"""Help that fits a screen. `--help` of a command shows its own flags, and names the groups of flags
that many commands share. `--help engine`, `--help toggles` (or another TOPIC) show such a group,
`--help all` shows everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cyclopts.help import DefaultFormatter

from workbench.cli.common import app
from workbench.common.errors import UsageError
from workbench.common.nearest import nearest

FLAGS = ("--help", "-h")
ALL = "all"
TOPICS = ("engine", "toggles", "server", "client")  # groups of flags, in small letters
ANY = "run"  # a command that has the flags of an engine and of toggles


class Screen:
    """Prints the help of one command; `topic`: a group, ALL, or None for the help that fits a
    screen."""

    def __init__(self, topic: str | None):
        self.topic, self._full = topic, DefaultFormatter()

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        group = str(panel.title).lower()
        if self.topic in (ALL, group) or (self.topic is None and group not in TOPICS):
            self._full(console, options, panel)
        elif self.topic is None:
            console.print(_line(group, panel.entries, console.width), markup=False, highlight=False)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        if self.topic in (ALL, None):
            self._full.render_usage(console, options, usage)

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        if self.topic in (ALL, None):
            self._full.render_description(console, options, description)


def _line(group: str, entries: Sequence[Any], width: int) -> str:
    """The line on a group that is not shown: how to see it, and as many of its flags as fit."""
    begin = f"--help {group:<8}{len(entries):>3} flags: "
    shown: list[str] = []
    left = width - len(begin) - len(" ...")
    for entry in entries:
        name = min((*entry.names, *entry.shorts), key=len)
        left -= len(name) + 1
        if left < 0:
            return f"{begin}{' '.join(shown)} ..."
        shown.append(name)
    return begin + " ".join(shown)


class Asked(NamedTuple):
    """Arguments without the word after --help, and how their help is printed."""

    arguments: list[str]
    screen: Screen


def asked(arguments: Sequence[str]) -> Asked:
    """The arguments, with a topic of `--help TOPIC` taken out. Raises UsageError where a command
    has no such topic, naming those it has."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    at = next((i for i in range(end) if words[i] in FLAGS), None)
    if at is None or at + 1 >= end or words[at + 1].startswith("-"):
        return Asked(words, Screen(None))
    before, topic = words[:at], words[at + 1]
    command = app.parse_commands(before)[1][-1]
    if command.default_command is None and topic not in (*TOPICS, ALL):
        return Asked(words, Screen(None))  # as `workbench --help run`, which is help on run
    if command is app and topic in TOPICS:
        before, command = [ANY], app[ANY]
    topics = _topics(command)
    if topic not in topics:
        meant = nearest(topic, topics)
        said = "" if meant is None else f"did you mean {meant}? "
        name = " ".join(command.name)
        raise UsageError(
            f"--help {topic}: {said}{name} has help on {', '.join(topics)}; `workbench toggles "
            "NAME` prints a toggle"
        )
    return Asked([*before, words[at], *words[at + 2 :]], Screen(topic))


def _topics(command: Any) -> list[str]:
    if command.default_command is None:
        return [ALL]
    groups = command.assemble_argument_collection().groups
    return [*(name for name in TOPICS if name in {g.name.lower() for g in groups}), ALL]
