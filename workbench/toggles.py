"""Toggles: every scheduling decision of an engine, a field each. And presets, which name sets.

`workbench toggles` and the help of every command are made of the fields' metadata, and of the word
that each value has (`choices.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import Any

from workbench.choices import (
    Activations,
    AttnKernel,
    BatchSizes,
    BranchFusion,
    CopyStream,
    Defrag,
    Fork,
    GraphReuse,
    Half,
    HostSource,
    InputOrder,
    KVCacheKind,
    KVGrowth,
    KVParts,
    LaunchAhead,
    Lifetimes,
    NCopies,
    Pdl,
    PlanBatch,
    PlanEnd,
    PlanEvict,
    PlanRule,
    PlanScope,
    PlanWarmup,
    Redo,
    Results,
    SampleOn,
    SkipGate,
    SkipMaskedKV,
    SlotChoice,
    StepWait,
    Streams,
    Switch,
    SyncMode,
    Validate,
)
from workbench.clashes import clash_of
from workbench.errors import UsageError
from workbench.presets import BASELINE as BASELINE
from workbench.presets import BEST, fixed_presets, preset_names

EXACT, ROUNDING = "exact", "rounding"
FAMILIES = ("fuse", "redo")  # names that stand for all toggles `<name>_...`


def _toggle(off: StrEnum, room: str, answer: str, thread: str = "", about: str = "") -> Any:
    metadata = {"room": room, "answer": answer, "thread": thread, "about": about}
    return field(default=off.value, metadata=metadata | {"values": type(off)})


def _of_family(made: Any) -> Any:
    made.default = _Held(made.default)
    return made


def _fusion(about: str, thread: str = "") -> Any:
    return _of_family(_toggle(Switch.OFF, "graph/fuse.py", ROUNDING, thread, about))


def _redo(about: str) -> Any:
    return _of_family(_toggle(Redo.OFF, _REUSE, EXACT, _REUSED, about))


class _Held(str):
    """The value of a family's member that nobody asked for: a default, or one that a Toggles holds.
    `dataclasses.replace` passes it on, and a family's value (`fuse="on"`) replaces it."""

    __slots__ = ()


_SYNC, _LAYOUT, _LOWER = (f"program/{room}.py" for room in ("sync_modes", "layout", "lower"))
_WAITS = "llama.cpp #17795"
_REUSE, _REUSED = "engine/reuse.py", "llama.cpp #8366"
_PLAN, _PLANS = "backend/plan.py", "llama.cpp #16548"
_CACHE, _SERVED = "engine/kv_cache.py", "llama.cpp #14924"
_EXTENT, _ATTEND = "engine/kv_extent.py", "graph/attend.py"
_GROWTH = "engine/kv_growth.py"
_FORKS, _STREAMS = "graph/forks.py", "llama.cpp #16991"


