"""`Toggles`: one position of every switch, frozen; and presets by name, with changes.

`table.py` has a row for each toggle, with its values and what they do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from workbench.common.errors import UsageError
from workbench.common.keywords import refusing_unknown
from workbench.common.nearest import choices, nearest
from workbench.config.engine import EngineConfig
from workbench.config.presets import BEST, fixed_presets, preset_names
from workbench.config.table import CLASHES, FAMILIES, ROWS, Row


class _Held(str):
    """The value of a family's member that nobody has just asked for: a default, or a value that a
    Toggles holds already. `dataclasses.replace` passes it on. A value for the whole family
    (`fuse="on"`) replaces it."""

    __slots__ = ()


def _toggle(name: str) -> Any:
    """The field of a toggle of the table, off."""
    row = ROWS[name]
    return field(default=_Held(row.off) if row.family else row.off.value)


def unknown_toggle(name: str) -> str:
    """The line on a toggle that does not exist. What is known by another name than a toggle's (a
    preset, a setting) has a line on where it is given. There are too many toggles to list."""
    if name in preset_names():
        return (
            f"toggle {name!r} does not exist, but a preset of this name does: "
            f"Toggles.preset({name!r}), or --preset {name}"
        )
    if name in ("preset", "presets"):
        return (
            f"{name} is no toggle; give its name alone, as background='best'; sets of toggles are "
            "compared as 'plans=off | plans=ours'"
        )
    if (setting := str(name).replace("-", "_")) in EngineConfig.__dataclass_fields__:
        return (
            f"{setting} is a setting and no toggle; give it beside the toggles, or compare "
            "settings with sweep"
        )
    meant = nearest(name, (*FAMILIES, *Toggles.names(), *preset_names()))
    guess = f"did you mean {meant}? " if meant else ""
    return f"toggle {name!r} does not exist; {guess}`workbench toggles` lists all"


def no_setting(name: str, value: Any) -> str:
    """The line on a toggle that is given as a setting of an engine."""
    return f"{name} is a toggle and no setting; give toggles={{{name!r}: {value!r}}}"


@refusing_unknown(unknown_toggle)
@dataclass(frozen=True, repr=False)
class Toggles:
    """One field per mechanism; `Toggles()` is everything off, the baseline.

    Values are plain strings, and equal to the members of the table's enums. A whole number is
    accepted for its digits (`streams=3`), True and False for `on` and `off` (`pdl=True`). `fuse`
    stands for every `fuse_...` that is not given itself, and `redo` for every `redo_...`. Variants
    are made with `dataclasses.replace`. `ROWS` says which room reads a toggle, which thread it
    comes from, and what it may do to the logits.

    Raises UsageError for a toggle or a value that does not exist, and for given toggles that clash
    on any device. What a value needs beside it (`launch_ahead=on` needs plans) is checked where an
    engine is opened with the set.
    """

    sync: str = _toggle("sync")
    copy_stream: str = _toggle("copy_stream")
    host_source: str = _toggle("host_source")
    n_copies: str = _toggle("n_copies")
    input_order: str = _toggle("input_order")
    step_wait: str = _toggle("step_wait")
    results: str = _toggle("results")
    graph_reuse: str = _toggle("graph_reuse")
    redo_build: str = _toggle("redo_build")
    redo_split: str = _toggle("redo_split")
    redo_layout: str = _toggle("redo_layout")
    redo_lower: str = _toggle("redo_lower")
    redo_bind: str = _toggle("redo_bind")
    kv_growth: str = _toggle("kv_growth")
    kv_cache: str = _toggle("kv_cache")
    skip_masked_kv: str = _toggle("skip_masked_kv")
    skip_gate: str = _toggle("skip_gate")
    slot_choice: str = _toggle("slot_choice")
    defrag: str = _toggle("defrag")
    batch_sizes: str = _toggle("batch_sizes")
    sampling: str = _toggle("sampling")
    attn_kernel: str = _toggle("attn_kernel")
    kv_parts: str = _toggle("kv_parts")
    activations: str = _toggle("activations")
    defer_norm: str = _toggle("defer_norm")
    fuse_norm_mul: str = _toggle("fuse_norm_mul")
    fuse_norm_quantize: str = _toggle("fuse_norm_quantize")
    fuse_add_norm: str = _toggle("fuse_add_norm")
    fuse_bias: str = _toggle("fuse_bias")
    fuse_qkv: str = _toggle("fuse_qkv")
    fuse_rope_store: str = _toggle("fuse_rope_store")
    fuse_glu: str = _toggle("fuse_glu")
    fuse_epilogue_quantize: str = _toggle("fuse_epilogue_quantize")
    fuse_product_norm: str = _toggle("fuse_product_norm")
    pdl: str = _toggle("pdl")
    plans: str = _toggle("plans")
    plan_scope: str = _toggle("plan_scope")
    plan_warmup: str = _toggle("plan_warmup")
    plan_evict: str = _toggle("plan_evict")
    plan_batch: str = _toggle("plan_batch")
    launch_ahead: str = _toggle("launch_ahead")
    plan_end: str = _toggle("plan_end")
    streams: str = _toggle("streams")
    fork: str = _toggle("fork")
    branch_fusion: str = _toggle("branch_fusion")
    lifetimes: str = _toggle("lifetimes")
    validate: str = _toggle("validate")
    fuse: InitVar[str | None] = None  # every fuse_... that is not given itself
    redo: InitVar[str | None] = None

    def __post_init__(self, fuse: str | None, redo: str | None) -> None:
        for family, value in zip(FAMILIES, (fuse, redo), strict=True):
            if value is not None and not isinstance(value, _Held):
                self._spread(family, value)
        if keywords := _keywords_for(self.sync):
            raise UsageError(f"Toggles takes keywords; write {keywords}")
        for f in dataclasses.fields(self):
            own = getattr(self, f.name)
            value = as_value(f.name, own, [v.value for v in ROWS[f.name].values])
            if not isinstance(own, str):
                object.__setattr__(self, f.name, value)
        for family in FAMILIES:
            for name in self.members(family):
                object.__setattr__(self, name, _Held(getattr(self, name)))
        if clash := clash_of(vars(self)):
            raise UsageError(clash)

    def _spread(self, family: str, value: str) -> None:
        """Gives `value` to the members of a family that are not given themselves."""
        value = as_value(family, value, self.values(family))
        for name in self.members(family):
            if isinstance(getattr(self, name), _Held):
                object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Toggles | TogglePreset:
        """The toggles of a preset, with `changes`; for `best`, which a device resolves, a
        TogglePreset that `Engine.load` takes. Raises UsageError for an unknown name, and for a
        change that clashes with the preset."""
        made = TogglePreset(name, changes)
        return made if made.of_device else made.toggles()

    @classmethod
    def names(cls) -> list[str]:
        """The names of all toggles, in the table's order; families are none of them."""
        return [f.name for f in dataclasses.fields(cls)]

    @classmethod
    def members(cls, name: str) -> list[str]:
        """The toggles that `name` stands for: a toggle for itself, a family (`fuse`) for all of its
        members (`fuse_...`). Raises UsageError for an unknown name."""
        if name in cls.names():
            return [name]
        family = [n for n in cls.names() if n.startswith(f"{name}_")] if name in FAMILIES else []
        if not family:
            raise UsageError(unknown_toggle(name))
        return family

    @classmethod
    def values(cls, name: str) -> list[str]:
        """The values that toggle `name`, or each member of a family, can take. Raises UsageError
        for an unknown name."""
        return [v.value for v in cls.row(name).values]

    @classmethod
    def answer_class(cls, name: str) -> str:
        """`exact` or `rounding`: what flipping toggle `name` may do to the logits."""
        return cls.row(name).answer

    @classmethod
    def row(cls, name: str) -> Row:
        """The row of toggle `name`, or of a family's first member. Raises UsageError for an unknown
        name."""
        return ROWS[cls.members(name)[0]]

    def value_of(self, name: str) -> str:
        """The value of toggle `name`; of a family, the value that all members have, or `mixed`."""
        found = {str(getattr(self, n)) for n in self.members(name)}
        return found.pop() if len(found) == 1 else "mixed"

    def switched(self, name: str, value: str) -> Toggles:
        """These toggles with `name`, or every member of a family, at `value`. Raises UsageError as
        `changed_by`."""
        return self.changed_by({name: value})

    def changed_by(self, changes: Mapping[str, Any]) -> Toggles:
        """These toggles with `changes`, values by the names of toggles or families. Raises
        UsageError for a name or a value that does not exist, and for a clash."""
        return dataclasses.replace(self, **_spread(changes))

    def to_dict(self) -> dict[str, str]:
        """The values of all toggles by name; a family is its members."""
        return {name: str(getattr(self, name)) for name in self.names()}

    def changed(self) -> dict[str, str]:
        """The toggles that differ from the baseline. A family whose members agree is one entry."""
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
    """A family reads like a toggle. `dataclasses.replace` passes its value on, which then changes
    nothing."""
    said = f"The value that every {family}_... has, or `mixed`."
    return property(lambda toggles: _Held(toggles.value_of(family)), doc=said)


