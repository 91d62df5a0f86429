"""Frames as people read them: Markdown that fits a terminal, and HTML for a notebook.

    Model: tiny-llama Q8_0; n: 10            values that all rows share stand above, once
                                             (wrapped, as prose)
    | Toggled | t/s toggled | Speedup |
    |---------|------------:|--------:|      numbers to the right, text to the left
    | packed  |      831.32 |    1.74 |

    - packed: a text too long for a column stands below, after the name of its row

A table that is too wide is first divided by its groups. If that is not enough, its texts move to
the list below. Then it becomes several tables that repeat its keys, and at last a list. Each form
is Markdown, no line is wider than allowed, and no figure is lost.

A frame describes itself in `attrs`:

    constant   name to value, true of every row
    groups     columns by which rows belong together
    keys       columns that name a row; by default the first columns that tell the rows apart
    digits     column to digits after the point; 2 by default
    code       columns that a page shows in code style
    right      more columns that stand to the right, as numbers do
"""

from __future__ import annotations

import html
import math
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

NO_TERMINAL = 100  # columns, where standard output is no terminal and COLUMNS is not set
NARROWEST = 40
PROSE = 24  # a text longer than this may leave its column
# of a page: a table that is wider or longer than the window scrolls in a box, which is in view as a
# whole, with both scroll bars; the names of the columns stay in view
BOX_CSS = """.wide{overflow:auto;max-height:85vh}
.wide thead th{position:sticky;top:0;background:#fff}
@media print{.wide{overflow:visible;max-height:none}}"""
_KEPT = ("constant", "groups", "keys", "digits", "code", "right")
_CODE = re.compile(r"`([^`]+)`")


class Table(pd.DataFrame):
    """A frame of a few rows that is shown whole, in a notebook and on a terminal."""

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def shown(self, **how: Any) -> Table:
        """The table itself, with these `attrs` (`keys`, `digits`, `code`, ...)."""
        self.attrs |= how
        return self

    def _repr_html_(self) -> str:
        return to_html(self)

    def __repr__(self) -> str:
        return markdown(self, terminal_columns())


def terminal_columns() -> int:
    """How wide a line may be: the terminal's width or COLUMNS, else NO_TERMINAL."""
    return known_columns() or NO_TERMINAL


def known_columns() -> int | None:
    """The terminal's width or COLUMNS; None where standard output goes to a file or a pipe."""
    columns = shutil.get_terminal_size((0, 0)).columns
    return max(NARROWEST, columns) if columns else None


def show(table: pd.DataFrame) -> None:
    """Prints the frame as Markdown that fits the terminal."""
    print(markdown(table, terminal_columns()))


def show_prose(text: str) -> None:
    """Prints sentences, a line for each; on a terminal each is wrapped at its width."""
    width = known_columns()
    for line in text.splitlines():
        print(line if width is None else _wrapped(line, width))


def markdown(table: pd.DataFrame, width: int | None = None) -> str:
    """The frame as Markdown. Values that all rows share stand above it. A `|` in a cell is escaped.

    width: no line is longer, except a line with a single word that is. None: one table, however
        wide, with only `attrs["constant"]` above it, as for a file.
    """
    cells = _Cells.from_frame(table)
    if width is None:
        return _paragraphs([_common(cells.constant), cells.text()])
    return _paragraphs(list(_fitted(cells, width)))


