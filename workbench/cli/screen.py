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
from workbench.config import FAMILIES, Toggles
from workbench.config.presets import preset_names

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
    """The arguments, with a topic of `--help TOPIC` taken out. Raises UsageError where there is no
    such topic, naming the nearest and those there are."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    at = next((i for i in range(end) if words[i] in FLAGS), None)
    if at is None or at + 1 >= end or words[at + 1].startswith("-"):
        return Asked(words, Screen(None))
    before, topic = words[:at], words[at + 1]
    command = app.parse_commands(before)[1][-1]
    if topic not in TOPICS and topic in _commands(command):
        return Asked(words, Screen(None))  # as `workbench --help run`, which is help on run
    if topic not in _topics(command):
        raise UsageError(f"--help {topic}: {_instead(topic, command)}")
    if command is app and topic != ALL:
        before = [ANY]
    return Asked([*before, words[at], *words[at + 2 :]], Screen(topic))


def _instead(topic: str, command: Any) -> str:
    """What to type in place of a topic that a command does not have."""
    commands, topics = _commands(command), _topics(command)
    toggles = {*FAMILIES, *Toggles.names(), *preset_names()}
    meant = nearest(topic, [*toggles, *commands, *topics])
    guess = "" if meant in (None, topic) else f"did you mean {meant}? "
    if meant in toggles:
        return f"{guess}`workbench toggles {meant}` describes {'it' if guess else meant}"
    name = " ".join(command.name)
    have = ", ".join(topics if command is app else [*commands, *topics])
    each = ", and on each command that `workbench --help` lists" if command is app else ""
    return f"{guess}{name} has help on {have}{each}; `workbench toggles NAME` prints a toggle"


def _commands(command: Any) -> list[str]:
    """The names of a command's own commands."""
    return [name for name in command if not name.startswith("-")]


def _topics(command: Any) -> list[str]:
    """The groups of flags that a command, or any command where it is the app, has help on."""
    shown = app[ANY] if command is app else command
    if shown.default_command is None:
        return [ALL]
    groups = shown.assemble_argument_collection().groups
    return [*(name for name in TOPICS if name in {g.name.lower() for g in groups}), ALL]
