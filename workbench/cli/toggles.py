"""The command that prints toggles and presets, from the table of toggles."""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from workbench.cli import flags as f
from workbench.cli.common import app, wrapped
from workbench.common import devices
from workbench.config import FAMILIES, Toggles
from workbench.config.presets import described as preset_entries
from workbench.config.presets import preset_names, preset_words, served_words
from workbench.config.table import (
    CLASHES,
    EXACT,
    ROUNDING,
    ROWS,
    Clash,
    F,
    Need,
    Row,
    Want,
    facts_of,
)
from workbench.config.toggles import as_value
from workbench.program.letters import legend, patterns_in

ANSWERS = {EXACT: "logits are bit-equal to the baseline's", ROUNDING: "the last bits may differ"}


@app.command
def toggles(
    *names: Annotated[
        str, f.flag(f"toggles, families ({', '.join(FAMILIES)}) or presets; none: all")
    ],
    as_json: Annotated[bool, f.flag("print it as JSON, with all words", "--json")] = False,
) -> None:
    """Print every toggle, or those that are named.

    Of all toggles: values, thread, room and answer; then the presets. Of a named toggle also a word
    on each value, what the value needs, and what it clashes with. Of a preset: its toggles.

    exact: the logits are bit-equal to the baseline's. rounding: the last bits may differ.
    """
    asked = [_asked(name) for name in names]
    presets = [name for name in asked if name in preset_names()]
    wanted = [m for name in asked if name not in presets for m in Toggles.members(name)]
    found = [one for one in described() if not names or one["toggle"] in wanted]
    if as_json:
        of_presets = [one._asdict() for name in presets for one in preset_entries(name)]
        print(json.dumps(found + of_presets, indent=1))
    elif not names:
        _print_all(found)
    else:
        of = {one["toggle"]: one for one in found}
        print("\n\n".join("\n".join(_described(name, of)) for name in asked))


def _described(name: str, found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """What there is to say about a toggle, a family or a preset. found: facts by toggle."""
    if name in preset_names():
        return (line for one in preset_entries(name) for line in wrapped(str(one), 2))
    if name in FAMILIES:
        return _family(name, [found[member] for member in Toggles.members(name)])
    return _one(found[name])


def _asked(text: str) -> str:
    """The name in NAME or NAME=VALUE, which is written everywhere else: the page of the toggle has
    every value. Raises UsageError for a value that does not exist."""
    if text in preset_names():
        return text
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if equals:
        as_value(name, value, Toggles.values(name))
    return name


def _one(found: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say about a toggle, as lines that fit the terminal."""
    name, answer = found["toggle"], found["answer"]
    yield from wrapped(f"{name}: {found['about']}", 2)
    own = {
        "flag": f"--{name.replace('_', '-')}",
        "thread": found["thread"] or "none of its own",
        "room": f"workbench/{found['room']}",
        "answer": f"{answer}: {ANSWERS[answer]}",
    }
    for what, text in own.items():
        yield from wrapped(f"  {what:<8}{text}", 10)
    yield "  values"
    baseline = next(iter(found["values"]))
    for value, word in found["values"].items():
        said = [f"{value}{' (baseline)' if value == baseline else ''}: {word}"]
        if value != baseline and found["answers"][value] != answer:
            said.append(f"answer {found['answers'][value]}")
        yield from wrapped(f"    {'; '.join([*said, *_facts(found, value)])}", 6)
    if letters := legend(patterns_in(found["values"].values())):
        yield from wrapped(f"  {'letters':<8}{letters}", 10)
    for one, value, clash in CLASHES:
        if name in (one, clash.toggle):
            pair = f"{one}={value} clashes with {clash.toggle}={clash.value}"
            yield from wrapped(f"  {pair}: {clash.why}", 4)


def _facts(found: Mapping[str, Any], value: str) -> Iterator[str]:
    """What a value needs of a device and of other toggles."""
    needs = [
        f"{capability.replace('_', ' ')}{f' (at least {least})' if least > 1 else ''}"
        for capability, least in found["needs"].get(value, {}).items()
    ]
    if needs:
        yield f"needs of a device: {', '.join(needs)}"
    for toggle, others in found["wants"].get(value, {}).items():
        yield f"needs {toggle}={' or '.join(others)}"


def _family(name: str, members: list[Mapping[str, Any]]) -> Iterator[str]:
    from workbench.common.tables import Table, markdown, terminal_columns

    yield from wrapped(f"--{name} sets every --{name}-... that is not given itself", 2)
    rows = [
        {
            "toggle": one["toggle"],
            "about": one["about"],
            "values": ", ".join(one["values"]),
            "thread": one["thread"].removeprefix("llama.cpp "),
            "room": one["room"],
            "answer": one["answer"],
        }
        for one in members
    ]
    yield ""
    yield markdown(Table(rows).shown(keys=["toggle"]), terminal_columns())


def _print_all(found: list[dict[str, Any]]) -> None:
    import pandas as pd

    from workbench.common.tables import show, terminal_columns

    rows = [
        {
            "toggle": one["toggle"],
            "values": ", ".join(one["values"]),
            "thread": one["thread"].removeprefix("llama.cpp "),
            "room": one["room"],
            "answer": one["answer"],
        }
        for one in found
    ]
    show(pd.DataFrame(rows))
    print("\nThe first value is the baseline's. `workbench toggles NAME` has a word on each.")
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
