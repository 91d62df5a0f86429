"""Every op but mul_mat and attention. Argument order: backend/issue/args.py; maths: graph/ops.py.

Parts are flat ranges of elements, or rows where a row is summed. A vector of elements and a single
element at the end get the same arithmetic, so results do not depend on n_parts.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.backend.cpu.kernels.cells import CELL_TYPES
from workbench.backend.cpu.kernels.mathfn import exp, sine_cosine
from workbench.backend.cpu.kernels.vector import Body, Emit, Value

ELEMENTS = 16  # float32 elements worked on together; narrower machines split them


def binary_body(combine: Callable[[Value, Value], Value]) -> Body:
    """Kernel: dst = combine(a, b), b one row for all or as many rows as a."""

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, a, b, rows, cols, b_rows = e.arguments(args, "iiiiii")
        start, stop = e.share(rows * cols, part, n_parts)
        row_step = e.select(b_rows.compare("==", 1), e.const("i64", 0), cols)
        with e.when(start.compare("<", stop)):
            last_row = (stop - 1) // cols
            with e.loop(start // cols, last_row + 1) as row:
                first = e.max(start - row * cols, 0)
                last = e.min(stop - row * cols, cols)

                def step(c: Value, n: int, row=row) -> None:
                    at = (row * cols + c) * 4
                    left = e.load("f32", a + at, n)
                    e.store(combine(left, e.load("f32", b + (row * row_step + c) * 4, n)), dst + at)

                e.flat_loops(first, last, ELEMENTS, step)

    return body


def swiglu(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    dst, gate, up, rows, cols = e.arguments(args, "iiiii")
    start, stop = e.share(rows * cols, part, n_parts)

    def step(i: Value, n: int) -> None:
        g, u = e.load("f32", gate + i * 4, n), e.load("f32", up + i * 4, n)
        e.store(g / (exp(e, 0.0 - g) + 1.0) * u, dst + i * 4)

    e.flat_loops(start, stop, ELEMENTS, step)


def rms_norm(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Squares are added as float64, eight sums side by side."""
    dst, x, rows, cols, eps = e.arguments(args, "iiiif")
    start, stop = e.share(rows, part, n_parts)
    with e.loop(start, stop) as row:
        source, target = x + row * cols * 4, dst + row * cols * 4
        wide = e.var(e.const("f64", 0.0, 8))
        rest = e.var(e.const("f64", 0.0))

        def add(c: Value, n: int, source=source, wide=wide, rest=rest) -> None:
            v = e.load("f32", source + c * 4, n).to("f64")
            total = wide if n > 1 else rest
            total.set(e.fma(v, v, total.get()))

        e.flat_loops(e.const("i64", 0), cols, 8, add)
        mean = (e.sum(wide.get()) + rest.get()) / cols.to("f64")
        factor = (e.const("f64", 1.0) / e.sqrt(mean + eps)).to("f32")
        e.copy_floats(source, target, 0, cols, factor)


