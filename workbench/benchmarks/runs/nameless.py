"""Text for run folders that does not reveal whose machine it was. Run folders have names of
programs and files, and no folders, hosts, user names or serial numbers.

In a command line every path is cut to its last name: `-m /home/me/x.gguf` becomes `-m x.gguf`. In
all other text absolute paths are cut likewise. An address on this machine (`HERE`) stays. Any other
address keeps its scheme, port and path, and loses its host and a user's key.
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
    """The words of a command line, each path cut to its last name."""
    return [_word(word) for word in words]


def portable(value: Any, key: str = "") -> Any:
    """`value` (as of JSON) with all text made nameless. A list under the key `command` is a command
    line."""
    if isinstance(value, Mapping):
        return {name: portable(one, name) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        texts = key == "command" and all(isinstance(one, str) for one in value)
        return nameless_command(value) if texts else [portable(one) for one in value]
    return nameless_text(value) if isinstance(value, str) else value


def nameless_text(said: str) -> str:
    """`said`, with paths cut to their last names, and without hosts."""
    parts, end = [], 0
    for found in _ADDRESS.finditer(said):
        parts += [_ABSOLUTE.sub(_last, said[end : found.start()]), _address(found)]
        end = found.end()
    return "".join([*parts, _ABSOLUTE.sub(_last, said[end:])])


def card_number(uuid: str | None) -> str | None:
    """8 hexadecimal digits that tell GPUs apart, and do not reveal the uuid (BLAKE2s)."""
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
