"""The table of architectures: the blocks of a layer, and what sets each architecture apart."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What sets one architecture apart, as data.

    blocks: the names of a layer's blocks, in order (`blocks.BLOCKS`).
    neox: RoPE pairs element i with i + n_rot/2 (otherwise 2i with 2i + 1).
    qk_norm: every query and key head is RMS-normalised with a weight of its own before RoPE.
    rope_factors: a file may hold `rope_freqs.weight`, a divisor for each rotation speed.
    """

    blocks: tuple[str, ...]
    neox: bool
    qk_norm: bool
    rope_factors: bool = False


DENSE = ("attention", "dense_ffn")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(DENSE, neox=False, qk_norm=False, rope_factors=True),
    "qwen2": Architecture(DENSE, neox=True, qk_norm=False),
    "qwen3": Architecture(DENSE, neox=True, qk_norm=True),
}
