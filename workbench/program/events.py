"""What a program's events stand behind, which is how they are called.

A name is the same in every program of an engine, whatever its shape: an event that one step records
is what a later one waits for. It has the backend that records it, since events are a device's own,
and steps of other shapes can end on another.
"""

from __future__ import annotations


def ended(backend: str) -> str:
    """The results of a step, on their way to the host."""
    return f"end of step on {backend}"


def landed(backend: str, split: int) -> str:
    """The copies of a split's inputs."""
    return f"inputs of split {split} on {backend}"


def read(backend: str, split: int, place: int) -> str:
    """The graph that reads a split's inputs in a place of theirs."""
    return f"graph of split {split} on {backend}, place {place}"


def staged(backend: str, place: int) -> str:
    """A device's copies from a place of staging memory."""
    return f"copies to {backend} from staging place {place}"


def crossed(backend: str, split: int) -> str:
    """The copies of what a device computed to another, which a split of that one reads."""
    return f"copies from {backend} for split {split}"
