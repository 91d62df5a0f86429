"""The toggles that a server has, where nobody says otherwise."""

from __future__ import annotations

from workbench import devices
from workbench.config import BEST, TogglePreset

# What a server adds to `best`. A region for each request, with its masked cells left unread, keeps
# a step's cost to its own cells. The device goes on with the tokens that it draws, so the host
# looks at results while the next step runs. Few shapes let plans be replayed. Norms in halves pay
# for one token alone.
SERVING: dict[str, str] = {
    "kv_cache": "per_sequence",
    "kv_growth": "geometric",
    "kv_parts": "parallel_blocks",
    "skip_masked_kv": "tail",
    "batch_sizes": "padded",
    "defer_norm": "one",
    "sampling": "device",
    "graph_reuse": "set_rows",
    "results": "behind",
    "sync": "packed_implicit",
    "copy_stream": "compute",
    "host_source": "pinned_ring_2",
    "step_wait": "outputs",
    "launch_ahead": "off",
    "plan_end": "event",
}
# the host computes a step where it is issued: nothing can run behind it
ON_HOST = ("kv_cache", "kv_growth", "kv_parts", "skip_masked_kv", "batch_sizes", "graph_reuse")
ON_GPU = ("defer_norm",)  # a CPU has no halves


def serving(device: str, wanted: TogglePreset) -> TogglePreset:
    """The toggles of a server: what is wanted, and where that begins with `best` what serving adds.
    device: as EngineConfig has it."""
    if wanted.name != BEST:
        return wanted
    on_gpu = device == devices.AUTO or devices.is_gpu(device)
    own = {k: v for k, v in SERVING.items() if on_gpu or k not in ON_GPU}
    if device == devices.HOST:
        own = {k: v for k, v in own.items() if k in ON_HOST}
    return TogglePreset(BEST, own | wanted.changes)
