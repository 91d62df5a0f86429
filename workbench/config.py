"""Toggles and EngineConfig: every decision of an engine, frozen, validated once.

No environment variable is read here or anywhere in the package: two engines with different toggles
live side by side in one process.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from workbench.errors import UsageError


class SyncMode(StrEnum):
    """Where `program.lower` puts the host's waits before a split (llama.cpp #17795).

    Letters: `s` the host waits, `c` blocking copy, `a` asynchronous copy, `g` the split's work.
    llama.cpp before the change is PER_COPY with copies on their own stream, what was merged is
    COPY_BOUNDARY on the compute stream; the other modes and streams are what the thread argued
    about, and EVENT_GUARDED and PACKED go beyond it.

    * PER_COPY `scsc...g`: before the change; for every input a wait on the split's stream, then a
      blocking copy.
    * BLOCKING_COPIES `sccccsg`: one wait before all blocking copies, one after.
    * COPY_BOUNDARY `saaaasg`: what was merged; asynchronous copies between two waits.
    * WRITE_READ_BOUNDARY `aaaasg`: only the wait between the copies and the graph that reads them.
    * IMPLICIT `aaaag`: no wait; stream order alone keeps copies before the graph.
    * EVENT_GUARDED `saaaarw`: the host waits for the graph before, then a recorded event keeps the
      graph behind the copies; asks for copies on their own stream.
    * PACKED `sasg`: as COPY_BOUNDARY, but inputs lie together and are one copy.
    * AUTO: of the modes that are safe under the backend's capabilities and the other toggles, the
      one with the fewest waits; the choice is named in every result.
    """

    PER_COPY = "per_copy"
    BLOCKING_COPIES = "blocking_copies"
    COPY_BOUNDARY = "copy_boundary"
    WRITE_READ_BOUNDARY = "write_read_boundary"
    IMPLICIT = "implicit"
    EVENT_GUARDED = "event_guarded"
    PACKED = "packed"
    AUTO = "auto"


class CopyStream(StrEnum):
    """Which stream input copies ride: their OWN, or COMPUTE.

    On its own stream, nothing but the host's waits orders a copy against the device's work. AUTO is
    OWN for modes whose copies block, as in llama.cpp, and for EVENT_GUARDED; else COMPUTE, as what
    was merged.
    """

    AUTO = "auto"
    OWN = "own"
    COMPUTE = "compute"


class HostSource(StrEnum):
    """What memory input values are copied from: PINNED (page-locked), as llama.cpp's are, or
    PAGEABLE, which a driver may stage and make the call wait for. Either may be read late. A
    PINNED_RING has a place for each of the last 2 or 4 steps; before one is written again the host
    waits for the copies from it."""

    PINNED = "pinned"
    PAGEABLE = "pageable"
    PINNED_RING_2 = "pinned_ring_2"
    PINNED_RING_4 = "pinned_ring_4"


class NCopies(StrEnum):
    """How many places a device has for each input, which steps take in turn (llama.cpp: 4 with
    pipeline parallelism, which one device or a tensor override rules out, else 1; here wherever
    there are events). With several the host waits before a copy not for all the device's work, but
    for an event behind the graph that read the place last. llama.cpp's n_copies also makes copies
    of what the host writes; here that is HostSource's ring."""

    ONE = "1"
    FOUR = "4"


class InputOrder(StrEnum):
    """Which of a split's input copies come first: in GRAPH order those of the kind that it uses
    first, written by the host or computed by another backend; USER_FIRST, always those that the
    host writes (llama.cpp #28874)."""

    GRAPH = "graph"
    USER_FIRST = "user_first"


class StepWait(StrEnum):
    """Which steps end with a wait of the host: EVERY one, or those that return OUTPUTS. With the
    latter a prompt of several ubatches is a train with one wait, at its end."""

    EVERY = "every"
    OUTPUTS = "outputs"


class GraphReuse(StrEnum):
    """What happens to the graph and program of a step (llama.cpp #8366).

    * REBUILD: built from nothing for every step.
    * SET_ROWS: kept by step shape; cache stores go through a row-index input, so no address in
      the program changes from token to token.
    """

    REBUILD = "rebuild"
    SET_ROWS = "set_rows"


