"""The choice of attention kernels on CUDA: with tensor cores or without them.

mma        `attention.py`: tensor cores; K and V are F16
vec, tile  `attention_plain.py`: no tensor cores; K and V of any type of the cache
auto       mma where the types allow it; else vec for few tokens of a sequence, tile for many
"""

from workbench.backend.cuda.kernels import attention, attention_plain
from workbench.backend.cuda.kernels.attention import AttentionAt, AttentionShape
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.common.errors import DeviceError
from workbench.config import AttnKernel


def _is_mma(shape: AttentionShape) -> bool:
    """Whether mma computes attention. Raises DeviceError where mma is chosen and reads no such
    cache."""
    types = dict.fromkeys(t for t in (shape.k_type, shape.v_type) if t != "F16")
    if types and shape.kernel == AttnKernel.MMA:
        raise DeviceError(
            f"attn_kernel=mma reads no cache of {' and '.join(types)}; use attn_kernel=auto, vec "
            "or tile, or a cache of f16"
        )
    return not types and shape.kernel in (AttnKernel.AUTO, AttnKernel.MMA)


def launches(shape: AttentionShape, at: AttentionAt, scale: float, quantised: bool) -> list[Kernel]:
    """The launches that compute attention.

    quantised: whether dst is Q8_ACT; only where `can_quantise`.

    Raises DeviceError for a shape that no kernel takes, or that the chosen kernel does not take.
    """
    if _is_mma(shape):
        return attention.launches(shape, at, scale, quantised)
    return attention_plain.launches(shape, at, scale)


def can_quantise(shape: AttentionShape) -> bool:
    """Whether `launches` can give its result as Q8_ACT. Kernels without tensor cores cannot."""
    return _is_mma(shape) and attention.can_quantise(shape)


def scratch_bytes(shape: AttentionShape) -> int:
    """Bytes of the partial results that blocks leave to be combined."""
    if _is_mma(shape):
        return attention.scratch_bytes(shape)
    return attention_plain.scratch_bytes(shape)
