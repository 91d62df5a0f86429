"""The names of a program's events: what each event is recorded after.

A name is the same in every program of an engine, whatever its shape: a later step waits for the
event that an earlier one recorded. The name has the backend that records, because events belong to
a device, and steps of other shapes can end on another.
"""


def ended(backend: str) -> str:
    """The results of a step, on their way to the host."""
    return f"end of step on {backend}"


def computed(backend: str) -> str:
    """The results of a step, where a copy that follows the step brings them."""
    return f"results on {backend}"


def arrived(backend: str, turn: int) -> str:
    """The copy of the results of a step of this turn, while the next step may run."""
    return f"results of turn {turn} from {backend}"


def landed(backend: str, split: int) -> str:
    """The copies of a split's inputs."""
    return f"inputs of split {split} on {backend}"


def read(backend: str, turn: int) -> str:
    """The graph on a device that reads its inputs of this turn.

    It is named by device, not by split, because a step with other splits may come next. llama.cpp
    has an event for each backend and copy, too.
    """
    return f"graph on {backend}, turn {turn}"


def staged(backend: str, turn: int) -> str:
    """A device's copies from the staging memory of this turn."""
    return f"copies to {backend} from staging of turn {turn}"


def before_plan(stream: str) -> str:
    """What a stream does before a plan that has parts on it."""
    return f"{stream} before a plan"


def replayed(stream: str) -> str:
    """A plan on this stream that has parts on others."""
    return f"plan on {stream}"


def crossed(backend: str, split: int) -> str:
    """The copies of what a device computed to another device, where a split reads them."""
    return f"copies from {backend} for split {split}"


def begun(backend: str, split: int) -> str:
    """What the first compute stream does before a split."""
    return f"begin of split {split} on {backend}"


def branch(backend: str, split: int, node: int) -> str:
    """A node of a split, which another compute stream waits for."""
    return f"node {node} of split {split} on {backend}"
