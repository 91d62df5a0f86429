"""The types that K and V may have in the cache, by their names in settings and flags."""

from __future__ import annotations

import os

from workbench.common.errors import UsageError
from workbench.config import CACHE_TYPES
from workbench.graph.ir import CACHE_DTYPES, DType

CacheTypes = tuple[str, str]  # names, of K and of V
DEFAULT: CacheTypes = (CACHE_TYPES[0], CACHE_TYPES[0])
_BY_NAME = dict(zip(CACHE_TYPES, CACHE_DTYPES, strict=True))


def cache_dtypes(
    path: str | os.PathLike[str], types: CacheTypes, head_dims: tuple[int, int]
) -> tuple[DType, DType]:
    """The types of K and V for a model at `path`, whose heads have so many elements. Raises
    UsageError where whole blocks of a type do not fill a head."""
    found = _BY_NAME[types[0]], _BY_NAME[types[1]]
    for which, name, dtype, head_dim in zip("kv", types, found, head_dims, strict=True):
        if head_dim % dtype.block:
            raise UsageError(
                f"cache_type_{which}={name}: heads of {os.fspath(path)} have {head_dim} elements, "
                f"no multiple of {dtype.block}; use f16, bf16 or f32"
            )
    return found