@dataclass(frozen=True, repr=False)
class Toggles:
    """One field per mechanism; `Toggles()` is everything off, the baseline.

    Values are plain strings (the enum members compare equal to them). `fuse` stands for every
    `fuse_...` that is not given itself, and `redo` for every `redo_...`. Variants are made with
    `dataclasses.replace`. Each field's metadata names the room that reads it, the thread it comes
    from and its correctness class: `exact` (logits bit-equal to the baseline's) or `rounding`.

    Raises UsageError for a value that does not exist and for two toggles that clash.
    """

    sync: str = _toggle(
        SyncMode.PER_COPY, _SYNC, EXACT, _WAITS, "where the host waits around copies"
    )
    copy_stream: str = _toggle(
        CopyStream.AUTO, _SYNC, EXACT, _WAITS, "which stream input copies ride"
    )
    host_source: str = _toggle(
        HostSource.PINNED, _LAYOUT, EXACT, _WAITS, "memory that inputs are copied from"
    )
    n_copies: str = _toggle(
        NCopies.ONE, _LAYOUT, EXACT, _WAITS, "buffers a device has for each input"
    )
    input_order: str = _toggle(
        InputOrder.GRAPH, _LOWER, EXACT, "llama.cpp #28874", "which input goes first"
    )
    step_wait: str = _toggle(
        StepWait.EVERY, _LOWER, EXACT, _WAITS, "which steps the host waits for"
    )
    results: str = _toggle(Results.COPY, _LAYOUT, EXACT, "", "how logits come to the host")
    graph_reuse: str = _toggle(
        GraphReuse.REBUILD, _REUSE, EXACT, _REUSED,
        "how graph and program of a step are kept, and the cache is stored to",
    )  # fmt: skip
    # one for each layer of reuse: what it saves is what doing it again costs
    redo_build: str = _redo("graph and fusions of a step")
    redo_split: str = _redo("where the graph is cut")
    redo_layout: str = _redo("where tensors lie")
    redo_lower: str = _redo("commands of a step")
    redo_bind: str = _redo("commands bound to addresses")
    kv_growth: str = _toggle(
        KVGrowth.STEP, _GROWTH, ROUNDING, _REUSED, "cells that attention looks at"
    )
    kv_cache: str = _toggle(
        KVCacheKind.UNIFIED, _CACHE, ROUNDING, _SERVED, "whose cells the cache has"
    )
    skip_masked_kv: str = _toggle(
        SkipMaskedKV.OFF, _EXTENT, EXACT, _SERVED, "masked cells that attention leaves unread"
    )
    skip_gate: str = _toggle(
        SkipGate.REFERENCE, _EXTENT, EXACT, _SERVED, "steps in which they are left unread"
    )
    slot_choice: str = _toggle(
        SlotChoice.LONGEST_PREFIX, "engine/slots.py", ROUNDING, _SERVED, "a request's slot"
    )
    defrag: str = _toggle(
        Defrag.OFF, "engine/defrag.py", ROUNDING, _SERVED, "holes among a server's cells"
    )
    batch_sizes: str = _toggle(
        BatchSizes.EXACT, "engine/padding.py", ROUNDING, _SERVED, "tokens and sequences of a step"
    )
    sampling: str = _toggle(
        SampleOn.HOST, "engine/draws.py", EXACT, _SERVED, "where a server's tokens are drawn"
    )
    attn_kernel: str = _toggle(
        AttnKernel.AUTO, _ATTEND, ROUNDING, _SERVED, "which kernels compute attention"
    )
    kv_parts: str = _toggle(
        KVParts.OFF, _ATTEND, ROUNDING, _SERVED, "parts that attention splits the cells into"
    )
    activations: str = _toggle(
        Activations.Q8, "model/decoder.py", ROUNDING, "", "what products are given"
    )
    defer_norm: str = _toggle(
        Half.OFF, "graph/defer.py", ROUNDING, "", "norms in two halves, up to 8 tokens"
    )
    # one for each pattern of graph/fuse.py, which says what they join
    fuse_norm_mul: str = _fusion("RMS norm and its weight", "llama.cpp #14800")
    fuse_norm_quantize: str = _fusion("a norm and the quantisation of its result")
    fuse_add_norm: str = _fusion("the residual add and the norm behind it")
    fuse_bias: str = _fusion("a product and its bias", "llama.cpp #16715")
    fuse_qkv: str = _fusion("the products Q, K and V")
    fuse_rope_store: str = _fusion("RoPE and the cache store", "llama.cpp #16884")
    fuse_glu: str = _fusion("gate, up and SwiGLU", "llama.cpp #16715")
    fuse_epilogue_quantize: str = _fusion("attention or SwiGLU and the quantisation of its result")
    fuse_product_norm: str = _fusion("a product, the residual add and half a norm")
    pdl: str = _toggle(Pdl.OFF, _LOWER, EXACT, "llama.cpp #22522", "programmatic dependent launch")
    plans: str = _toggle(
        PlanRule.OFF, _PLAN, EXACT, _PLANS, "when a device's commands are captured and replayed"
    )
    plan_scope: str = _toggle(
        PlanScope.SPLIT, "program/plans.py", EXACT, _PLANS, "what is in a plan"
    )
    plan_warmup: str = _toggle(
        PlanWarmup.AUTO, _PLAN, EXACT, "llama.cpp #19754", "equal calls before a capture"
    )
    plan_evict: str = _toggle(PlanEvict.AUTO, _PLAN, EXACT, _PLANS, "which plans go")
    plan_batch: str = _toggle(PlanBatch.ANY, _PLAN, EXACT, _PLANS, "which steps have plans")
    launch_ahead: str = _toggle(
        LaunchAhead.OFF, _PLAN, EXACT, "", "when the plan of a step like the one before is launched"
    )
    plan_end: str = _toggle(
        PlanEnd.EVENT, _PLAN, EXACT, "", "how the host learns that a plan is over"
    )
    streams: str = _toggle(
        Streams.ONE, _FORKS, EXACT, _STREAMS, "streams that compute side by side"
    )
    fork: str = _toggle(Fork.QKV, _FORKS, EXACT, _STREAMS, "where a step leaves its stream")
    branch_fusion: str = _toggle(
        BranchFusion.AUTO, "graph/branch_fusion.py", ROUNDING, _STREAMS, "fusion where forks are"
    )
    lifetimes: str = _toggle(
        Lifetimes.VISIBILITY, "graph/arena.py", EXACT, _STREAMS, "when memory is used again"
    )
    validate: str = _toggle(
        Validate.OFF, "program/branches.py", EXACT, _STREAMS, "what branches are checked for"
    )
    fuse: InitVar[str | None] = None  # every fuse_... that is not given itself
    redo: InitVar[str | None] = None

    def __post_init__(self, fuse: str | None, redo: str | None) -> None:
        for family, value in zip(FAMILIES, (fuse, redo), strict=True):
            if value is not None and not isinstance(value, _Held):
                self._spread(family, value)
        for f in dataclasses.fields(self):
            _check_value(f.name, getattr(self, f.name), [v.value for v in f.metadata["values"]])
        for family in FAMILIES:
            for name in self.members(family):
                object.__setattr__(self, name, _Held(getattr(self, name)))
        if clash := clash_of(vars(self)):
            raise UsageError(clash)

    def _spread(self, family: str, value: str) -> None:
        """Gives `value` to the members of a family that are not given themselves."""
        _check_value(family, value, self.values(family))
        for name in self.members(family):
            if isinstance(getattr(self, name), _Held):
                object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, **changes: str) -> Toggles | TogglePreset:
        """The toggles of a preset, with `changes`; for `best`, which a device resolves, a
        TogglePreset that `Engine.load` takes. Raises UsageError for an unknown name, and for a
        change that clashes with the preset."""
        made = TogglePreset(name, changes)
        return made if made.of_device else made.toggles()

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
        found = {str(getattr(self, n)) for n in self.members(name)}
        return found.pop() if len(found) == 1 else "mixed"

    def switched(self, name: str, value: str) -> Toggles:
        """These toggles with `name`, or every one of a family, at `value`."""
        return dataclasses.replace(self, **dict.fromkeys(self.members(name), value))

    def to_dict(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in self.names()}

    def changed(self) -> dict[str, str]:
        """What differs from the baseline, a family that agrees under its one name."""
        off = type(self)()
        return {k: v for k, v in folded(self.to_dict()).items() if v != off.value_of(k)}

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.changed().items()) or "everything off"

    def __repr__(self) -> str:
        given = ", ".join(f"{k}={v!r}" for k, v in self.changed().items())
        return f"{type(self).__name__}({given})"

    def _repr_html_(self) -> str:
        off: Toggles = type(self)()
        own, base = self.to_dict(), off.to_dict()
        td, th = (f'<{tag} style="text-align:left">' for tag in ("td", "th"))
        rows = "".join(
            f"<tr>{td}{name}</td>{td}<b>{value}</b></td>{td}{base[name]}</td></tr>"
            for name, value in own.items()
            if value != base[name]
        )
        if not rows:
            return "<p>everything off: the baseline</p>"
        head = f"<tr>{th}toggle</th>{th}value</th>{th}baseline</th></tr>"
        left = "everything else off, as in the baseline"
        rest = f'<tr><td colspan="3" style="text-align:left">{left}</td></tr>'
        return f"<table>{head}{rows}{rest}</table>"


