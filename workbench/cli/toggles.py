"""The command that prints every toggle and preset, from the metadata of `Toggles`."""

import json
import textwrap
from typing import Annotated, Any

from workbench.cli import flags as f
from workbench.cli.common import app
from workbench.config import FAMILIES, Toggles
from workbench.presets import preset_words


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

    from workbench.frames import show, terminal_columns

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
    print("\nPresets (--preset NAME):")
    for line in preset_words():
        print(
            textwrap.fill(line, terminal_columns(), initial_indent="  ", subsequent_indent="    ")
        )


def described() -> list[dict[str, Any]]:
    """A toggle each: its name, what it decides, its values with a word (the baseline's first), the
    thread, the room in `workbench/`, and whether its answer is exact or rounding."""
    return [
        {
            "toggle": name,
            "about": meta["about"],
            "values": {v.value: v.word for v in (meta["values"](off), *meta["values"])},
            "thread": meta["thread"],
            "room": meta["room"],
            "answer": meta["answer"],
        }
        for name in Toggles.names()
        for meta, off in [(Toggles._field(name).metadata, Toggles._field(name).default)]
    ]
