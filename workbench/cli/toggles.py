"""The command that prints every toggle and preset, from the table of toggles."""

import json
import textwrap
from collections.abc import Callable
from typing import Annotated, Any

from workbench.cli import flags as f
from workbench.cli.common import app
from workbench.common import devices
from workbench.config import FAMILIES
from workbench.config.presets import preset_words, served_words
from workbench.config.table import ROWS, Clash, F, Need, Row, Want, facts_of


@app.command
def toggles(
    *, as_json: Annotated[bool, f.flag("print it as JSON, with all words", "--json")] = False
) -> None:
    """Print every toggle: its values, the thread it comes from, its room, and its answer.

    exact: the logits are bit-equal to the baseline's. rounding: the last bits may differ.
    """
    if as_json:
        print(json.dumps(described(), indent=1))
        return
    import pandas as pd

    from workbench.common.tables import show, terminal_columns

    rows = [
        {
            "toggle": found["toggle"],
            "values": ", ".join(found["values"]),
            "thread": found["thread"].removeprefix("llama.cpp "),
            "room": found["room"],
            "answer": found["answer"],
        }
        for found in described()
    ]
    show(pd.DataFrame(rows))
    print("\nThe first value is the baseline's. `workbench run --help` has a word on each.")
    print("A thread is a pull request of llama.cpp. Rooms are files in workbench/.")
    print(
        "\n".join(f"--{name} sets every --{name}-... that is not given itself" for name in FAMILIES)
    )
    for heading, lines in (
        ("Presets (--preset NAME):", preset_words()),
        ("What a server adds to best for several sequences (workbench serve):", served_words()),
    ):
        print(f"\n{heading}")
        for line in lines:
            print(textwrap.fill(line, terminal_columns(), initial_indent="  ",
                                subsequent_indent="    "))  # fmt: skip


def described() -> list[dict[str, Any]]:
    """The facts of each toggle, from its row in `config/table.py`.

    values: each with what it does, the baseline's first.
    answers: for each value, whether the answer is exact or rounding.
    served: the value that a server has, on the host and elsewhere; empty for none.
    needs, clashes, wants: for values that have such facts: what the value needs of a device, which
        values of other toggles exclude it, and which values of other toggles it needs.
    """
    return [
        {
            "toggle": row.name,
            "about": row.about,
            "values": {v.value: v.word for v in (row.off, *row.values)},
            "thread": row.thread,
            "room": row.room,
            "answer": row.answer,
            "answers": {v.value: row.answer_of(v) for v in row.values},
            "served": {devices.HOST: row.served(on_host=True), "others": row.served(on_host=False)},
            "needs": _by_value(row, Need, lambda need: (need.capability, need.least)),
            "clashes": _by_value(row, Clash, lambda clash: (clash.toggle, clash.value)),
            "wants": _by_value(row, Want, lambda want: (want.toggle, want.values)),
        }
        for row in ROWS.values()
    ]


def _by_value(row: Row, kind: type[F], said: Callable[[F], tuple[str, Any]]) -> dict[str, Any]:
    """The facts of one kind, for each value that has any."""
    found = {value.value: facts_of(row.name, value, kind) for value in row.values}
    return {value: dict(map(said, facts)) for value, facts in found.items() if facts}
