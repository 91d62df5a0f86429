"""Where numba keeps the compiled loops of this folder and its subfolders, and finds them again.

By default numba keeps a compiled function beside the source, under the source's digest and the
function's line. So an edited comment would compile all loops again, and every checkout would
compile its own. Loops of these folders are kept in the user's cache instead (`compiled.cache_dir`).
Their name is a digest of what they do: module, bytecode, and the bytecode of all functions they
call, down to functions that write LLVM's text. numba itself adds the signature, the CPU and its own
version.

This holds for every function of these folders with `cache=True`, once this module is imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from numba.core import caching, types
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

from workbench.backend import compiled

FOLDER = __name__.rpartition(".")[0]


def digest_of(function: FunctionType) -> str:
    """A digest of what a function does: its bytecode, constants, defaults and the objects it names;
    of a named function, the same again. Lines, docstrings and names of files are left out."""
    found = hashlib.sha256()
    for said in _said(function, set()):
        found.update(said.encode() + b"\0")
    return found.hexdigest()[:32]


def _said(thing: Any, seen: set[int]) -> Iterator[str]:
    """The words that a thing adds to a digest."""
    if isinstance(thing, Dispatcher):
        thing = thing.py_func
    elif isinstance(thing, _Intrinsic):
        thing = thing._defn
    if isinstance(thing, FunctionType):
        if id(thing) in seen:
            yield thing.__qualname__
            return
        seen.add(id(thing))
        yield thing.__module__  # numba imports the module when it reads the kept file
        yield from _said_of_code(thing.__code__, thing.__doc__)
        yield repr(thing.__defaults__)
        for name in _names(thing.__code__):
            if name in thing.__globals__:
                yield name
                yield from _said(thing.__globals__[name], seen)
        for cell in thing.__closure__ or ():
            yield from _said(cell.cell_contents, seen)
    elif isinstance(thing, ModuleType | type | BuiltinFunctionType):
        yield f"{type(thing).__name__} {thing.__name__}"
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from _said(one, seen)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield repr(key)
            yield from _said(value, seen)
    elif isinstance(thing, bool | int | float | str | bytes | None | types.Type):
        yield repr(thing)
    else:  # an object: its text may hold an address
        yield f"{type(thing).__module__}.{type(thing).__qualname__}"


def _said_of_code(code: CodeType, doc: str | None) -> Iterator[str]:
    yield repr((code.co_code, code.co_varnames, code.co_names, code.co_freevars, code.co_argcount))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            first = constant.co_consts[:1]
            yield from _said_of_code(constant, first[0] if first else None)
        elif not (isinstance(constant, str) and constant == doc):
            yield repr(constant)


def _names(code: CodeType) -> list[str]:
    """The names that a function and its inner functions look up."""
    inside = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for names in inside for name in names)]))


class Locator(caching._CacheLocator):
    """Tells numba where a function below this folder is kept."""

    def __init__(self, function: FunctionType):
        self._digest = digest_of(function)

    def get_cache_path(self) -> str:
        return str(compiled.cache_dir())

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return self._digest

    @classmethod
    def from_function(cls, function: FunctionType, path: str) -> Locator | None:
        """None for functions of other places: numba looks on."""
        return cls(function) if function.__module__.startswith(f"{FOLDER}.") else None


if Locator not in caching.CacheImpl._locator_classes:
    locators: list[Any] = caching.CacheImpl._locator_classes
    locators.insert(0, Locator)
