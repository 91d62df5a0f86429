"""The GGUF parser: one checked pass over a file's header, metadata and tensor list.

Layout, from the GGUF specification (ggml `docs/gguf.md`); strings are a u64 length and UTF-8 bytes:

    magic "GGUF" | u32 version | u64 n_tensors | u64 n_keys
    n_keys    x ( string key | u32 type | value )         array: u32 item type | u64 n | n items
    n_tensors x ( string name | u32 n_dims | n_dims x u64 | u32 type | u64 offset )
    padding to `general.alignment` | tensor data, every tensor at a multiple of the alignment

A model file is untrusted input. Every length, offset, type and count is checked against the rest of
the file before it is believed. An error raises ModelFileError with one line: what is wrong, at
which byte, and what to do. Allocations are bounded. The numbers of an array take their own size. A
string array takes 8 bytes a string (it is decoded on demand), a single string up to 4 bytes a byte
(Python's widest form). Keys, tensors and nested arrays take under 1 KiB each, and there are at most
MAX_ENTRIES of each.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from workbench.common.errors import ModelFileError
from workbench.common.sizes import round_up
from workbench.graph.ir import BF16, F16, F32, MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, DType

DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_DEPTH = 4  # arrays within arrays
MAX_ENTRIES = 1 << 16  # of keys, tensors, nested arrays each; large real models: a few thousand
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64

_U8, _U32, _U64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "?", 10: "<Q", 11: "<q",
    12: "<d",
}  # metadata type -> what NumPy and struct call it  # fmt: skip

TENSOR_TYPES = {
    0: F32, 1: F16, 2: Q4_0, 8: Q8_0, 12: Q4_K, 13: Q5_K, 14: Q6_K, 30: BF16, 39: MXFP4,
}  # ggml type number -> DType, of types with kernels  # fmt: skip
EXPANDED_TYPES = {
    number: DType(name, block, block_bytes)
    for number, name, block, block_bytes in (
        (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (40, "NVFP4", 64, 36),
    )
}  # the same, of types that are expanded when a model is loaded (`expand.py`)  # fmt: skip
_KNOWN_TYPES = TENSOR_TYPES | EXPANDED_TYPES
_REFUSED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 41: "Q1_0",
}  # known to ggml, now or once, and not to us  # fmt: skip

AT_ONCE_BYTES = 1 << 16  # of strings that are checked together

DAMAGED = "the file is damaged or was cut short: download or write it again"
REWRITE = "write the file again with a current converter"


class TensorInfo(NamedTuple):
    """A tensor of a file: its shape in numpy order (ggml's `ne` reversed), and its offset from the
    file's start. part: the number of its file among a model's files, from 0.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class StringArray(Sequence[str]):
    """The strings of one metadata array, decoded when asked for (checked UTF-8 already).

    Keeps the file's map alive, so it outlives `GGUFFile.close`. A slice is a list.
    """

    __slots__ = ("_map", "_starts")

    def __init__(self, source: mmap.mmap, starts: array[int]):
        self._map = source
        self._starts = starts  # n + 1 offsets; a string follows the 8 bytes of its length

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"string {index} of {n}")
        index %= n
        return self._map[self._starts[index] + 8 : self._starts[index + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        source = self._map
        for start, end in zip(self._starts, islice(self._starts, 1, None), strict=False):
            yield source[start + 8 : end].decode()

    def tolist(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


class HeaderWalk:
    """One pass over header, metadata and tensor list, every read checked against the file's end."""

    def __init__(self, path: str, source: mmap.mmap):
        self.path = path
        self.map = source
        self.size = len(source)
        self.pos = 0
        self.n_nested = 0
        self.alignment = DEFAULT_ALIGNMENT
        self.version = self._header()
        n_tensors = self._count("the tensor count", 33)
        n_keys = self._count("the metadata count", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            self._key_value()
        found = [self._tensor() for _ in range(n_tensors)]
        self.data_offset = round_up(self.pos, self.alignment)
        self.tensors = self._located(found)

    def fail(self, what: str, at: int, do: str = DAMAGED) -> NoReturn:
        raise ModelFileError(f"{shown(self.path)}: {what} at byte {at}; {do}")

    def _take(self, form: struct.Struct, what: str) -> Any:
        at = self.pos
        if self.size - at < form.size:
            self.fail(f"the file ends (size {self.size}) inside {what}", at)
        self.pos = at + form.size
        return form.unpack_from(self.map, at)[0]

    def _count(self, what: str, least: int) -> int:
        """A u64 count of things that take at least `least` bytes each in the rest of the file."""
        at = self.pos
        n = self._take(_U64, what)
        if n > MAX_ENTRIES or n * least > self.size - self.pos:
            self.fail(f"{what} is {signed(n)}, more than the file can hold", at)
        return n

    def _string(self, what: str, limit: int | None = None) -> str:
        at = self.pos
        n = self._take(_U64, f"the length of {what}")
        left = self.size - self.pos
        if n > left:
            self.fail(f"{what} has length {signed(n)}, but {left} bytes are left", at)
        if limit is not None and n > limit:
            self.fail(f"{what} has length {n}, but {limit} is the limit", at)
        start, self.pos = self.pos, self.pos + n
        try:
            return self.map[start : self.pos].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8", start + error.start)

    def _header(self) -> int:
        magic = self.map[:4]
        if magic != b"GGUF":
            do = "convert the model with llama.cpp's convert_hf_to_gguf.py"
            self.fail(f"not a GGUF file: {magic!r} instead of b'GGUF'", 0, do)
        self.pos = 4
        version = self._take(_U32, "the version")
        if version in (0x02000000, 0x03000000):
            do = "convert the file with `gguf-convert-endian FILE little`"
            self.fail("big-endian GGUF, only little-endian is read: version", 4, do)
        if version not in (2, 3):
            self.fail(f"GGUF version {version}, only 2 and 3 are read", 4, REWRITE)
        return version

    def _key_value(self) -> None:
        at = self.pos
        key = self._string("a metadata key", MAX_KEY_BYTES)
        if key in self.metadata:
            self.fail(f"metadata key {shown(key)} appears twice, again", at, REWRITE)
        value = self.metadata[key] = self._value(f"metadata key {shown(key)}")
        if key == "general.alignment":
            # The specification wants a multiple of 8; offsets are rounded up by it, so a power too.
            if type(value) is not int or value < 8 or value & (value - 1):
                wanted = "must be a power of two from 8 up: metadata key"
                self.fail(f"general.alignment is {shown(value)}, {wanted}", at, REWRITE)
            self.alignment = value

    def _value(self, what: str) -> Any:
        at = self.pos
        kind = self._take(_U32, f"the type of {what}")
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, 1)
        if kind not in _SCALARS:
            self.fail(f"{what} has unknown type {kind}", at)
        value = self._take(_U8 if kind == _BOOL else struct.Struct(_SCALARS[kind]), what)
        if kind == _BOOL:
            if value > 1:
                self.fail(f"{what} is a bool with value {value}", self.pos - 1)
            return value == 1
        return value

    def _array(self, what: str, depth: int) -> Any:
        at = self.pos
        kind = self._take(_U32, f"the item type of {what}")
        n = self._take(_U64, f"the length of {what}")
        if kind != _STRING and kind != _ARRAY and kind not in _SCALARS:
            self.fail(f"{what} is an array of unknown type {kind}", at)
        # Least bytes of an item: a string is a length, an array a type and a length.
        least = {_STRING: 8, _ARRAY: 12}.get(kind) or np.dtype(_SCALARS[kind]).itemsize
        left = self.size - self.pos
        if n > left // least:
            self.fail(f"{what} has {signed(n)} items, but {left} bytes are left", at + 4)
        if kind == _STRING:
            return self._string_array(what, n)
        if kind == _ARRAY:
            self.n_nested += n
            if depth == MAX_DEPTH or self.n_nested > MAX_ENTRIES:
                self.fail(f"{what} nests arrays too deep or too often", at, REWRITE)
            return [self._array(what, depth + 1) for _ in range(n)]
        items = np.frombuffer(self.map, _SCALARS[kind], n, self.pos).copy()
        if kind == _BOOL and n and (raw := items.view(np.uint8)).max() > 1:
            bad = self.pos + int(np.argmax(raw > 1))
            self.fail(f"{what} has a bool that is neither 0 nor 1", bad)
        self.pos += items.nbytes
        return items

    def _string_array(self, what: str, n: int) -> StringArray:
        starts = self._starts_at_once(n) or self._starts(what, n)
        self.pos = starts[n]
        return StringArray(self.map, starts)

    def _starts_at_once(self, n: int) -> array[int] | None:
        """What `_starts` returns, and sooner, where all n strings are well: llama 3's vocabulary
        has 128,256 tokens and 280,147 merges. None where one is not."""
        starts, pos = array("q", (0,)) * (n + 1), self.pos
        source, length_at = self.map, _U64.unpack_from
        try:
            for i in range(n):
                starts[i] = pos
                (length,) = length_at(source, pos)
                pos += length + 8
            starts[n] = pos
        except (struct.error, OverflowError):
            return None
        return starts if pos <= self.size and self._are_utf8(starts) else None

    def _are_utf8(self, starts: array[int]) -> bool:
        """Whether every string is UTF-8. That holds where some of them, joined, are, and none
        begins in the middle of a character."""
        at, first = np.frombuffer(starts, np.int64), 0
        while first < len(at) - 1:
            end = int(np.searchsorted(at, at[first] + AT_ONCE_BYTES, "right")) - 1
            end = max(end, first + 1)  # a string that is longer is looked at by itself
            inside = at[first : end + 1] - at[first]
            raw = np.frombuffer(self.map, np.uint8, int(inside[-1]), starts[first])
            text = np.ones(len(raw), bool)
            for i in range(8):
                text[inside[:-1] + i] = False
            begins = inside[:-1][np.diff(inside) > 8] + 8
            if (raw[begins] & 0xC0 == 0x80).any():
                return False
            try:
                str(raw[text].data, "utf-8")
            except UnicodeDecodeError:
                return False
            first = end
        return True

    def _starts(self, what: str, n: int) -> array[int]:
        """Where each of n strings begins, and where the last ends; fails at the first string that
        is not well."""
        starts = array("q", (0,)) * (n + 1)
        source, size, pos, length_at = self.map, self.size, self.pos, _U64.unpack_from
        try:
            for i in range(n):
                starts[i] = pos
                end = pos + 8 + length_at(source, pos)[0]
                if end > size:
                    length = signed(end - pos - 8)
                    self.fail(f"string {i} of {what} has length {length}, past the end", pos)
                source[pos + 8 : end].decode()
                pos = end
        except struct.error:
            self.fail(f"the file ends (size {size}) inside string {i} of {what}", pos)
        except UnicodeDecodeError as error:
            self.fail(f"string {i} of {what} is not UTF-8", pos + 8 + error.start)
        starts[n] = pos
        return starts

    def _tensor(self) -> tuple[int, TensorInfo]:
        """One entry of the tensor list, and where it stands; its offset still relative."""
        at = self.pos
        name = self._string("a tensor name", MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        n_dims = self._take(_U32, f"the number of dimensions of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            self.fail(f"{what} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed", self.pos - 4)
        dims_at = self.pos
        dims = [self._take(_U64, f"the dimensions of {what}") for _ in range(n_dims)]
        kind = self._take(_U32, f"the type of {what}")
        if kind not in _KNOWN_TYPES:
            readable = f"types read are {', '.join(d.name for d in _KNOWN_TYPES.values())}"
            if kind in _REFUSED_TYPES:
                why, do = f"type {_REFUSED_TYPES[kind]}, not supported", "quantise the model anew"
            else:
                why, do = f"unknown type {kind}", DAMAGED
            self.fail(f"{what} has {why},", self.pos - 4, f"{do}; {readable}")
        dtype = _KNOWN_TYPES[kind]
        n = math.prod(dims)
        if n == 0 or n // dtype.block * dtype.block_bytes > self.size:
            why = "none may be 0" if n == 0 else "more than the file can hold"
            self.fail(f"{what} has dimensions {'x'.join(map(signed, dims))}, {why},", dims_at)
        if dims[0] % dtype.block:
            why = f"not a multiple of {dtype.name}'s block of {dtype.block}"
            self.fail(f"{what} has rows of {dims[0]}, {why},", dims_at, REWRITE)
        offset_at = self.pos
        offset = self._take(_U64, f"the offset of {what}")
        if offset % self.alignment:
            why = f"not a multiple of the alignment {self.alignment}"
            self.fail(f"{what} has offset {signed(offset)}, {why},", offset_at)
        nbytes = n // dtype.block * dtype.block_bytes
        return at, TensorInfo(name, dtype, tuple(reversed(dims)), offset, nbytes)

    def _located(self, found: list[tuple[int, TensorInfo]]) -> dict[str, TensorInfo]:
        """Tensors by name with absolute offsets; refuses twins, overlaps, and ends past the end."""
        tensors: dict[str, TensorInfo] = {}
        for at, info in found:
            if info.name in tensors:
                self.fail(f"tensor {shown(info.name)} appears twice, again", at, REWRITE)
            start = self.data_offset + info.offset
            end = start + info.nbytes
            if end > self.size:
                why = f"ends at byte {end}, past the end of the file (size {self.size}): its entry"
                self.fail(f"tensor {shown(info.name)} {why}", at)
            tensors[info.name] = info._replace(offset=start)
        end, last = 0, ""
        for info in sorted(tensors.values(), key=lambda t: t.offset):
            if info.offset < end:
                self.fail(f"tensors {shown(last)} and {shown(info.name)} overlap", info.offset)
            end, last = info.offset + info.nbytes, info.name
        return tensors


def signed(n: int) -> str:
    """A u64 as text; one past 2^63 as the negative number somebody stored."""
    return str(n) if n < 1 << 63 else f"{n - (1 << 64)} (negative)"


def shown(value: object) -> str:
    """Text from a file or a path, safe in a one-line message."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 160 else text[:157] + "..."
