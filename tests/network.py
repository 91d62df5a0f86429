"""What a browser would fetch to show a page, read off its HTML."""

from __future__ import annotations

import re

# how a page makes a browser load something from a network
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc\s*=\s*["']?(?:https?:)?//[^"'>\s]+
      | <link\b[^>]*?\bhref\s*=\s*["']?(?:https?:)?//[^"'>\s]+
      | @import\s+(?:url\()?\s*["']?(?:https?:)?//[^"')\s]+
      | \burl\(\s*["']?(?:https?:)?//[^"')]+
      | \bimport\s*\(\s*["'`](?:https?:)?//[^"'`]+
      | \bfrom\s+["'](?:https?:)?//[^"']+["']""",
    re.IGNORECASE | re.VERBOSE,
)


def network_loads(page: str) -> list[str]:
    """What a browser would fetch from a network to show this page: nothing, for a report.

    Links that a reader may follow are no loads.
    """
    return [m[0][:200] for m in LOADS.finditer(page)]
