"""What `Engine.generate` hands back."""

from __future__ import annotations

import html
from dataclasses import dataclass, field


@dataclass
class Generation:
    """What `generate` made. prefill_us: the prompt, in all; token_us: each token after it.

    interrupted: Ctrl-C ended it; what was made until then is here.
    """

    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    prefill_us: float = 0.0
    token_us: list[float] = field(default_factory=list)
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float:
        return 1e6 * len(self.token_us) / sum(self.token_us) if self.token_us else 0.0

    def _repr_html_(self) -> str:
        said = self.text if self.text is not None else " ".join(map(str, self.tokens))
        return f"<p>{html.escape(said)}<br><small>{self.tokens_per_second:.1f} t/s</small></p>"
