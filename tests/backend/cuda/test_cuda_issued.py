"""Prepared commands of the cuda backend without a GPU: what makes two of them the same work, and
which of their arguments are addresses."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any

import pytest

from tests.backend.cuda.fake_cuda import Call, fake_backend
from tests.backend.cuda.launch_cases import every, plain_nodes
from tests.profiles import long
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import op_table
from workbench.backend.cuda.kernels.kernel import CLUSTERS, Gemm, Kernel
from workbench.backend.issue.issued import Address, Issued, pointers_of
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Node, Tensor
from workbench.graph.ops import make

FAR = 1 << 40  # between tensors, beyond every shape
SCRATCH, COUNTERS = 1 << 60, 1 << 61
NORM, EMPTY = (make("rms_norm", "n", Tensor("x", F32, (n, 256)), eps=1e-5) for n in (2, 0))
fake = pytest.fixture(fake_backend)


class Map:
    """Addresses for tensors, `first` on: one storage, one address. asked: those that were given."""

    def __init__(self, first: int):
        self.first = first
        self.asked: dict[Tensor, int] = {}

    def __call__(self, tensor: Tensor) -> int:
        return self.asked.setdefault(tensor.storage, self.first + FAR * len(self.asked))


def fields(work: Kernel | Gemm) -> list[tuple[int, bool]]:
    """Every whole number among the arguments, and whether it is marked as an address."""
    given = work.args if isinstance(work, Kernel) else work[1:]
    marked = pointers_of(given)
    return [(int(a), i in marked) for i, a in enumerate(given) if isinstance(a, int)]


@pytest.mark.parametrize("sm", [CLUSTERS - 1, CLUSTERS])
@pytest.mark.parametrize("tokens", [1, long(33), long(512)])
def test_every_address_is_marked_and_nothing_else_is(tokens: int, sm: int):
    """Of every op, fused and not: what is given as an address stays one through all arithmetic."""
    for case in every(tokens):
        addresses, node = Map(FAR), case.node
        at = lambda t: Address(addresses(t))  # noqa: B023, E731
        given = op_table.Operands(at, Address(SCRATCH), Address(COUNTERS), sm)
        passed = set()
        for work in op_table.launches(node, given):
            for number, marked in fields(work):
                assert marked == (number >= FAR), (number, node, work)
                passed.add(number // FAR * FAR)
        touched = {t.storage for t in (*node.inputs, *node.outputs)}
        assert touched <= addresses.asked.keys(), f"{node} is not told where all of it lies"
        made = {t.storage for part in node.parts for t in part.outputs}
        assert addresses.asked.keys() <= touched | made
        assert {addresses.asked[t] for t in touched} <= passed, node


def passed(log: list[Call], issued: Issued) -> list[Call]:
    log.clear()
    issued()
    return list(log)


def test_an_early_launch_is_the_same_launch(fake):
    """Function, grid, block, shared memory, stream and arguments; another call of the driver."""
    backend, log = fake
    grids = set()
    for stream, case in itertools.product((0, 3), every(1)):
        if backend.begins_early(case.node):
            plain, early = (
                passed(log, backend.launch(case.node, Map(FAR), SCRATCH, stream, programmatic))
                for programmatic in (False, True)
            )
            assert [call.args for call in early] == [call.args for call in plain], case.node
            assert {call.function for call in early} == {"cuLaunchKernelEx"}
            grids |= {call.args[1] for call in early}
    assert len(grids) > 5


def assert_patchable(log: list[Call], issued: Issued) -> None:
    """Each address of each part is patched by itself. The next call passes the new one, and all
    else is as it was; it is the same work."""
    parts = issued.parts or (issued,)
    for n, part in enumerate(parts):
        for field in part.block.pointers:
            before, key, was = passed(log, issued), issued.key, part.block[field]
            assert len(before) == len(parts)
            part.block[field] = now = (1 << 58) + 4096 * field
            after = passed(log, issued)
            assert now in issued.addresses and issued.key == key
            pairs = [(a, b) for one, other in zip(before, after, strict=True)
                     for a, b in zip(one.args, other.args, strict=True)]  # fmt: skip
            assert before[n] != after[n] and [x for x in pairs if x[0] != x[1]] == [(was, now)]
            part.block[field] = was


@pytest.mark.parametrize("tokens", [2, 40])
def test_the_key_is_the_work_and_not_where_it_lies(fake, tokens):
    """It names the parts of a launch, one for each kernel and each product of cuBLAS, in order. A
    patched pointer is what the next launch passes. A programmatic launch is other work, and so is
    one with another parameter or other shapes."""
    backend, log = fake

    def launched(node: Node, at=FAR, early=False) -> Issued:
        return backend.launch(node, Map(at), at + SCRATCH, 0, early)

    for (node, *_), (more, *_) in zip(plain_nodes(tokens), plain_nodes(tokens + 1), strict=True):
        here, there = launched(node), launched(node, 512 * FAR)
        assert here.key == there.key and hash(here.key) == hash(there.key)
        assert here.addresses != there.addresses
        names = [kernel.function for kernel in backend.kernels_of(node)]
        for part, function in zip(here.parts or (here,), names, strict=True):
            assert part.same[0] == "cublasGemmEx" if function is None else part.same[1] == function
        assert_patchable(log, here)
        others = [more]
        for name, value in node.params.items():
            if isinstance(value, bool | float):
                other = not value if isinstance(value, bool) else 2 * value
                params = {**node.params, name: other}
                others.append(Node(node.op, node.name, node.output, node.inputs, params, -1))
        assert here.key not in [launched(other).key for other in others], node
        if backend.begins_early(node):
            early = launched(node, early=True)
            assert_patchable(log, early)
            assert {call.function for call in passed(log, early)} == {"cuLaunchKernelEx"}
            assert early.key != here.key


KERNEL = Kernel("f", "k", (3, 2), 64, [Address(1 << 40), 7, 0.5], ("A=1",), 1024, waits=True)
GEMM = Gemm("F16", Address(3 << 40), Address(1 << 40), Address(2 << 40), 10, 64, 20, 30)
OTHERS: list[tuple[Any, list[dict[str, Any]]]] = [
    (KERNEL, [{"file": "g"}, {"function": "l"}, {"grid": (3, 1)}, {"grid": (4, 2)}, {"block": 32},
              {"defines": ("A=2",)}, {"shared": 2048}, {"args": [Address(1 << 40), 8, 0.5]},
              {"args": [Address(1 << 40), 7, 0.25]}, {"args": [0, 7, 0.5]}]),
    (GEMM, [{"dtype": "BF16"}, {"rows": 11}, {"cols": 72}, {"n_tokens": 21}, {"dst_stride": 31}]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "others"), OTHERS)
def test_each_part_of_a_launch_is_in_the_key(fake, one, others):
    backend, _ = fake
    there = backend._stream(0)
    works = (one, *(one._replace(**other) for other in others))
    keys = [backend._prepare(work, there, "test").key for work in works]
    assert len(set(keys)) == len(keys)
    assert backend._prepare(one, there, "another name").key == keys[0]


def test_copies_records_and_waits_are_work_too(fake):
    backend, log = fake
    peer, event, other = CudaBackend(1), backend.event(), backend.event()
    there, keys = partial(backend.copy_to_peer, peer), []
    for act in (partial(backend.copy, to_host=False), partial(backend.copy, to_host=True), there):
        copy = lambda dst, n, act=act: act(dst, 8 * FAR, n, 0)  # noqa: E731
        assert copy(FAR, 64).key == copy(2 * FAR, 64).key != copy(FAR, 128).key
        assert copy(FAR, 64).addresses == (FAR, 8 * FAR) and copy(FAR, 0).addresses == ()
        assert_patchable(log, copy(FAR, 64))
        keys.append(copy(FAR, 64).key)
    for mark in (backend.record, backend.wait):
        assert mark(event, 0).key == mark(other, 0).key != mark(event, 1).key
        assert mark(event, 0).addresses == (int(event.handle),)
        assert_patchable(log, mark(event, 0))
        keys.append(mark(event, 0).key)
    assert len(set(keys)) == len(keys)


def test_a_patched_value_is_passed_and_is_other_work(fake):
    backend, log = fake
    issued = backend._prepare(KERNEL, backend._stream(0), "test")
    (before,), key = passed(log, issued), issued.key
    assert before.args[:5] == ("k of ('f', ('A=1',))", (3, 2, 1), (64, 1, 1), 1024, 1)
    assert before.args[5:] == (1 << 40, 7, 0x3F000000)  # 0.5 as float32
    issued.block[1] = 9
    assert passed(log, issued)[0].args[5:] == (1 << 40, 9, 0x3F000000) and issued.key != key
    refused = KERNEL._replace(waits=False)
    with pytest.raises(DeviceError, match="kernel k declares no wait"):
        backend._prepare(refused, backend._stream(0), "launch", programmatic=True)


def test_commands_keep_what_they_read_alive(fake):
    """The block, the event: nobody else holds them. A node without tokens does nothing."""
    backend, log = fake
    launch = backend.launch(NORM, Map(FAR), SCRATCH, 0)
    before = passed(log, launch)
    record = backend.record(backend.event(), 1)
    gc.collect()
    others = [backend.launch(NORM, Map(n * FAR), SCRATCH, 0) for n in range(1, 100)]
    assert passed(log, launch) == before and len(others) == 99
    assert passed(log, record)[0].args[0] >= 5000
    none = backend.launch(EMPTY, Map(FAR), SCRATCH, 0)
    assert not passed(log, none) and none.addresses == () and none.key == ()
