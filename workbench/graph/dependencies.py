"""Which nodes must be over when a node begins.

A node is behind what wrote the bytes that it reads, and behind what read or wrote those that it
writes. Whole tensors are looked at: two stores into one cache keep their order.
"""

from collections.abc import Sequence

from workbench.graph import ops
from workbench.graph.ir import Kind, Node, Tensor

_NEVER_WRITTEN = (Kind.WEIGHT, Kind.INPUT)  # by a device


def dependencies(nodes: Sequence[Node]) -> list[list[int]]:
    """Of each node, the numbers of earlier nodes that it is behind, without those that another of
    them is behind by the same tensor."""
    writer: dict[Tensor, int] = {}
    readers: dict[Tensor, list[int]] = {}
    found: list[list[int]] = []
    for i, node in enumerate(nodes):
        before: set[int] = set()
        reads = {t for t, *_ in ops.reads(node) if t.kind not in _NEVER_WRITTEN}
        writes = {t for t, *_ in ops.writes(node)}
        for t in reads:
            if t in writer:
                before.add(writer[t])
        for t in writes:
            earlier = readers.pop(t, None)
            if earlier:
                before.update(earlier)
            elif t in writer:
                before.add(writer[t])
            writer[t] = i
        for t in reads - writes:
            readers.setdefault(t, []).append(i)
        found.append(sorted(before))
    return found
