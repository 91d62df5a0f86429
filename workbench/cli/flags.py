"""Flags that many commands take, with their help: settings of an engine, toggles, repetitions.

Flags with llama.cpp's names have llama.cpp's meaning. The flags of toggles are made from the rows
of the table, so a new toggle needs no line here.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from workbench.common import devices
from workbench.common.errors import UsageError
from workbench.config import (
    BASELINE,
    BEST,
    CACHE_TYPES,
    EXPAND,
    FAMILIES,
    NVTX,
    EngineConfig,
    TogglePreset,
    Toggles,
)
from workbench.config.presets import preset_words
from workbench.program.letters import legend, patterns_in


def flag(help: str, names: str | None = None, **settings: Any) -> Parameter:
    """A parameter of a command.

    help: its help line.
    names: its names, where the argument's own name is not enough.

    Other arguments are settings of cyclopts. No flag has a form `--no-...`.
    """
    usual: dict[str, Any] = {"negative": "", "show_default": _default_in_words}
    return Parameter(names and names.split(), help=help, **(usual | settings))


def _default_in_words(value: Any) -> str | None:
    """A default as a person types it; None for a flag that is simply not given."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return None if value is False or value is None else str(value)


def whole(_: Any, tokens: Any) -> int:
    """A whole number. Raises ValueError for 1.5 and 1e3, which cyclopts would round."""
    return _whole(tokens[0].value)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text.strip(), re.ASCII):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def layers(_: Any, tokens: Any) -> int:
    """A whole number; -1 for `all` and `auto`, as in llama.cpp."""
    return -1 if tokens[0].value in ("all", "auto") else _whole(tokens[0].value)


AUTO_MODEL = Path(devices.AUTO)  # the word; a file of that name has another path (`model_file`)


def two_words(parameter: str) -> str:
    """How to write a notebook's parameter that was given as `model=x`, or without a value."""
    name, _, value = parameter.partition("=")
    return f"the name and the value as two words: -p {name} {value or 'VALUE'}"


def model_file(_: Any, tokens: Any) -> Path:
    """The path of a model, or AUTO_MODEL for the word `auto`; `./auto` is a file."""
    text = str(tokens[0].value)
    path = Path(text)
    return path.absolute() if path == AUTO_MODEL and text != devices.AUTO else path


# `int` in every command: digits, and nothing that would have to be rounded
Whole = Annotated[int, Parameter(converter=whole)]
AT_LEAST_0, AT_LEAST_1 = Number(gte=0), Number(gte=1)
DeviceName = Annotated[str, flag(devices.in_words())]
GIVE_MODEL = "Give -m auto, or -m and a GGUF file (`workbench model tiny` writes some)"
OneModel = Annotated[Path, Parameter(converter=model_file)]
ModelPath = Annotated[
    OneModel, flag("GGUF file; auto: tiny on a CPU, a real shape on a GPU", "--model -m")
]
ModelPaths = Annotated[list[OneModel], flag("GGUF file or auto; repeatable", "--model -m")]
Ids = Annotated[str | None, flag("token ids, as 1,2,3")]
AsJson = Annotated[bool, flag("print it as JSON", "--json")]
Nvtx = Annotated[str, flag(f"NVTX ranges: {', '.join(NVTX)}; auto: where a tool, as nsys, listens")]
Seed = Annotated[Whole, flag("seed of everything that is drawn", validator=AT_LEAST_0)]

ENGINE = Group("Engine", sort_key=1)
TOGGLES = Group(
    "Toggles",
    sort_key=2,
    help="Every scheduling decision; `workbench toggles` prints them with their threads.",
)
CachedAs = Literal["f16", "bf16", "f32", "q8_0"]  # K and V in the cache
_CACHED = f"{', '.join(CACHE_TYPES[:-1])} or {CACHE_TYPES[-1]}"
SERVED_TOKENS = 4096  # the most tokens of a request, prompt and answer, by default
ATTENTION = ("auto", "on", "off", "1", "0")  # values of -fa in llama.cpp, and in llama-bench


