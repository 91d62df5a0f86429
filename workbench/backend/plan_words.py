"""What became of an engine's plans, in a line."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.backend.plan import COUNTS


def in_words(counts: Mapping[str, int]) -> str:
    """A line on plans, as `plans: 3 captured (2.1 ms), 0 updated, 61 replayed`; empty where there
    are none. counts: `Plans.counts`, or more."""
    if not any(counts.get(name) for name in COUNTS):
        return ""
    made_ns = counts["plans_capture_ns"] + counts["plans_instantiate_ns"]
    updated = f"{counts['plans_updated']} updated"
    if counts["plans_updated"]:
        updated += f" ({counts['plans_update_ns'] / 1e6:.1f} ms)"
    twinned = counts.get("plans_twinned")  # an older run has none
    made = f"{counts['plans_captured']} captured" + (f", {twinned} twinned" if twinned else "")
    said = [
        f"{made} ({made_ns / 1e6:.1f} ms)",
        updated,
        f"{counts['plans_replayed']} replayed",
    ]
    for name, words in (
        ("reinstantiated", "instantiated again"),
        ("evicted", "evicted"),
        ("issued", "issued part by part"),
        ("ahead", "launched ahead"),
        ("ahead_missed", "launched ahead for nothing"),
    ):
        said += [f"{n} {words}" for n in [counts.get(f"plans_{name}")] if n]
    return f"plans: {', '.join(said)}"
