"""Nsight Compute's command line, and what it writes. Pure but for `find_ncu`."""

from __future__ import annotations

import csv
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path


def find_ncu() -> Path | None:
    """ncu on the PATH, or of an installed CUDA toolkit."""
    paths = [Path(found)] if (found := shutil.which("ncu")) else []
    paths.append(Path("/usr/local/cuda/bin/ncu"))
    return next((path for path in paths if path.is_file()), None)


def command(
    tool: Path, metrics: Sequence[str], functions: Iterable[str], log: Path, child: Sequence[str]
) -> list[str]:
    """How `tool` is called to count the launches of `functions` that `child` makes between
    cuProfilerStart and cuProfilerStop; what it says goes to `log`."""
    wanted = "|".join(sorted(set(functions)))
    return [
        str(tool), "--clock-control", "none", "--cache-control", "all", "--target-processes", "all",
        "--profile-from-start", "off", "--kernel-name-base", "function",
        "--kernel-name", f"regex:^({wanted})$", "--metrics", ",".join(metrics),
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), *child,
    ]  # fmt: skip


def launches_counted(log: str) -> list[dict[str, tuple[str, str]]]:
    """The launches in what ncu wrote (a line of names, one of units, then one for each launch):
    names of columns to value and unit. Lines around the table are passed over."""
    table = [line for line in log.splitlines() if not line.startswith("==")]
    begin = next((i for i, line in enumerate(table) if line.startswith('"ID"')), len(table))
    rows = list(csv.reader(table[begin:]))
    if len(rows) < 3:
        return []
    names, units = rows[0], rows[1] + [""] * len(rows[0])
    return [
        dict(zip(names, zip(row, units, strict=False), strict=True))
        for row in rows[2:]
        if len(row) == len(names)
    ]


def number(value: str) -> float | None:
    """`1,234.5` as a number; None where there is none (`n/a`, `nan`, empty)."""
    try:
        found = float(value.replace(",", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def unknown(log: str, metrics: Iterable[str]) -> list[str]:
    """The metrics that an error or a warning of ncu names."""
    complaints = " ".join(re.findall(r"^==(?:ERROR|WARNING)== .*$", log, re.MULTILINE))
    return [m for m in metrics if re.search(rf"(?<![\w.]){re.escape(m)}(?!\.?\w)", complaints)]


def refusal(log: str, output: str) -> str:
    """The line that says why not all was counted: ncu's own error, or the child's last line."""
    errors = re.findall(r"^==ERROR== (.*\S)", log + "\n" + output, re.MULTILINE)
    own = [line for line in errors if "application returned" not in line]
    lines = [line for line in output.strip().splitlines() if not line.startswith("==")]
    return next(iter(own or lines[-1:] or errors), "ncu gave no reason")