Toggles.__doc__ = f"{Toggles.__doc__}\n" + "\n".join(  # what each field decides, of the table
    f"    {row.name}: {row.about}: {' or '.join(row.values)}." for row in ROWS.values()
)
for _family in FAMILIES:
    setattr(Toggles, _family, _common_value(_family))


_CHANGE = re.compile(r"[\w-]+\s*=\s*\S*")  # NAME=VALUE; no value of a toggle has a `=`


def as_value(name: str, value: Any, known: list[str]) -> str:
    """The value as its toggle has it: `3` for 3, `on` and `off` for True and False. Raises
    UsageError for a value that the toggle `name`, which knows `known`, does not have."""
    word: Any = value
    if isinstance(value, bool):
        word = "on" if value else "off"
    elif isinstance(value, int):
        word = str(value)
    if word not in known:
        second = _CHANGE.search(value) if isinstance(value, str) else None
        if second:  # of `sync=per_copy,packed plans=off,ours`
            raise UsageError(
                f"toggle {name} has {second[0]!r} among its values; one toggle is compared at a "
                "time: write ' | ' between sets of toggles, or make a matrix with sweep"
            )
        raise UsageError(f"toggle {name}={value!r} does not exist; {choices(value, known)}")
    return word


def _keywords_for(value: Any) -> str:
    """What to write where Toggles was given a text, a mapping or a preset's name in place of
    keywords; empty for any other value."""
    if isinstance(value, Mapping):
        return f"Toggles(**{value!r})"
    if not isinstance(value, str):
        return ""
    if value in preset_names():
        return f"Toggles.preset({value!r})"
    words = [word.partition("=") for word in re.split(r"[,\s]+", value.strip(", \t\n"))]
    if not words or not all(equals for _, equals, _ in words):
        return ""
    return f"Toggles({', '.join(f'{name}={given!r}' for name, _, given in words)})"


