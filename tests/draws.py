"""Rows of logits and settings of draws, for tests that hold a device's draws against the host's:
ties, gaps that no float32 sum sees, the ends of every range."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from workbench.graph.ir import F32, Node, Tensor
from workbench.graph.ops import make
from workbench.model.sampler import Sampling, drawn

MOST = float(np.finfo(np.float32).max)
LEVELS = {
    "ties": [0.0, -0.0, 1.0, 2.0, 2.0],
    "gaps": [0.0, -16.0, -27.7, -28.9, -37.0, -104.0],
    "close": [1.0, float(np.nextafter(np.float32(1), np.float32(0))), 1.0 - 1e-6, 0.5],
    "extremes": [0.0, MOST, -MOST, MOST / 2, -1e38, 1e-45, -1e-38, -np.inf, -np.inf],
    "broken": [0.0, 1.0, np.nan, np.inf, -np.inf],
    "low": [-np.inf, -MOST, -1e38],
}
TEMPERATURES = [0.0, 1e-50, 1e-45, 1e-38, 1e-30, 0.01, 0.7, 1.0, 1.5, 100.0, MOST]
TOP_KS = [0, 1, 2, 3, 40, 2**24 + 1, 2**31 - 1]
TOP_PS = [1e-50, 1e-9, 0.1, 0.3, 0.5, 0.7, 0.95, 0.999999, 1 - 1e-9, 1.0]
MIN_PS = [0.0, 1e-50, 1e-12, 0.05, 0.1, 0.5, 1 - 1e-9, 1.0]
UNIFORMS = [0.0, 1e-45, 0.1, 0.25, 0.5, 0.75, 1 - 2**-24, 1.0]


class Draw(NamedTuple):
    """A row of logits, (n_vocab,) float32, and how a token is drawn of it."""

    logits: np.ndarray
    sampling: Sampling
    uniform: float

    @property
    def token(self) -> int:
        """The host's."""
        return drawn(self.logits, self.sampling, self.uniform)


samplings = st.builds(
    Sampling,
    st.sampled_from(TEMPERATURES) | st.floats(0, 100),
    st.sampled_from(TOP_KS) | st.integers(0, 60),
    st.sampled_from(TOP_PS) | st.floats(1e-6, 1),
    st.sampled_from(MIN_PS) | st.floats(0, 1),
)
uniforms = st.sampled_from(UNIFORMS) | st.floats(0, 1, width=32)


@st.composite
def several(draw: st.DrawFn, n_vocab: st.SearchStrategy[int], most: int = 8) -> list[Draw]:
    """1 to `most` draws of rows of one length."""
    n = draw(n_vocab)
    made = []
    for _ in range(draw(st.integers(1, most))):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        kind = draw(st.sampled_from([*LEVELS, "normal", "wide"]))
        if kind in LEVELS:
            row = rng.choice(np.array(LEVELS[kind], np.float32), n)
        else:
            row = rng.normal(0, 3 if kind == "normal" else 40, n).astype(np.float32)
        made.append(Draw(row, draw(samplings), draw(uniforms)))
    return made


def as_node(draws: list[Draw]) -> tuple[Node, dict[Tensor, np.ndarray]]:
    """The op that makes them, with its inputs."""
    logits = np.stack([d.logits for d in draws])
    how = np.stack([d.sampling.settings(d.uniform) for d in draws])
    rows, settings = Tensor("l", F32, logits.shape), Tensor("s", F32, how.shape)
    return make("draw", "d", rows, settings), {rows: logits, settings: how}
