"""The pattern of a step as it really ran: the letters of `Program.pattern`, read off its spans.

A program says what was asked for. What happened can differ in one way: the call of an asynchronous
copy may make the host wait. CUDA does so when it must stage a pageable source behind work that is
still under way. Such a hidden wait is drawn as `(s)` behind its copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from workbench.common.errors import UsageError
from workbench.program.commands import COPY_STREAM, RESULT
from workbench.program.letters import folded as fold_group
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
    what orders such streams has no letter: it is known by both its ends, in `_orders_branches`.

    Whether a copy was held is decided over all recorded steps with the same letters: in one step
    the operating system may have stopped the host for as long. A step tells only if the copy's
    stream worked for 20 us or more between the copy's call and its end: a shorter wait cannot be
    told from a slow call, and an idle stream makes nobody wait. Raises UsageError for a step that
    is not in the trace, and for steps that differ.
    """
    spans = _spans(trace)
    steps = {n: _letters(part) for n, part in _by_step(spans).items()}
    if step is None:
        patterns = {_text(letters, frozenset(), False): n for n, letters in steps.items()}
        if len(patterns) != 1:
            found = ", ".join(f"{p!r} (step {n})" for p, n in list(patterns.items())[:2])
            raise UsageError(
                f"the trace has steps of {len(patterns)} patterns{': ' + found if found else ''}; "
                "name one of its steps"
            )
        step = next(iter(steps))
    if step not in steps:
        raise UsageError(f"step {step} is not in the trace; it has {_listed(steps)}")
    alike = [n for n, letters in steps.items() if letters == steps[step]]
    return _text(steps[step], _held(spans, alike), fold)


def _spans(trace: Any) -> list[Span]:
    """Of a profile (its timeline), a timeline, a recorder, or as they are."""
    source = getattr(trace, "timeline", trace)
    return list(getattr(source, "spans", source))


def _by_step(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Of each step: the host's commands, in order, its splits, and the launches that ran."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        commands = span.lane == HOST_LANE and ("index" in span.args or span.category == "split")
        ran = span.category == "device" and span.args.get("kind") == "launch"
        if (commands or ran) and span.args.get("step") is not None:
            steps[span.args["step"]].append(span)
    return steps


def _letters(spans: Sequence[Span]) -> list[_Letter]:
    """The letters of one step, in program order."""
    backends = {s.args["split"]: s.args["backend"] for s in spans if s.category == "split"}
    calls = (s for s in spans if s.lane == HOST_LANE and "index" in s.args)
    commands = sorted(calls, key=lambda s: s.args["index"])
    inner = _orders_branches(commands)
    letters: list[_Letter] = []
    for span in commands:
        split, index = span.args["split"], span.args["index"]
        if index in inner:
            continue
        letter = LETTERS.get(span.category, "")
        if letter == "g" and backends.get(split) == HOST_BACKEND:
            letter = "h"
        if not letter or split == RESULT:
            continue
        if "blocks" in span.args:  # a copy and the host's wait for it are one letter
            letters[-1] = letters[-1]._replace(letter="c")
        elif letter not in "gh" or not letters or letters[-1][:2] != (split, letter):
            letters.append(_Letter(split, letter, index))  # as are the launches of a split
    return _numbered(letters, spans)


def _numbered(letters: Sequence[_Letter], spans: Iterable[Span]) -> list[_Letter]:
    """The letters; work that several streams did, with their number."""
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
        if (event := span.args.get("event")) is None:
            continue
        if span.category == "record":
            recorded[event] = span
        elif span.category == "wait" and event in recorded:
            ends = recorded[event], span
            devices = {str(end.args["on"]).rpartition(" stream ")[0] for end in ends}
            alike = len(devices) == len({end.args["split"] for end in ends}) == 1
            computes = all(end.args["stream"] != COPY_STREAM for end in ends)
            if alike and computes:
                found |= {end.args["index"] for end in ends}
    return found


def _held(spans: Sequence[Span], steps: Sequence[int]) -> frozenset[int]:
    """The commands (by index) of `steps` with a call that was held for the device: in more than
    half of the steps that can tell."""
    chosen = set(steps)
    lanes: dict[str, list[Span]] = defaultdict(list)
    ended: dict[tuple[int, int], Span] = {}
    for span in spans:
        if span.category == "device":
            lanes[span.lane].append(span)
            if span.args.get("kind") == "copy":
                ended[span.args["step"], span.args["index"]] = span
    streams = {lane: _Stream(work) for lane, work in lanes.items()}
    votes: dict[int, int] = defaultdict(int)
    for call in spans:
        if call.lane != HOST_LANE or call.category != "copy" or call.args["step"] not in chosen:
            continue
        index = call.args["index"]
        copy = ended.get((call.args["step"], index))
        if copy is None:
            continue
        if streams[copy.lane].busy_ns(call.start_ns, copy.end_ns) >= HELD_NS:
            votes[index] += 1 if call.end_ns + SLACK_NS >= copy.end_ns else -1
    return frozenset(index for index, n in votes.items() if n > 0)


class _Stream:
    """When a stream worked: its spans, joined where they overlap."""

    def __init__(self, spans: Iterable[Span]):
        self._starts: list[int] = []
        self._ends: list[int] = []
        for span in sorted(spans, key=lambda s: s.start_ns):
            if self._ends and span.start_ns <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], span.end_ns)
            else:
                self._starts.append(span.start_ns)
                self._ends.append(span.end_ns)

    def busy_ns(self, first: int, last: int) -> int:
        """Of the time from `first` to `last`, that at work."""
        busy = 0
        for i in range(bisect_right(self._ends, first), len(self._starts)):
            if self._starts[i] >= last:
                break
            busy += min(self._ends[i], last) - max(self._starts[i], first)
        return busy


def _text(letters: Sequence[_Letter], held: frozenset[int], fold: bool) -> str:
    """The splits' letters, hidden waits behind asynchronous copies: a `c` waits anyway."""
    n_splits = max((one.split for one in letters), default=-1) + 1
    groups = [[one for one in letters if one.split == n] for n in range(n_splits)]
    return " ".join(_group(group, held, fold) for group in groups)


def _group(group: Sequence[_Letter], held: frozenset[int], fold: bool) -> str:
    plain = "".join(one.letter for one in group)
    hidden = [one.command in held for one in group if one.letter == "a"]
    if fold and len(set(hidden)) < 2:
        folded = fold_group(plain)
        return folded.replace("a", f"a{HIDDEN}") if any(hidden) else folded
    return "".join(
        one.letter + (HIDDEN if one.letter == "a" and one.command in held else "") for one in group
    )


def _listed(steps: Iterable[int]) -> str:
    numbers = sorted(steps)
    if not numbers:
        return "none"
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
