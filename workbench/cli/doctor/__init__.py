"""`workbench doctor`: what works on this machine, what is missing, and the line that mends it."""

import dataclasses
import json
import textwrap
from typing import Annotated

from workbench.cli import flags as f
from workbench.cli.common import app
from workbench.cli.doctor import look
from workbench.cli.doctor.findings import BROKEN, Finding, diagnose

BROKEN_STATUS = 1


@app.command
def doctor(
    *, as_json: Annotated[bool, f.flag("print findings and facts as JSON", "--json")] = False
) -> None:
    """Say what works, what is missing, and what mends it.

    ok: works. missing: not installed or not there, and not needed for the rest. broken: needed, or
    here and unusable; the exit status is then 1. Nothing is changed.
    """
    facts = look.facts()
    found = diagnose(facts)
    if as_json:
        made = {
            "findings": [one._asdict() for one in found],
            "facts": dataclasses.asdict(facts),
            "works": not any(one.state == BROKEN for one in found),
        }
        print(json.dumps(made, indent=1, default=str))
    else:
        _print(found)
    if any(one.state == BROKEN for one in found):
        raise SystemExit(BROKEN_STATUS)


def _print(found: list[Finding]) -> None:
    from workbench.common.tables import terminal_columns

    width = max(len(one.part) for one in found) + 1
    for one in found:
        begin = f"{one.state:<8}{one.part:<{width}}"
        space = " " * len(begin)
        print(textwrap.fill(begin + one.says, terminal_columns(), subsequent_indent=space,
                            break_on_hyphens=False))  # fmt: skip
        if one.mend:
            print(textwrap.fill(f"{space}mend: {one.mend}", terminal_columns(),
                                subsequent_indent=space, break_on_hyphens=False,
                                break_long_words=False))  # fmt: skip
