"""Progress of long work: a bar on a terminal, a plain line now and then in a log.

    with bar("tg128", 1280, "tokens") as left:
        for ...:
            left.update(1)

Work that ends within SHOWN_AFTER_S shows nothing. On a terminal there is one bar, drawn again at
most every BAR_EVERY_S and wiped out at the end. In a notebook's cell that somebody runs by hand it
is a line of the cell's output, which is emptied at the end. (What is written to stderr leaves a red
strip there.) Elsewhere a line is written at most every LINE_EVERY_S, without control codes:
`tg128: 384 of 1,280 tokens, about 34 s left`.

Only `update` writes, in the thread that calls it. So nothing is written while a clock runs, unless
`update` is called then. `workload.take_sample` asks `due_ns` whether the next `update` writes, and
stops its clock first if so.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO, TypeVar, Union

SHOWN_AFTER_S, LINE_EVERY_S, BAR_EVERY_S = 2.0, 10.0, 0.5
BYTES, SHARE = "bytes", "%"  # units that are written in their own way
NEVER = 1 << 63
FIRST_SHARE = 0.01  # of the work: before this its own pace tells nothing
TRUSTED_SHARE = 0.1  # of the work: from here on its own pace counts, not what was expected

Out = TypeVar("Out", bound=TextIO)
Shown = Union[TextIO, "Cell"]
_chosen: ContextVar[TextIO | None] = ContextVar("progress", default=None)


@contextmanager
def shown_on(out: Out) -> Iterator[Out]:
    """Work in the body shows its progress on `out`, which need not be a terminal. Otherwise
    progress is shown only on a terminal, and in a notebook's cell that somebody runs by hand."""
    before = _chosen.set(out)
    try:
        yield out
    finally:
        _chosen.reset(before)


def note(line: str) -> None:
    """Writes a line where progress is shown, if it is shown at all."""
    if (out := _chosen.get() or _watched()) is not None:
        _write(out, line + "\n")


class Cell:
    """A line in the output of a notebook's cell. total, n: as a bar has them; its text has both."""

    total: float | None = None
    n: float = 0

    def __init__(self) -> None:
        self._shown: Any = None

    def write(self, text: str) -> None:
        """Shows a line that stays."""
        from IPython.display import display

        display({"text/plain": text.rstrip("\n")}, raw=True)

    def flush(self) -> None:
        """Each line is shown at once."""

    def set_description_str(self, text: str) -> None:
        """Shows the text in place of the text before it."""
        from IPython.display import display

        if self._shown is None:
            self._shown = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._shown.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        """Empties the line. An output without any content has no height in JupyterLab."""
        if self._shown is not None:
            self._shown.update({}, raw=True)
            self._shown = None


