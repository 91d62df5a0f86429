"""llama-bench's lists: `512,1024`, `1-8`, `128-512+128`, `1-8*2`, or a flag given several times.
Toggles take lists of their values in the same way: `--sync per_copy,packed`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from cyclopts import Parameter

from workbench.cli.flags import ENGINE, TOGGLES, EngineSettings, EveryToggle
from workbench.common.errors import UsageError
from workbench.config import BEST, FAMILIES, TogglePreset, Toggles

MOST_NUMBERS = 1000  # that one list may stand for
_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?", re.ASCII)
Listed = Annotated[list[str], Parameter(negative="", consume_multiple=False)]


def numbers(flag: str, texts: str | Iterable[str], twice: bool = False) -> list[int]:
    """The whole numbers of a list, in its order. Raises UsageError, naming `flag`, for anything
    else, for a range that does not end, and for a number that is there twice, unless it may be."""
    given = [texts] if isinstance(texts, str) else list(texts)
    found = [n for text in given for part in text.split(",") for n in _numbers(flag, part.strip())]
    return found if twice else once(flag, found)


V = TypeVar("V")


def once(flag: str, values: list[V]) -> list[V]:
    """The values of a list. Raises UsageError, naming `flag`, for a value that is there twice."""
    for n, value in enumerate(values):
        if value in values[:n] and value != "":  # an empty one has an error of its own
            raise UsageError(f"{flag} has {value} twice; give each value once")
    return values


def _numbers(flag: str, part: str) -> list[int]:
    if re.fullmatch(r"-?\d+", part, re.ASCII):
        return [int(part)]
    found = _RANGE.fullmatch(part)
    if found is None:
        raise UsageError(
            f"{flag} {part!r} is no list of whole numbers; write them as 512,1024, or 1-8*2"
        )
    first, last, step = int(found[1]), int(found[2]), int(found[4] or 1)
    stuck = step < 1 or (found[3] == "*" and (step < 2 or first < 1))
    if first > last or stuck:
        raise UsageError(f"{flag} {part!r} is a range that does not end; write it as 1-8*2")
    many = itertools.takewhile(lambda n: n <= last, _walk(first, step, found[3] == "*"))
    out = list(itertools.islice(many, MOST_NUMBERS + 1))
    if len(out) > MOST_NUMBERS:
        raise UsageError(f"{flag} {part!r} stands for more than {MOST_NUMBERS} numbers; give fewer")
    return out


def _walk(first: int, step: int, by_product: bool) -> Iterator[int]:
    n = first
    while True:
        yield n
        n = n * step if by_product else n + step


LISTED = ("n_ubatch", "threads", "n_gpu_layers", "n_batch", "flash_attn")


class SeveralSettings:
    """`EngineSettings` in which the flags of LISTED take lists. Its fields are made by
    `_several`."""

    def each(self) -> list[EngineSettings]:
        """The settings of each engine: one for each combination that differs. Raises UsageError."""
        given: dict[str, list[Any]] = {}
        for f in fields(EngineSettings):
            value = getattr(self, f.name)
            if f.name not in LISTED:
                given[f.name] = [value]
            elif value is None:
                given[f.name] = [f.default]
            elif f.name == "flash_attn":
                given[f.name] = once("-fa", [part for text in value for part in text.split(",")])
            else:
                given[f.name] = numbers(f"--{f.name.replace('_', '-')}", as_numbers(value))
        names = list(given)
        every = [
            EngineSettings(**dict(zip(names, chosen, strict=True)))
            for chosen in itertools.product(*given.values())
        ]
        return list({settings.plain(): settings for settings in every}.values())  # alike: one


def as_numbers(texts: Sequence[str]) -> list[str]:
    """The texts of a list; as in llama.cpp, `all` stands for all layers."""
    return [{"all": "-1", "auto": "-1"}.get(text, text) for text in texts]


TOGGLE_FLAGS = ("preset", *FAMILIES, *Toggles.names())


class SeveralToggles:
    """`EveryToggle` in which a preset and every toggle take lists. Its fields are made by
    `_several_toggles`."""

    def given(self) -> dict[str, list[str]]:
        """The values of every flag that was given, by its name."""
        lists = {name: getattr(self, name) for name in TOGGLE_FLAGS}
        return {
            name: once(
                f"--{name.replace('_', '-')}",
                [part for text in texts for part in map(str.strip, text.split(","))],
            )
            for name, texts in lists.items()
            if texts is not None
        }

    def each(self, start: str = BEST) -> list[TogglePreset]:
        """A preset for each combination of values that differs, in order. Raises UsageError as
        `GivenToggles.wanted` does."""
        given = self.given()
        every = [
            EveryToggle(**dict(zip(given, chosen, strict=True))).wanted(start)
            for chosen in itertools.product(*given.values())
        ]
        return list(dict.fromkeys(every))  # alike: one


def _several() -> type[SeveralSettings]:
    hints = get_type_hints(EngineSettings, include_extras=True)
    made = []
    for f in fields(EngineSettings):
        hint, default = hints[f.name], f.default
        if f.name in LISTED:
            own = next(p for p in reversed(hint.__metadata__) if getattr(p, "help", None))
            said = f"{own.help}. Default: {default}. A list, as llama-bench takes it"
            own = Parameter(name=own.name, help=said, show_default=False)
            hint, default = Annotated[Listed | None, own], None
        made.append((f.name, hint, field(default=default)))
    several = dataclasses.make_dataclass(
        "SeveralEngines", made, bases=(SeveralSettings,), frozen=True
    )
    several.__module__ = __name__
    return several


def _several_toggles() -> type[SeveralToggles]:
    hints = get_type_hints(EveryToggle, include_extras=True)
    several = dataclasses.make_dataclass(
        "SeveralEveryToggle",
        [
            (name, Annotated[Listed | None, *hints[name].__metadata__], field(default=None))
            for name in TOGGLE_FLAGS
        ],
        bases=(SeveralToggles,),
        frozen=True,
    )
    several.__module__ = __name__
    return several


if TYPE_CHECKING:
    SeveralEngines = SeveralSettings
    SeveralEveryToggle = SeveralToggles
else:
    SeveralEngines, SeveralEveryToggle = _several(), _several_toggles()
BenchFlags = Annotated[SeveralEngines, Parameter(name="*", group=ENGINE)]
BenchToggles = Annotated[SeveralEveryToggle, Parameter(name="*", group=TOGGLES, show_default=False)]
DEFAULT_BENCH, DEFAULT_BENCH_TOGGLES = SeveralEngines(), SeveralEveryToggle()
