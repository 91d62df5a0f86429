"""The arena against brute force: no two tensors that are alive together share a byte."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.graph.arena import FreeList, layout
from workbench.graph.ir import ALIGN, F32, Kind, Node, Tensor


@st.composite
def graphs(draw):
    """Random straight-line graphs: each node reads up to three earlier tensors."""
    sizes = st.integers(1, 400)
    inputs = [
        Tensor(f"in{i}", F32, (draw(sizes),), Kind.INPUT) for i in range(draw(st.integers(0, 3)))
    ]
    tensors, nodes = list(inputs), []
    for i in range(draw(st.integers(1, 25))):
        n_sources = draw(st.integers(0, min(3, len(tensors))))
        sources = tuple(draw(st.sampled_from(tensors)) for _ in range(n_sources))
        out = Tensor(f"t{i}", F32, (draw(sizes),))
        nodes.append(Node("op", out.name, out, sources, {}, -1))
        tensors.append(out)
    made = [n.output for n in nodes]
    keep = [t for t in made if draw(st.booleans()) and draw(st.booleans())]
    scratch = {n: draw(st.sampled_from([0, 0, 64, 900])) for n in nodes}
    return nodes, inputs, keep, scratch


def lifetimes(nodes, inputs, keep):
    """First and last node index at which each tensor's bytes matter, by brute force. Weights and
    caches lie elsewhere."""
    alive = {t: [-1, len(nodes)] for t in inputs}
    for i, node in enumerate(nodes):
        for t in node.outputs:
            if t.kind != Kind.CACHE:
                alive[t.storage] = [i, i]
        for t in node.inputs:
            if t.storage not in inputs and t.kind not in (Kind.WEIGHT, Kind.CACHE):
                alive[t.storage][1] = i
    for t in keep:
        alive[t][1] = len(nodes)
    return alive


def overlap(a, b):
    return a[0] < b[1] and b[0] < a[1]


def check_layout(nodes, inputs, keep, found):
    """No two tensors that are alive together share a byte, nor does a node's scratch with them."""
    alive = lifetimes(nodes, inputs, keep)
    spans = {t: (found.offsets[t], found.offsets[t] + t.nbytes) for t in (*inputs, *alive)}
    tensors = list(spans)
    for i, a in enumerate(tensors):
        assert spans[a][1] <= found.nbytes
        assert spans[a][0] % ALIGN == 0
        for b in tensors[:i]:
            together = alive[a][0] <= alive[b][1] and alive[b][0] <= alive[a][1]
            if together:
                assert not overlap(spans[a], spans[b]), (a, b)
    for i, node in enumerate(nodes):
        if node in found.scratch:
            offset, nbytes = found.scratch[node]
            for t in tensors:
                if alive[t][0] <= i <= alive[t][1]:
                    assert not overlap((offset, offset + nbytes), spans[t])


@given(graphs())
@settings(max_examples=examples(200))
def test_live_tensors_never_overlap(case):
    nodes, inputs, keep, scratch = case
    check_layout(nodes, inputs, keep, layout(nodes, inputs, keep, scratch.__getitem__))


def test_memory_is_shared():
    """A chain of equal tensors needs two ranges, whatever its length."""
    x = Tensor("x", F32, (ALIGN // 4,), Kind.INPUT)
    nodes, last = [], x
    for i in range(10):
        out = Tensor(f"t{i}", F32, (ALIGN // 4,))
        nodes.append(Node("op", out.name, out, (last,), {}, -1))
        last = out
    assert layout(nodes, [x], [last], lambda n: 0).nbytes == 3 * ALIGN  # the input keeps its own


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
@settings(max_examples=examples(200))
def test_free_list_gives_disjoint_ranges(steps):
    free, held = FreeList(), []
    for take, n in steps:
        if take or not held:
            offset = free.take(n)
            assert all(not overlap((offset, offset + n), (o, o + m)) for o, m in held)
            held.append((offset, n))
        else:
            free.give(*held.pop(n % len(held)))
    for h in held:
        free.give(*h)
    whole = free.end
    if whole:
        assert free.take(whole) == 0  # everything merged back into one range


def test_no_bytes_take_no_range():
    free = FreeList()
    offset = free.take(ALIGN)
    assert free.take(0) == 0 and free.end == ALIGN
    free.give(offset, ALIGN)
    free.give(offset, 0)
    assert free.take(0) == 0 and free.take(ALIGN) == offset and free.end == ALIGN
