"""What the commands share: the app they register with, flags, and how they begin."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from workbench import __version__
from workbench.cli.flags import AUTO_MODEL, EngineSettings, GivenToggles, check_computes
from workbench.common.devices import AUTO
from workbench.common.errors import UsageError
from workbench.config import BEST, EngineConfig

if TYPE_CHECKING:
    from workbench.engine.cache.room import Room
    from workbench.engine.choose import Variants
    from workbench.engine.engine import Engine
    from workbench.engine.load import Fit, Loaded
    from workbench.engine.look.nvtx_ranges import NoRanges

    Check = Callable[[Loaded, Room], None]

app = App(
    name="workbench",
    version=__version__,
    help=(
        "Where the time between tokens goes.\n\n"
        "'workbench ab --help' is help on a command. Flags that commands share: 'workbench --help "
        "engine', 'workbench --help toggles'."
    ),
    result_action="return_none",
    suppress_keyboard_interrupt=False,  # `main` says in one line what an interruption left
)
model_app = App(name="model", help="Write and inspect model files.")
app.command(model_app)

MODELS, RUNS = Path("data/models"), Path("data/runs")


def say(line: str) -> None:
    print(line, file=sys.stderr)


def wrapped(text: str, indent: int) -> list[str]:
    """The text as lines that fit the terminal; all but the first are indented."""
    from workbench.common.tables import terminal_columns

    return textwrap.wrap(
        text, terminal_columns(), subsequent_indent=" " * indent, break_on_hyphens=False
    )


def say_replays(counters: Mapping[str, int]) -> None:
    """Prints a line on an engine's plans, where it has any."""
    from workbench.backend.plan.life import in_words

    if words := in_words(counters):
        say(words)


def say_ranges(ranges: NoRanges) -> None:
    """Where there are NVTX ranges, prints a line that says so, and whether a tool listens."""
    if ranges.on:
        say(f"NVTX ranges: {ranges.words}; they take time (--nvtx off leaves them out)")


def file_of(model: Path, device: str) -> Path:
    """The file that `-m` means: of `auto` the model for the device, written where it is not there
    yet. Raises DeviceError for a device that is not there."""
    from workbench.backend.base import choose_device
    from workbench.engine.load import model_for

    return model_for(choose_device(device)[0]) if model == AUTO_MODEL else model


def load(
    model: Path,
    config: EngineConfig,
    toggles: Any,
    variants: Variants = (),
    check: Check | None = None,
    *,
    fit: Fit | None = None,
    longest: int | None = None,
    start: str = BEST,
    computes: bool = True,
) -> Engine:
    """As `Engine.load`; also prints the device and the toggles.

    longest: tokens of the longest sequence, where they are known.
    start: the preset, unless the command names another.
    check: given the opened model and the room of a sequence, before weights are read; it may
    refuse. computes: the device must be one that computes.
    """
    from workbench.engine.cache.kv_cache import n_regions
    from workbench.engine.cache.room import Room
    from workbench.engine.choose import resolve
    from workbench.engine.engine import Engine

    if computes:
        check_computes(config.device)
    if isinstance(config, EngineSettings):
        for note in config.notes:
            say(note)
        config = config.plain()
    wanted = toggles.wanted(start) if isinstance(toggles, GivenToggles) else toggles

    def refuse(loaded: Loaded) -> None:
        if check is not None:
            regions = n_regions(resolve(wanted, loaded), loaded.config)
            check(loaded, Room(loaded.config.n_ctx, regions))

    engine = Engine.load(
        AUTO if model == AUTO_MODEL else model,
        config=config,
        toggles=wanted,
        variants=variants,
        check=refuse,
        fit=fit,
    )
    if model == AUTO_MODEL:
        say(f"model: {engine.model.path} (auto)")
    say(f"device: {engine.backend.description} ({engine.device_reason})")
    say(f"toggles: {engine.chosen}")
    say_ranges(engine.ranges)
    n_ctx, trained = engine.config.n_ctx, engine.model.n_ctx_train
    if n_ctx > config.n_ctx > 0:
        say(f"n_ctx={n_ctx}, since the tests need more than {config.n_ctx}")
    longest = longest or Room(n_ctx, n_regions(engine.toggles, engine.config)).each
    if longest > trained:
        what = f"n_ctx={n_ctx}" if longest == n_ctx else f"a sequence of {longest} tokens"
        say(
            f"note: {what} is more than the {trained} tokens that {engine.model.path} was "
            "trained on; expect worse answers beyond"
        )
    return engine


def as_typed(flag: str, text: str) -> str:
    """An argument that is text, not a path: UTF-8, whatever letters the locale has."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {text!r} is no UTF-8; set a UTF-8 locale") from None
    except UnicodeEncodeError:  # it holds letters that this locale could not have passed on
        return text


def parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?\d+", part, re.ASCII) for part in parts):
        raise UsageError(f"--tokens {text!r} is no list of token ids; write them as 1,2,3")
    return [int(part) for part in parts]
