"""The memory that programs refer to: buffers, and ranges of their bytes."""

from enum import StrEnum
from typing import NamedTuple


class Space(StrEnum):
    HOST = "host"  # pageable host memory
    PINNED = "pinned"  # page-locked host memory
    DEVICE = "device"


class Buffer:
    """A block of memory that a program refers to. backend: the index of its owner. lands: it holds
    one result that a copy brings to the host, and nothing else."""

    __slots__ = ("backend", "lands", "name", "nbytes", "space")

    def __init__(self, name: str, space: Space, nbytes: int, backend: int):
        self.name = name
        self.space = space
        self.nbytes = nbytes
        self.backend = backend
        self.lands = False

    def __repr__(self) -> str:
        return f"{self.name}[{self.nbytes}]"


class Range(NamedTuple):
    """Bytes offset..offset+nbytes-1 of a buffer."""

    buffer: Buffer
    offset: int
    nbytes: int

    def __repr__(self) -> str:
        return f"{self.buffer.name}+{self.offset}:{self.nbytes}"
