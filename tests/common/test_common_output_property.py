"""The writer over kinds of target, contents and faults: old content or new, nothing left beside.

A fault is an exception out of one call of the operating system: the n-th, before it acts or after.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.common.killed_saves import CALLS, no_exchange, watched
from tests.profiles import examples
from workbench.common import output_swap
from workbench.common.errors import UsageError
from workbench.common.output import check_folder, check_writable, writing, writing_folder

OLD = b"what stood there"
Tree = dict[str, bytes | str | None]  # content of files, target of links, None for folders


class Fault(NamedTuple):
    """The `nth` call of os.`call` raises `what`: before it acts, or after."""

    call: str
    nth: int
    what: BaseException
    after: bool


def is_hopeless(fault: Fault) -> bool:
    """What cannot be removed stays, and no call fails that has renamed: no writer can help."""
    renamed = fault.call in ("rename", "exchange") and fault.after
    return isinstance(fault.what, OSError) and (fault.call in ("unlink", "rmdir") or renamed)


ERRORS = [OSError(n, os.strerror(n)) for n in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS,
                                               errno.EPERM, errno.EFBIG, 121)]  # fmt: skip
FAULTS = st.none() | st.builds(
    Fault, st.sampled_from([*CALLS, "write", "write"]), st.integers(0, 3),
    st.sampled_from([*ERRORS, *[KeyboardInterrupt()] * 3]), st.booleans(),
).filter(lambda fault: not is_hopeless(fault))  # fmt: skip


@contextmanager
def injected(fault: Fault | None, most: int) -> Iterator[list[str]]:
    """Within, the fault strikes; yields where it did."""
    struck, count = list[str](), itertools.count()

    def look(name: str, after: bool) -> None:
        if fault and (name, after) == (fault.call, fault.after) and next(count) == fault.nth:
            struck.append(name)
            raise fault.what

    with watched(look, most):
        yield struck


def make(folder: Path, wanted: Tree) -> None:
    for name, what in wanted.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        elif what is None:
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(what)


def tree(folder: Path) -> Tree:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink()
        else path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }  # fmt: skip


def raised_by(body: Callable[[], None]) -> BaseException | None:
    try:
        body()
    except BaseException as error:
        return error
    return None


def tried(before: Tree, check: Callable, write: Callable, fault: Fault | None, most: int):
    """What a check of x and its writing raised, where the fault struck, and what is there then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, before)
        foreseen = raised_by(lambda: check(folder / "x"))
        assert tree(folder) == before
        with injected(fault, most) as struck:
            raised = raised_by(lambda: write(folder / "x"))
        return foreseen, raised, struck, tree(folder)


# what stands there, and what file then has the content of x; None: it is refused
TARGETS: dict[str, tuple[Tree, str | None]] = {
    "new": ({}, "x"), "file": ({"x": OLD}, "x"), "link": ({"x": "y", "y": OLD}, "y"),
    "link of a link": ({"x": "y", "y": "z", "z": OLD}, "z"), "dangling": ({"x": "y"}, "y"),
    "link into a folder": ({"f": None, "x": "f/y"}, "f/y"), "loop": ({"x": "x"}, None),
    "folder": ({"x": None}, None), "link to a folder": ({"f": None, "x": "f"}, None),
    "missing parent": ({"x": "no/y"}, None), "a file as parent": ({"f": OLD, "x": "f/y"}, None),
    "/dev/full": ({"x": "/dev/full"}, None), "/proc": ({"x": "/proc/x"}, None),
    "/dev/null": ({"x": "/dev/null"}, None),
}  # fmt: skip


@settings(max_examples=examples(500))
@given(
    st.sampled_from(list(TARGETS)), st.lists(st.binary(max_size=40), max_size=4),
    st.integers(1, 50), FAULTS, st.sampled_from([None, "body", "flush"]), st.booleans(),
)  # fmt: skip
@example("missing parent", [b"x"], 50, None, "body", True)
def test_old_content_or_new_and_nothing_beside(kind, parts, most, fault, own, parents):
    """What can be seen before is refused before, in the words of the writing."""
    before, at = TARGETS[kind]
    if kind == "missing parent" and parents:
        at = "no/y"

    def write(path: Path) -> None:
        with writing(path, parents=parents) as file:
            for part in parts:
                file.write(part)
                if own == "flush":
                    file.flush()
            if own == "body":
                raise LookupError("of the caller's own")

    foreseen, raised, struck, after = tried(
        before, lambda path: check_writable(path, parents=parents), write, fault, most
    )
    assert all(stat.S_ISCHR(os.stat(device).st_mode) for device in ("/dev/full", "/dev/null"))
    new = b"".join(parts)
    written = {**before, **({} if at is None else {at: new})}
    if at == "no/y":
        written |= {"no": None}
    if raised is None:
        assert at is not None or (kind == "/dev/full" and not new) or "null" in kind
        assert after == written and foreseen is None
    elif struck and isinstance(raised, KeyboardInterrupt):
        assert after in (before, written)
    else:
        assert after == before and isinstance(raised, (UsageError, LookupError))
        assert "\n" not in str(raised) and (struck or at is None or own == "body")
        assert struck or foreseen is None or str(foreseen) == str(raised)


FOLDERS: dict[str, Tree] = {
    "new": {}, "parents": {"x": "a/b"}, "a file": {"x": OLD}, "loop": {"x": "x"},
    "old": {"x": None, "x/one": OLD, "x/o": b"", "x/in": None, "x/in/link": "../o"},
    "below a file": {"f": OLD, "x": "f/y"}, "/proc": {"x": "/proc/x"},
}  # fmt: skip


@settings(max_examples=examples(300))
@given(
    st.sampled_from(list(FOLDERS)), st.binary(max_size=40), st.integers(1, 50), FAULTS,
    st.booleans(),
)  # fmt: skip
@example("old", b"", 1, Fault("rename", 2, ERRORS[0], False), False)  # the old folder stays aside
def test_a_folder_is_whole_or_as_it_was(kind, content, most, fault, exchanges):
    before = FOLDERS[kind]

    def write(path: Path) -> None:
        with writing_folder(path) as made:
            for file_name in ("one", "two"):
                with made.writing(file_name) as file:
                    file.write(content)

    with pytest.MonkeyPatch.context() as patch:
        if not exchanges:
            patch.setattr(output_swap, "exchange", no_exchange)
        foreseen, raised, struck, after = tried(before, check_folder, write, fault, most)
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


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=70_000), max_size=4), st.none() | st.integers(0, 3))
def test_a_fifo_hands_over_what_was_written_and_stays(parts, interrupted_at):
    with tempfile.TemporaryDirectory() as name:
        pipe, got = Path(name) / "pipe", []
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
        reader.start()
        check_writable(pipe)  # the reader, waiting already, must not see an end

        def write() -> None:
            with writing(pipe) as file:
                for i, part in enumerate(parts):
                    if i == interrupted_at:
                        raise KeyboardInterrupt
                    file.write(part)

        interrupted = isinstance(raised_by(write), KeyboardInterrupt)
        reader.join()
        assert interrupted == (interrupted_at is not None and interrupted_at < len(parts))
        assert b"".join(parts).startswith(got[0]) and (interrupted or got[0] == b"".join(parts))
        assert pipe.is_fifo() and os.listdir(name) == ["pipe"]


@settings(max_examples=examples(100))
@given(st.text(min_size=1, max_size=300) | st.sampled_from([".", "..", "0/../1", "0//", "~", " "]))
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
