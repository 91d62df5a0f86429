"""The toggles that a server has, where nobody says otherwise."""

from __future__ import annotations

from workbench import devices
from workbench.config import BEST, TogglePreset

# What only a server can have, beside `best` for several sequences. Its requests come and go, and
# have other lengths: each has cells of its own, which nobody else can use up, and masked ones are
# left unread. Steps of few shapes let programs and plans be kept, whoever stands beside whom. The
# device goes on with the tokens that it draws, so that the host looks at results while the next
# step runs; the last five belong to that.
SERVING: dict[str, str] = {
    "kv_cache": "per_sequence",
    "kv_growth": "geometric",
    "skip_masked_kv": "auto",
    "batch_sizes": "padded",
    "sampling": "device",
    "results": "behind",
    "sync": "packed_implicit",
    "copy_stream": "compute",
    "host_source": "pinned_ring_2",
    "step_wait": "outputs",
}
# the host computes a step where the step is issued: nothing can run behind it
ON_HOST = ("kv_cache", "kv_growth", "skip_masked_kv", "batch_sizes")


def serving(device: str, wanted: TogglePreset) -> TogglePreset:
    """The toggles of a server: what is wanted; where that is `best`, for several sequences, and
    with what only a server can have. device: as EngineConfig has it."""
    if wanted.name != BEST:
        return wanted
    own = {k: v for k, v in SERVING.items() if device != devices.HOST or k in ON_HOST}
    return TogglePreset(BEST, own | wanted.changes, n_seqs=2)