def square_sums(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Sums of squares of each 32 columns, added as float32. Parts are ranges of sums."""
    dst, x, rows, cols = e.arguments(args, "iiii")
    start, stop = e.share(rows * (cols // 32), part, n_parts)
    with e.loop(start, stop) as i:
        low, high = (e.load("f32", x + (i * 32 + h * 16) * 4, 16) for h in range(2))
        e.store(e.sum(e.fma(low, low, high * high)), dst + i * 4)


def rms_scale(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Sums are added as float64. Parts are ranges of columns; each part computes all scales."""
    dst, x, squares, rows, cols, n, normed, eps = e.arguments(args, "iiiiiiif")
    start, stop = e.share(cols, part, n_parts)
    with e.loop(0, rows) as row:
        total = e.var(e.const("f64", 0.0))
        with e.loop(0, n) as i:
            total.set(total.get() + e.load("f32", squares + (row * n + i) * 4).to("f64"))
        factor = (e.const("f64", 1.0) / e.sqrt(total.get() / normed.to("f64") + eps)).to("f32")
        at = row * cols * 4
        e.copy_floats(x + at, dst + at, start, stop, factor)


def quantize(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """F32 to Q8_ACT (layout: DType.row_bytes). Parts are ranges of blocks of 32.

    Quants are clamped to -127..127, which only matters where the scale is denormal. A block with a
    NaN gets the scale NaN, which keeps the NaN visible.
    """
    dst, x, rows, cols = e.arguments(args, "iiii")
    n_blocks = cols // 32
    used = cols + n_blocks * 8
    row_bytes = (used + 63) // 64 * 64
    start, stop = e.share(rows * n_blocks, part, n_parts)
    with e.loop(start, stop) as block:
        row, b = block // n_blocks, block % n_blocks
        target = dst + row * row_bytes
        halves = [e.load("f32", x + (block * 32 + h * 16) * 4, 16) for h in range(2)]
        most = e.reduce(e.max(e.abs(halves[0]), e.abs(halves[1])), e.max)
        scale = most / 127.0
        nan = halves[0].compare("!=", halves[0]).to("u8") | halves[1].compare("!=", halves[1]).to(
            "u8"
        )
        any_nan = e.reduce(nan, lambda p, q: p | q).compare("!=", 0)
        divisor = e.select(scale.compare("==", 0.0), e.const("f32", 1.0), scale)
        for h, values in enumerate(halves):
            ratio = e.select(scale.compare("==", 0.0), e.like(values, 0.0), values / divisor)
            quants = e.round_even(e.max(e.min(ratio, 127.0), -127.0)).to("i32")
            e.store(quants.to("i8"), target + b * 32 + h * 16)
            e.store(e.sum(quants).to("i16"), target + cols + n_blocks * 4 + b * 4 + 2 * h)
        e.store(e.select(any_nan, e.const("f32", float("nan")), scale), target + cols + b * 4)
        with e.when((b + 1).compare("==", n_blocks)), e.loop(used, row_bytes) as i:
            e.store(e.const("u8", 0), target + i)


_PAIRS = 8  # angles worked on together, as float64


def rope(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Parts are ranges of (token, head). An angle is a float64, and serves all heads of a token in
    the part."""
    (dst, x, positions, factors, n_tokens, n_heads, head_dim, n_rot, neox, theta_base,
     freq_scale) = e.arguments(args, "iiiiiiiiiff")  # fmt: skip
    start, stop = e.share(n_tokens * n_heads, part, n_parts)
    rotation = _Rotation(e, positions, factors, n_rot, neox, theta_base, freq_scale)
    last_token = (stop + n_heads - 1) // n_heads
    with e.loop(start // n_heads, last_token) as token:
        first = e.max(start - token * n_heads, 0)
        last = e.min(stop - token * n_heads, n_heads)
        base = token * n_heads

        def heads(act: Callable[[Value], None], base=base, first=first, last=last) -> None:
            with e.loop(first, last) as head:
                act((base + head) * head_dim * 4)

        rotation.rotate(token, heads, x, dst)
        heads(lambda at: e.copy_floats(x + at, dst + at, n_rot, head_dim))


def rope_shift(dtype: str) -> Body:
    """Parts are ranges of cells. An angle is a float64 as in `rope`, for all heads of a cell. The
    blocks with elements to turn become float32 in the part's scratch, and are rounded once."""
    types = CELL_TYPES[dtype]

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        (cache, deltas, factors, scratch, n_cells, n_heads, head_dim, n_rot, neox, theta_base,
         freq_scale) = e.arguments(args, "iiiiiiiiiff")  # fmt: skip
        start, stop = e.share(n_cells, part, n_parts)
        rotation = _Rotation(e, deltas, factors, n_rot, neox, theta_base, freq_scale)
        cols, block = n_heads * head_dim, types.dtype.block
        own = scratch + part * cols * 4
        turned = (n_rot + (block - 1)) // block * block
        with e.loop(start, stop) as cell, e.when(e.load("i32", deltas + cell * 4).compare("!=", 0)):

            def heads(act: Callable[[Value], None]) -> None:
                with e.loop(0, n_heads) as head:
                    act(head * head_dim * 4)

            def there(at: Value, cell=cell) -> Value:
                return cache + types.nbytes(cell * cols + at // 4)

            heads(lambda at: types.read(e, there(at), own + at, turned))
            rotation.rotate(cell, heads, own, own)
            heads(lambda at: types.write(e, own + at, there(at), e.const("i64", 0), turned))

    return body


def rope_shift_scratch_bytes(cols: int, n_parts: int) -> int:
    """A cell as float32 for each part."""
    return n_parts * cols * 4


class _Rotation:
    """The code that rotates pairs of elements. It computes the powers of a rotation once, first."""

    def __init__(self, e: Emit, positions: Value, factors: Value, n_rot: Value, neox: Value,
                 theta_base: Value, freq_scale: Value):  # fmt: skip
        self.e, self.positions, self.factors = e, positions, factors
        self.half, self.freq_scale = n_rot // 2, freq_scale
        ratio = e.call("llvm.pow.f64", "f64", 1, theta_base, e.const("f64", -2.0) / n_rot.to("f64"))
        powers = [e.const("f64", 1.0)]
        for _ in range(_PAIRS):
            powers.append(powers[-1] * ratio)
        self.first_powers = e.stack(8 * _PAIRS)
        for exponent, power in enumerate(powers[:-1]):
            e.store(power, self.first_powers + 8 * exponent)
        self.stride = powers[_PAIRS]
        self.is_neox = neox.compare("!=", 0)

    def rotate(self, row: Value, heads: _Heads, x: Value, dst: Value) -> None:
        """Rotates the pairs of all heads of `row`, float32, from x to dst, by the row's position.
        heads(act) runs act(byte offset) for each head."""
        e, half = self.e, self.half
        position = e.load("i32", self.positions + row * 4).to("f64") * self.freq_scale
        frequency = e.var(e.load("f64", self.first_powers, _PAIRS))

        def load(at: Value, n: int) -> Value:
            return e.load("f32", x + at, n)

        def store(value: Value, at: Value) -> None:
            e.store(value, dst + at)

        def step(i: Value, n: int, freq: Value) -> None:
            divisor = e.var(e.const("f64", 1.0, n))
            with e.when(self.factors.compare("!=", 0)):
                divisor.set(e.load("f32", self.factors + i * 4, n).to("f64"))
            sine, cosine = sine_cosine(e, freq * position / divisor.get())
            sine, cosine = sine.to("f32"), cosine.to("f32")

            def pair(a: Value, b: Value) -> tuple[Value, Value]:
                return e.fma(a, cosine, 0.0 - b * sine), e.fma(a, sine, b * cosine)

            def head(at: Value) -> None:
                with e.when_else(self.is_neox) as (apart, adjacent):
                    with apart:
                        low, high = at + i * 4, at + (i + half) * 4
                        c, d = pair(load(low, n), load(high, n))
                        store(c, low)
                        store(d, high)
                    with adjacent:
                        low = at + i * 8
                        both = load(low, 2 * n)
                        c, d = pair(
                            both.shuffle(range(0, 2 * n, 2)), both.shuffle(range(1, 2 * n, 2))
                        )
                        if n == 1:
                            store(c, low)
                            store(d, low + 4)
                        else:
                            order = [k // 2 + n * (k % 2) for k in range(2 * n)]
                            store(c.shuffle(order, d), low)

            heads(head)

        whole = half // _PAIRS * _PAIRS
        with e.loop(0, whole, _PAIRS) as i:
            step(i, _PAIRS, frequency.get())
            frequency.set(frequency.get() * self.stride)
        rest = e.stack(8 * _PAIRS)
        e.store(frequency.get(), rest)
        with e.loop(whole, half) as i:
            step(i, 1, e.load("f64", rest + (i - whole) * 8))


_Heads = Callable[[Callable[[Value], None]], None]
