"""The difference of two traces for reading: a table for the terminal, and an offline page."""

import html

import pandas as pd

from workbench.common.tables import BOX_CSS, Table, boxed_html, prose_html

SHOWN = 20  # rows of a table on the terminal; the page has all
WIDEST = 26  # letters of a name on the terminal
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:15px/1.45 sans-serif;color:#222;max-width:1100px;margin:24px auto;padding:0 16px}}
table{{border-collapse:collapse;margin:12px 0}}
th,td{{padding:4px 8px;border-bottom:1px solid #ddd;white-space:nowrap;
font-variant-numeric:tabular-nums}}
td:nth-child(2){{white-space:normal;overflow-wrap:anywhere}}
{box_css}
</style></head>
<body><h1>{title}</h1>
<p>{answer}</p>
<ul>{notes}</ul>
{table}
</body></html>
"""


def table_of(difference: pd.DataFrame, short: bool = False) -> Table:
    """`wb.diff` for reading, with units. Times are traced and of a step. short: at most SHOWN rows,
    and names cut to WIDEST letters."""
    rows = difference.head(SHOWN) if short else difference
    what = rows["what"].astype(str).map(_without_arguments)
    layer = rows["layer"].map(lambda n: f", layer {int(n)}" if pd.notna(n) else "")
    if short:
        what = what.where(what.str.len() <= WIDEST, what.str.slice(0, WIDEST - 3) + "...")
    made = Table(
        {
            "where": rows["where"],
            "what": what + layer,
            "calls": [
                f"{_count(before)} -> {_count(after)}"
                for before, after in zip(rows["calls_before"], rows["calls_after"], strict=True)
            ],
            "us before": rows["us_before"],
            "us after": rows["us_after"],
            "delta us": rows["delta_us"],
            "% of step": 100 * rows["share"],
        }
    ).reset_index(drop=True)
    digits = dict.fromkeys(("us before", "us after", "delta us", "% of step"), 1)
    return made.shown(keys=["where", "what"], digits=digits, right=["calls"])


def _count(calls: float) -> str:
    """Calls in a step: a whole number as such, else with one digit after the point."""
    return f"{calls:.0f}" if float(calls).is_integer() else f"{calls:.1f}"


def _without_arguments(function: str) -> str:
    """A kernel's name with its template's arguments, and without the others:
    `void f<(int)1>(const char *)` -> `f<(int)1>`."""
    depth = 0
    for at in range(len(function) - 1, -1, -1) if function.endswith(")") else ():
        depth += (function[at] == ")") - (function[at] == "(")
        if not depth:
            return function[:at].removeprefix("void ") or function
    return function.removeprefix("void ")


def page_of(difference: pd.DataFrame, lines: list[str]) -> str:
    """The difference as one offline page: the answer, the sources, and all rows. All text of a file
    is escaped."""
    before, after = difference.attrs["names"]
    title = html.escape(f"What takes longer in {after} than in {before}?")
    notes = "".join(f"<li>{prose_html(line)}</li>" for line in lines)
    answer = prose_html(difference.attrs["line"])
    table = boxed_html(table_of(difference))
    return PAGE.format(title=title, answer=answer, notes=notes, table=table, box_css=BOX_CSS)
