"""A model in several files, as llama-gguf-split and converters write it.

The files are called `NAME-00001-of-00003.gguf` and so on, in one folder. Each says in its metadata
which part it is (`split.no`, from 0), of how many (`split.count`), and how many tensors all parts
have together (`split.tensors.count`). The first part has all other metadata. From any part the
others are found by name, and all must agree.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from workbench.common.errors import ModelFileError
from workbench.model.gguf.walk import HeaderWalk, TensorInfo, shown

MOST_PARTS = 65535  # the keys have 16 bits
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_AGAIN = "download all parts again, or split the model again"


def names(path: str, metadata: dict[str, Any]) -> list[str]:
    """The files of the model that `path` belongs to, in order; `path` alone where it is whole.

    Raises ModelFileError for keys that make no sense, for a name that does not fit them, and for a
    part that is not there.
    """
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        _fail(path, f"metadata key split.count is {shown(count)}, not a number of parts", _AGAIN)
    if count <= 1:
        return [path]
    number = _number(path, metadata, "split.no")
    folder, own = os.path.split(path)
    found = _NAME.fullmatch(own)
    ends = f"-{number + 1:05d}-of-{count:05d}.gguf"
    if found is None or not own.endswith(ends):
        do = f"give all parts their names back: this one's ends in {ends}"
        _fail(path, f"part {number + 1} of {count} of a model is not called so", do)
    every = [
        os.path.join(folder, f"{found[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)
    ]
    missing = [i for i, name in enumerate(every) if not os.path.lexists(name)]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        said = f"part {missing[0] + 1} of {count}{more} is missing"
        name = shown(os.path.basename(every[missing[0]]))
        _fail(path, said, f"put {name} into the same folder")
    return every


def joined(path: str, walks: Sequence[HeaderWalk]) -> dict[str, TensorInfo]:
    """The tensors of all parts, in order, each with the number of its part.

    Raises ModelFileError where a part is another one than its name says, and for a tensor that is
    in two parts. It also does where parts disagree about how many parts or tensors there are.
    """
    if len(walks) == 1 and walks[0].metadata.get("split.count", 1) in (0, 1):
        return walks[0].tensors
    tensors: dict[str, TensorInfo] = {}
    wanted = {"split.count": len(walks)}
    wanted["split.tensors.count"] = _number(path, walks[0].metadata, "split.tensors.count")
    for i, walk in enumerate(walks):
        for key, value in {"split.no": i, **wanted}.items():
            other = _number(walk.path, walk.metadata, key)
            if other != value:
                said = f"{key} is {other}, {value} is expected of part {i + 1} of {len(walks)}"
                _fail(walk.path, said, _AGAIN)
        for name, info in walk.tensors.items():
            if name in tensors:
                said = f"tensor {shown(name)} is in part {tensors[name].part + 1}, too"
                _fail(walk.path, said, _AGAIN)
            tensors[name] = info._replace(part=i)
    if len(tensors) != wanted["split.tensors.count"]:
        said = f"the {len(walks)} parts hold {len(tensors)} tensors"
        _fail(path, f"{said} and say {wanted['split.tensors.count']}", _AGAIN)
    return tensors


def _number(path: str, metadata: dict[str, Any], key: str) -> int:
    value = metadata.get(key)
    if type(value) is not int or value < 0:
        said = "is missing" if value is None else f"is {shown(value)}, not a number"
        _fail(path, f"metadata key {key} {said}, and this is a part of a model", _AGAIN)
    return value


def _fail(path: str, what: str, do: str) -> NoReturn:
    raise ModelFileError(f"{shown(path)}: {what}; {do}")
