"""Prepared commands of the cuda backend without a GPU: what makes two of them the same work, which
of their arguments are addresses, and that a patched argument is what the next call passes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.backend.cuda.fake_cuda import Call, FakeDriver, fake_backend
from tests.backend.cuda.launch_cases import every
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import op_table
from workbench.backend.cuda.kernels.kernel import CLUSTERS, Gemm, Kernel
from workbench.backend.issue.issued import Address, Issued, pointers_of
from workbench.common.errors import DeviceError
from workbench.graph.ir import BF16, F16, F32, I32, I64, Q4_0, Q8_ACT, DType, Kind, Node, Tensor
from workbench.graph.ops import make

FAR = 1 << 40  # between tensors, beyond every shape
SCRATCH, COUNTERS = 1 << 60, 1 << 61
STREAM = 0


@pytest.fixture
def fake(monkeypatch) -> tuple[CudaBackend, list[Call]]:
    return fake_backend(monkeypatch)


class Map:
    """Addresses for tensors, `first` on: one storage, one address. asked: those that were given."""

    def __init__(self, first: int = FAR):
        self.first = first
        self.asked: dict[Tensor, int] = {}

    def __call__(self, tensor: Tensor) -> int:
        return self.asked.setdefault(tensor.storage, self.first + FAR * len(self.asked))


# which arguments are addresses --------------------------------------------------------------------


def fields(work: Kernel | Gemm) -> Iterator[tuple[int, bool]]:
    """Every whole number among the arguments, and whether it is marked as an address."""
    given = work.args if isinstance(work, Kernel) else [work.dst, work.w, work.x]
    marked = pointers_of(given)
    for i, argument in enumerate(given):
        if isinstance(argument, int):
            yield int(argument), i in marked
    if isinstance(work, Gemm):
        yield from ((n, False) for n in (work.rows, work.cols, work.n_tokens, work.dst_stride))


@pytest.mark.parametrize("sm", [CLUSTERS - 1, CLUSTERS])
@pytest.mark.parametrize("tokens", [1, 33, 512])
def test_every_address_is_marked_and_nothing_else_is(tokens: int, sm: int):
    """Of every op, fused and not: what is given as an address stays one through all arithmetic."""
    for case in every(tokens):
        addresses = Map()
        at = lambda t: Address(addresses(t))  # noqa: B023, E731
        given = op_table.Operands(at, Address(SCRATCH), Address(COUNTERS), sm)
        passed = set()
        for work in op_table.launches(case.node, given):
            for number, marked in fields(work):
                assert marked == (number >= FAR), (number, case.node, work)
                passed.add(number // FAR * FAR)
        node = case.node
        touched = {t.storage for t in (*node.inputs, *node.outputs)}
        made = {t.storage for part in node.parts for t in part.outputs}
        assert addresses.asked.keys() <= touched | made
        assert {addresses.asked[t] for t in touched if t in addresses.asked} <= passed, node
        assert touched - addresses.asked.keys() == set(), f"{node} is not told where all of it lies"


# what makes two commands the same work ------------------------------------------------------------


def attention(
    tokens: int = 2, heads: int = 8, n_kv: int = 256, scale: float = 0.1, n_head_kv: int = 4
) -> Node:
    q = Tensor("q", F32, (tokens, heads, 64))
    k = Tensor("k", F16, (512, n_head_kv * 64), Kind.CACHE)
    mask = Tensor("m", F16, (tokens, n_kv))
    return make("attention", "o", q, k, k, mask, n_kv=n_kv, n_head_kv=n_head_kv, scale=scale)


def rows_of(n: int) -> Node:
    table = Tensor("t", F16, (n, 256), Kind.WEIGHT)
    return make("get_rows", "r", table, Tensor("i", I32, (4,)))


def norm(rows: int = 2, cols: int = 256, eps: float = 1e-5) -> Node:
    return make("rms_norm", "n", Tensor("x", F32, (rows, cols)), eps=eps)


def rope(op: str = "rope", n: int = 3, **changed: Any) -> Node:
    said: dict[str, Any] = {"n_rot": 64, "neox": True, "theta_base": 1e4, "freq_scale": 1.0}
    at = Tensor("p", I32, (n,))
    if op == "rope_shift":
        cache = Tensor("k", F16, (9, 4 * 64), Kind.CACHE)
        return make(op, "k", cache, at, **{"n_head_kv": 4} | said | changed)
    return make(op, "r", Tensor("h", F32, (n, 4, 64)), at, **said | changed)


def store(n_kv: int = 256) -> Node:
    cache = Tensor("k", F16, (512, 256), Kind.CACHE)
    x, rows = Tensor("x", F32, (2, 256)), Tensor("i", I64, (2,))
    return make("set_rows", "k", cache, x, rows, n_kv=n_kv)


def product(
    dtype: DType = Q4_0, rows: int = 64, tokens: int = 2, cols: int = 256, floats: bool = False
) -> Node:
    w = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    x = Tensor("x", F32 if floats or dtype in (F32, F16, BF16) else Q8_ACT, (tokens, cols))
    said: dict[str, Any] = {"activations": "float"} if floats else {}
    return make("mul_mat", "y", w, x, **said)


SAME_OP = {
    "attention": [attention(), attention(tokens=3), attention(heads=4), attention(n_kv=512),
                  attention(scale=0.2)],
    "norm": [norm(), norm(rows=3), norm(cols=512), norm(eps=1e-6)],
    "rope": [rope(), rope(n=4), rope(n_rot=32), rope(neox=False), rope(theta_base=5e5),
             rope(freq_scale=0.5)],
    "rope_shift": [rope("rope_shift"), rope("rope_shift", n=4), rope("rope_shift", n_head_kv=2),
                   rope("rope_shift", theta_base=5e5)],
    "set_rows": [store(), store(n_kv=512)],
    "product": [product(), product(rows=96), product(tokens=3), product(cols=512), product(F16),
                product(floats=True), product(tokens=40), product(tokens=1100)],
    # of equal results: only what a source is differs
    "sources": [rows_of(100), rows_of(101)],
    "heads of K": [attention(), attention(n_head_kv=2)],
    "cuBLAS": [product(F16, tokens=40), product(F16, tokens=41), product(F16, rows=65, tokens=40),
               product(F16, cols=512, tokens=40), product(BF16, tokens=40),
               product(F32, tokens=40)],
}  # fmt: skip


def launched(backend: CudaBackend, node: Node, first: int = FAR, **said: Any) -> Issued:
    return backend.launch(node, Map(first), first + (1 << 59), STREAM, **said)


@pytest.mark.parametrize("name", SAME_OP)
def test_the_key_is_the_work_and_not_where_it_lies(fake, name: str):
    backend, _ = fake
    keys = []
    for node in SAME_OP[name]:
        here, there = launched(backend, node), launched(backend, node, 512 * FAR)
        assert here.key == there.key and hash(here.key) == hash(there.key)
        assert here.addresses != there.addresses
        assert len(here.addresses) == len(there.addresses)
        keys.append(here.key)
    assert len(set(keys)) == len(keys), "a shape or a parameter is missing in the key"


def test_the_key_names_the_parts_of_a_launch(fake):
    """One part for each kernel and each product of cuBLAS, in order."""
    backend, _ = fake
    node = product(tokens=1100)
    issued = launched(backend, node)
    names = [name.function for name in backend.kernels_of(node)]
    assert len(issued.parts) == len(names) > 2 and None in names
    for part, name in zip(issued.parts, names, strict=True):
        assert (part.same[0] == "cublasGemmEx") if name is None else (part.same[1] == name)
    assert issued.addresses == tuple(a for part in issued.parts for a in part.addresses)


def test_a_node_without_tokens_is_the_same_work_as_another(fake):
    backend, log = fake
    none = launched(backend, product(tokens=0))
    none()
    assert not log and none.addresses == () and none.key == ()


KERNEL = Kernel("f", "k", (3, 2), 64, [Address(1 << 40), 7, 0.5], ("A=1",), 1024, waits=True)
OTHERS = [
    KERNEL._replace(file="g"), KERNEL._replace(function="l"), KERNEL._replace(grid=(3, 1)),
    KERNEL._replace(grid=(4, 2)), KERNEL._replace(block=32), KERNEL._replace(defines=("A=2",)),
    KERNEL._replace(shared=2048), KERNEL._replace(args=[Address(1 << 40), 8, 0.5]),
    KERNEL._replace(args=[Address(1 << 40), 7, 0.25]), KERNEL._replace(args=[0, 7, 0.5]),
]  # fmt: skip
GEMM = Gemm("F16", Address(3 << 40), Address(1 << 40), Address(2 << 40), 10, 64, 20, 30)
OTHER_GEMMS = [
    GEMM._replace(dtype="BF16"), GEMM._replace(rows=11), GEMM._replace(cols=72),
    GEMM._replace(n_tokens=21), GEMM._replace(dst_stride=31),
]  # fmt: skip


def test_each_part_of_a_kernel_and_of_a_product_is_in_the_key(fake):
    backend, _ = fake
    there = backend._stream(STREAM)
    for one, others in ((KERNEL, OTHERS), (GEMM, OTHER_GEMMS)):
        keys = [backend._prepare(work, there, "test").key for work in (one, *others)]
        assert len(set(keys)) == len(keys)
        assert backend._prepare(one, there, "another name").key == keys[0]
    moved = KERNEL._replace(args=[Address(5 << 40), 7, 0.5])
    assert backend._prepare(moved, there, "").key == backend._prepare(KERNEL, there, "").key


def test_a_programmatic_launch_is_other_work(fake):
    backend, _ = fake
    early, late = (launched(backend, norm(), programmatic=p) for p in (True, False))
    assert early.key != late.key
    assert early.key == launched(backend, norm(), 9 * FAR, programmatic=True).key
    refused = KERNEL._replace(waits=False)
    with pytest.raises(DeviceError, match="kernel k declares no wait"):
        backend._prepare(refused, backend._stream(STREAM), "launch", programmatic=True)


def test_copies_records_and_waits_are_work_too(fake):
    backend, _ = fake
    peer, event, other = CudaBackend(1), backend.event(), backend.event()
    assert isinstance(peer._driver, FakeDriver)
    of: list[Callable[..., Issued]] = [
        lambda dst, n, s=0: backend.copy(dst, 8 * FAR, n, s, to_host=False),
        lambda dst, n, s=0: backend.copy(dst, 8 * FAR, n, s, to_host=True),
        lambda dst, n, s=0: backend.copy_to_peer(peer, dst, 8 * FAR, n, s),
    ]
    keys = []
    for copy in of:
        assert copy(FAR, 64).key == copy(2 * FAR, 64).key != copy(FAR, 128).key
        assert copy(FAR, 64).addresses == (FAR, 8 * FAR)
        assert copy(FAR, 0).addresses == ()
        keys.append(copy(FAR, 64).key)
    for mark in (backend.record, backend.wait):
        assert mark(event, 0).key == mark(other, 0).key != mark(event, 1).key
        assert mark(event, 0).addresses == (int(event.handle),)
        keys.append(mark(event, 0).key)
    assert len(set(keys)) == len(keys)


# patching -----------------------------------------------------------------------------------------


def passed(log: list[Call], issued: Issued) -> list[Call]:
    log.clear()
    issued()
    return list(log)


def assert_patchable(log: list[Call], issued: Issued) -> None:
    """Each address of each part is patched by itself. The next call passes the new one, and all
    else is as it was."""
    for n, part in enumerate(issued.parts or (issued,)):
        for field in part.block.pointers:
            before, key = passed(log, issued), issued.key
            assert len(before) == len(issued.parts or (issued,))
            was = part.block[field]
            part.block[field] = now = (1 << 58) + 4096 * field
            after = passed(log, issued)
            assert part.block[field] == now and now in issued.addresses and issued.key == key
            changed = [i for i, pair in enumerate(zip(before, after, strict=True))
                       if pair[0] != pair[1]]  # fmt: skip
            assert changed == [n]
            pairs = list(zip(before[n].args, after[n].args, strict=True))
            assert [pair for pair in pairs if pair[0] != pair[1]] == [(was, now)]
            part.block[field] = was
            assert passed(log, issued) == before


@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("name", SAME_OP)
def test_a_patched_pointer_is_what_the_next_launch_passes(fake, name: str, programmatic: bool):
    backend, log = fake
    for node in SAME_OP[name]:
        if not programmatic or backend.begins_early(node):
            issued = launched(backend, node, programmatic=programmatic)
            assert_patchable(log, issued)
            calls = passed(log, issued)
            early = {call.function for call in calls} == {"cuLaunchKernelEx"}
            assert early == programmatic


def test_a_patched_pointer_is_what_the_next_copy_record_or_wait_passes(fake):
    backend, log = fake
    peer = CudaBackend(1)
    for to_host in (False, True):
        assert_patchable(log, backend.copy(FAR, 2 * FAR, 64, STREAM, to_host))
    assert_patchable(log, backend.copy_to_peer(peer, FAR, 2 * FAR, 64, STREAM))
    for mark in (backend.record, backend.wait):
        assert_patchable(log, mark(backend.event(), STREAM))


def test_a_patched_value_is_passed_and_is_other_work(fake):
    backend, log = fake
    issued = backend._prepare(KERNEL, backend._stream(STREAM), "test")
    (before,), key = passed(log, issued), issued.key
    assert before.args[:5] == ("k of ('f', ('A=1',))", (3, 2, 1), (64, 1, 1), 1024, 1)
    assert before.args[5:] == (1 << 40, 7, 0x3F000000)  # 0.5 as float32
    assert len(issued.block) == 3 and issued.block.pointers == (0,)
    issued.block[1] = 9
    (after,) = passed(log, issued)
    assert after.args[5:] == (1 << 40, 9, 0x3F000000) and issued.key != key


def test_commands_keep_what_they_read_alive(fake):
    """The block, the event: nobody else holds them."""
    backend, log = fake
    launch = launched(backend, norm())
    before = passed(log, launch)
    record = backend.record(backend.event(), 1)
    gc.collect()
    blocks = [launched(backend, norm(), n * FAR) for n in range(1, 100)]
    assert passed(log, launch) == before and len(blocks) == 99
    assert passed(log, record)[0].args[0] >= 5000
