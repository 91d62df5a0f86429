"""Kernels that note when they ran, made by a second compilation of the same sources.

That compilation gives each kernel one more argument, the address of a note. It also begins each
kernel with an object that writes to the note: the block's begin, and at every return its threads'
end (`kernels/launch_span.cuh`). The sources do not contain this code, so the kernels that compute
tokens are not changed.

A launch that begins early (`pdl`) notes its begin before it waits for the launch before it. It may,
because no other launch uses its note. The host then leaves the time of the wait out
(`backend/clock/launch_notes.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from workbench.backend.clock.launch_notes import NOTE_BYTES as NOTE_BYTES
from workbench.backend.cuda.kernels.kernel import Kernel, Work
from workbench.backend.issue.issued import Address

NOTING = "NOTING"  # the macro of such a compilation; no source tests it
HEADER = "launch_span.cuh"  # no other compilation includes it
# No kernel has a brace between `__global__` and its body.
_HEAD = re.compile(rb"(__global__[^{;]*)\)(\s*)\{")
_ARGUMENT, _OBJECT = b"unsigned long long* span_note", b"LaunchSpan launch_span(span_note);"


def noting(source: bytes, headers: Mapping[str, bytes]) -> tuple[bytes, dict[str, bytes]]:
    """A source and its headers, changed so that kernels note when they ran. Lines keep their
    numbers."""
    added = rb"\1, " + _ARGUMENT + rb")\2{ " + _OBJECT
    noted = {name: _HEAD.sub(added, text) for name, text in headers.items()}
    return f'#include "{HEADER}"\n#line 1\n'.encode() + _HEAD.sub(added, source), noted


def noted(works: Iterable[Work], notes: int) -> list[Work]:
    """The same launches with kernels that note when they ran. Products by cuBLAS note nothing.

    notes: the address of the first kernel's note; 0: the launches are not changed.
    """
    if not notes:
        return list(works)
    found, note = list[Work](), Address(notes)
    for work in works:
        if isinstance(work, Kernel):
            args, defines = [*work.args, note], (*work.defines, NOTING)
            work, note = work._replace(args=args, defines=defines), note + NOTE_BYTES
        found.append(work)
    return found
