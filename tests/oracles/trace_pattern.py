"""The pattern of a step as it really ran: the letters of `Program.pattern`, read off its spans.

A program says what was asked for. What happened can differ in one way: the call of an asynchronous
copy may make the host wait. CUDA does so when it must stage a pageable source behind work that is
still under way. Such a hidden wait is drawn as `(s)` behind its copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.program.commands import COPY_STREAM, RESULT
from workbench.program.letters import folded
from workbench.trace.spans import HOST_LANE, Span

HIDDEN = "(s)"
# A copy's call that does not wait takes 2 to 10 us, traced. One during which its stream worked for
# this long, and which returned no sooner than the copy was done, was held.
HELD_NS = 20_000
SLACK_NS = 5_000  # how far device spans may be off the host's
LETTERS = {"copy": "a", "launch": "g", "sync": "s", "record": "r", "wait": "w", "replay": "p"}
HOST_BACKEND = "host"


class _Letter(NamedTuple):
    """A letter of a split, and the command it stands for."""

    split: int
    letter: str
    command: int


def trace_pattern(trace: Any, step: int | None = None, *, fold: bool = False) -> str:
    """The pattern of step number `step` as recorded, hidden waits as `(s)`. Where nothing is
    hidden, it equals the pattern of the step's program.

    trace: a Profile, a Timeline, a recorder, or spans. Without `step`, all recorded steps must
    have the same pattern. fold as for `Program.pattern`; a split with only some copies held is
    written in full. The work of a split has the number of streams that did some of it (`g3`), and
    what orders such streams has no letter.

    Whether a copy was held is decided over all recorded steps with the same letters: in one step
    the operating system may have stopped the host for as long. A step tells only if the copy's
    stream worked for 20 us or more between the copy's call and its end: a shorter wait cannot be
    told from a slow call, and an idle stream makes nobody wait. Raises UsageError for a step that
    is not in the trace, and for steps that differ.
    """
    source = getattr(trace, "timeline", trace)
    spans: list[Span] = list(getattr(source, "spans", source))
    of_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        commands = span.lane == HOST_LANE and ("index" in span.args or span.category == "split")
        ran = span.category == "device" and span.args.get("kind") == "launch"
        if (commands or ran) and span.args.get("step") is not None:
            of_step[span.args["step"]].append(span)
    steps = {n: _letters(part) for n, part in of_step.items()}
    if step is None:
        patterns = {_text(letters, (), False): n for n, letters in steps.items()}
        if len(patterns) != 1:
            found = ", ".join(f"{p!r} (step {n})" for p, n in list(patterns.items())[:2])
            what = f"the trace has steps of {len(patterns)} patterns{': ' + found if found else ''}"
            raise UsageError(f"{what}; name one of its steps")
        step = next(iter(steps))
    if step not in steps:
        known = sorted(steps)
        several = f"steps {known[0]} to {known[-1]}" if len(known) > 1 else ""
        it_has = several or (f"step {known[0]}" if known else "none")
        raise UsageError(f"step {step} is not in the trace; it has {it_has}")
    alike = {n for n, letters in steps.items() if letters == steps[step]}
    return _text(steps[step], _held(spans, alike), fold)


def _letters(spans: Sequence[Span]) -> list[_Letter]:
    """The letters of one step, in program order; work that several streams did, with their
    number."""
    backends = {s.args["split"]: s.args["backend"] for s in spans if s.category == "split"}
    calls = (s for s in spans if s.lane == HOST_LANE and "index" in s.args)
    commands = sorted(calls, key=lambda s: s.args["index"])
    inner = _orders_branches(commands)
    letters: list[_Letter] = []
    for span in commands:
        split, index = span.args["split"], span.args["index"]
        letter = LETTERS.get(span.category, "")
        if not letter or split == RESULT or index in inner:
            continue
        if letter == "g" and backends.get(split) == HOST_BACKEND:
            letter = "h"
        if "blocks" in span.args:  # a copy and the host's wait for it are one letter
            letters[-1] = letters[-1]._replace(letter="c")
        elif letter not in "gh" or not letters or letters[-1][:2] != (split, letter):
            letters.append(_Letter(split, letter, index))  # as are the launches of a split
    lanes: dict[int, set[str]] = defaultdict(set)
    for span in spans:
        if span.category == "device":
            lanes[span.args["split"]].add(span.lane)
    return [
        one._replace(letter=f"{one.letter}{len(lanes[one.split])}")
        if one.letter in ("g", "p") and len(lanes[one.split]) > 1
        else one
        for one in letters
    ]


def _orders_branches(commands: Sequence[Span]) -> set[int]:
    """The Records and Waits (by index) that order compute streams of one device in a split. Behind
    a plan of branches both are on its stream."""
    found: set[int] = set()
    recorded: dict[str, Span] = {}
    for span in commands:
        event = span.args.get("event")
        if event is not None and span.category == "record":
            recorded[event] = span
        elif event in recorded and span.category == "wait":
            ends = recorded[event], span
            places = {(str(end.args["on"]).rpartition(" stream ")[0], end.args["split"])
                      for end in ends}  # fmt: skip
            if len(places) == 1 and all(end.args["stream"] != COPY_STREAM for end in ends):
                found |= {end.args["index"] for end in ends}
    return found


def _held(spans: Sequence[Span], steps: Collection[int]) -> set[int]:
    """The commands (by index) of `steps` with a call that was held for the device: in more than
    half of the steps that can tell."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    ended: dict[tuple[int, int], Span] = {}
    for span in sorted(spans, key=lambda s: s.start_ns):
        if span.category == "device":
            lanes[span.lane].append(span)
            if span.args.get("kind") == "copy":
                ended[span.args["step"], span.args["index"]] = span
    votes: dict[int, int] = defaultdict(int)
    for call in spans:
        if call.lane == HOST_LANE and call.category == "copy" and call.args["step"] in steps:
            copy = ended.get((call.args["step"], call.args["index"]))
            if copy and _busy_ns(lanes[copy.lane], call.start_ns, copy.end_ns) >= HELD_NS:
                late = call.end_ns + SLACK_NS >= copy.end_ns
                votes[call.args["index"]] += 1 if late else -1
    return {index for index, n in votes.items() if n > 0}


def _busy_ns(work: Iterable[Span], first: int, last: int) -> int:
    """Of the time from `first` to `last`, that which a stream worked; work: in order."""
    busy = 0
    for span in work:
        begin, end = max(span.start_ns, first), min(span.end_ns, last)
        busy += max(0, end - begin)
        first = max(first, end)
    return busy


def _text(letters: Sequence[_Letter], held: Collection[int], fold: bool) -> str:
    """The splits' letters, hidden waits behind asynchronous copies: a `c` waits anyway."""
    found = []
    for n in range(max((one.split for one in letters), default=-1) + 1):
        group = [one for one in letters if one.split == n]
        marks = {one: HIDDEN for one in group if one.letter == "a" and one.command in held}
        copies = [one for one in group if one.letter == "a"]
        if fold and len(marks) in (0, len(copies)):
            text = folded("".join(one.letter for one in group))
            found.append(text.replace("a", f"a{HIDDEN}") if marks else text)
        else:
            found.append("".join(one.letter + marks.get(one, "") for one in group))
    return " ".join(found)
