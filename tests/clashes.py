"""Which toggles clash, said once more than the package does."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.config import FAMILIES, Toggles


def spread(given: Mapping[str, str]) -> dict[str, str]:
    """Values by toggle: a family's for each of its members that is not given itself."""
    wide = {m: v for k, v in given.items() if k in FAMILIES for m in Toggles.members(k)}
    return wide | {k: v for k, v in given.items() if k not in FAMILIES}


def clashing(values: Mapping[str, str], given: Mapping[str, str]) -> bool:
    """Whether a preset's values clash with what is given beside it, or that with itself."""
    every = Toggles().to_dict() | spread(values) | spread(given)
    redone = any(every[name] == "on" for name in Toggles.members("redo"))
    in_a_row = every["graph_reuse"] in ("patch_pointers", "pointer_table")
    apart = every["kv_cache"] == "per_sequence" or every["batch_sizes"] == "padded"
    if in_a_row and apart:
        return True
    return (every["sync"], every["copy_stream"]) == ("event_guarded", "compute") or (
        redone and every["graph_reuse"] == "rebuild"
    )
