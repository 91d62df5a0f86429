"""A plan that is kept: what a device recorded, and whose it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from workbench.backend.base import Captured
from workbench.backend.identity import Identity
from workbench.backend.issued import Plannable
from workbench.errors import DeviceError

R = TypeVar("R")


class Plan:
    """What a device recorded, if anything yet, and the latest work that came.

    identity: of that work. recorded: of what is recorded. fits: the two are equal. alike: calls in
    a row, up to the latest, that a rule takes for the same. work: nothing once the work is gone.
    settled: it was launched, and the plan for the landing behind it was looked for.
    """

    __slots__ = (
        "alike", "captured", "fits", "identity", "recorded", "settled", "uid", "used", "work",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self.fits = self.settled = False
        self.identity: Identity | None = None
        self.recorded: Identity | None = None
        self.uid = self.alike = 0
        self.used = 0.0
        self.work: Callable[[], Plannable | None] = _nobody

    def ask(self, act: Callable[..., R], *given: Any) -> R:
        """What `act` of the captured plan returns. Where it fails, the next call captures anew."""
        try:
            return act(*given)
        except DeviceError:
            self.destroy()
            raise

    def destroy(self) -> None:
        captured, self.captured, self.recorded, self.fits = self.captured, None, None, False
        if captured is not None:
            captured.destroy()


def _nobody() -> None:
    """In place of a weak reference: no work has come yet."""
