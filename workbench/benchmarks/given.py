"""An engine that a measurement is given: an open engine, or the file to open for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike, fspath
from typing import Any

from workbench.benchmarks.workload import Workload, long_enough, wide_enough
from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.config import EngineConfig
from workbench.engine.choose import Wanted
from workbench.engine.engine import Engine
from workbench.engine.load import config_of

# words for how often something is measured: a function has one of them as an argument
HOW_OFTEN = ("repetitions", "rounds", "repeats", "reps", "iterations")
EngineOrPath = Engine | str | PathLike[str]


@contextmanager
def given_engine(
    given: EngineOrPath,
    asked_by: Callable[..., Any],
    settings: Mapping[str, Any],
    toggles: Wanted = None,
    tests: Sequence[Workload] = (),
) -> Iterator[Engine]:
    """The engine that a function was given. An engine of a file is closed at the end of the body.

    asked_by: the function, whose arguments a refusal names.
    settings: its further keywords: fields of EngineConfig, for a file.
    toggles: of an engine of a file.
    tests: what such an engine must have room for.

    Raises UsageError for a keyword that does not exist, and for settings of an engine that is open
    already; and what `Engine.load` raises.
    """
    own = [name for name in inspect.signature(asked_by).parameters if name != "settings"]
    known = EngineConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            how_often = [one for one in own if one in HOW_OFTEN and name in HOW_OFTEN]
            said = choices(name, (*own, *known))
            if how_often:
                said = f"did you mean {how_often[0]}?"
            raise UsageError(f"argument {name!r} does not exist; {said}")
    if isinstance(given, Engine):
        if settings:
            raise UsageError(
                f"{', '.join(settings)} cannot be set of an engine that is open; give the path of "
                "a model in its place, or load the engine with it"
            )
        yield given
        return
    if not isinstance(given, str | PathLike):
        raise UsageError(
            f"{type(given).__name__} is no engine; give an Engine, or the path of a GGUF file"
        )
    config = config_of(dict(settings))
    fit = partial(long_enough, tests) if tests else None
    if tests:
        config = wide_enough(tests, config)
    with Engine.load(fspath(given), toggles=toggles, config=config, fit=fit) as engine:
        yield engine
