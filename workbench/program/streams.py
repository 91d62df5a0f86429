"""Streams by number: a backend's, and one of its queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.errors import UsageError

HOST = 0  # index of the host backend in every program
DEVICE = 1


class Stream(NamedTuple):
    """Stream `id` of backend number `backend`. Id 0 is the first compute stream, 1 the copy stream;
    from 2 on come the other compute streams."""

    backend: int
    id: int

    def words(self, backends: Sequence[str]) -> str:
        """`cuda:1`. backends: the program's, by index. Raises UsageError for one not there."""
        if not 0 <= self.backend < len(backends):
            raise UsageError(
                f"a command is on stream {self.id} of backend {self.backend}, and the program's "
                f"backends are numbered 0 to {len(backends) - 1} ({', '.join(backends)}); name it"
            )
        return f"{backends[self.backend]}:{self.id}"


COMPUTE_STREAM, COPY_STREAM = 0, 1


def compute_stream(number: int) -> int:
    """The id of a compute stream: of number 0, the first, and of those beside it."""
    return COMPUTE_STREAM if number == 0 else COPY_STREAM + number
