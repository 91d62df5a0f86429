"""What the commands share: the app they register with, flags, and how they begin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from workbench import __version__
from workbench.config import FAMILIES, EngineConfig, Toggles
from workbench.errors import UsageError
from workbench.output import check_folder

if TYPE_CHECKING:
    from workbench.engine.loaded import Loaded

app = App(
    name="workbench",
    version=__version__,
    help="Where the time between tokens goes: an LLM engine in which scheduling is a switch.",
    result_action="return_none",
    suppress_keyboard_interrupt=False,  # `main` says in one line what an interruption left
)
model_app = App(name="model", help="Write and inspect model files.")
app.command(model_app)

ModelPath = Annotated[Path, Parameter(name=["--model", "-m"], help="GGUF file")]
EngineFlags = Annotated[EngineConfig, Parameter(name="*")]
TOGGLES = Group(
    "Toggles",
    help=" ".join(
        f"--{name} {'|'.join(Toggles.values(name))} sets every --{name}-... not given itself."
        for name in FAMILIES  # `spell_out` writes them out before anything is parsed
    ),
)
ToggleFlags = Annotated[Toggles, Parameter(name="*", group=TOGGLES)]
Ids = Annotated[str | None, Parameter(help="token ids, as 1,2,3")]
AT_LEAST_0, AT_LEAST_1 = Number(gte=0), Number(gte=1)
Seed = Annotated[int, Parameter(validator=AT_LEAST_0)]
DEFAULT_CONFIG, DEFAULT_TOGGLES = EngineConfig(), Toggles()
MODELS, RUNS = Path("data/models"), Path("data/runs")


def say(line: str) -> None:
    print(line, file=sys.stderr)


def load(
    model: Path,
    config: EngineConfig,
    toggles: Toggles,
    variants: Sequence[Toggles] = (),
    check: Callable[[Loaded], None] | None = None,
) -> Any:
    """As `Engine.load`, and says on what device. What takes no model to see is refused before this
    is called; what takes one, but no weights, by `check`."""
    from workbench.engine.engine import Engine

    engine = Engine.load(model, config=config, toggles=toggles, variants=variants, check=check)
    say(f"device: {engine.backend.description} ({engine.device_reason}); sync={engine.sync_mode}")
    return engine


def check_new(folder: Path | None) -> None:
    """Raises UsageError where the run folder is there already, or cannot be written."""
    if folder is not None:
        check_folder(folder, new=True)


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--tokens {text!r} is no list of token ids; write them as 1,2,3"
        ) from None


def parse_sizes(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text!r} is no list of sizes; write them as 512,1024") from None