def check_computes(device: str) -> None:
    """Raises UsageError for the device that computes nothing."""
    if not devices.computes(device):
        raise UsageError(
            f"--device {device} computes nothing: it has no answers and no times; use it with "
            "program or check, or name another device"
        )


@dataclass(frozen=True)
class EngineSettings(EngineConfig):
    """EngineConfig as flags. n_batch and flash_attn are accepted because llama.cpp has them."""

    device: Annotated[str, flag(devices.in_words(also_idle=True))] = "auto"
    n_ctx: Annotated[
        Whole,
        flag(
            "tokens the KV cache holds; 0: as many as the model was trained on. bench, ab, profile "
            "and advise make the default as long as their tests need, and keep any other number",
            "--n-ctx --ctx-size -c",
        ),
    ] = 2048
    n_seqs: Annotated[
        Whole, flag("sequences that share the KV cache; more where a test names more, as tg8@b8")
    ] = 1
    n_ubatch: Annotated[
        Whole, flag("most tokens computed together", "--n-ubatch --ubatch-size -ub")
    ] = 512
    n_kv_pad: Annotated[Whole, flag("a step reads this much of the cache, or a multiple of it")] = (
        256
    )
    threads: Annotated[
        Whole, flag("compute threads of a CPU device; 0 or -1: every core", "--threads -t")
    ] = 0
    unsafe: Annotated[bool, flag("run toggles that are known to race, too")] = False
    n_devices: Annotated[Whole, flag("devices of the kind that share the layers")] = 1
    n_gpu_layers: Annotated[
        int,
        flag(
            "layers on the device, the last ones; the output counts as one. -1, all, or more "
            "than there are (99): every layer",
            "--n-gpu-layers --gpu-layers -ngl",
            converter=layers,
        ),
    ] = -1
    override_tensor: Annotated[
        tuple[str, ...],
        flag(
            "PATTERN=host (or CPU) or PATTERN=device (or CUDA0): where weights are whose name "
            "the pattern is found in, as ffn_.*=host; can be given again, the first match counts",
            "--override-tensor -ot",
            show_default=False,
        ),
    ] = ()
    expand: Annotated[
        str, flag(f"what tensor types without kernels become: {' or '.join(EXPAND)}")
    ] = "f16"
    cache_type_k: Annotated[
        str, flag(f"type of K in the cache: {_CACHED}", "--cache-type-k -ctk")
    ] = "f16"
    cache_type_v: Annotated[
        str, flag(f"type of V in the cache: {_CACHED}", "--cache-type-v -ctv")
    ] = "f16"
    nvtx: Nvtx = "auto"
    n_batch: Annotated[
        Whole,
        flag(
            "tokens submitted at once. A prompt has as many ubatches as it needs here, so "
            "this does one thing: --n-ubatch is never above it, and bench records that as n_batch",
            "--n-batch --batch-size -b",
        ),
    ] = 2048
    flash_attn: Annotated[
        str,
        flag(
            "on, off or auto (or 1, 0). Attention is one fused kernel here either way",
            "--flash-attn -fa",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.n_batch < 1:
            raise UsageError(f"n_batch={self.n_batch} must be at least 1")
        if self.flash_attn not in ATTENTION:
            raise UsageError(f"-fa {self.flash_attn!r}: choose one of {', '.join(ATTENTION)}")
        object.__setattr__(self, "n_ubatch", min(self.n_ubatch, self.n_batch))
        if self.threads == -1:  # llama.cpp's word for every core
            object.__setattr__(self, "threads", 0)
        super().__post_init__()

    def plain(self) -> EngineConfig:
        """The configuration of the engine."""
        names = [f.name for f in dataclasses.fields(EngineConfig)]
        return EngineConfig(**{name: getattr(self, name) for name in names})

    @property
    def notes(self) -> list[str]:
        """A line for each flag that has no effect here."""
        if self.flash_attn in ("off", "0"):
            return ["-fa off changes nothing: attention is one fused kernel here"]
        return []


@dataclass(frozen=True)
class ServedSettings(EngineSettings):
    """EngineSettings of a server."""

    n_ctx: Annotated[
        Whole,
        flag(
            "tokens the KV cache holds, of all slots together; 0: for each slot as many as the "
            f"model was trained on, at most {SERVED_TOKENS}",
            "--n-ctx --ctx-size -c",
        ),
    ] = 0


class GivenToggles:
    """A preset's name, and toggles that change it; None where one is not given. The fields are made
    from the table of toggles (`_flags`)."""

    preset: str | None

    def wanted(self, start: str = BEST) -> TogglePreset:
        """The preset (`start` unless another is named) with the given toggles. Raises UsageError
        for names and values that do not exist, and for a clash with a fixed preset."""
        given = {
            name: value
            for name in (*FAMILIES, *Toggles.names())
            if (value := getattr(self, name)) is not None
        }
        made = TogglePreset(self.preset or start, given)
        if not made.of_device:
            made.toggles()
        return made


def _help(name: str) -> str:
    """The help of a toggle: what it decides, and what each value does."""
    row, values = Toggles.row(name), " or ".join(Toggles.values(name))
    if name in FAMILIES:
        return f"every --{name}-... that is not given itself: {values}"
    if row.family:
        return f"{row.about}: {values}"
    words = [f"* {v.value}{' (baseline)' if v == row.off else ''}: {v.word}" for v in row.values]
    letters = legend(patterns_in(v.word for v in row.values))
    return "\n\n".join(filter(None, (f"{row.about}.", "\n".join(words), letters)))


def _flags() -> type[GivenToggles]:
    presets = "\n".join(f"* {line}" for line in preset_words())
    begin = (
        f"where toggles begin: {BEST}, but {BASELINE} in ab, check and program. A toggle given "
        "beside it changes that toggle only."
    )
    helps = {"preset": f"{begin}\n\n{presets}"}
    helps |= {name: _help(name) for name in (*FAMILIES, *Toggles.names())}
    made = dataclasses.make_dataclass(
        "EveryToggle",
        [
            (name, Annotated[str | None, flag(text)], field(default=None))
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
DEFAULT_SERVED = ServedSettings()
EngineFlags = Annotated[EngineSettings, Parameter(name="*", group=ENGINE)]
ServedFlags = Annotated[ServedSettings, Parameter(name="*", group=ENGINE)]
ToggleFlags = Annotated[EveryToggle, Parameter(name="*", group=TOGGLES, show_default=False)]


# repetitions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """`--until` and `--at-most`, as they were typed."""

    until: Annotated[
        str | None, flag("repeat until the 95 % interval is that narrow: its half-width, as 1%")
    ] = None
    at_most: Annotated[
        str | None, flag("with --until: end after so much measuring, as 30s or 1h; default 10m")
    ] = None

    def arguments(self, n: int = 1) -> dict[str, Any]:
        """The keyword arguments of `ab` and `bench`; n calls share the time. Raises UsageError for
        a text that is no share or no length of time, and for a time without a share."""
        from workbench.benchmarks.compare import until

        if self.until is None:
            if self.at_most is not None:
                raise UsageError("--at-most ends what --until repeats; add --until 1%, say")
            return {}
        share, at_most_s = until.parse_share("--until", self.until), until.AT_MOST_S
        if self.at_most is not None:
            at_most_s = until.parse_duration("--at-most", self.at_most)
        return {"until": share, "at_most_s": at_most_s / n}


Resume = Annotated[bool, flag("continue the run in --out; with --until for --at-most again")]
EnergyFlag = Annotated[
    bool, flag("joules a token, too, by the GPU's counter: 5 windows of 5 s of each arm and test")
]
RepeatFlags = Annotated[Repeat, Parameter(name="*")]
DEFAULT_REPEAT = Repeat()
