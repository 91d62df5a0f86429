"""Tokens one after the other: what `Engine.generate` does, and what it hands back."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workbench.engine.batch import Outputs
from workbench.engine.finite import require_finite
from workbench.engine.ready import make_ready
from workbench.engine.rehearsal import alone
from workbench.errors import UsageError
from workbench.model.sampler import Sampler
from workbench.progress import HIDDEN, Bar, bar
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

MADE_READY = 1024  # so many tokens have what they launch compiled before the first of them
CONTEXT_FULL, END_OF_TEXT, INTERRUPTED = "n_ctx", "end of text", "interrupted"


@dataclass
class Generation:
    """What `generate` made. prefill_us: the prompt, in all; token_us: each token after it.

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


def _ubatches(engine: Engine, ids: Sequence[int]) -> list[Sequence[int]]:
    n = engine.config.n_ubatch
    return [ids[i : i + n] for i in range(0, len(ids), n)]


def _steps(parts: list[Sequence[int]], outputs: Outputs) -> list[tuple[int, int]]:
    """Tokens and outputs of the steps of a prompt's ubatches."""
    if outputs == "last":
        return [*[(len(part), 0) for part in parts[:-1]], (len(parts[-1]), 1)]
    return [(len(part), len(part) if outputs == "all" else 0) for part in parts]


def prefilled(
    engine: Engine, ids: Sequence[int], outputs: Outputs, left: Bar, sequence: int
) -> np.ndarray:
    """See `Engine.prefill`. A step without outputs may still be under way when the next is issued,
    so the host waits before the bar shows it as done."""
    engine.cache.check_steps(sequence, len(ids), engine.config.n_ubatch)
    parts = _ubatches(engine, ids)
    make_ready(engine, alone(engine, sequence, _steps(parts, outputs)))
    rows = []
    with engine.ranges.scope("prompt", "prompt", len(ids)):
        for part in parts:
            last = part is parts[-1]
            wanted: Outputs = "none" if outputs == "last" and not last else outputs
            rows.append(engine.step(part, wanted, sequence))
            if not last and now_ns() >= left.due_ns:
                engine.synchronize()
            left.update(len(part))
    return rows[-1] if outputs == "last" else np.concatenate(rows)


def asked_for(
    engine: Engine, prompt: str | None, tokens: Sequence[int] | None, max_tokens: int | None
) -> list[int]:
    """The ids to continue. Raises UsageError for a prompt and tokens, neither, or a negative
    max_tokens."""
    if (prompt is None) == (tokens is None):
        raise UsageError("give either a prompt or token ids")
    if max_tokens is not None and max_tokens < 0:
        raise UsageError(f"max_tokens={max_tokens} must be 0 or more")
    return engine.tokenizer.encode(prompt) if prompt is not None else list(tokens or ())


def continued(
    engine: Engine,
    ids: list[int],
    as_text: bool,
    max_tokens: int | None,
    sampler: Sampler,
    on_text: Callable[[str], None] | None,
    stop_at_eos: bool,
) -> Generation:
    """Continues `ids` on `engine`; see `Engine.generate`. as_text: the result is text, too, and an
    end-of-generation token ends it."""
    from workbench.model.tokenizer import StreamDecoder

    stops = engine.tokenizer.eog_ids if stop_at_eos and as_text else frozenset()
    decoder = StreamDecoder(engine.tokenizer) if as_text else None
    room = engine.cache.left() - len(ids) + 1  # the last token needs no cell
    most = room + 1 if max_tokens is None else max_tokens
    made, pieces = Generation(), []

    def say(piece: str) -> None:
        pieces.append(piece)
        if on_text is not None and piece:
            on_text(piece)

    try:
        if ids:
            prompt = _steps(_ubatches(engine, ids), "last")
            tokens = [(1, 1)] * max(0, min(most, room, MADE_READY) - 1)
            make_ready(engine, alone(engine, 0, [*prompt, *tokens]))
        with bar("prompt", len(ids), "tokens") as left:
            start = now_ns()
            logits = engine.prefill(ids, left=left)
            made.prefill_us = (now_ns() - start) / 1e3
        count = bar("generating", min(most, room), "tokens")  # or the text shows as it comes
        with nullcontext(HIDDEN) if on_text else count as left:
            while len(made.tokens) < most:
                require_finite(engine.model, logits[-1], engine.cache.length() - 1)
                token = sampler(logits[-1])
                if token in stops:
                    made.stopped = END_OF_TEXT
                    break
                made.tokens.append(token)
                if decoder is not None:
                    say(decoder.feed(token))
                if len(made.tokens) == most:
                    break
                if not engine.cache.left():
                    made.stopped = CONTEXT_FULL
                    break
                start = now_ns()
                logits = engine.step([token])
                made.token_us.append((now_ns() - start) / 1e3)
                left.update()
    except KeyboardInterrupt:
        made.stopped = INTERRUPTED
        engine.synchronize()  # the step cut short still reads staging memory
    if decoder is not None:
        say(decoder.flush())
        made.text = "".join(pieces)
    return made
