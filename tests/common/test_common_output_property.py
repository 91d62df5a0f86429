"""The writer over kinds of target, contents and faults: old content or new, nothing left beside.

A fault is an exception out of one call of the operating system: the n-th, before it acts or after.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.common.killed_saves import no_exchange
from workbench.common import output_swap
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, check_writable, writing, writing_folder

OLD = b"what stood there"


CALLS = (
    "open", "write", "close", "rename", "link", "unlink", "fchmod", "mkdir", "rmdir", "exchange",
)  # fmt: skip


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Fault(NamedTuple):
    """The `nth` call of os.`call` raises `what`: before it acts, or after."""

    call: str
    nth: int
    what: BaseException
    after: bool


@contextmanager
def injected(fault: Fault | None, most: int = 1 << 20) -> Iterator[list[str]]:
    """Within, the fault strikes, and `os.write` takes at most `most` bytes; yields where it did."""
    struck: list[str] = []
    homes = dict.fromkeys(CALLS, os) | {"exchange": output_swap}
    real = {name: getattr(home, name) for name, home in homes.items()}
    count = [0]

    def replaced(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "write":
                arguments = (arguments[0], bytes(arguments[1])[:most])
            strikes = False
            if fault is not None and fault.call == name:
                strikes = count[0] == fault.nth
                count[0] += 1
            found = None if strikes and not fault.after else real[name](*arguments, **named)
            if strikes:
                struck.append(name)
                raise fault.what
            return found

        return call

    for name, home in homes.items():
        setattr(home, name, replaced(name))
    try:
        yield struck
    finally:
        for name, home in homes.items():
            setattr(home, name, real[name])


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything under `folder`: content of files, target of links, None for folders and FIFOs."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def raised_by(body: Callable[[], None]) -> BaseException | None:
    try:
        body()
    except BaseException as error:
        return error
    return None


# how each kind of target is made, and what file then has the content; None: it is refused
TARGETS: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "new": (lambda path: None, "x"),
    "file": (lambda path: path.write_bytes(OLD), "x"),
    "link": (lambda path: (path.symlink_to("y"), path.with_name("y").write_bytes(OLD)), "y"),
    "link of a link": (
        lambda path: (
            path.symlink_to("y"), path.with_name("y").symlink_to("z"),
            path.with_name("z").write_bytes(OLD),
        ),
        "z",
    ),
    "dangling": (lambda path: path.symlink_to("y"), "y"),
    "link into a folder": (
        lambda path: (path.with_name("f").mkdir(), path.symlink_to("f/y")), "f/y",
    ),
    "loop": (lambda path: path.symlink_to("x"), None),
    "folder": (lambda path: path.mkdir(), None),
    "link to a folder": (lambda path: (path.with_name("f").mkdir(), path.symlink_to("f")), None),
    "missing parent": (lambda path: path.symlink_to("no/y"), None),
    "a file as parent": (
        lambda path: (path.with_name("f").write_bytes(OLD), path.symlink_to("f/y")), None,
    ),
    "/dev/full": (lambda path: path.symlink_to("/dev/full"), None),
    "/proc": (lambda path: path.symlink_to("/proc/x"), None),
}  # fmt: skip


ANY_FAULT = st.builds(
    Fault,
    st.sampled_from([*CALLS, "write", "write"]),
    st.integers(0, 3),
    st.sampled_from([NO_SPACE, OSError(errno.EIO, "I/O error"), KeyboardInterrupt()]),
    st.booleans(),
)


def hopeless(fault: Fault) -> bool:
    """What cannot be removed stays, and no call fails that has renamed: no writer can help it."""
    lost = fault.call in ("unlink", "rmdir") or (
        fault.call in ("rename", "exchange") and fault.after
    )
    return lost and isinstance(fault.what, OSError)


FAULTS = st.none() | ANY_FAULT.filter(lambda fault: not hopeless(fault))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(TARGETS)), st.lists(st.binary(max_size=40), max_size=4),
    st.integers(1, 50), FAULTS, st.sampled_from([None, "body", "flush"]), st.booleans(),
)  # fmt: skip
@example("missing parent", [b"x"], 50, None, "body", True)
def test_old_content_or_new_and_nothing_beside(kind, parts, most, fault, own, parents):
    """What can be seen before is refused before, in the words of the writing."""
    make, at = TARGETS[kind]
    if kind == "missing parent" and parents:
        at = "no/y"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "x")
        before, new = tree(folder), b"".join(parts)
        foreseen = raised_by(lambda: check_writable(folder / "x", parents=parents))
        assert tree(folder) == before

        def write() -> None:
            with writing(folder / "x", parents=parents) as file:
                for part in parts:
                    file.write(part)
                    if own == "flush":
                        file.flush()
                if own == "body":
                    raise LookupError("of the caller's own")

        with injected(fault, most) as struck:
            raised = raised_by(write)
        after = tree(folder)
    written = {**before, **({} if at is None else {at: new})}
    if at == "no/y":
        written |= {"no": None}
    if raised is None:
        assert at is not None or (kind == "/dev/full" and not new)
        assert after == written and foreseen is None
    elif struck and isinstance(raised, KeyboardInterrupt):
        assert after in (before, written)
    else:
        assert after == before and isinstance(raised, (UsageError, LookupError))
        assert "\n" not in str(raised) and (struck or at is None or own == "body")
        assert struck or foreseen is None or str(foreseen) == str(raised)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=70_000), max_size=4), st.none() | st.integers(0, 3))
def test_a_fifo_hands_over_what_was_written_and_stays(parts, interrupted_at):
    with tempfile.TemporaryDirectory() as name:
        pipe, got = Path(name) / "pipe", []
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
        reader.start()
        check_writable(pipe)  # the reader, waiting already, must not see an end
        try:
            with writing(pipe) as file:
                for i, part in enumerate(parts):
                    if i == interrupted_at:
                        raise KeyboardInterrupt
                    file.write(part)
        except KeyboardInterrupt:
            assert b"".join(parts).startswith(got[0] if got else b"")
        reader.join()
        whole = interrupted_at is None or interrupted_at >= len(parts)
        assert b"".join(parts).startswith(got[0]) and (got[0] == b"".join(parts) or not whole)
        assert pipe.is_fifo() and os.listdir(name) == ["pipe"]


# folders -----------------------------------------------------------------------------------------

FOLDERS: dict[str, Callable[[Path], Any]] = {
    "new": lambda path: None,
    "parents": lambda path: path.symlink_to("a/b"),
    "old": lambda path: (
        path.mkdir(), (path / "one").write_bytes(OLD), (path / "o").touch(),
        (path / "in").mkdir(), (path / "in" / "link").symlink_to("../o"),
    ),
    "a file": lambda path: path.write_bytes(OLD),
    "below a file": lambda path: (
        path.with_name("f").write_bytes(OLD),
        path.symlink_to("f/y"),
    ),
    "loop": lambda path: path.symlink_to("x"),
    "/proc": lambda path: path.symlink_to("/proc/x"),
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(FOLDERS)), st.binary(max_size=40), st.integers(1, 50), FAULTS,
    st.booleans(),
)  # fmt: skip
def test_a_folder_is_whole_or_as_it_was(kind, content, most, fault, exchanges):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if not exchanges:
            patch.setattr(output_swap, "exchange", no_exchange)
        folder = Path(name)
        FOLDERS[kind](folder / "x")
        before = tree(folder)
        foreseen = raised_by(lambda: check_folder(folder / "x"))
        assert tree(folder) == before

        def write() -> None:
            with writing_folder(folder / "x") as made:
                for file_name in ("one", "two"):
                    with made.writing(file_name) as file:
                        file.write(content)

        with injected(fault, most) as struck:
            raised = raised_by(write)
        after = tree(folder)
    at = {"parents": "a/b"}.get(kind, "x")
    written = before | {at: None, f"{at}/one": content, f"{at}/two": content}
    written |= {"a": None, "x": "a/b"} if kind == "parents" else {}
    if raised is None:
        assert foreseen is None and after == written
    elif isinstance(raised, KeyboardInterrupt):
        assert struck and after in (before, written)
    else:
        assert isinstance(raised, UsageError) and "\n" not in str(raised)
        assert after == before and (struck or str(raised) == str(foreseen))


NAMES = [".", "..", "0/../1", "0/", "0/.", "0//", "~", " ", "-"]


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=300) | st.sampled_from(NAMES))
@example("0/")
@example("0/.")
def test_any_name_is_written_or_refused_in_one_line(name):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "in", name.lstrip("/"))
        os.mkdir(os.path.join(folder, "in"))
        try:
            check_writable(path)
            with writing(path) as file:
                file.write(OLD)
            with open(path, "rb") as file:
                assert file.read() == OLD
        except UsageError as error:
            assert str(error).isprintable()
            assert tree(Path(folder)) == {"in": None}
