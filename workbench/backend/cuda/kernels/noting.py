"""Kernels that note when they ran: a compilation of the same sources with one thing added.

Each kernel takes one more argument, the address of a note, and begins with an object that notes its
block's begin there, and at every return its threads' end (`kernels/launch_span.cuh`). The sources
themselves have no trace of it, so the kernels that compute tokens are what they were.

A launch that begins early (`pdl`) notes its begin before it waits for the one in front of it. The
note is its own, so the wait protects nothing there; what the wait takes, the host leaves out
(`backend/clock/launch_notes.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from workbench.backend.clock.launch_notes import NOTE_BYTES as NOTE_BYTES
from workbench.backend.cuda.kernels.kernel import Kernel, Work
from workbench.backend.issue.issued import Address

NOTING = "NOTING"  # the macro that such a compilation has; no source asks for it
HEADER = "launch_span.cuh"  # in no other compilation
# What stands between the name of a kernel's kind and its body has no brace.
_HEAD = re.compile(rb"(__global__[^{;]*)\)(\s*)\{")
_ARGUMENT, _OBJECT = b"unsigned long long* span_note", b"LaunchSpan launch_span(span_note);"


def noting(source: bytes, headers: Mapping[str, bytes]) -> tuple[bytes, dict[str, bytes]]:
    """A source and its headers, whose kernels note when they ran. Lines keep their numbers."""
    added = rb"\1, " + _ARGUMENT + rb")\2{ " + _OBJECT
    noted = {name: _HEAD.sub(added, text) for name, text in headers.items()}
    return f'#include "{HEADER}"\n#line 1\n'.encode() + _HEAD.sub(added, source), noted


def noted(works: Iterable[Work], notes: int) -> list[Work]:
    """The same launches, whose kernels note when they ran. notes: address of the first kernel's
    note; 0 for launches as they are. Products by cuBLAS note nothing."""
    if not notes:
        return list(works)
    found, note = list[Work](), Address(notes)
    for work in works:
        if isinstance(work, Kernel):
            args, defines = [*work.args, note], (*work.defines, NOTING)
            work, note = work._replace(args=args, defines=defines), note + NOTE_BYTES
        found.append(work)
    return found
