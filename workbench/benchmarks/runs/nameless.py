"""What a run folder says of programs and files: their names. Nothing in it tells whose machine it
was: no folders, no hosts, no user names, no serial numbers.

A command keeps its words, and a path among them its last name: `-m /home/me/x.gguf` is `-m x.gguf`.
In all other text only absolute paths and addresses lose their places. An address on this machine
stays as it is; of another one the scheme and the port stay, without the host and a user's key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

HERE = ("localhost", "127.0.0.1", "[::1]")

_ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?:[^/@\s]*@)?(?P<host>\[[^\]\s]*\]|[^/:?#\s]*)"
    r"(?P<port>:\d+)?(?P<path>/[^?#\s]*)?(?:[?#]\S*)?"
)
_ABSOLUTE = re.compile(r"(?<![\w/:.~-])(?:~[\w-]*|\.\.?)?(?:/[\w.@+-]+){2,}/?")
_SHORT_FLAG = re.compile(r"-[A-Za-z](?=.*/)")


def nameless_command(words: Sequence[str]) -> list[str]:
    """The words of a command line, and of each path its last name."""
    return [_word(word) for word in words]


def portable(value: Any, key: str = "") -> Any:
    """The same, as JSON has it, with all text as the module says; the list of a key `command` is
    a command line."""
    if isinstance(value, Mapping):
        return {name: portable(one, name) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        texts = key == "command" and all(isinstance(one, str) for one in value)
        return nameless_command(value) if texts else [portable(one) for one in value]
    return nameless_text(value) if isinstance(value, str) else value


def nameless_text(said: str) -> str:
    """`said` without folders and hosts."""
    parts, end = [], 0
    for found in _ADDRESS.finditer(said):
        parts += [_ABSOLUTE.sub(_last, said[end : found.start()]), _address(found)]
        end = found.end()
    return "".join([*parts, _ABSOLUTE.sub(_last, said[end:])])


def card_number(uuid: str | None) -> str | None:
    """8 hexadecimal digits that tell one GPU from another, and from which its number does not
    follow: of BLAKE2s."""
    return None if uuid is None else hashlib.blake2s(uuid.encode(), digest_size=4).hexdigest()


def _word(word: str) -> str:
    if "://" in word:
        return nameless_text(word)
    return "".join(_part(part) for part in re.split("([=,])", word))


def _part(part: str) -> str:
    if "/" not in part:
        return part
    flag = _SHORT_FLAG.match(part)
    return (flag[0] if flag else "") + PurePosixPath(part).name


def _last(found: re.Match[str]) -> str:
    return PurePosixPath(found[0]).name


def _address(found: re.Match[str]) -> str:
    host = found["host"]
    if found["scheme"] == "file://":
        return PurePosixPath(found["path"] or "").name
    shown = host if host in HERE else "host"
    return f"{found['scheme']}{shown}{found['port'] or ''}{found['path'] or ''}"
