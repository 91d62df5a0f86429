"""A small assembler of portable vector code, in which all CPU kernels are written.

A kernel is a Python function that runs once, at compile time, with an `Emit`, and writes LLVM IR
through it. Python's loops and conditions therefore unroll and specialise. Loops and conditions of
the kernel itself are `with emit.loop(...)` and `with emit.when(...)`.

A `Value` is a scalar or a vector of one element kind:

| kind | meaning |
|---|---|
| i1 | a condition, or a mask of conditions |
| i8, i16, i32, i64 | signed integers: `>>` keeps the sign, conversions extend the sign |
| u8, u16, u32, u64 | unsigned integers |
| f16, f32, f64 | floating point |

Operators work element by element; a Python number or a scalar is splatted to meet a vector. The IR
is generic LLVM vector code, which LLVM lowers to the host's instructions. The few instructions that
LLVM does not choose by itself (byte dot products) are in `cpu/isa.py`. Nothing is contracted or
reassociated: only `fma` makes an fma, and sums keep the order in which they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils

_LL: dict[str, ir.Type] = {
    "i1": ir.IntType(1), "i8": ir.IntType(8), "i16": ir.IntType(16), "i32": ir.IntType(32),
    "i64": ir.IntType(64), "u8": ir.IntType(8), "u16": ir.IntType(16), "u32": ir.IntType(32),
    "u64": ir.IntType(64),
    "f16": ir.HalfType(), "f32": ir.FloatType(), "f64": ir.DoubleType(),
}  # fmt: skip
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
Operand: TypeAlias = "Value | int | float"
Body: TypeAlias = "Callable[[Emit, Value, Value, Value], None]"  # emit, args, part, n_parts


def size_of(kind: str) -> int:
    """Bytes of one element of `kind`."""
    return _BYTES[kind[1:]]


def ll_type(kind: str, n: int) -> ir.Type:
    """LLVM type of `n` elements of `kind`; n = 1 is a scalar."""
    return _LL[kind] if n == 1 else ir.VectorType(_LL[kind], n)


def _operator(
    name: str, of_floats: str = "", signed: str = "", swap: bool = False
) -> Callable[[Value, Operand], Value]:
    """A method of Value that writes the instruction `name`.

    of_floats, signed: the instruction of floats, or of signed integers, where it has another name.
    swap: the other operand comes first.
    """
    names = {"f": of_floats or name, "i": signed or name, "u": name}

    def apply(self: Value, other: Operand) -> Value:
        a, b = self, self.emit.like(self, other)
        if isinstance(other, Value) and other.n > self.n:
            a, b = self.emit.splat(self, other.n), other
        if swap:
            a, b = b, a
        build = getattr(self.emit.builder, names[self.kind[0]])
        return Value(self.emit, a.kind, a.n, build(a.ll, b.ll))

    return apply


@dataclass(slots=True, eq=False)
class Value:
    """A scalar (n = 1) or vector (n > 1) of element `kind`, held in the LLVM value `ll`."""

    emit: Emit
    kind: str
    n: int
    ll: ir.Value

    @property
    def is_float(self) -> bool:
        return self.kind[0] == "f"

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __rsub__ = _operator("sub", "fsub", swap=True)
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __truediv__ = _operator("fdiv", "fdiv")
    __floordiv__ = _operator("udiv")  # truncating; both operands are counts, and never negative
    __mod__ = _operator("urem")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr", signed="ashr")

    def compare(self, op: str, other: Operand) -> Value:
        """Condition `self op other`; op is one of < <= == != > >=. NaN compares false, except by
        !=."""
        b = self.emit.like(self, other)
        build = self.emit.builder
        if not self.is_float:
            test = build.icmp_signed if self.kind[0] == "i" else build.icmp_unsigned
        elif op == "!=":
            test = build.fcmp_unordered
        else:
            test = build.fcmp_ordered
        return Value(self.emit, "i1", self.n, test(op, self.ll, b.ll))

    def to(self, kind: str) -> Value:
        """The same numbers as `kind`; float to float rounds to nearest even, to int truncates."""
        if kind == self.kind:
            return self
        src, dst = self.kind, kind
        build, ll = self.emit.builder, ll_type(kind, self.n)
        if src[0] == "f" and dst[0] == "f":
            act = build.fpext if size_of(dst) > size_of(src) else build.fptrunc
        elif src[0] == "f":
            act = build.fptosi
        elif dst[0] == "f":
            act = build.sitofp if src[0] == "i" and src != "i1" else build.uitofp
        elif src == "i1" or size_of(dst) > size_of(src):
            act = build.sext if src[0] == "i" and src != "i1" else build.zext
        elif size_of(dst) < size_of(src):
            act = build.trunc
        else:
            return Value(self.emit, kind, self.n, self.ll)
        return Value(self.emit, kind, self.n, act(self.ll, ll))

    def bits(self, kind: str) -> Value:
        """The same bytes seen as elements of `kind`."""
        n = self.n * size_of(self.kind) // size_of(kind)
        ll = self.emit.builder.bitcast(self.ll, ll_type(kind, n))
        return Value(self.emit, kind, n, ll)

    def shuffle(self, order: Sequence[int], other: Value | None = None) -> Value:
        """Elements of self (numbers 0..n-1) and other (n..2n-1) in the given order."""
        b = ir.Constant(self.ll.type, ir.Undefined) if other is None else other.ll
        mask = ir.Constant(ir.VectorType(_LL["i32"], len(order)), list(order))
        out = self.emit.builder.shuffle_vector(self.ll, b, mask)
        if len(order) == 1:
            out = self.emit.builder.extract_element(out, ir.Constant(_LL["i32"], 0))
        return Value(self.emit, self.kind, len(order), out)

    def element(self, i: int) -> Value:
        out = self.emit.builder.extract_element(self.ll, ir.Constant(_LL["i32"], i))
        return Value(self.emit, self.kind, 1, out)


class Variable:
    """A mutable Value, carried through loops (LLVM keeps it in a register)."""

    __slots__ = ("emit", "kind", "memory", "n")

    def __init__(self, emit: Emit, first: Value):
        self.emit, self.kind, self.n = emit, first.kind, first.n
        self.memory = cgutils.alloca_once(emit.builder, first.ll.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self.emit, self.kind, self.n, self.emit.builder.load(self.memory))

    def set(self, value: Value) -> None:
        self.emit.builder.store(value.ll, self.memory)


class Emit:
    """Writes a kernel's IR. Addresses are i64 values; loads and stores assume no alignment."""

    __slots__ = ("builder",)

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    # values
    def const(self, kind: str, number: float | Sequence[float], n: int = 1) -> Value:
        """`number` (or a sequence of n numbers) as a constant."""
        ll = ll_type(kind, n)
        if n == 1:
            return Value(self, kind, 1, ir.Constant(ll, number))
        numbers = list(number) if isinstance(number, (list, tuple)) else [number] * n
        return Value(self, kind, n, ir.Constant(ll, numbers))

    def splat(self, scalar: Value, n: int) -> Value:
        if n == 1:
            return scalar
        ll = ll_type(scalar.kind, n)
        one = self.builder.insert_element(
            ir.Constant(ll, ir.Undefined), scalar.ll, ir.Constant(_LL["i32"], 0)
        )
        return Value(self, scalar.kind, n, one).shuffle([0] * n)

    def like(self, model: Value, other: Operand) -> Value:
        """`other` as a value of the model's kind, splatted to its width."""
        if not isinstance(other, Value):
            return self.const(model.kind, other, model.n)
        if other.kind != model.kind and size_of(other.kind) != size_of(model.kind):
            raise TypeError(f"{model.kind} meets {other.kind}")
        return self.splat(other, model.n) if other.n < model.n else other

    def var(self, first: Value) -> Variable:
        return Variable(self, first)

    # memory
    def _pointer(self, address: Value, ll: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address.ll, ll.as_pointer())

    def load(self, kind: str, address: Value, n: int = 1) -> Value:
        ll = ll_type(kind, n)
        return Value(self, kind, n, self.builder.load(self._pointer(address, ll), align=1))

    def store(self, value: Value, address: Value) -> None:
        self.builder.store(value.ll, self._pointer(address, value.ll.type), align=1)

    def prefetch(self, address: Value) -> None:
        """Prefetches the cache line at `address`; the address may be outside any memory."""
        byte = _LL["i8"].as_pointer()
        flags = [ir.Constant(_LL["i32"], flag) for flag in (0, 3, 1)]  # read, keep, data
        signature = ir.FunctionType(ir.VoidType(), [byte, *(flag.type for flag in flags)])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        self.builder.call(function, [self._pointer(address, _LL["i8"]), *flags])

    def stack(self, n_bytes: int) -> Value:
        """Address of `n_bytes` bytes of the kernel's stack frame, aligned to 64, not initialised.

        numba's `alloca_once` would write a zero to every byte, one store each.
        """
        with self.builder.goto_entry_block():
            block = self.builder.alloca(ir.ArrayType(_LL["i8"], n_bytes))
        block.align = 64
        return Value(self, "i64", 1, self.builder.ptrtoint(block, _LL["i64"]))

    def arguments(self, address: Value, kinds: str) -> list[Value]:
        """The words of the argument block, one letter each: i for an integer, f for a float64."""
        name = {"i": "i64", "f": "f64"}
        return [self.load(name[k], address + 8 * i) for i, k in enumerate(kinds)]

    # control
    @contextmanager
    def loop(self, start: Operand, stop: Value, step: int = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)`; yields i (i64)."""
        build = self.builder
        first = self.like(stop, start)
        before = build.basic_block
        head = build.append_basic_block("loop")
        body = build.append_basic_block("body")
        after = build.append_basic_block("after")
        build.branch(head)
        build.position_at_end(head)
        i = build.phi(_LL["i64"])
        i.add_incoming(first.ll, before)
        build.cbranch(build.icmp_signed("<", i, stop.ll), body, after)
        build.position_at_end(body)
        yield Value(self, "i64", 1, i)
        i.add_incoming(build.add(i, ir.Constant(_LL["i64"], step)), build.basic_block)
        build.branch(head)
        build.position_at_end(after)

    def when(self, condition: Value) -> AbstractContextManager[Any]:
        return self.builder.if_then(condition.ll)

    def when_else(self, condition: Value) -> AbstractContextManager[Any]:
        """Two context managers: one for code where the condition holds, one for the other case."""
        return self.builder.if_else(condition.ll)

    def share(self, n: Value, part: Value, n_parts: Value) -> tuple[Value, Value]:
        """The items start..stop-1 of n that part `part` computes."""
        return n * part // n_parts, n * (part + 1) // n_parts

    def flat_loops(
        self, start: Value, stop: Value, width: int, body: Callable[[Value, int], None]
    ) -> None:
        """body(i, width) over whole vectors from start, then body(i, 1) over the rest."""
        whole = start + ((stop - start) // width) * width
        with self.loop(start, whole, width) as i:
            body(i, width)
        with self.loop(whole, stop) as i:
            body(i, 1)

    def copy_floats(
        self, source: Value, target: Value, start: Operand, stop: Value, factor: Value | None = None
    ) -> None:
        """Copies float32 elements start..stop-1, times `factor`."""

        def step(i: Value, n: int) -> None:
            value = self.load("f32", source + i * 4, n)
            self.store(value if factor is None else value * factor, target + i * 4)

        self.flat_loops(self.like(stop, start), stop, 16, step)

    # functions
    def call(self, name: str, kind: str, n: int, *args: Value) -> Value:
        """Calls the LLVM intrinsic `name`, which returns n elements of kind."""
        signature = ir.FunctionType(ll_type(kind, n), [a.ll.type for a in args])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return Value(self, kind, n, self.builder.call(function, [a.ll for a in args]))

    def _generic(self, name: str, *args: Value) -> Value:
        """Calls an intrinsic whose operands and result all have the first operand's type."""
        a = args[0]
        suffix = ("" if a.n == 1 else f"v{a.n}") + a.kind.replace("u", "i")
        return self.call(f"llvm.{name}.{suffix}", a.kind, a.n, *args)

    def fma(self, a: Operand, b: Operand, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self._generic("fma", self.like(c, a), self.like(c, b), c)

    def _extreme(self, which: str, a: Value, b: Operand) -> Value:
        """Of two floats with one NaN: the other float."""
        name = {"f": f"{which}num", "i": f"s{which}", "u": f"u{which}"}[a.kind[0]]
        return self._generic(name, a, self.like(a, b))

    min, max = partialmethod(_extreme, "min"), partialmethod(_extreme, "max")
    abs, sqrt = partialmethod(_generic, "fabs"), partialmethod(_generic, "sqrt")
    round_even = partialmethod(_generic, "roundeven")

    def select(self, condition: Value, a: Value, b: Operand) -> Value:
        """a where the condition holds, else b."""
        b = self.like(a, b)
        if condition.n == 1 or condition.n == a.n:
            return Value(self, a.kind, a.n, self.builder.select(condition.ll, a.ll, b.ll))
        raise TypeError("a mask must be as wide as what it selects")

    def reduce(self, a: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Combines all elements of a by halves, as a tree of fixed order."""
        while a.n > 1:
            half = a.n // 2
            a = combine(a.shuffle(range(half)), a.shuffle(range(half, a.n)))
        return a

    def sum(self, a: Value) -> Value:
        return self.reduce(a, lambda x, y: x + y)

    def sum_each(self, rows: Sequence[Value]) -> Value:
        """The sums of n vectors of n elements, as one vector (n a power of two).

        Each round halves the number of vectors: it adds the even to the odd groups of a pair.
        """
        rows = list(rows)
        n, width = len(rows), 1
        while len(rows) > 1:
            groups = range(0, n, 2 * width)
            low = [side + g + i for g in groups for side in (0, n) for i in range(width)]
            high = [x + width for x in low]
            rows = [
                a.shuffle(low, b) + a.shuffle(high, b)
                for a, b in zip(rows[0::2], rows[1::2], strict=True)
            ]
            width *= 2
        return rows[0]
