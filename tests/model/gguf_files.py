"""Model files for the tests of the reader: by the gguf package, or byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

from workbench.graph.ir import F32, DType
from workbench.model.gguf.quants import random_blocks

Value = gguf.GGUFValueType
SCALARS = {bool: Value.BOOL, float: Value.FLOAT32, str: Value.STRING}


def write(path: Path, tensors=(), keys=None, arch="llama", a_part=0) -> Path:
    """A model file by gguf's writer, in parts of `a_part` tensors (0: in one). Tensors are (name,
    dtype, shape), of random blocks, or (name, bytes or values, name of the type); keys are a
    mapping, lists as arrays, or a function of the writer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=a_part)
    if callable(keys):
        keys(writer)
    for key, value in () if callable(keys) else (keys or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            number = Value.INT32 if isinstance(value, int) and value < 0 else Value.UINT32
            writer.add_key_value(key, value, SCALARS.get(type(value), number))
    for name, data, how in tensors:
        if isinstance(data, DType):
            dtype, shape, how = data, how, data.name
            data = random_blocks(rng, dtype, int(np.prod(shape[:-1])), shape[-1], 0.1)
            data = data.reshape(*shape[:-1], -1)
            data = data.view(np.float32) if dtype == F32 else data
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[how])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- files, made byte by byte -----------------------------------------------------------------


def text(s: str | bytes) -> bytes:
    s = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(s)) + s


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, 4, struct.pack("<I", value))


def items(kind: int, n: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, n) + data


def tensor(name="w", dims=(8,), kind=0, offset=0) -> bytes:
    head = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + head + struct.pack("<IQ", kind, offset)


def build(
    keys=(), tensors=(), data=b"", magic=b"GGUF", version=3, n_tensors=None, n_keys=None, align=32
) -> bytes:
    """A file from its parts; counts follow from the parts unless given."""
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_keys = len(keys) if n_keys is None else n_keys
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


GOOD = build(
    [u32("a", 1), pair("s", 8, text("x")), pair("l", 9, items(8, 2, text("p") + text("é")))],
    [tensor("w", (8, 2), 0, 0), tensor("v", (32,), 2, 64)],
    bytes(64 + 18),
)
