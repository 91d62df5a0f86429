"""A tool for NVTX, made without a compiler: the library it loads, and the counting behind it.

NVTX finds a tool through the environment variable NVTX_INJECTION64_PATH: it opens that shared
library and calls its `InitializeInjectionNvtx2` (nvtx3, nvtxDetail/nvtxInit.h). `write_library`
writes such a library, under 1 KiB: the exported function is a single jump through the exported
word `nvtx_tool_entry`. `Counter` opens the library first, puts the address of its own function
into that word, and, when NVTX calls, takes over the entries of NVTX's function tables that it
wants (nvtxDetail/nvtxTypes.h gives their numbers and signatures).

So NVTX goes the whole way it goes for a real tool: environment variable, dlopen, entry point,
callback tables. Only the counting is done in Python.
"""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import sys
from collections.abc import Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, NamedTuple

ENTRY = "InitializeInjectionNvtx2"
SLOT = "nvtx_tool_entry"

# machine -> (ELF e_machine, the jump's code as a function of the slot's distance from the code)
MACHINES: dict[str, tuple[int, Any]] = {
    # jmp *[rip + d], where rip is the address after these 6 bytes
    "x86_64": (62, lambda d: b"\xff\x25" + struct.pack("<i", d - 6)),
    # ldr x16, [pc + d]; br x16
    "aarch64": (183, lambda d: struct.pack("<II", 0x58000010 | (d // 4) << 5, 0xD61F0200)),
}


def supported() -> bool:
    return sys.platform == "linux" and platform.machine() in MACHINES


def write_library(path: Path, machine: str = "") -> None:
    """Writes a minimal ELF64 shared object exporting ENTRY (code) and SLOT (one zeroed word).

    Two loaded segments, one read-execute and one read-write, because a segment that is both is
    refused by hardened kernels. Their addresses are 64 KiB apart, the largest page size in use, at
    the same offset within a page as in the file.
    """
    e_machine, jump = MACHINES[machine or platform.machine()]
    strings = b"\0" + ENTRY.encode() + b"\0" + SLOT.encode() + b"\0"
    n_headers, n_symbols, page = 4, 3, 0x10000
    symtab = 64 + 56 * n_headers
    strtab = symtab + 24 * n_symbols
    hashtab = _align(strtab + len(strings))
    text = _align(hashtab + 4 * (2 + 1 + n_symbols), 16)
    data = _align(text + 8, 16)  # file offset; loaded at data + page
    slot, dynamic = data + page, data + page + 16

    code = jump(slot - text).ljust(8, b"\0")
    symbols = bytes(24)
    for name, kind, section, address, size in (
        (1, 0x12, 1, text, len(code)),  # global function
        (2 + len(ENTRY), 0x11, 2, slot, 8),  # global object
    ):
        symbols += struct.pack("<IBBHQQ", name, kind, 0, section, address, size)
    # one bucket, and both symbols in its chain: 1 -> 2 -> end
    hashes = struct.pack("<6I", 1, n_symbols, 1, 0, 2, 0)
    tags = ((4, hashtab), (5, strtab), (6, symtab), (10, len(strings)), (11, 24), (0, 0))
    entries = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    end = data + 16 + len(entries)

    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, e_machine, 1, 0, 64, 0, 0, 64, 56, n_headers, 0, 0, 0
    )
    segments = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size, align)
        for kind, flags, offset, address, size, align in (
            (1, 5, 0, 0, text + len(code), page),  # PT_LOAD, read and execute
            (1, 6, data, data + page, end - data, page),  # PT_LOAD, read and write
            (2, 6, data + 16, dynamic, len(entries), 8),  # PT_DYNAMIC
            (0x6474E551, 6, 0, 0, 0, 16),  # PT_GNU_STACK: no executable stack
        )
    )
    out = bytearray(end)
    for offset, part in (
        (0, header + segments),
        (symtab, symbols),
        (strtab, strings),
        (hashtab, hashes),
        (text, code),
        (data + 16, entries),
    ):
        out[offset : offset + len(part)] = part
    path.write_bytes(out)


