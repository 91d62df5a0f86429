"""ROOM #14924: the device draws tokens, and goes on with them itself.

With sampling=device a step can end in tokens, not in logits (`StepShape.draws`). The device keeps
each sequence's last one. In place of the next token of a sequence the host then gives FED, which
stands for it. So a step can be issued before the host knows the tokens of the step before.

Each sequence has a sampler. Every draw takes one number of it, on the host or on the device: equal
logits give equal tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.config import SampleOn, Toggles
from workbench.engine.load import Loaded
from workbench.graph.ir import I32, Kind, Tensor
from workbench.graph.shapes import DRAW_SETTINGS
from workbench.model.inputs import DRAWS, OUT_SEQS
from workbench.model.sampler import Sampler, Sampling

UNKEPT = -1  # in place of a sequence: nothing keeps the token
FED = -1  # in place of a token id: the token that the sequence has drawn last
GREEDY = Sampler(Sampling(), 0)


def last_tokens(toggles: Toggles, loaded: Loaded, n_seqs: int) -> Tensor | None:
    """What a device keeps of each sequence, where it draws: (n_seqs,) I32. The device has the
    embedding then, and all layers (`engine/choose.py`)."""
    if toggles.sampling == SampleOn.HOST:
        return None
    _bring_embedding(loaded, len(loaded.backends) - 1)
    return Tensor("last_tokens", I32, (n_seqs,), Kind.CACHE)


class Draws:
    """The samplers of the sequences of one engine. A sequence without a sampler draws greedily."""

    def __init__(self) -> None:
        self.samplers: dict[int, Sampler] = {}

    def values(self, sequences: Sequence[int]) -> dict[str, np.ndarray]:
        """The inputs of a step that draws a token for each of these sequences, in the order of its
        rows. Each sampler takes its next number. For a sequence below 0 the device keeps no
        token."""
        settings = np.zeros((len(sequences), DRAW_SETTINGS), np.float32)
        if self.samplers:
            for row, sequence in enumerate(sequences):
                sampler = self.samplers.get(sequence)
                if sampler is not None and sampler.sampling.temperature:
                    settings[row] = sampler.settings()
        return {DRAWS: settings, OUT_SEQS: np.array(sequences, np.int32)}

    def draw(self, sequence: int, logits: np.ndarray) -> int:
        """The token that a device would draw for a sequence, drawn on the host. -1 where no token
        can be drawn from the logits, (n_vocab,) float32."""
        return self.samplers.get(sequence, GREEDY)(logits)


def _bring_embedding(loaded: Loaded, b: int) -> None:
    """Loads the embedding to backend b too, where it is not there."""
    backend, embedding = loaded.backends[b], loaded.model.embedding
    if embedding not in loaded.residents[b]:
        loaded.reside(b, embedding, backend.load_weight(embedding, loaded.model.data(embedding)))
        backend.finish_loading()
