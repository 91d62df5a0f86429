"""Toggles that cannot be together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# two values that cannot be together, why, and what to use
CLASHES: list[tuple[tuple[str, str], tuple[str, str], str]] = [
    (
        ("sync", "event_guarded"), ("copy_stream", "compute"),
        "the event orders two streams; use copy_stream=own, or sync=write_read_boundary",
    ),
    *(
        (
            ("graph_reuse", reuse), ("kv_cache", "per_sequence"),
            "it stores a step's tokens in cells in a row, and those of several sequences are in "
            "none; use graph_reuse=set_rows",
        )
        for reuse in ("patch_pointers", "pointer_table")
    ),
    *(
        (
            ("graph_reuse", reuse), ("batch_sizes", "padded"),
            "it stores every token of a step, and those that are added have no cell; use "
            "graph_reuse=set_rows",
        )
        for reuse in ("patch_pointers", "pointer_table")
    ),
    *(
        (
            ("graph_reuse", "rebuild"), (f"redo_{layer}", "on"),
            "every step does all of it; use graph_reuse=set_rows",
        )
        for layer in ("build", "split", "layout", "lower", "bind")
    ),
]  # fmt: skip


def clash_of(values: Mapping[str, str], preset: str = "", own: Collection[str] = ()) -> str:
    """The first clash among toggles, empty where there is none. Of a preset's values, those not in
    `own`, it says so."""
    for first, second, why in CLASHES:
        if all(values[name] == value for name, value in (first, second)):
            named = [
                f"{name}={value}" + (f" (of preset {preset})" if preset and name not in own else "")
                for name, value in (first, second)
            ]
            return f"toggles {' and '.join(named)} clash: {why}"
    return ""
