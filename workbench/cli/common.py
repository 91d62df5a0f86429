"""What the commands share: the app they register with, flags, and how they begin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from workbench import __version__
from workbench.config import EngineConfig, Toggles
from workbench.errors import UsageError

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
ToggleFlags = Annotated[Toggles, Parameter(name="*")]
Ids = Annotated[str | None, Parameter(help="token ids, as 1,2,3")]
DEFAULT_CONFIG, DEFAULT_TOGGLES = EngineConfig(), Toggles()
MODELS, RUNS = Path("data/models"), Path("data/runs")


def say(line: str) -> None:
    print(line, file=sys.stderr)


def load(model: Path, config: EngineConfig, toggles: Toggles) -> Any:
    from workbench.engine.engine import Engine

    engine = Engine.load(model, config=config, toggles=toggles)
    say(f"device: {engine.backend.description} ({engine.device_reason}); sync={engine.sync_mode}")
    return engine


def parse_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
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
