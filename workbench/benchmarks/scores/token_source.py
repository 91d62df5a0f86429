"""Tokens to score: of a text, of a file of ids, or drawn from the model itself; cut into windows.

A window begins with an empty cache. Its first input is BOS where the model wants a BOS, else the
token before the window. Each further input is the target before it (drawn in `perplexity.py`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.benchmarks.workload import bos_token
from workbench.common.errors import UsageError
from workbench.engine.batch import check_ids
from workbench.engine.finite import require_finite

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.load import Loaded

_SAMPLE = re.compile(r"sample:(\d+)(?::(\d+))?")


class TokenWindow(NamedTuple):
    """Tokens computed together from an empty cache: after inputs[i] comes targets[i]."""

    inputs: list[int]
    targets: list[int]


class Source(NamedTuple):
    """The tokens of a run.

    label: the name of the source.
    n_tokens: how many tokens will be scored.
    seed: 0 where nothing is drawn.
    windows: made one at a time; a sampling source computes each.
    """

    label: str
    n_tokens: int
    seed: int
    windows: Iterable[TokenWindow]

    def after(self, known: Sequence[Sequence[int]]) -> Iterator[TokenWindow]:
        """All windows. known: the targets of the first windows, which a sampling source does not
        compute again. Raises UsageError where the source now has other tokens."""
        if isinstance(self.windows, _Drawn):
            self.windows.known = known
        windows = iter(self.windows)
        first = list(itertools.islice(windows, len(known)))
        if [window.targets for window in first] != [list(targets) for targets in known]:
            raise UsageError(
                f"{self.label} has other tokens than the run to resume; give the tokens of that "
                "run, or another folder"
            )
        return itertools.chain(first, windows)


@dataclass
class AskedTokens:
    """Tokens as the user asks for them, before there is a model: a text, ids, or a sample of n."""

    label: str
    text: str | None = None
    ids: list[int] | None = None
    n: int = 0
    seed: int = 0

    def check_tokens(self, opened: Engine | Loaded) -> None:
        """Raises UsageError for ids outside the vocabulary and for too few tokens, ModelFileError
        for a text where the model has no tokenizer. A text is tokenised here, once.

        opened: an engine, or an `engine.load.Loaded` before its weights are loaded.
        """
        if self.ids is None and self.text is not None:
            self.ids = opened.tokenizer.encode(self.text, add_bos=False)
        if self.ids is not None:
            _scored(opened, self.label, self.ids)

    def open(self, engine: Engine) -> Source:
        """The windows for `engine`, as long as its context. Raises as `check_tokens` does."""
        self.check_tokens(engine)
        if self.ids is None:
            return sample(engine, self.n, self.seed)
        bos, (ids, n) = bos_token(engine), _scored(engine, self.label, self.ids)
        return Source(self.label, n, 0, windows(ids, engine.cache.n_ctx_seq, bos))


def ask(file: Path | None, tokens_from: str | None) -> AskedTokens:
    """The tokens of a UTF-8 text `file`, or of `tokens_from`. Reads these files, and no model.

    tokens_from: `sample:N` or `sample:N:SEED`, or a file of ids. The suffix of the file decides how
        it is read: `.npy` (integers, one dimension); `.jsonl` (a line is an id, a list of ids, or
        an object with a list `tokens`); any other (ids between spaces, commas or line ends).
    Raises UsageError, in one line, for neither or both, and for a file that cannot be read.
    """
    if (file is None) == (tokens_from is None):
        raise UsageError("give either a text file (-f) or token ids (--tokens-from)")
    if file is not None:
        return AskedTokens(file.name, text=_decode(file, _read(file)))
    wanted = _SAMPLE.fullmatch(str(tokens_from))
    if wanted is not None:
        n, seed = int(wanted[1]), int(wanted[2] or 0)
        return AskedTokens(_sample_label(n, seed), n=n, seed=seed)
    if str(tokens_from).startswith("sample:"):
        raise UsageError(f"{tokens_from!r} names no sample; write sample:2048, or sample:2048:SEED")
    path = Path(str(tokens_from))
    return AskedTokens(path.name, ids=read_ids(path))


def _scored(opened: Engine | Loaded, label: str, ids: list[int]) -> tuple[list[int], int]:
    """`ids` without a leading BOS (every window begins with BOS anyway), and how many of them will
    be scored."""
    check_ids(ids, opened.model.n_vocab)
    bos = bos_token(opened)
    if ids[:1] == [bos]:
        ids = ids[1:]
    n = len(ids) - (bos is None)
    if n < 1:
        raise UsageError(
            f"{label} holds {len(ids)} tokens, and none of them can be scored; give more tokens"
        )
    return ids, n


def windows(ids: list[int], size: int, bos: int | None) -> Iterator[TokenWindow]:
    """Windows of `size` over `ids`. Every id is scored once; without BOS all but the first."""
    first, targets = (ids[0], ids[1:]) if bos is None else (bos, ids)
    for i in range(0, len(targets), size):
        here = targets[i : i + size]
        if bos is None and i:
            first = targets[i - 1]
        yield TokenWindow([first, *here[:-1]], here)


# drawn from the model ----------------------------------------------------------------------------


def sample(engine: Engine, n: int, seed: int) -> Source:
    """`n` tokens drawn by `engine` at temperature 1 from its whole vocabulary, to be scored.

    Equal seeds and engines give equal tokens. Without a BOS the first input is drawn uniformly.
    Raises UsageError for n below 1.
    """
    return Source(_sample_label(n, seed), n, seed, _Drawn(engine, n, seed))


def _sample_label(n: int, seed: int) -> str:
    if n < 1:
        raise UsageError(f"sample:{n} draws nothing; give 1 token or more")
    return f"sample:{n}:{seed}"


class _Drawn:
    """Windows drawn one at a time. known: the targets of the first windows, which are not drawn
    again."""

    def __init__(self, engine: Engine, n: int, seed: int):
        self._engine, self._n, self._seed = engine, n, seed
        self.known: Sequence[Sequence[int]] = ()

    def __iter__(self) -> Iterator[TokenWindow]:
        engine, n = self._engine, self._n
        rng, bos = np.random.default_rng(self._seed), bos_token(engine)
        first = int(rng.integers(engine.model.n_vocab)) if bos is None else bos
        known = iter(self.known)
        while n > 0:
            targets = list(next(known, ()))
            if targets:
                rng.random(len(targets))  # as many as drawing them took
            else:
                targets = self._draw(first, min(n, engine.cache.n_ctx_seq), rng)
            yield TokenWindow([first, *targets[:-1]], targets)
            n -= len(targets)
            first = targets[-1] if bos is None else bos

    def _draw(self, first: int, n: int, rng: np.random.Generator) -> list[int]:
        """Draws n tokens after `first`, from an empty cache."""
        self._engine.reset()
        inputs, targets = [first], list[int]()
        while True:
            row = self._engine.step(inputs[-1:])[-1]
            require_finite(self._engine.model, row, len(inputs) - 1)
            targets.append(draw(row, rng.random()))
            if len(targets) == n:
                return targets
            inputs.append(targets[-1])


def draw(logits: np.ndarray, u: float) -> int:
    """The token at `u` in [0, 1) of the cumulative softmax of `logits`, float32 (n_vocab,), finite.

    Unlike `Sampler` it keeps the whole vocabulary and does not sort. At 128,256 logits it is ten
    times as fast.
    """
    wide = logits.astype(np.float64)
    total = np.cumsum(np.exp(wide - wide.max()))
    return min(int(np.searchsorted(total, u * total[-1], side="right")), len(logits) - 1)


# files -------------------------------------------------------------------------------------------


def read_ids(path: Path) -> list[int]:
    """The token ids of a file, read as in `ask`. Raises UsageError in one line."""
    return _READERS.get(path.suffix.lower(), _read_text)(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no UTF-8 text: byte {error.start} cannot be decoded; convert it first"
        ) from error


def _read_npy(path: Path) -> list[int]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read as .npy: {reason}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        what = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else "none"
        raise UsageError(f"{path}: ids are integers in one dimension, and this is {what}")
    return [int(i) for i in found]


def _read_jsonl(path: Path) -> list[int]:
    ids: list[int] = []
    for number, line in enumerate(_decode(path, _read(path)).splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: no JSON: {error}") from error
        found = found.get("tokens") if isinstance(found, dict) else found
        here: list[Any] = found if isinstance(found, list) else [found]
        if not all(type(i) is int for i in here):  # true is an int, too
            raise UsageError(
                f"{path}, line {number}: a line is an id, a list of ids, or an object with a list "
                '"tokens"'
            )
        ids += here
    return ids


def _read_text(path: Path) -> list[int]:
    ids = []
    for number, line in enumerate(_decode(path, _read(path)).splitlines(), 1):
        for word in line.replace(",", " ").split():
            try:
                ids.append(int(word))
            except ValueError:
                raise UsageError(
                    f"{path}, line {number}: {word[:20]!r} is no token id; text goes to -f"
                ) from None
    return ids


_READERS: dict[str, Callable[[Path], list[int]]] = {".npy": _read_npy, ".jsonl": _read_jsonl}