def _align(n: int, to: int = 8) -> int:
    return -(-n // to) * to


class EventAttributes(ctypes.Structure):
    """nvtxEventAttributes_t (nvtx3/nvToolsExt.h), 48 bytes; message types 1: ASCII, 3: handle."""

    _fields_ = (
        ("version", ctypes.c_uint16),
        ("size", ctypes.c_uint16),
        ("category", c_uint32),
        ("color_type", ctypes.c_int32),
        ("color", c_uint32),
        ("payload_type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("payload", ctypes.c_uint64),
        ("message_type", ctypes.c_int32),
        ("message", c_void_p),
    )


class _Callbacks(ctypes.Structure):
    """NvtxExportTableCallbacks: how a tool asks for a module's function table."""

    _fields_ = (
        ("struct_size", c_size_t),
        (
            "get_module",
            CFUNCTYPE(c_int, c_int, POINTER(POINTER(POINTER(c_void_p))), POINTER(c_uint32)),
        ),
    )


CALLBACKS_TABLE = 1  # NVTX_ETID_CALLBACKS
CORE2 = 5  # NVTX_CB_MODULE_CORE2: the functions that take a domain
# NvtxCallbackIdCore2
START, END, PUSH, POP, NAME_CATEGORY, REGISTER_STRING, CREATE_DOMAIN = 2, 3, 4, 5, 8, 10, 12
INT64, EXTENDED = 2, 0xDFBD0009  # payload types; nvtxPayloadData_t: schema, bytes, address
REGISTERED = 3  # message type


class Event(NamedTuple):
    """A range that begins (`push`, `start`) or ends (`pop`, `end`), of a process's one thread.

    payload: the number, or the numbers of an extended payload. registered: the name is a registered
    string. number: of the range, for `start` and `end`.
    """

    kind: str
    domain: str
    name: str = ""
    category: str = ""
    payload: int | tuple[int, ...] | None = None
    registered: bool = False
    number: int = 0


class Counter:
    """The tool behind the library at `path`. Make it before the first NVTX call of the process.

    events: what NVTX was told, in order. log: a file that has each as a line of JSON at once, for
    processes that end as they like.
    """

    def __init__(self, path: Path, log: Path | None = None):
        self.loaded = False
        self.events: list[Event] = []
        self._log = None if log is None else log.open("w", buffering=1)
        self._names: list[bytes] = [b""]  # what handles stand for: domains and strings, by number
        self._categories: dict[tuple[int, int], str] = {}  # by domain and number
        self._n_started = 0
        pointer, attributes = c_void_p, POINTER(EventAttributes)
        self._keep = {
            START: CFUNCTYPE(c_uint64, pointer, attributes)(self._start),
            END: CFUNCTYPE(None, pointer, c_uint64)(self._end),
            PUSH: CFUNCTYPE(c_int, pointer, attributes)(self._push),
            POP: CFUNCTYPE(c_int, pointer)(self._pop),
            NAME_CATEGORY: CFUNCTYPE(None, pointer, c_uint32, c_char_p)(self._name_category),
            REGISTER_STRING: CFUNCTYPE(pointer, pointer, c_char_p)(lambda _, s: self._handle(s)),
            CREATE_DOMAIN: CFUNCTYPE(pointer, c_char_p)(self._handle),
        }
        self._entry = CFUNCTYPE(c_int, CFUNCTYPE(pointer, c_uint32))(self._initialize)
        self._library = ctypes.CDLL(str(path))
        slot = c_void_p.in_dll(self._library, SLOT)
        slot.value = ctypes.cast(self._entry, c_void_p).value

    @property
    def begun(self) -> list[Event]:
        """The ranges, in the order in which they began."""
        return [event for event in self.events if event.kind in ("push", "start")]

    def _initialize(self, get_export_table: Any) -> int:
        """What NVTX calls as InitializeInjectionNvtx2; 1 means that the tool is in place."""
        tables = ctypes.cast(get_export_table(CALLBACKS_TABLE), POINTER(_Callbacks)).contents
        table, size = POINTER(POINTER(c_void_p))(), c_uint32()
        if not tables.get_module(CORE2, ctypes.byref(table), ctypes.byref(size)):
            return 0
        for number, callback in self._keep.items():
            table[number][0] = ctypes.cast(callback, c_void_p).value
        self.loaded = True
        return 1

    def _handle(self, name: bytes) -> int:
        self._names.append(name)
        return len(self._names) - 1

    def _name_category(self, domain: int, number: int, name: bytes) -> None:
        self._categories[domain, number] = name.decode()

    def _add(self, event: Event) -> None:
        self.events.append(event)
        if self._log is not None:
            self._log.write(json.dumps(event) + "\n")

    def _begun(self, kind: str, domain: int, a: Any, number: int = 0) -> None:
        registered = a.message_type == REGISTERED
        name = self._names[a.message] if registered else ctypes.string_at(a.message)
        category = self._categories.get((domain, a.category), "")
        self._add(
            Event(
                kind, self._names[domain].decode(), name.decode(), category, _payload(a),
                registered, number,
            )
        )  # fmt: skip

    def _push(self, domain: int, attributes: Any) -> int:
        self._begun("push", domain, attributes.contents)
        return 0

    def _pop(self, domain: int) -> int:
        self._add(Event("pop", self._names[domain].decode()))
        return 0

    def _start(self, domain: int, attributes: Any) -> int:
        self._n_started += 1
        self._begun("start", domain, attributes.contents, self._n_started)
        return self._n_started

    def _end(self, domain: int, number: int) -> None:
        self._add(Event("end", self._names[domain].decode(), number=number))


def _payload(a: Any) -> int | tuple[int, ...] | None:
    kind = a.payload_type & 0xFFFFFFFF
    if kind == INT64:
        return c_int64(a.payload).value
    if kind != EXTENDED:
        return None
    _, n_bytes, address = (c_uint64 * 3).from_address(a.payload)
    return tuple((c_int64 * (n_bytes // 8)).from_address(address))


def balanced(events: Sequence[Event]) -> bool:
    """Whether every range has ended, once, and no thread's range ended before it began."""
    depth, lowest, open_ones = 0, 0, set[int]()
    for event in events:
        depth += {"push": 1, "pop": -1}.get(event.kind, 0)
        lowest = min(lowest, depth)
        if event.kind == "start":
            open_ones.add(event.number)
        elif event.kind == "end":
            open_ones.remove(event.number)
    return (depth, lowest, len(open_ones)) == (0, 0, 0)


# every Python that begins with the variables of `environment` has a tool, whoever starts it
_SITE = """
import os, sys
from pathlib import Path
sys.path.append(os.environ["NVTX_TOOL_HELPER"])
import nvtx_injection
tool = nvtx_injection.Counter(
    Path(os.environ["NVTX_INJECTION64_PATH"]),
    Path(os.environ["NVTX_TOOL_LOGS"], f"{os.getpid()}.jsonl"),
)
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables with which Python processes, and those that they start, have a tool from their
    begin. What it is told goes to files in `folder` (`logged`)."""
    site, library = folder / "site", folder / "libnvtxtool.so"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_SITE)
    write_library(library)
    return {
        "PYTHONPATH": str(site),
        "NVTX_INJECTION64_PATH": str(library),
        "NVTX_TOOL_HELPER": str(Path(__file__).parent),
        "NVTX_TOOL_LOGS": str(folder),
    }


def logged(folder: Path) -> list[list[Event]]:
    """What the tool of each process was told, of processes that said anything."""
    found = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
    return [[as_event(json.loads(line)) for line in lines] for lines in found if lines]


def as_event(row: Sequence[Any]) -> Event:
    """An event that JSON gives back."""
    event = Event(*row)
    numbers = event.payload
    return event._replace(payload=tuple(numbers)) if isinstance(numbers, list) else event
