"""Opens GGUF model files (versions 2 and 3, little endian) by memory map.

`open_gguf` gives metadata, the tensor list and read-only views of tensor bytes. `model_hash` names
a file for provenance. `walk` is the parser; `parts` finds the other files of a model in several
files. A file that cannot be believed raises ModelFileError, with one line.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

import numpy as np

from workbench.common.errors import ModelFileError
from workbench.model.gguf import parts
from workbench.model.gguf.walk import DAMAGED, REWRITE, HeaderWalk, StringArray, TensorInfo, shown

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "model_hash", "open_gguf"]

T = TypeVar("T")
D = TypeVar("D")


_REQUIRED: Any = object()


class File(NamedTuple):
    """A file of a model. data_offset: where its tensor data starts."""

    path: str
    nbytes: int
    data_offset: int


class GGUFFile:
    """An open model: one file, or all the parts of one that was split. A context manager.

    metadata: from keys to int, float, bool or str. Arrays are numpy arrays (numbers, bools),
        StringArray, or a list of arrays (nested).
    tensors: in file order.

    Views stay valid after `close`: the map is released with the last view of it. The file must not
    be shortened meanwhile: reading a mapped page that is gone kills the process, as with any memory
    map.
    """

    __slots__ = (
        "_maps", "alignment", "data_offset", "file_bytes", "files", "metadata", "path", "tensors",
        "version",
    )  # fmt: skip

    def __init__(self, path: str, walks: list[HeaderWalk], tensors: dict[str, TensorInfo]):
        """walks: of each file. tensors: of all of them, in order."""
        first = walks[0]
        self._maps: list[mmap.mmap] | None = [walk.map for walk in walks]
        self.path = path  # as it was opened: any of `files`
        self.files = [File(walk.path, walk.size, walk.data_offset) for walk in walks]
        self.file_bytes = sum(walk.size for walk in walks)
        self.version = first.version
        self.metadata: dict[str, Any] = first.metadata
        self.alignment = first.alignment
        self.tensors = tensors
        self.data_offset = first.data_offset  # where tensor data starts in the first file

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the maps. Safe to call twice."""
        self._maps = None

    def data(self, name: str) -> np.ndarray:
        """The bytes of tensor `name`: uint8 (nbytes,), read-only, not copied.

        Raises ModelFileError where the file has no such tensor, ValueError once closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(
                f"{shown(self.path)}: tensor {name!r} is missing; {REWRITE}, or use another model"
            )
        if self._maps is None:
            raise ValueError(f"{self.path} was closed")
        return np.frombuffer(self._maps[info.part], np.uint8, info.nbytes, info.offset)

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...
    def get(self, key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
        """The metadata value of `key`, which must be of `kind`; `default` where it is absent.

        kind: int, float (takes integers too), bool, str, np.ndarray, StringArray, or list (any
        array, as a list). Raises ModelFileError that names a missing or wrongly typed key.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelFileError(
                    f"{shown(self.path)}: metadata key {key!r} is missing; {REWRITE}, or use "
                    f"another model"
                )
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)
        if kind is list and isinstance(value, np.ndarray | StringArray):
            return value.tolist()
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFileError(
                f"{shown(self.path)}: metadata key {key!r} holds {type(value).__name__}, "
                f"{kind.__name__} is wanted; {REWRITE}"
            )
        return value


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Maps the model at `path`, and reads its metadata and tensor list. No tensor data is touched.

    path: the file; or any file of a model in several files, which lie beside one another.

    Raises ModelFileError for a path that is absent or no file, and for a file that cannot be
    believed.
    """
    path = os.fspath(path)
    opened = _walk(path)
    names = parts.names(path, opened.metadata)
    walks = [opened if name == path else _walk(name) for name in names]
    return GGUFFile(path, walks, parts.joined(path, walks))


def _walk(path: str) -> HeaderWalk:
    with _open(path) as file:
        try:
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: shortened to nothing meanwhile
            why = getattr(error, "strerror", None) or error
            raise ModelFileError(
                f"{shown(path)} cannot be mapped: {why}; copy it to a local disk, or raise "
                "`ulimit -n`"
            ) from None
        return HeaderWalk(path, source)


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file that holds something, for reading; ModelFileError for anything else."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{shown(path)} is a directory; name the .gguf file in it")
        if not stat.S_ISREG(mode):  # opening a pipe would wait for its writer
            raise ModelFileError(f"{shown(path)} is no regular file; name a .gguf file")
        file = open(path, "rb")  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError:
        raise ModelFileError(
            f"{shown(path)}: no such file; check the path; `-m auto` makes a model with random "
            "weights, and `workbench model synth` writes any other"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = getattr(error, "strerror", None) or error
        raise ModelFileError(
            f"{shown(path)} cannot be opened: {why}; check path and permissions"
        ) from None
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise ModelFileError(f"{shown(path)} is empty (0 bytes); {DAMAGED}")
    return file


def model_hash(model: str | os.PathLike[str] | GGUFFile) -> str:
    """The identity of a model for provenance: 64 hex digits, quick for files of any size.

    SHA-256 over the file's size, everything before the tensor data (metadata and tensor list), and
    samples of the data. The samples are the first 4 KiB of every tensor, and 256 evenly spaced
    blocks of 64 KiB. These include the data's first and last bytes. Data of up to 16 MiB is
    hashed whole. The identity of a model in several files is a hash over the files' hashes. It
    depends only on the files' bytes. A change outside of all samples is not noticed: the identity
    tells models apart, and is no proof against tampering. Raises ModelFileError as `open_gguf`
    does.
    """
    if not isinstance(model, GGUFFile):
        with open_gguf(model) as opened:
            return model_hash(opened)
    hashes = [
        _file_hash(file, [info for info in model.tensors.values() if info.part == i])
        for i, file in enumerate(model.files)
    ]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("\n".join(["workbench model in parts 1", *hashes]).encode()).hexdigest()


def _file_hash(of: File, tensors: list[TensorInfo]) -> str:
    n_blocks, block = 256, 64 << 10
    size, data = of.nbytes, min(of.data_offset, of.nbytes)
    digest = hashlib.sha256(b"workbench model hash 1\0" + struct.pack("<Q", size))
    # Read, not mapped: a fault far from the last one makes Linux read megabytes around it.
    with _open(of.path) as file:

        def update(offset: int, n: int) -> None:
            file.seek(offset)
            for start in range(0, n, 1 << 20):
                digest.update(file.read(min(1 << 20, n - start)))

        update(0, data)
        if size - data <= n_blocks * block:
            update(data, size - data)
        else:
            for info in tensors:
                update(info.offset, min(4096, info.nbytes))
            for i in range(n_blocks):
                update(data + (size - data - block) * i // (n_blocks - 1), block)
    return digest.hexdigest()