class Activations(StrEnum):
    """What products are given.

    * Q8: for quantised weights activations quantised to 8 bits in blocks of 32, once for all
      products that share them, and integer dot products (as llama.cpp does); for float weights
      float32, which a backend may round to the weights' type where tokens are many.
    * FLOAT: float32 activations and decoded weights, nothing rounded: slow, the yardstick.
    """

    Q8 = "q8"
    FLOAT = "float"


class Switch(StrEnum):
    OFF = "off"
    ON = "on"


EXACT, ROUNDING = "exact", "rounding"


FAMILIES = ("fuse",)  # names that stand for all toggles `<name>_...`


def _toggle(values: type[StrEnum], off: StrEnum, room: str, answer: str) -> Any:
    return field(default=off.value, metadata={"values": values, "room": room, "answer": answer})


@dataclass(frozen=True)
class Toggles:
    """One field per mechanism; `Toggles()` is everything off, the baseline.

    Values are plain strings (the enum members compare equal to them). Variants are made with
    `dataclasses.replace`. Each field's metadata names the room that reads it and its correctness
    class: `exact` (logits bit-equal to the baseline's) or `rounding`.

    Raises UsageError for a value that does not exist and for two toggles that clash.
    """

    sync: str = _toggle(SyncMode, SyncMode.PER_COPY, "program/ordering.py", EXACT)
    copy_stream: str = _toggle(CopyStream, CopyStream.AUTO, "program/ordering.py", EXACT)
    host_source: str = _toggle(HostSource, HostSource.PINNED, "program/lower.py", EXACT)
    n_copies: str = _toggle(NCopies, NCopies.ONE, "program/lower.py", EXACT)
    input_order: str = _toggle(InputOrder, InputOrder.GRAPH, "program/lower.py", EXACT)
    step_wait: str = _toggle(StepWait, StepWait.EVERY, "program/lower.py", EXACT)
    graph_reuse: str = _toggle(GraphReuse, GraphReuse.REBUILD, "engine/reuse.py", EXACT)
    activations: str = _toggle(Activations, Activations.Q8, "model/decoder.py", ROUNDING)
    defer_norm: str = _toggle(Switch, Switch.OFF, "graph/defer.py", ROUNDING)
    # one for each pattern of graph/fuse.py, which says what they join
    fuse_norm_mul: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_norm_quantize: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_add_norm: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_bias: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_qkv: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_rope_store: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_glu: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_epilogue_quantize: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    fuse_product_norm: str = _toggle(Switch, Switch.OFF, "graph/fuse.py", ROUNDING)
    pdl: str = _toggle(Switch, Switch.OFF, "program/lower.py", EXACT)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            values = [v.value for v in f.metadata["values"]]
            if getattr(self, f.name) not in values:
                raise UsageError(
                    f"toggle {f.name}={getattr(self, f.name)!r} does not exist; "
                    f"choose one of {', '.join(values)}"
                )
        if self.sync == SyncMode.EVENT_GUARDED and self.copy_stream == CopyStream.COMPUTE:
            raise UsageError(
                "toggles sync=event_guarded and copy_stream=compute clash: the event orders two "
                "streams; use copy_stream=own, or sync=write_read_boundary"
            )

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in dataclasses.fields(cls)]

    @classmethod
    def members(cls, name: str) -> list[str]:
        """The toggles that `name` stands for: itself, or for a family (`fuse`) all of its names
        (`fuse_...`). Raises UsageError for an unknown name."""
        if name in cls.names():
            return [name]
        family = [n for n in cls.names() if n.startswith(f"{name}_")] if name in FAMILIES else []
        if not family:
            known = ", ".join((*FAMILIES, *cls.names()))
            raise UsageError(f"toggle {name!r} does not exist; choose one of {known}")
        return family

    @classmethod
    def values(cls, name: str) -> list[str]:
        """The values toggle `name`, or each of a family, can take; UsageError if unknown."""
        return [v.value for v in cls._field(name).metadata["values"]]

    @classmethod
    def answer_class(cls, name: str) -> str:
        """`exact` or `rounding`: what flipping toggle `name` may do to the logits."""
        return cls._field(name).metadata["answer"]

    @classmethod
    def _field(cls, name: str) -> dataclasses.Field:
        first = cls.members(name)[0]
        return next(f for f in dataclasses.fields(cls) if f.name == first)

    def value_of(self, name: str) -> str:
        """The value of toggle `name`; of a family the common one, or `mixed`."""
        found = {getattr(self, n) for n in self.members(name)}
        return found.pop() if len(found) == 1 else "mixed"

    def switched(self, name: str, value: str) -> Toggles:
        """These toggles with `name`, or every one of a family, at `value`."""
        return dataclasses.replace(self, **dict.fromkeys(self.members(name), value))

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str:
        off: Toggles = type(self)()
        own, base = self.to_dict(), off.to_dict()
        rows = "".join(
            f"<tr><td>{name}</td><td><b>{value}</b></td><td>{base[name]}</td></tr>"
            for name, value in own.items()
            if value != base[name]
        )
        if not rows:
            return "<p>every toggle off: the baseline</p>"
        head = "<tr><th>toggle</th><th>value</th><th>baseline</th></tr>"
        rest = '<tr><td colspan="3">everything else off, as in the baseline</td></tr>'
        return f"<table>{head}{rows}{rest}</table>"


