"""An engine whose clock is a counter: it computes nothing, and takes as long as it is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from workbench.common.progress import HIDDEN
from workbench.config import EngineConfig, Toggles
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.engine import Engine
from workbench.engine.look.nvtx_ranges import OFF
from workbench.engine.rehearsal import Rehearsal
from workbench.engine.slots.padding import as_they_are
from workbench.program.commands import Program, Sync

SPEC = "sync=per_copy,copy_boundary"  # the arms of `timed`
N_VOCAB = 50
BOS = 7


@dataclass
class Clock:
    """Nanoseconds that pass only when the engine computes; `install` makes it the bench's clock."""

    now: int = 0

    def __call__(self) -> int:
        return self.now

    def install(self, monkeypatch) -> Clock:
        monkeypatch.setattr("workbench.benchmarks.workload.now_ns", self)
        return self


class FakeEngine:
    """ns_of(toggles, n_tokens, nth step of all engines) is what a step takes.

    The logits of a token are a function of the tokens in the cache alone, but for `wrong`: engines
    with a sync mode named there add an error of that size to one logit.
    """

    def __init__(self, clock, toggles=None, ns_of=None, wrong=None, n_ctx=256, shared=None):
        self.clock = clock
        self.toggles, self.wanted = toggles or Toggles(), None  # no preset
        self.chosen = "as given"
        self.config = EngineConfig(n_ctx=n_ctx, n_ubatch=16)
        self.cache = KVCache(n_ctx, 16)
        self.rehearsal = Rehearsal(self.cache, as_they_are, self.config.n_ubatch)
        self.ns_of = ns_of or (lambda toggles, n_tokens, nth: 1_000_000 * n_tokens)
        self.wrong = wrong or {}
        self.shared = shared or SimpleNamespace(
            steps=0, variants=[], stop_at=None, error=None, waits=[]
        )
        self.recorder, self.ranges = None, OFF
        self._loaded = self  # what it stands on, for `exclusive`
        self.closed = False
        self.n_waits = 0  # for the device
        self.calls: list[list[int]] = []
        self.live: list[int] = []
        self.device, self.device_reason = "embedded", "as asked"
        self.sync_mode = "copy_boundary" if self.toggles.sync == "auto" else self.toggles.sync
        self.backend = SimpleNamespace(
            description="a clock that counts",
            waiting="never",
            sync_stream=lambda stream: lambda: None,
            clock=lambda: None,
            synchronize=lambda: self.shared.waits.append(self.shared.steps),
        )
        metadata = {"tokenizer.ggml.bos_token_id": BOS}
        get = lambda key, kind, default=None: metadata.get(key, default)  # noqa: E731
        self.model = SimpleNamespace(
            path=Path("models/fake.gguf"), hash="h" * 64, architecture="llama", name="fake",
            quant="Q4_0", n_params=1_236_000_000, n_layer=2, n_embd=8, n_vocab=N_VOCAB,
            file_bytes=770_000_000, weight_bytes_per_token=700_000_000,
            file=SimpleNamespace(tensors={}, metadata=metadata, get=get),
            weights=[SimpleNamespace(nbytes=500_000_000), SimpleNamespace(nbytes=260_000_000)],
        )  # fmt: skip
        self.counters = {"steps": 0, "wait_ns": 0}
        self._open = self._loaded = SimpleNamespace(backends=[])

    @property
    def __class__(self):
        """For `isinstance`: whoever asks is given an engine."""
        return Engine

    def variant(self, toggles):
        made = FakeEngine(
            self.clock, toggles, self.ns_of, self.wrong, self.config.n_ctx, self.shared
        )
        self.shared.variants.append(made)
        return made

    def reset(self):
        self.live = []

    def make_ready(self, shapes):
        """Nothing is compiled."""

    def unready(self, shapes):
        return []

    def step(self, tokens, outputs="last"):
        shared = self.shared
        shared.steps += 1
        if shared.stop_at == shared.steps:
            raise shared.error
        assert len(self.live) + len(tokens) <= self.config.n_ctx
        self.calls.append(list(tokens))
        self.live += tokens
        self.clock.now += int(self.ns_of(self.toggles, len(tokens), shared.steps))
        self.counters = {"steps": self.counters["steps"] + 1, "wait_ns": self.clock.now}
        n, live = len(tokens) if outputs == "all" else 1, self.live
        seeds = [live[: len(live) - i] for i in reversed(range(n))]
        logits = np.array(
            [np.random.default_rng(seed).standard_normal(N_VOCAB) for seed in seeds], np.float32
        )
        logits[:, 3] += np.float32(self.wrong.get(self.toggles.sync, 0))
        return logits

    def prefill(self, tokens, outputs="last", left=HIDDEN):
        n = self.config.n_ubatch
        for i in range(0, len(tokens), n):
            logits = self.step(tokens[i : i + n])
            left.update(len(tokens[i : i + n]))
        return logits

    def resolve(self, toggles):
        return toggles

    def program(self, n_tokens=1, n_outputs=1, n_past=0, n_seqs=1):
        waits = 9 if self.toggles.sync == "per_copy" else 2
        counts = {"waits": waits, "copies": 3, "launches": 5, "copied_bytes": 99}
        return SimpleNamespace(
            commands=(), singly=tuple, counts=lambda: counts,
            pattern=lambda fold=False: "s" * waits + "g",
        )  # fmt: skip

    @property
    def settled(self):
        return self.toggles

    def programs_of(self, shapes):
        """As many commands as there are waits, and one more with other toggles that are exact."""
        names = [f"{n}={v}" for n, v in self.toggles.changed().items() if n != "sync"]
        waits = 9 if self.toggles.sync == "per_copy" else 2
        syncs = [Sync(0, event=name) for name in ["wait"] * waits + names]
        for shape in shapes:
            yield Program(syncs, [], [], [], ("fake",), shape, self.toggles.sync, "own")

    def synchronize(self):
        self.n_waits += 1

    def close(self):
        self.closed = True


def timed(monkeypatch, faster=1.0, noise=0.0, **options) -> FakeEngine:
    """An engine whose copy_boundary is `faster` times the baseline's speed."""
    rng = np.random.default_rng(0)

    def ns_of(toggles, n_tokens, nth):
        base = 1_000_000 * n_tokens * (1 + noise * rng.random())
        return base / (faster if toggles.sync == "copy_boundary" else 1)

    return FakeEngine(Clock().install(monkeypatch), ns_of=ns_of, **options)


def interrupted(engine: FakeEngine, at: int) -> FakeEngine:
    """Ctrl-C in that step of all engines."""
    engine.shared.stop_at, engine.shared.error = at, KeyboardInterrupt()
    return engine
