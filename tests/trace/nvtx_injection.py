"""A tool for NVTX, made without a compiler: the library it loads, and the counting in it.

NVTX opens the library in NVTX_INJECTION64_PATH and calls its `InitializeInjectionNvtx2` (nvtx3,
nvtxDetail/nvtxInit.h): in the one that `write_library` writes, a jump through the exported word
`nvtx_tool_entry`, where `Counter` has put the address of its own function before. That takes over
the entries of NVTX's function tables (nvtxDetail/nvtxTypes.h) that it wants.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from struct import pack, unpack
from typing import Any, NamedTuple

ENTRY, SLOT, PAGE = "InitializeInjectionNvtx2", "nvtx_tool_entry", 0x10000
# machine -> (ELF e_machine, the jump's code as a function of the slot's distance from the code)
MACHINES: dict[str, tuple[int, Any]] = {
    # jmp *[rip + d], where rip is the address after these 6 bytes
    "x86_64": (62, lambda d: b"\xff\x25" + pack("<i", d - 6)),
    # ldr x16, [pc + d]; br x16
    "aarch64": (183, lambda d: pack("<II", 0x58000010 | (d // 4) << 5, 0xD61F0200)),
}


def supported() -> bool:
    return sys.platform == "linux" and platform.machine() in MACHINES


def write_library(path: Path) -> None:
    """A minimal ELF64 shared object with ENTRY (code) and SLOT (one zeroed word).

    Two loaded segments, one executable and one writable: hardened kernels refuse one that is both.
    Their addresses are 64 KiB apart, the largest page in use, at the same offset as in the file."""
    machine, jump = MACHINES[platform.machine()]
    strings = f"\0{ENTRY}\0{SLOT}\0".encode()
    symtab, strtab = 64 + 4 * 56, 64 + 4 * 56 + 3 * 24
    hashtab = strtab + len(strings) + -len(strings) % 8
    text = (hashtab + 24 + 15) // 16 * 16
    data = text + 16  # file offset; loaded at data + PAGE
    code = jump(data + PAGE - text).ljust(8, b"\0")
    symbols = bytes(24) + pack("<IBBHQQ", 1, 0x12, 0, 1, text, 8)  # a function, and an object
    symbols += pack("<IBBHQQ", 2 + len(ENTRY), 0x11, 0, 2, data + PAGE, 8)
    tags = ((4, hashtab), (5, strtab), (6, symtab), (10, len(strings)), (11, 24), (0, 0))
    entries = b"".join(pack("<qQ", *tag) for tag in tags)
    header = b"\x7fELF\2\1\1" + bytes(9)
    header += pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    for kind, flags, at, address, n, align in (
        (1, 5, 0, 0, text + 8, PAGE),  # PT_LOAD, read and execute
        (1, 6, data, data + PAGE, 16 + len(entries), PAGE),  # PT_LOAD, read and write
        (2, 6, data + 16, data + PAGE + 16, len(entries), 8),  # PT_DYNAMIC
        (0x6474E551, 6, 0, 0, 0, 16),  # PT_GNU_STACK: no executable stack
    ):
        header += pack("<IIQQQQQQ", kind, flags, at, address, address, n, n, align)
    hashes = pack("<6I", 1, 3, 1, 0, 2, 0)  # one bucket, and both symbols in its chain
    out = bytearray(data + 16)
    for at, part in ((0, header), (symtab, symbols), (strtab, strings), (hashtab, hashes),
                     (text, code)):  # fmt: skip
        out[at : at + len(part)] = part
    path.write_bytes(out + entries)


CALLBACKS_TABLE = 1  # NVTX_ETID_CALLBACKS
CORE2 = 5  # NVTX_CB_MODULE_CORE2: the functions that take a domain
# NvtxCallbackIdCore2
START, END, PUSH, POP, NAME_CATEGORY, REGISTER_STRING, CREATE_DOMAIN = 2, 3, 4, 5, 8, 10, 12
INT64, EXTENDED = 2, 0xDFBD0009  # payload types; nvtxPayloadData_t: schema, bytes, address
REGISTERED = 3  # message type
# nvtxEventAttributes_t (nvtx3/nvToolsExt.h): category, payload type, payload, kind of message, it
ATTRIBUTES, N_ATTRIBUTES = "<4xI8xI4xQi4xQ", 48


class Event(NamedTuple):
    """A range that begins (`push`, `start`) or ends (`pop`, `end`), of a process's one thread.

    payload: the number, or the numbers of an extended payload. registered: the name is a registered
    string. number: of the range, for `start` and `end`."""

    kind: str
    domain: str
    name: str = ""
    category: str = ""
    payload: int | tuple[int, ...] | None = None
    registered: bool = False
    number: int = 0


class Counter:
    """The tool in the library at `path`. Make it before the first NVTX call of the process.

    events: what NVTX said, in order."""

    def __init__(self, path: Path):
        self.loaded = False
        self.events: list[Event] = []
        self._names: list[bytes] = [b""]  # what handles stand for: domains and strings, by number
        self._categories: dict[tuple[int, int], str] = {}  # by domain and number
        self._n_started = 0
        pointer = c_void_p
        self._keep = {
            START: CFUNCTYPE(c_uint64, pointer, pointer)(self._start),
            END: CFUNCTYPE(None, pointer, c_uint64)(lambda d, n: self._add("end", d, number=n)),
            PUSH: CFUNCTYPE(c_int, pointer, pointer)(lambda d, a: self._begun("push", d, a)),
            POP: CFUNCTYPE(c_int, pointer)(lambda d: self._add("pop", d)),
            NAME_CATEGORY: CFUNCTYPE(None, pointer, c_uint32, c_char_p)(
                lambda d, n, name: self._categories.update({(d, n): name.decode()})
            ),
            REGISTER_STRING: CFUNCTYPE(pointer, pointer, c_char_p)(lambda _, s: self._handle(s)),
            CREATE_DOMAIN: CFUNCTYPE(pointer, c_char_p)(self._handle),
        }
        self._entry = CFUNCTYPE(c_int, CFUNCTYPE(pointer, c_uint32))(self._initialize)
        self._library = ctypes.CDLL(str(path))
        c_void_p.in_dll(self._library, SLOT).value = ctypes.cast(self._entry, c_void_p).value

    def _initialize(self, get_export_table: Any) -> int:
        """What NVTX calls as InitializeInjectionNvtx2; 1 says that the tool is in place."""
        table, size = POINTER(POINTER(c_void_p))(), c_uint32()
        get_module = CFUNCTYPE(c_int, c_int, c_void_p, c_void_p).from_address(
            get_export_table(CALLBACKS_TABLE) + 8  # behind the size of the struct
        )
        if not get_module(CORE2, ctypes.addressof(table), ctypes.addressof(size)):
            return 0
        for number, callback in self._keep.items():
            table[number][0] = ctypes.cast(callback, c_void_p).value
        self.loaded = True
        return 1

    def _handle(self, name: bytes) -> int:
        self._names.append(name)
        return len(self._names) - 1

    def _add(self, kind: str, domain: int, *more: Any, number: int = 0) -> int:
        event = Event(kind, self._names[domain].decode(), *more)._replace(number=number)
        self.events.append(event)
        return 0

    def _begun(self, kind: str, domain: int, attributes: int, number: int = 0) -> int:
        raw = ctypes.string_at(attributes, N_ATTRIBUTES)
        category, of, payload, message_type, message = unpack(ATTRIBUTES, raw)
        told: int | tuple[int, ...] | None = None
        if of == INT64:
            told = c_int64(payload).value
        elif of == EXTENDED:
            _, n_bytes, address = (c_uint64 * 3).from_address(payload)
            told = tuple((c_int64 * (n_bytes // 8)).from_address(address))
        registered = message_type == REGISTERED
        name = self._names[message] if registered else ctypes.string_at(message)
        category = self._categories.get((domain, category), "")
        return self._add(kind, domain, name.decode(), category, told, registered, number=number)

    def _start(self, domain: int, attributes: int) -> int:
        self._n_started += 1
        self._begun("start", domain, attributes, self._n_started)
        return self._n_started
