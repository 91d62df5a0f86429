"""The toggles that a server has, where nobody says otherwise."""

from __future__ import annotations

from workbench import devices
from workbench.config import BEST, TogglePreset

# What only a server can have, beside `best` for several sequences. The requests of a server come
# and go: steps of few shapes let programs and plans be kept, whoever stands beside whom. The device
# goes on with the tokens that it draws, so that the host looks at them while the next step runs.
SERVING: dict[str, str] = {
    "kv_growth": "geometric",
    "batch_sizes": "padded",
    "sampling": "device",
}
# the host computes a step where the step is issued: nothing can run behind it
ON_HOST = ("kv_growth", "batch_sizes")


def serving(device: str, wanted: TogglePreset) -> TogglePreset:
    """The toggles of a server: what is wanted; where that is `best`, for several sequences, and
    with what only a server can have. device: as EngineConfig has it."""
    if wanted.name != BEST:
        return wanted
    own = {k: v for k, v in SERVING.items() if device != devices.HOST or k in ON_HOST}
    return TogglePreset(BEST, own | wanted.changes, n_seqs=2)
