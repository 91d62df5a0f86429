"""Do two engines give the same answer? Their logits after the same tokens are compared.

Every toggle value declares a class. `exact`: the logits are bit-equal to the baseline's.
`rounding`: the logits are close, and every clear decision of the baseline is the same. Both engines
are fed the same fixed tokens, not tokens of their own choice. So one difference causes no further
differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import Tokens, Workload, bos_token, draw_tokens, make_ready
from workbench.common.progress import HIDDEN, Bar, bar
from workbench.config import EXACT

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

NMSE_TOLERANCE = 1e-3
MARGIN_IN_RMS = 4.0
N_PREFILL, N_STEPS = 24, 12


class Answer(NamedTuple):
    """Whether two engines gave the same answer.

    kind: the class, `exact` or `rounding`.
    holds: the rule of the class holds.
    n_rows: how many rows of logits were compared.
    n_differ: how many of them broke the rule.
    nmse: normalised mean square error, of the worst comparison (0.0 where bit-equal).
    equal: every row is bit-equal, also where the class allows a difference.
    """

    kind: str
    holds: bool
    n_rows: int
    n_differ: int
    nmse: float
    equal: bool = False

    def __str__(self) -> str:
        if self.holds and (self.equal or self.kind == EXACT):
            return f"{self.kind}: bit-equal ({self.n_rows} rows)"
        if self.kind == EXACT:
            return f"exact: DIFFERENT in {self.n_differ} of {self.n_rows} rows"
        if self.holds:
            return f"rounding: within tolerance (nmse {self.nmse:.1e}, {self.n_rows} rows)"
        return (
            f"rounding: OUT OF TOLERANCE (nmse {self.nmse:.1e}, "
            f"{self.n_differ} of {self.n_rows} rows)"
        )

    def to_dict(self) -> dict[str, Any]:
        """For run.json: null stands for infinity, which JSON does not have."""
        return dict(results.finite(self._asdict()))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Answer:
        """From run.json. Old runs lack `equal`; it is true where the answer holds with nmse 0."""
        nmse = math.inf if found["nmse"] is None else found["nmse"]
        return cls(**({"equal": nmse == 0 and found["holds"]} | found | {"nmse": nmse}))


def force(engine: Engine, tokens: Tokens, left: Bar = HIDDEN) -> np.ndarray:
    """Feeds `tokens` into an empty cache: the prompt in ubatches, then token by token. Updates the
    bar `left`.

    Returns float32 (1 + len(tokens.gen), n_vocab): the logits after the prompt and each token.
    """
    engine.reset()
    rows = [np.array(engine.prefill(tokens.depth + tokens.prompt, left=left), np.float32)[-1:]]
    for token in tokens.gen:
        rows.append(np.array(engine.step((token,)), np.float32)[-1:])
        left.update()
    return np.concatenate(rows)


def workload_of(engines: Sequence[Engine]) -> Workload:
    """The prompt and the tokens that `compare_engines` feeds, as many as fit every context."""
    room = min(engine.cache.n_ctx_seq for engine in engines)
    n_steps = min(N_STEPS, room - 1)
    return Workload(min(N_PREFILL, room - n_steps), n_steps)


def compare_engines(engines: Sequence[Engine], kinds: Sequence[str], seed: int) -> list[Answer]:
    """Feeds the same tokens to every engine, a prompt and then token by token, and compares the
    logits with the first engine's. kinds: the class for each further engine."""
    fixed = workload_of(engines)
    make_ready(engines, [fixed])
    tokens = draw_tokens(fixed, engines[0].model.n_vocab, seed, bos=bos_token(engines[0]))
    with bar("comparing logits", fixed.n_tokens * len(engines), "tokens") as left:
        baseline = force(engines[0], tokens, left)
        return [
            compare_logits(baseline, force(engine, tokens, left), kind)
            for engine, kind in zip(engines[1:], kinds, strict=True)
        ]


def compare_logits(
    baseline: np.ndarray, toggled: np.ndarray, kind: str, tolerance: float = NMSE_TOLERANCE
) -> Answer:
    """Compares logits, both float32 (n_rows, n_vocab), row i of both after the same tokens.

    exact: every row is bit-equal. rounding: two conditions. The normalised mean square error of all
    rows together is at most `tolerance`. And a row's argmax is the same wherever the baseline's
    margin (best minus second) exceeds four times the rms of the row's differences. A row with a NaN
    or an infinity never passes. Raises ValueError where the shapes differ.
    """
    a = np.ascontiguousarray(baseline, np.float32)
    b = np.ascontiguousarray(toggled, np.float32)
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"logits of shapes {a.shape} and {b.shape} cannot be compared")
    finite = np.logical_and(np.isfinite(a).all(axis=1), np.isfinite(b).all(axis=1))
    x, y = (np.where(finite[:, None], v, 0).astype(np.float64) for v in (a, b))
    power, error = float(np.sum(x**2)), float(np.sum((x - y) ** 2))
    nmse = error / power if power else (0.0 if error == 0 and finite.any() else math.inf)
    same = (a.view(np.uint32) == b.view(np.uint32)).all(axis=1) & finite
    equal = bool(same.all())
    if kind == EXACT:
        return Answer(kind, equal, len(a), int((~same).sum()), nmse, equal)
    rms = np.sqrt(np.mean((x - y) ** 2, axis=1))
    top2 = np.partition(x, -2, axis=1)[:, -2:]
    decided = top2[:, 1] - top2[:, 0] > MARGIN_IN_RMS * rms
    broken = ~finite | (decided & (np.argmax(x, axis=1) != np.argmax(y, axis=1)))
    holds = not broken.any() and nmse <= tolerance
    return Answer(kind, bool(holds), len(a), int(broken.sum()), nmse, equal)


def merge(answers: Iterable[Answer]) -> Answer:
    """One answer from several comparisons of one arm; it holds where all of them hold."""
    every = list(answers)
    return Answer(
        every[0].kind,
        all(a.holds for a in every),
        sum(a.n_rows for a in every),
        sum(a.n_differ for a in every),
        max(a.nmse for a in every),
        all(a.equal for a in every),
    )
