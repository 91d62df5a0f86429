"""Flags that many commands take, with their help: settings of an engine, and toggles.

llama.cpp's names are taken with llama.cpp's meaning. The flags of toggles are made of their
metadata, so a new toggle needs no line here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from workbench.config import BEST, FAMILIES, EngineConfig, Preset, Toggles
from workbench.errors import UsageError
from workbench.toggles import presets_in_words


def whole(_: Any, tokens: Any) -> int:
    """A whole number; ValueError for 1.5 and 1e3, which `int` of a float would round."""
    return int(tokens[0].value)


# `int` in every command: digits, and nothing that would have to be rounded
Whole = Annotated[int, Parameter(converter=whole)]
AT_LEAST_0, AT_LEAST_1 = Number(gte=0), Number(gte=1)
ModelPath = Annotated[Path, Parameter(name=["--model", "-m"], help="GGUF file")]
Ids = Annotated[str | None, Parameter(help="token ids, as 1,2,3")]
Seed = Annotated[Whole, Parameter(validator=AT_LEAST_0, help="seed of everything that is drawn")]

ENGINE = Group("Engine", sort_key=1)
TOGGLES = Group(
    "Toggles",
    sort_key=2,
    help="Every scheduling decision; `workbench toggles` prints them with their threads.",
)
ATTENTION = ("auto", "on", "off", "1", "0")  # what -fa takes in llama.cpp, and in llama-bench


@dataclass(frozen=True)
class EngineSettings(EngineConfig):
    """EngineConfig as flags. n_batch and flash_attn are taken for llama.cpp's sake."""

    device: Annotated[
        str,
        Parameter(
            group=ENGINE,
            help="auto: cuda where there is a GPU, else embedded. embedded: an asynchronous device "
            "on CPU threads. host: the CPU, each kernel when it is called. null: computes nothing",
        ),
    ] = "auto"
    n_ctx: Annotated[
        Whole,
        Parameter(
            name=["--n-ctx", "--ctx-size", "-c"],
            group=ENGINE,
            help="tokens the KV cache holds; 0: as many as the model was trained on",
        ),
    ] = 2048
    n_ubatch: Annotated[
        Whole,
        Parameter(
            name=["--n-ubatch", "--ubatch-size", "-ub"],
            group=ENGINE,
            help="most tokens computed together",
        ),
    ] = 512
    n_kv_pad: Annotated[
        Whole,
        Parameter(group=ENGINE, help="a step reads this much of the cache, or a multiple of it"),
    ] = 256
    threads: Annotated[
        Whole,
        Parameter(
            name=["--threads", "-t"],
            group=ENGINE,
            help="compute threads of a CPU device; 0 or -1: every core",
        ),
    ] = 0
    unsafe: Annotated[
        bool,
        Parameter(group=ENGINE, negative="", help="run toggles that are known to race, too"),
    ] = False
    n_devices: Annotated[
        Whole, Parameter(group=ENGINE, help="devices of the kind that share the layers")
    ] = 1
    n_gpu_layers: Annotated[
        Whole,
        Parameter(
            name=["--n-gpu-layers", "--gpu-layers", "-ngl"],
            group=ENGINE,
            help="layers on the device, the last ones; the output counts as one. -1, or more than "
            "there are: all",
        ),
    ] = -1
    override_tensor: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--override-tensor", "-ot"],
            group=ENGINE,
            negative="",
            show_default=False,
            help="PATTERN=host or PATTERN=device: where weights are whose name the pattern is "
            "found in, as ffn_.*=host; can be given again, the first that matches counts",
        ),
    ] = ()
    n_batch: Annotated[
        Whole,
        Parameter(
            name=["--n-batch", "--batch-size", "-b"],
            group=ENGINE,
            help="tokens submitted at once. A prompt is submitted whole here, so this only lowers "
            "--n-ubatch to itself",
        ),
    ] = 2048
    flash_attn: Annotated[
        str,
        Parameter(
            name=["--flash-attn", "-fa"],
            group=ENGINE,
            help="on, off or auto (or 1, 0). Attention is one fused kernel here either way",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.n_batch < 1:
            raise UsageError(f"n_batch={self.n_batch} must be at least 1")
        if self.flash_attn not in ATTENTION:
            raise UsageError(f"-fa {self.flash_attn!r}: choose one of {', '.join(ATTENTION)}")
        object.__setattr__(self, "n_ubatch", min(self.n_ubatch, self.n_batch))
        super().__post_init__()

    def plain(self) -> EngineConfig:
        """What the engine is built with."""
        names = [f.name for f in dataclasses.fields(EngineConfig)]
        return EngineConfig(**{name: getattr(self, name) for name in names})

    @property
    def notes(self) -> list[str]:
        """What is asked for in vain, a line each."""
        if self.flash_attn in ("off", "0"):
            return ["-fa off changes nothing: attention is one fused kernel here"]
        return []


class GivenToggles:
    """A preset's name, and the toggles that are given beside it; None is not given. Its fields are
    made of the metadata of `Toggles` (`_flags`)."""

    preset: str | None

    def wanted(self, start: str = BEST) -> Preset:
        """The preset (`start` unless one is named) with what is given. Raises UsageError for names
        and values that do not exist, and for a clash in a fixed preset."""
        given = {
            name: value
            for name in (*FAMILIES, *Toggles.names())
            if (value := getattr(self, name)) is not None
        }
        made = Preset(self.preset or start, given)
        if not made.of_device:
            made.toggles()
        return made


def _help(name: str) -> str:
    """What a toggle decides, and a word on each of its values."""
    field_ = Toggles._field(name)
    if name in FAMILIES:
        return f"every --{name}-... that is not given itself: {' or '.join(Toggles.values(name))}"
    meta, off = field_.metadata, field_.default
    words = [f"* {v.value}{' (baseline)' if v == off else ''}: {v.word}" for v in meta["values"]]
    if name not in {m for f in FAMILIES for m in Toggles.members(f)}:
        return f"{meta['about']}.\n\n" + "\n".join(words)
    return f"{meta['about']}: {' or '.join(v.value for v in meta['values'])}"


def _flags() -> type[GivenToggles]:
    helps = {"preset": f"where toggles begin; one given beside it wins.\n\n{presets_in_words()}"}
    helps |= {name: _help(name) for name in (*FAMILIES, *Toggles.names())}
    made = dataclasses.make_dataclass(
        "EveryToggle",
        [
            (name, Annotated[str | None, Parameter(help=text)], field(default=None))
            for name, text in helps.items()
        ],
        bases=(GivenToggles,),
        frozen=True,
    )
    made.__module__ = __name__  # where the names in its annotations are looked up
    return made


if TYPE_CHECKING:
    EveryToggle = GivenToggles
else:
    EveryToggle = _flags()
DEFAULT_CONFIG, DEFAULT_TOGGLES = EngineSettings(), EveryToggle()
EngineFlags = Annotated[EngineSettings, Parameter(name="*")]
ToggleFlags = Annotated[EveryToggle, Parameter(name="*", group=TOGGLES, show_default=False)]