def folded(toggles: Mapping[str, str]) -> dict[str, str]:
    """Toggles for reading, names to values: those of a family under one name where they agree."""
    found: dict[str, str] = {}
    for name, value in toggles.items():
        family = next((f for f in FAMILIES if name.startswith(f"{f}_")), None)
        own = {v for k, v in toggles.items() if family and k.startswith(f"{family}_")}
        found[family if family and len(own) == 1 else name] = value
    return found


PLACES = ("host", "device")  # where a weight can be


def parse_override(text: str) -> tuple[re.Pattern[str], str]:
    """`PATTERN=PLACE` as a regular expression and one of PLACES. Raises UsageError."""
    pattern, _, place = text.rpartition("=")
    if not pattern or place not in PLACES:
        raise UsageError(
            f"override_tensor {text!r} is no PATTERN=PLACE with place {' or '.join(PLACES)}; "
            "write ffn_.*=host"
        )
    try:
        return re.compile(pattern), place
    except re.error as error:
        raise UsageError(
            f"override_tensor {text!r}: {pattern!r} is no regular expression ({error})"
        ) from None


MOST = 1 << 24  # cells, tokens; more fit no memory
DEVICES = ("auto", "embedded", "cuda", "host", "null")  # null computes nothing


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built with, apart from its toggles.

    n_ctx: cells in the KV cache. n_ubatch: most tokens computed together. n_kv_pad: the KV extent
    of a step is rounded up to a multiple of this (llama.cpp: 256). threads: compute threads of the
    host backend and lanes of the embedded device; 0 means every core this process may use. unsafe:
    toggles whose programs are known to race are run all the same, and may give wrong answers.

    n_devices: devices of the kind that share the layers, one part of them after the other; what one
    computes is copied to the next, which works on it while the first begins the next ubatch.

    n_gpu_layers: so many of the last layers are the device's, the output counted as the very last,
    the others the host's, each with its cache; -1 is everything (llama.cpp's -ngl).
    override_tensor: `PATTERN=host` or `PATTERN=device`, a regular expression searched for in the
    names of weights; the first that matches says where a weight is (llama.cpp's -ot).
    """

    device: str = "auto"
    n_ctx: int = 2048
    n_ubatch: int = 512
    n_kv_pad: int = 256
    threads: int = 0
    unsafe: bool = False
    n_devices: int = 1
    n_gpu_layers: int = -1
    override_tensor: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(
                f"device {self.device!r} does not exist; choose one of {', '.join(DEVICES)}"
            )
        for name in ("n_ctx", "n_ubatch", "n_kv_pad", "n_devices"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1, at most {MOST}")
        if self.threads < 0:
            raise UsageError(f"threads={self.threads} must be 0 (every core) or more")
        if self.n_gpu_layers < -1:
            raise UsageError(f"n_gpu_layers={self.n_gpu_layers} must be -1 (all) or more")
        for override in self.override_tensor:
            parse_override(override)

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        found = dataclasses.asdict(self)
        return found | {"override_tensor": list(self.override_tensor)}
