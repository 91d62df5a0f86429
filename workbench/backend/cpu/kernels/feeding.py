"""feed and keep_tokens: a device feeds the tokens that it drew to its next step itself."""

from __future__ import annotations

from workbench.backend.cpu.kernels.vector import Emit, Value


def feed(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Parts are ranges of tokens. A sequence that does not exist gives token 0."""
    dst, ids, last, n_tokens, n_seqs = e.arguments(args, "iiiii")
    start, stop = e.share(n_tokens, part, n_parts)
    with e.loop(start, stop) as t:
        token = e.var(e.load("i32", ids + t * 4))
        sequence = -1 - token.get().to("i64")
        with e.when(sequence.compare(">=", 0)):
            token.set(e.const("i32", 0))
            with e.when(sequence.compare("<", n_seqs)):
                token.set(e.load("i32", last + sequence * 4))
        e.store(token.get(), dst + t * 4)


def keep_tokens(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """The first part stores all tokens: of two tokens for one sequence the last wins."""
    last, ids, rows, n_ids, n_seqs = e.arguments(args, "iiiii")
    with e.when(part.compare("==", 0)), e.loop(e.const("i64", 0), n_ids) as i:
        row = e.load("i32", rows + i * 4).to("i64")
        with e.when(row.compare(">=", 0)), e.when(row.compare("<", n_seqs)):
            e.store(e.load("i32", ids + i * 8), last + row * 4)