class Bar:
    """Work under way: `done` of `total` units.

    total: None where it is not known.
    expected_s: what the whole work may take, where that is known in advance. Where `total` is set
        anew later, the work may take as much more or less.
    alike: whether units take alike long, so that its own pace tells what is left.
    detail: words that are shown at the end of the line; the caller may set them.
    """

    def __init__(
        self,
        what: str,
        total: float | None,
        unit: str,
        out: Shown | None,
        expected_s: float | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        alike: bool = True,
    ):
        self.what, self.total, self.unit, self.detail = what, total, unit, ""
        self.alike = alike
        self.done = 0.0
        self._out, self._clock = out, clock
        self._each_s = expected_s / total if expected_s is not None and total else None
        self._begun = clock()
        self._drawn: Any = None  # of tqdm, once there is something to draw
        self._redrawn = out is not None and _redraws(out)
        # the clock's ns at which the next `update` writes; NEVER where nobody is told
        told = out is not None and total != 0
        self.due_ns = self._begun + int(SHOWN_AFTER_S * 1e9) if told else NEVER

    def update(self, n: float = 1) -> None:
        """Counts n more units as done. Writes where it is time to."""
        self.done += n
        if n and self.due_ns != NEVER and (now := self._clock()) >= self.due_ns:
            self._show()
            every = BAR_EVERY_S if self._redrawn else LINE_EVERY_S
            self.due_ns = now + int(every * 1e9)

    def left_s(self) -> float | None:
        """Seconds that the rest may take; None where that is not known yet, or nothing is left."""
        elapsed = (self._clock() - self._begun) / 1e9
        if not self.total or self.done >= self.total:
            return None
        share = self.done / self.total
        if self._each_s is not None and share < TRUSTED_SHARE:
            return max(self._each_s * self.total - elapsed, 0.0)
        told = self.alike and share >= FIRST_SHARE
        return elapsed * (1 - share) / share if told else None

    def __str__(self) -> str:
        """`tg128: 384 of 1,280 tokens, about 34 s left`"""
        left = self.left_s()
        if self.total is None:
            counted = f"{_amount(self.done, self.done, self.unit)} so far"
        else:
            counted = _amount(self.done, self.total, self.unit, f"of {{}} {self.unit}")
        words = [counted, "" if left is None else f"about {duration(left)} left", self.detail]
        return f"{self.what}: {', '.join(filter(None, words))}"

    def _show(self) -> None:
        out = self._out
        assert out is not None
        if not self._redrawn:
            _write(out, f"{self}\n")
            return
        if self._drawn is None:
            self._drawn = _new_bar(self.total, out, str(self))
        drawn = self._drawn
        drawn.total, drawn.n = self.total, min(self.done, self.total or self.done)
        with suppress(OSError, ValueError):
            drawn.set_description_str(str(self))

    def close(self) -> None:
        """Wipes the bar out. Lines stay."""
        self.due_ns = NEVER
        if self._drawn is not None:
            with suppress(OSError, ValueError):
                self._drawn.close()
            self._drawn = None


HIDDEN = Bar("", 0, "", None)  # counts and shows nothing


@contextmanager
def bar(
    what: str,
    total: float | None,
    unit: str,
    expected_s: float | None = None,
    *,
    alike: bool = True,
) -> Iterator[Bar]:
    """A Bar for the body. It ends with the body."""
    made = Bar(what, total, unit, _chosen.get() or _watched(), expected_s, alike=alike)
    try:
        yield made
    finally:
        made.close()


def duration(seconds: float) -> str:
    """A length of time in words: `34 s`, `5 min`, `2.5 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _amount(done: float, total: float, unit: str, of: str = "") -> str:
    """`384 of 1,280 tokens`, `1.2 of 4.6 GB`, `43 %`."""
    if unit == SHARE:
        return f"{100 * done / total if total else 100:.0f} %"
    if unit != BYTES:
        counted = f"{int(done):,}"
        return f"{counted} {of.format(f'{int(total):,}')}" if of else f"{counted} {unit}"
    scale, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / scale:.1f}" + (f" of {total / scale:.1f} {name}" if of else f" {name}")


def _watched() -> Shown | None:
    """stderr, where it is a terminal; the cell of a notebook that is run by hand. (A program that
    runs notebooks allows no input, and keeps what is written.) Else None."""
    if _in_cell():
        return Cell()
    out = sys.stderr
    return out if out is not None and _is_terminal(out) else None


def _is_terminal(out: Shown) -> bool:
    if isinstance(out, Cell):
        return False
    with suppress(AttributeError, ValueError):  # no stream of a file, or a closed one
        return out.isatty()
    return False


def _in_cell() -> bool:
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else None
    return bool((parent or {}).get("content", {}).get("allow_stdin"))


def _redraws(out: Shown) -> bool:
    """Whether a line on `out` can be written over."""
    return isinstance(out, Cell) or _is_terminal(out)


def _write(out: Shown, text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more; the work goes on
        out.write(text)
        out.flush()


def _new_bar(total: float | None, out: Shown, words: str) -> Any:
    if isinstance(out, Cell):
        return out

    from tqdm import tqdm

    class Quiet(tqdm):
        monitor_interval = 0  # no thread that draws when it likes: a clock may be running

    # some terminals have a size of 0: tqdm would hide every bar there
    size = {"dynamic_ncols": True} if _has_size(out) else {"ncols": 100, "nrows": 20}
    return Quiet(
        total=total, file=out, desc=words, leave=False, mininterval=0, **size,
        bar_format="{desc} |{bar:24}|" if total else "{desc}",
    )  # fmt: skip


def _has_size(out: TextIO) -> bool:
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(out.fileno()).columns > 0
    return False
