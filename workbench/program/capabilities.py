"""What a backend can do. `lower` asks this and never a backend's name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    asynchronous_copies: a copy call returns before the copy is done.
    events: Record, Wait and Sync on events.
    one_order: copies and launches on one stream run in issue order.
    capture: a split can be captured as a plan.
    n_streams: the most streams usable side by side; 0: every launch runs inside the call.
    programmatic: a launch may begin before the launch before it on the stream has ended, and its
        kernel waits for what it reads (programmatic dependent launch).
    """

    asynchronous_copies: bool
    events: bool
    one_order: bool
    capture: bool
    n_streams: int
    programmatic: bool = False

    @property
    def synchronous(self) -> bool:
        return self.n_streams == 0

    @property
    def in_stream(self) -> bool:
        """Whether a copy runs after the launches before it, and an event can stand for it."""
        return self.one_order and self.events

    @property
    def compute_streams(self) -> int:
        """On how many streams a step may compute: one stream is for copies."""
        return max(1, self.n_streams - 1)