def parse_changes(changes: str | Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE NAME=VALUE...`, or its words, as value by name. Raises UsageError for an unknown
    name, and for a name without a value."""
    given: dict[str, str] = {}
    for change in changes.split() if isinstance(changes, str) else changes:
        name, equals, value = change.partition("=")
        known = Toggles.values(name)
        if not equals:
            raise UsageError(f"toggle {name} has no value; write {name}={known[-1]}")
        given[name] = value
    return given


def asked_toggles(given: Any, start: Toggles | TogglePreset) -> Toggles | TogglePreset:
    """The toggles that `given` means.

    given: Toggles or a preset, as they are. A mapping, or a text `NAME=VALUE NAME=VALUE...`:
        changes of `start`. A preset's name, also before such changes. None: `start`.

    Raises UsageError for a name or a value that does not exist, and for a clash with fixed toggles.
    """
    if given is None or given == "":
        return start
    if isinstance(given, Toggles | TogglePreset):
        return given
    if isinstance(given, Mapping):
        return start.changed_by(given)
    if not isinstance(given, str):
        raise UsageError(
            f"toggles {given!r} are none; give Toggles(sync='packed'), {{'sync': 'packed'}}, "
            "'sync=packed', or the name of a preset"
        )
    words = re.split(r"[,\s]+", given.strip(", \t\n"))
    if "=" not in words[0] and words[0] not in (*FAMILIES, *Toggles.names()):
        start, words = TogglePreset(words[0]), words[1:]
    return start.changed_by(parse_changes(words)) if words else start


def clash_of(values: Mapping[str, str], preset: str = "", own: Collection[str] = ()) -> str:
    """The first clash among toggles, in words; empty where there is none. Of a value that comes
    from the preset, and is not in `own`, the words say so."""

    def said(name: str) -> str:
        whose = f" (of preset {preset})" if preset and name not in own else ""
        return f"{name}={values[name]}{whose}"

    for name, value, clash in CLASHES:
        if values[name] == value and values[clash.toggle] == clash.value:
            return f"toggles {said(name)} and {said(clash.toggle)} clash: {clash.why}"
    return ""


def folded(toggles: Mapping[str, str]) -> dict[str, str]:
    """Toggles for reading, names to values. A family whose members agree is one entry."""
    agreed = {
        member: family
        for family in FAMILIES
        if len({toggles.get(member) for member in Toggles.members(family)}) == 1
        for member in Toggles.members(family)
    }
    return {agreed.get(name, name): value for name, value in toggles.items()}


def names_that_differ(*sides: Toggles) -> list[str]:
    """The toggles whose values are not the same on all sides. A family is named once where all of
    its members differ and agree on each side."""
    first, *others = sides
    names = [n for n in first.names() if any(o.value_of(n) != first.value_of(n) for o in others)]
    for family in FAMILIES:
        members = first.members(family)
        whole = all(len({side.value_of(n) for n in members}) == 1 for side in sides)
        if whole and set(members) <= set(names):
            names = [family if n == members[0] else n for n in names if n not in members[1:]]
    return names


def differing(before: Toggles, after: Toggles) -> tuple[str, str]:
    """What each of the two has where they differ (`names_that_differ`): `sync=per_copy` and
    `sync=packed`. Two equal ones give twice `the same toggles`."""
    names = names_that_differ(before, after)
    sides = (", ".join(f"{n}={side.value_of(n)}" for n in names) for side in (before, after))
    first, second = (side or "the same toggles" for side in sides)
    return first, second


def said_toggles(toggles: Mapping[str, str]) -> str:
    """The toggles that are not off, in words: `copy_stream=own, fuse=on, all else off`."""
    off = Toggles().to_dict()
    off |= folded(off)
    on = [f"{name}={value}" for name, value in folded(toggles).items() if off.get(name) != value]
    return ", ".join([*on, "all else off"]) if on else "everything off"


class TogglePreset:
    """A preset by name, with changes, which win over the preset.

    changes: toggles (or families) and their values.
    n_seqs: the number of sequences that `best` is meant for; 0: that of the engine.

    `engine.choose.resolve` makes Toggles of `best` for a device. Raises UsageError for an unknown
    name, toggle or value.
    """

    def __init__(self, name: str, changes: Mapping[str, Any] | None = None, n_seqs: int = 0):
        if name not in preset_names():
            raise UsageError(_unknown_preset(name))
        self.name, self.n_seqs = name, n_seqs
        own = _spread(changes or {})
        self.changes = {key: own[key] for key in Toggles.names() if key in own}

    @property
    def of_device(self) -> bool:
        """Whether the values of the preset depend on the device."""
        return self.name == BEST

    def toggles(self, values: Mapping[str, str] | None = None) -> Toggles:
        """`values` (default: those of a fixed preset) with the changes. Raises UsageError for a
        change that clashes with the preset, naming both."""
        if values is None and self.of_device:
            raise UsageError(f"preset {self.name} is resolved when an engine is loaded; load one")
        chosen = dict(fixed_presets()[self.name] if values is None else values)
        chosen = Toggles().to_dict() | _spread(chosen) | self.changes
        if clash := clash_of(chosen, self.name, self.changes):
            raise UsageError(clash)
        return Toggles(**chosen)

    def switched(self, name: str, value: str) -> TogglePreset:
        """The preset with one more change."""
        return self.changed_by({name: value})

    def changed_by(self, changes: Mapping[str, Any]) -> TogglePreset:
        """The preset with more changes, values by the names of toggles or families. Raises
        UsageError for a name or a value that does not exist."""
        return TogglePreset(self.name, self.changes | _spread(changes), self.n_seqs)

    def for_sequences(self, n_seqs: int) -> TogglePreset:
        """The preset for this number of sequences, whatever an engine is opened for."""
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


def _unknown_preset(name: str) -> str:
    """The line on a preset that does not exist; of a name that is nearly a toggle's, what to
    write."""
    line = f"preset {name!r} does not exist; {choices(name, preset_names())}"
    toggle = nearest(name, (*FAMILIES, *Toggles.names()))
    if toggle and not nearest(name, preset_names()):
        line += f"; a toggle is written {toggle}={Toggles.values(toggle)[-1]}"
    return line


def _spread(values: Mapping[str, Any]) -> dict[str, str]:
    """The values by toggle. A family's value is for each of its members that is not named itself.
    Raises UsageError for a name or a value that does not exist."""
    own: dict[str, str] = {}
    for key, value in sorted(values.items(), key=lambda c: c[0] not in FAMILIES):
        word = as_value(key, value, Toggles.values(key))
        own |= dict.fromkeys(Toggles.members(key), word)
    return own
