"""A record of rows, as tests/exhaustive.py and tests/faults write them: each row of one commit."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from workbench.benchmarks.runs import provenance
from workbench.common.output import write_text


class Rows:
    """What FILE holds: rows by name under `kind`, and of each commit the date and the machine. It
    is written whenever a row is noted, so a run that is cut off loses nothing.

    commit: of this checkout, with a + where it has changes.
    """

    def __init__(self, out: Path, kind: str) -> None:
        self.out, self.kind, self._lock = out, kind, threading.Lock()
        found = json.loads(out.read_text()) if out.is_file() else {}
        self.commits: dict[str, Any] = found.get("commits", {})
        self.rows: dict[str, Any] = found.get(kind, {})
        commit = provenance.commit()
        self.commit = commit["hash"] + ("+" if commit["dirty"] else "")
        self.about = {"commit": commit, "machine": provenance.machine()}

    def now(self, name: str) -> dict[str, Any]:
        """The row of this commit; empty where there is none."""
        row: dict[str, Any] = self.rows.get(name, {})
        return row if row.get("commit") == self.commit else {}

    def note(self, name: str, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows[name] = {"commit": self.commit, **row}
            self.commits[self.commit] = self.about | {"date": provenance.utc_now()}
            self.write()

    def write(self) -> None:
        """A line for a row: there are thousands."""
        used = {row["commit"] for row in self.rows.values()}
        commits = {name: about for name, about in self.commits.items() if name in used}
        rows = [f"{json.dumps(name)}: {json.dumps(self.rows[name])}" for name in sorted(self.rows)]
        lines = ",\n  ".join(rows)
        write_text(self.out, f'{{"commits": {json.dumps(commits, indent=1)},\n'
                             f' "{self.kind}": {{\n  {lines}\n}}}}\n')  # fmt: skip
