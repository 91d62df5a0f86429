"""What `Engine.generate` hands back: the tokens, their text, and how long each took."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

CONTEXT_FULL, END_OF_TEXT, INTERRUPTED = "n_ctx", "end of text", "interrupted"


@dataclass
class Generation:
    """What `generate` made.

    prefill_us: the time of the whole prompt.
    token_us: the time of each token after it.
    stopped: why it ended: `max_tokens`, `end of text`, `n_ctx` (the context is full), or
        `interrupted` by Ctrl-C, which keeps what was made.
    """

    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    prefill_us: float = 0.0
    token_us: list[float] = field(default_factory=list)
    stopped: str = "max_tokens"

    @property
    def interrupted(self) -> bool:
        return self.stopped == INTERRUPTED

    @property
    def tokens_per_second(self) -> float:
        return 1e6 * len(self.token_us) / sum(self.token_us) if self.token_us else 0.0

    def _repr_html_(self) -> str:
        said = self.text if self.text is not None else " ".join(map(str, self.tokens))
        rate = f"{self.tokens_per_second:.1f} t/s"
        rate += "; stopped at n_ctx: the context is full" if self.stopped == CONTEXT_FULL else ""
        return f"<p>{html.escape(said)}<br><small>{rate}</small></p>"
