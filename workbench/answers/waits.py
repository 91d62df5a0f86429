"""What a wait is worth beside a token: here, on a recorded GPU, and in the thread of #17795.

A wait costs the same beside a small model's token and a large one's, so its share falls with the
model. The waits' cost and the tokens of this run are measured; other models' come from the recorded
results, each beside the wait that was measured on the same device.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.answers import claims
from workbench.benchmarks.times.token_parts import WARM_UP, plain_us
from workbench.benchmarks.workload import Workload, draw_tokens
from workbench.common.errors import WorkbenchError
from workbench.common.shipped import shipped
from workbench.common.tables import Table
from workbench.config import BEST, SyncMode, TogglePreset
from workbench.engine.engine import Engine
from workbench.model.synth.models import write_model

if TYPE_CHECKING:
    from workbench.benchmarks.times.gaps import Gaps

BEFORE, AFTER = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value  # around #17795
HERE, NO_GAIN = "here", "-"
TOKENS = "with launches fused, without plans"
_SENTENCE = re.compile(r"^One wait, ([\d.]+) us, beside tokens of (.+?)\. (.+)$", re.M)
_TOKEN = re.compile(r"(\S+ \S+) (\d+) us")


class RecordedWait(NamedTuple):
    """What the results say of one GPU. wait_us: of one wait; token_us: model -> a token."""

    where: str
    wait_us: float
    token_us: Mapping[str, float]


def recorded(page: str | Path | None = None) -> RecordedWait | None:
    """The sentence of the results page that `said` writes; None where it is not there. page:
    default: the page that comes with the package."""
    try:
        page = page or shipped("data/results", "README.md") / "README.md"
    except WorkbenchError:
        return None
    found = _SENTENCE.search(Path(page).read_text(encoding="utf-8"))
    if found is None:
        return None
    tokens = {model: float(us) for model, us in _TOKEN.findall(found[2])}
    return RecordedWait(found[3], float(found[1]), tokens)


def said(found: RecordedWait) -> str:
    """That sentence."""
    tokens = ", ".join(f"{model} {us:.0f} us" for model, us in found.token_us.items())
    return f"One wait, {found.wait_us:.2f} us, beside tokens of {tokens}. {found.where}"


def tokens_us(engine: Engine, n: int = 24, seed: int = 0) -> dict[str, float]:
    """us of a token with the toggles of `best` without plans, as the recorded tokens have,
    untraced: of the engine's model, and of a tiny one on the same device, which is written for it.
    The median of n tokens."""
    found, best = {}, TogglePreset(BEST, {"plans": "off"})
    with engine.variant(best) as side:
        found[_named(engine)] = _median_us(side, n, seed)
    if engine.model.name.startswith("tiny"):
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = write_model("tiny-llama", "Q8_0", Path(folder, "tiny-llama-Q8_0.gguf"))
        with Engine.load(path, device=engine.device, toggles=best) as tiny:
            return {_named(tiny): _median_us(tiny, n, seed)} | found


def worth_table(gaps: Gaps, here_us: Mapping[str, float], other: RecordedWait | None) -> Table:
    """A row for each model: its token, one wait of the same device, what a token gains by the waits
    that AFTER has fewer than BEFORE, and what it would gain if each took what it does in the thread
    of #17795, on Windows.

    gaps: of this run; here_us, other: `tokens_us`, `recorded`.
    """
    n, (stream, fit) = n_fewer(gaps), next(iter(gaps.fits.items()))
    places = [(HERE, fit.wait_us, here_us)]
    if other is not None:
        places.append((other.where, other.wait_us, other.token_us))
    theirs = float(np.mean(claims.threads_us()))
    return Table(
        {
            "model": model,
            "a token, us": token_us,
            "a wait, us": wait_us,
            f"{n} fewer": _gain(n * wait_us, token_us),
            f"{n} fewer, {theirs:.1f} us each": _gain(n * theirs, token_us),
            "where": where,
        }
        for where, wait_us, tokens in places
        for model, token_us in tokens.items()
    ).shown(
        digits={"a token, us": 0, "a wait, us": 2},
        constant={"a wait": f"with copy_stream={stream}", "a token": TOKENS},
    )


def n_fewer(gaps: Gaps) -> int:
    """How many waits of the host AFTER has fewer than BEFORE, a token."""
    waits = gaps.table().set_index("arm")["waits"]
    return int(waits[BEFORE] - waits[AFTER])


def _gain(saved_us: float, token_us: float) -> str:
    """A token is shorter by saved_us; with nothing saved, or as much as it takes or more, there is
    no gain to tell."""
    if not 0 < saved_us < token_us:
        return NO_GAIN
    return f"{100 * (token_us / (token_us - saved_us) - 1):.1f} %"


def _named(engine: Any) -> str:
    return f"{engine.model.name.removesuffix(' with random weights')} {engine.model.quant}"


def _median_us(engine: Engine, n: int, seed: int) -> float:
    tokens = draw_tokens(Workload(0, WARM_UP + n), engine.model.n_vocab, seed, 0).gen
    plain_us(engine, tokens)  # so that no first step is timed
    return plain_us(engine, tokens)
