"""EngineConfig: what an engine is built with apart from its toggles, frozen, validated once.

No environment variable is read here or anywhere in the package: two engines with different toggles
live side by side in one process.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from workbench.common import devices
from workbench.common.errors import UsageError
from workbench.common.keywords import refusing_unknown
from workbench.common.nearest import choices
from workbench.common.whole import check_whole

ON_HOST = {devices.HOST: True, "device": False, "CPU": True, "CUDA0": False}  # also llama.cpp's


def parse_override(text: str) -> tuple[re.Pattern[str], bool]:
    """Parses `PATTERN=host` or `PATTERN=device`: a regular expression, and whether the host keeps
    the weights that match it. Raises UsageError."""
    pattern, _, keeper = text.rpartition("=")
    if not pattern or keeper not in ON_HOST:
        raise UsageError(
            f"override_tensor {text!r} is no PATTERN=host and no PATTERN=device; write ffn_.*=host"
        )
    try:
        return re.compile(pattern), ON_HOST[keeper]
    except re.error as error:
        raise UsageError(
            f"override_tensor {text!r}: {pattern!r} is no regular expression ({error})"
        ) from None


MOST = 1 << 24  # cells, tokens; more fit no memory
DEVICES = devices.names()
EXPAND = ("f16", "q8_0")
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0")
NVTX = ("auto", "on", "off")


def _unknown(name: str) -> str:
    """The line on a setting that does not exist."""
    return f"setting {name!r} does not exist; {choices(name, EngineConfig.__dataclass_fields__)}"


@refusing_unknown(_unknown)
@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built with, apart from its toggles.

    device: the kind of device: `auto` (a GPU where there is one), `cuda`, `embedded`, `host`, or
        `null`, which computes nothing.
    n_ctx: cells in the KV cache; 0: as many tokens as the model was trained on.
    n_seqs: sequences that share the cache, numbered from 0 (llama.cpp's n_seq_max). With
        kv_cache=per_sequence each has its part of the cells.
    n_ubatch: the most tokens that are computed together.
    n_kv_pad: the KV extent of a step is rounded up to a multiple of this (llama.cpp: 256).
    threads: threads of the host backend, workers of the embedded device; 0: every core that this
        process may use.
    unsafe: toggles whose programs are known to race are run all the same, and may give wrong
        answers.
    n_devices: devices of the kind that share the layers. Each has a part of the layers, in order.
        What a device computes is copied to the next. While that one works on it, the first begins
        the next ubatch.
    n_gpu_layers: how many of the last layers are on the device; the output counts as the very last
        layer. The others are on the host, each with its cache. -1, or more than there are: all
        layers (llama.cpp's -ngl).
    override_tensor: `PATTERN=host` or `PATTERN=device`, each a regular expression searched for in
        the names of weights. The first that matches says where a weight is (llama.cpp's -ot).
    expand: what weights of types without kernels (Q4_1, Q5_0, Q2_K, the IQ types, ...) become when
        they are loaded: `f16`, or `q8_0`, which takes half the memory and rounds to 8 bits.
    cache_type_k, cache_type_v: the types of K and V in the cache: `f16`, `bf16`, `f32` or `q8_0`
        (llama.cpp's -ctk and -ctv).
    nvtx: ranges for tools that listen to NVTX, as Nsight Systems does: `auto` (where a tool has
        announced itself to NVTX), `on` or `off`.

    Raises UsageError for a setting that does not exist, and for a value outside what is said here.
    """

    device: str = "auto"
    n_ctx: int = 2048
    n_seqs: int = 1
    n_ubatch: int = 512
    n_kv_pad: int = 256
    threads: int = 0
    unsafe: bool = False
    n_devices: int = 1
    n_gpu_layers: int = -1
    override_tensor: tuple[str, ...] = ()
    expand: str = "f16"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    nvtx: str = "auto"

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(
                f"device {self.device!r} does not exist; {choices(self.device, DEVICES)}"
            )
        whole = [field.name for field in dataclasses.fields(self) if field.type is int]
        check_whole(**{name: getattr(self, name) for name in whole})
        for name, least in {
            "n_ctx": 0,
            "n_seqs": 1,
            "n_ubatch": 1,
            "n_kv_pad": 1,
            "n_devices": 1,
        }.items():
            if not least <= getattr(self, name) <= MOST:
                raise UsageError(
                    f"{name}={getattr(self, name)} must be at least {least}, at most {MOST}"
                )
        if self.threads < 0:
            raise UsageError(f"threads={self.threads} must be 0 (every core) or more")
        if self.n_gpu_layers < -1:
            raise UsageError(f"n_gpu_layers={self.n_gpu_layers} must be -1 (all) or more")
        types = {"cache_type_k": CACHE_TYPES, "cache_type_v": CACHE_TYPES}
        for name, known in {"expand": EXPAND, **types, "nvtx": NVTX}.items():
            if (value := getattr(self, name)) not in known:
                raise UsageError(f"{name}={value!r} does not exist; {choices(value, known)}")
        for override in self.override_tensor:
            parse_override(override)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON would give them back."""
        found = dataclasses.asdict(self)
        return found | {"override_tensor": list(self.override_tensor)}