def to_html(table: pd.DataFrame) -> str:
    """The frame as HTML: text to the left, numbers to the right, `code` in code style. Values that
    all rows share stand above. The index is shown where it has a name."""
    cells = _Cells.from_frame(table).lifted()
    sides = ["right" if right else "left" for right in cells.right]

    code = [column in (table.attrs.get("code") or ()) for column in cells.columns]

    def row(tag: str, values: Sequence[str]) -> str:
        shown = (
            f'<{tag} style="text-align:{side}">'
            + (f"<code>{html.escape(v)}</code>" if own and tag == "td" else prose_html(v))
            + f"</{tag}>"
            for side, v, own in zip(sides, values, code, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    common = prose_html(_common(cells.constant))
    return (
        (f"<p><small>{common}</small></p>" if common else "")
        + f"<table><thead>{row('th', cells.columns)}</thead>"
        + f"<tbody>{''.join(row('td', values) for values in cells.rows)}</tbody></table>"
    )


def boxed_html(table: pd.DataFrame) -> str:
    """The frame as HTML in a box that scrolls; the page has BOX_CSS."""
    return f'<div class="wide" tabindex="0">{to_html(table)}</div>'


def prose_html(text: str) -> str:
    """Text as HTML: escaped, with text between backticks as code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


class _Cells(NamedTuple):
    """A frame as text. right: whether a column stands to the right, because it has only numbers."""

    columns: list[str]
    rows: list[list[str]]
    right: list[bool]
    constant: dict[str, str]
    groups: list[str]
    keys: list[str]

    @classmethod
    def from_frame(cls, table: pd.DataFrame) -> _Cells:
        attrs = {name: table.attrs.get(name) for name in _KEPT}
        if any(name is not None for name in table.index.names):
            table = table.reset_index()
        columns = [str(c) for c in table.columns]
        digits: Mapping[str, int] = attrs["digits"] or {}
        n_digits = [digits.get(c, 2) for c in columns]
        rows = [
            [_cell(value, n) for value, n in zip(row, n_digits, strict=True)]
            for row in table.to_numpy(dtype=object)
        ]
        right = [
            column in (attrs["right"] or ())
            or (bool(rows) and all(_is_number(row[i]) for row in rows if row[i]))
            for i, column in enumerate(columns)
        ]
        return cls(
            columns, rows, right,
            {str(k): _cell(v, 2) for k, v in (attrs["constant"] or {}).items()},
            list(attrs["groups"] or []), list(attrs["keys"] or []),
        )  # fmt: skip

    @property
    def widths(self) -> list[int]:
        return [
            max(3, *(len(_escaped(text)) for text in (column, *(row[i] for row in self.rows))))
            for i, column in enumerate(self.columns)
        ]

    @property
    def width(self) -> int:
        return sum(self.widths) + 3 * len(self.columns) + 1

    @property
    def naming(self) -> list[str]:
        """The columns that name a row."""
        given = [c for c in self.keys if c in self.columns]
        if given:
            return given
        for n in range(1, len(self.columns)):
            if len({tuple(row[:n]) for row in self.rows}) == len(self.rows):
                return self.columns[:n]
        return self.columns[:1]

    def name(self, row: Sequence[str]) -> str:
        at = [self.columns.index(c) for c in self.naming]
        return ", ".join(row[i] for i in at if row[i])

    def only(self, columns: Sequence[str]) -> _Cells:
        at = [self.columns.index(c) for c in columns]
        return self._replace(
            columns=[self.columns[i] for i in at],
            rows=[[row[i] for i in at] for row in self.rows],
            right=[self.right[i] for i in at],
        )

    def without(self, columns: Sequence[str]) -> _Cells:
        return self.only([c for c in self.columns if c not in columns])

    def lifted(self) -> _Cells:
        """Without the columns that have one value in all rows; these become `constant`."""
        if len(self.rows) < 2:
            return self
        same = [c for i, c in enumerate(self.columns) if len({row[i] for row in self.rows}) == 1]
        if len(same) == len(self.columns):
            same = same[1:]
        found = {c: self.rows[0][self.columns.index(c)] for c in same}
        return self.without(same)._replace(constant=self.constant | found)

    def text(self) -> str:
        """One table, however wide."""
        widths = self.widths

        def line(values: Sequence[str]) -> str:
            padded = [
                v.rjust(w) if r else v.ljust(w)
                for v, w, r in zip(map(_escaped, values), widths, self.right, strict=True)
            ]
            return "| " + " | ".join(padded) + " |"

        rule = "|".join(
            "-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, self.right, strict=True)
        )
        return "\n".join([line(self.columns), f"|{rule}|", *map(line, self.rows)])


def _fitted(cells: _Cells, width: int) -> Iterator[str]:
    """The paragraphs of a table, with lines of at most `width`."""
    cells = cells.lifted()
    yield _common(cells.constant, width)
    groups = [c for c in cells.groups if c in cells.columns]
    if cells.width <= width:
        yield cells.text()
    elif groups:
        rest = cells.without(groups)
        by = cells.only(groups).rows
        for values in dict.fromkeys(map(tuple, by)):
            rows = [row for row, own in zip(rest.rows, by, strict=True) if tuple(own) == values]
            heading = dict(zip(groups, values, strict=True))
            yield from _fitted(rest._replace(rows=rows, constant=heading, groups=[]), width)
    else:
        yield from _narrowed(cells, width)


def _narrowed(cells: _Cells, width: int) -> Iterator[str]:
    """A table that is too wide: texts below it, or several tables, or a list."""
    naming, texts = cells.naming, []
    table = cells
    while table.width > width:
        wide = [
            (w, c)
            for c, w, right in zip(table.columns, table.widths, table.right, strict=True)
            if w > PROSE and not right and c not in naming
        ]
        if not wide:
            break
        texts.append(max(wide)[1])
        table = table.without(texts[-1:])
    others = [c for c in table.columns if c not in naming]
    tables, left = [], others
    while left:
        n = len(left)
        while n and cells.only([*naming, *left[:n]]).width > width:
            n -= 1
        if not n:
            yield from _listed(cells, cells.columns, width)
            return
        tables.append(table.only([*naming, *left[:n]]).text())
        left = left[n:]
    yield from tables
    in_order = [c for c in cells.columns if c in texts]
    yield from _listed(cells, in_order, width, named=True, every=not tables)


def _listed(
    cells: _Cells, columns: Sequence[str], width: int, named: bool = False, every: bool = False
) -> Iterator[str]:
    """A list with an item for each row that has a text, or, with `every`, for each row. named: the
    item begins with the row's name; else it lists names and values."""
    at = [cells.columns.index(c) for c in columns]
    lines = []
    for row in cells.rows:
        said = [(cells.columns[i], row[i]) for i in at if row[i]]
        text = "; ".join(v if named and len(columns) == 1 else f"{c}: {v}" for c, v in said)
        if named and (text or every):
            text = f"{cells.name(row)}: {text}" if text else cells.name(row)
        if text:
            lines.append(_wrapped(f"- {text}", width))
    yield "\n".join(lines)


def _common(constant: Mapping[str, str], width: int | None = None) -> str:
    text = "; ".join(f"{name}: {value}" for name, value in constant.items() if value)
    return text if width is None else _wrapped(text, width, "")


def _wrapped(text: str, width: int, indent: str = "  ") -> str:
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _paragraphs(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _cell(value: Any, digits: int) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
    return text.replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
