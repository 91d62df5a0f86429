"""Sizes and counts: in words, the same in every message and table; and rounded up to whole blocks.

In words, `0.00 GB` means exactly zero.
"""

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))  # of 1,000, as disks count


def round_up(n: int, size: int) -> int:
    """The least multiple of `size` that is n or more."""
    return -(-n // size) * size


def counted(n: int, what: str) -> str:
    """A count in words: `1 reading`, `2 readings`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def size(n_bytes: float) -> str:
    """A size in words, `1.81 MB`: two digits after the point, in the largest unit that is not
    larger than the size. Below 1 kB in bytes: `128 B`.
    """
    for unit, scale in UNITS if round(n_bytes) >= 1000 else ():
        # what rounds up to 1,000 of a unit is 1 of the next
        if round(n_bytes / scale, 2) >= 1:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes:.0f} B"


def sizes(*n_bytes: int) -> list[str]:
    """Each size in words. Where two different sizes would read the same, all are in bytes."""
    said = [size(n) for n in n_bytes]
    if len(set(said)) < len(set(n_bytes)):
        return [f"{n:,} bytes" for n in n_bytes]
    return said
