"""Model files made from others by the gguf package: other metadata, tensors or types, or in several
parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.stored_blocks import stored_blocks

Stored = tuple[np.ndarray, str]  # bytes (rows, row_bytes) as uint8, or values; name of the type

_SCALARS = {
    bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING,
}  # fmt: skip


def edited(
    source: Path, out: Path, *, architecture: str | None = None,
    keys: Mapping[str, Any] | None = None, tensors: Mapping[str, Stored | None] | None = None,
    tensors_a_part: int = 0,
) -> Path:  # fmt: skip
    """Writes `source` to `out` with changes; returns the file to open.

    architecture: another one, whose keys are the source's under its name. keys: metadata to add or
    replace, lists as arrays; None drops one. tensors: to add or replace; None drops one.
    tensors_a_part: the model in parts of so many tensors, `out` with `-00001-of-...` behind its
    name.
    """
    reader = gguf.GGUFReader(source)
    own = reader.fields["general.architecture"].contents()
    wanted = architecture or own
    writer = gguf.GGUFWriter(out, wanted, split_max_tensors=tensors_a_part)
    values = dict(keys or {})
    for field in reader.fields.values():
        name = field.name
        if name.startswith(f"{own}."):
            name = wanted + name.removeprefix(own)
        if name.startswith("GGUF.") or name == "general.architecture" or name in values:
            continue
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_key_value(name, value, _SCALARS[type(value)])
    stored: dict[str, Stored | None] = {
        t.name: (np.asarray(t.data), t.tensor_type.name) for t in reader.tensors
    }
    for name, found in (stored | dict(tensors or {})).items():
        if found is not None:
            writer.add_tensor(name, found[0], raw_dtype=Kind[found[1]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out if not tensors_a_part else sorted(out.parent.glob(f"{out.stem}-*-of-*.gguf"))[0]


def retyped(
    source: Path, out: Path, choose: Callable[[str], str | None], seed: int = 0, **changes: Any
) -> Path:
    """`source` with random blocks of other types: `choose` names a matrix's type, None keeps it."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Stored | None] = {}
    for tensor in gguf.GGUFReader(source).tensors:
        cols, rows = (*map(int, tensor.shape), 1)[:2]
        kind = choose(tensor.name) if len(tensor.shape) == 2 else None
        if kind is not None:
            tensors[tensor.name] = (stored_blocks(rng, kind, rows, cols, cols**-0.5), kind)
    return edited(source, out, tensors=tensors, **changes)
