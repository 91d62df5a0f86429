"""Launches on the CPU backends and the null backend: what stands in their blocks, and what their
keys tell apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ranges
from tests.profiles import share
from workbench.backend.base import Backend, open_backend
from workbench.backend.issue.args import view_address
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued
from workbench.common.devices import DEVICES
from workbench.common.errors import DeviceError
from workbench.graph import ops
from workbench.graph.ir import F16, F32, I32, DType, Kind, Node, Tensor
from workbench.program.commands import COMPUTE_STREAM, Space
from workbench.program.first_cell import CELL, is_view

# every op and weight type, and one fused node of each list of parts
_FUSED = {tuple(part.op for part in node.parts): (name, node)
          for name, node, _ in ranges.fused_cases()}  # fmt: skip
CASES = {f"{node.op}: {name}": node for name, node, *_ in (*ranges.cases(), *_FUSED.values())}
SCRATCH = 7 << 40  # an address range of its own


@pytest.fixture(scope="module", params=["host", "embedded", "null"])
def backend(request) -> Iterator[Backend]:
    b = open_backend(request.param, threads=2)
    yield b
    b.close()


class Asked(dict[Tensor, int]):
    """Gives each tensor that is asked for an address of its own."""

    def __init__(self, base: int = 1 << 50):
        super().__init__()
        self.base = base

    def __call__(self, tensor: Tensor) -> int:
        return self.setdefault(tensor.storage, self.base + (len(self) << 32))


def key_of(backend: Backend, node: Node) -> Any:
    return backend.launch(node, Asked(), SCRATCH, COMPUTE_STREAM).key


def parts_of(issued: Issued) -> list[Issued]:
    return [p for part in issued.parts for p in parts_of(part)] or [issued]


@pytest.mark.parametrize("case", share(CASES, every=7, slow=4))
def test_pointers_are_addresses_and_the_key_is_the_work(backend, case):
    """Every address of a tensor and of the scratch is a pointer, and nothing else is one. A launch
    at other addresses has an equal key."""
    node, keys = CASES[case], set()
    for base in (1 << 50, 5 << 50):
        at, first = Asked(base), SCRATCH + base
        issued = backend.launch(node, at, first, COMPUTE_STREAM)
        scratch = range(first, first + max(backend.scratch_bytes(node), 1))
        wanted = {at[t.storage] for t in (*node.inputs, *node.outputs)}
        if is_view(node):  # a store to a view is given its first cell's
            cell = view_address(node.output, at[node.output.storage], node.params[CELL])
            wanted = wanted - {at[node.output.storage]} | {cell}
        assert {a for a in issued.addresses if a not in scratch} == wanted
        for part in parts_of(issued):
            values = [v for i, v in enumerate(part.block) if i not in part.block.pointers]
            assert not any(v in scratch or v in at.values() for v in values)
        keys.add(issued.key)
    assert len(keys) == 1


@pytest.mark.long
def test_launches_of_other_work_have_other_keys(backend):
    """But for nodes that are one work: the same op on the same types, shapes and parameters."""
    keys: dict[Any, list[Node]] = {}
    for node in CASES.values():
        keys.setdefault(key_of(backend, node), []).append(node)
    for same in keys.values():
        assert len({(node.op, tuple(node.params.items())) for node in same}) == 1
    assert len(keys) > len(CASES) - 10


# types and parameters, and two lists of sources of equal results: other rows to gather from, longer
# rows to multiply, a row added to each or a matrix, and caches whose rows are half as long
SOURCES: dict[str, tuple[list[DType], list[Any], dict[str, Any]]] = {
    "get_rows": ([F32, I32], [((n, 64), (4,)) for n in (100, 101)], {}),
    "mul_mat": ([F32, F32], [((32, n), (4, n)) for n in (64, 96)], {}),
    "add": ([F32, F32], [((4, 64), shape) for shape in ((64,), (4, 64))], {}),
    "attention": (
        [F32, F16, F16, F16], [((2, 8, 64), *[(256, n * 64)] * 2, (2, 256)) for n in (4, 2)],
        {"n_kv": 256, "scale": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", SOURCES)
def test_the_shape_of_a_source_alone_is_another_key(backend, op):
    """So a plan of the one is never replayed for the other: results of top-k once were (#18561)."""
    dtypes, both, params = SOURCES[op]
    kinds = [Kind.ACTIVATION, *[Kind.CACHE if params else Kind.ACTIVATION] * 2, Kind.ACTIVATION]
    keys, results = set(), set()
    for shapes in both:
        each = zip(dtypes, shapes, kinds, strict=False)
        tensors = [Tensor(f"source {i}", *of) for i, of in enumerate(each)]
        heads = {"n_head_kv": shapes[1][-1] // 64} if params else {}
        node = ops.make(op, "made", *tensors, **params, **heads)
        keys.add(key_of(backend, node))
        results.add((node.output.shape, node.output.dtype))
    assert len(keys) == 2 and len(results) == 1


@pytest.mark.parametrize("case", [c for c, n in CASES.items() if n.params and not n.parts])
def test_every_parameter_is_part_of_the_key(backend, case):
    node = CASES[case]
    own = key_of(backend, node)
    for name, value in node.params.items():
        # names are no number of a launch; the cell of a view is part of an address
        if not isinstance(value, str | tuple):
            params = {**node.params, name: not value if isinstance(value, bool) else value * 2}
            other = Node(node.op, node.name, node.output, node.inputs, params, node.layer)
            same = name == CELL and backend.name != "null"
            assert (key_of(backend, other) == own) == same, name


def test_what_the_null_device_cannot_is_refused():
    null: Any = open_backend("null")
    node = CASES["add: add"]
    for says, ask in (
        (
            "null device",
            lambda: null.capture(plannable(null, [null.copy(1, 2, 3, 0, True)], 0, (0,))),
        ),
        ("null device", lambda: null.launch_noted(node, lambda t: 0, 0, 0)),
        ("null device", lambda: null.stamp(0, 0, 8, False, 0)),
        ("address space", lambda: null.allocate(1 << 62, Space.HOST)),
    ):
        with pytest.raises(DeviceError, match=says):
            ask()


def test_a_numbered_device_is_opened_by_its_number(monkeypatch):
    asked = SimpleNamespace(open_backend=lambda **options: options)
    for name, device in DEVICES.items():
        monkeypatch.setitem(sys.modules, device.module, asked)
        wanted = {"threads": 2} | ({"device": 3} if device.numbered else {})
        assert open_backend(name, threads=2, number=3) == wanted