def _common_value(family: str) -> property:
    """Reads like a toggle; what `dataclasses.replace` passes on of it changes nothing."""
    return property(lambda toggles: _Held(toggles.value_of(family)))


for _family in FAMILIES:
    setattr(Toggles, _family, _common_value(_family))


def _check_value(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise UsageError(
            f"toggle {name}={value!r} does not exist; choose one of {', '.join(known)}"
        )


def folded(toggles: Mapping[str, str]) -> dict[str, str]:
    """Toggles for reading, names to values: a whole family under one name where it agrees."""
    agreed = {
        member: family
        for family in FAMILIES
        if len({toggles.get(member) for member in Toggles.members(family)}) == 1
        for member in Toggles.members(family)
    }
    return {agreed.get(name, name): value for name, value in toggles.items()}


class TogglePreset:
    """A preset by name, with toggles of one's own, which win.

    changes: toggles (or a family) that are given beside it. n_seqs: the sequences that `best` is to
    be for; 0: those that the engine is opened for. Raises UsageError for an unknown name, toggle or
    value. `engine.wanted.resolve` makes Toggles of `best`, for a device.
    """

    def __init__(self, name: str, changes: Mapping[str, str] | None = None, n_seqs: int = 0):
        if name not in preset_names():
            raise UsageError(
                f"preset {name!r} does not exist; choose one of {', '.join(preset_names())}"
            )
        self.name, self.n_seqs = name, n_seqs
        own: dict[str, str] = {}
        for key, value in sorted((changes or {}).items(), key=lambda c: c[0] not in FAMILIES):
            _check_value(key, value, Toggles.values(key))
            own |= dict.fromkeys(Toggles.members(key), value)
        self.changes = {key: own[key] for key in Toggles.names() if key in own}

    @property
    def of_device(self) -> bool:
        """Whether its values depend on the device."""
        return self.name == BEST

    def toggles(self, values: Mapping[str, str] | None = None) -> Toggles:
        """`values` (default: a fixed preset's own) with the changes. Raises UsageError for a change
        that clashes with the preset, and names both."""
        if values is None and self.of_device:
            raise UsageError(f"preset {self.name} is resolved when an engine is loaded; load one")
        chosen = dict(fixed_presets()[self.name] if values is None else values)
        chosen = Toggles().to_dict() | _spread(chosen) | self.changes
        if clash := clash_of(chosen, self.name, self.changes):
            raise UsageError(clash)
        return Toggles(**chosen)

    def switched(self, name: str, value: str) -> TogglePreset:
        """The preset with one more change."""
        changes = self.changes | dict.fromkeys(Toggles.members(name), value)
        return TogglePreset(self.name, changes, self.n_seqs)

    def for_sequences(self, n_seqs: int) -> TogglePreset:
        """The preset for so many sequences, whatever an engine is opened for."""
        return TogglePreset(self.name, self.changes, n_seqs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TogglePreset) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, int]:
        return str(self), self.n_seqs

    def __str__(self) -> str:
        changes = ", ".join(f"{k}={v}" for k, v in folded(self.changes).items())
        return f"{self.name} with {changes}" if changes else self.name

    def __repr__(self) -> str:
        changes = "".join(f", {k}={v!r}" for k, v in self.changes.items())
        return f"Toggles.preset({self.name!r}{changes})"


def _spread(values: Mapping[str, str]) -> dict[str, str]:
    """Values by toggle: a family's value for each of its members that is not named itself."""
    wide = {m: v for k, v in values.items() if k in FAMILIES for m in Toggles.members(k)}
    return wide | {k: v for k, v in values.items() if k not in FAMILIES}
