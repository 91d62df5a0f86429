"""The tests that are timed: those of llama-bench, with the same names and the same scope.

    pp512          a prompt of 512 tokens, whole, in ubatches, into an empty cache
    tg128          128 tokens one by one, the first into an empty cache
    tg128@d4096    the same after 4096 cells that were filled untimed
    pp512+tg128    a prompt and then 128 tokens, timed together
    pp512+tg128@b8 as in llama-batched-bench: 8 sequences with a prompt each, packed into ubatches,
                   and then 128 steps with a token of each sequence; @s8: they share one prompt

Tokens are random (BOS first), and nothing is sampled or tokenised. A token ends when its float32
logits are on the host. llama-bench (`tools/llama-bench`) times the same: there a token ends at
`llama_synchronize`, after the copy of the logits.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from workbench.common.collector import nothing_collected
from workbench.common.errors import UsageError
from workbench.common.nearest import nearest
from workbench.common.progress import HIDDEN, Bar, bar
from workbench.config import EngineConfig, Toggles
from workbench.engine import ready
from workbench.engine.batch import Entry, Work, n_tokens
from workbench.engine.cache.kv_cache import KVCache, n_regions
from workbench.engine.rehearsal import Act
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.load import Loaded
    from workbench.engine.step import Pending

Config = TypeVar("Config", bound=EngineConfig)

_NAME = re.compile(
    r"(?:pp(?P<pp>\d+))?(?P<plus>\+)?(?:tg(?P<tg>\d+))?"
    r"(?:\s*@\s*(?:d(?P<depth>\d+)|(?P<kind>[bs])(?P<n_seqs>\d+)))?"
)


class Workload(NamedTuple):
    """One test.

    n_prompt: tokens of a prompt.
    n_gen: tokens that a sequence generates.
    n_depth: cells filled before, untimed.
    n_seqs: sequences computed together, each with its own prompt and tokens; 0: a test of
        llama-bench, with one sequence.
    shared: all sequences share one prompt.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_seqs: int = 0
    shared: bool = False

    @property
    def n_prompt_tokens(self) -> int:
        """Computed tokens of all prompts; a shared prompt counts once."""
        return self.n_prompt * (1 if self.shared else self.width)

    @property
    def width(self) -> int:
        """How many tokens a generating step has."""
        return max(1, self.n_seqs)

    @property
    def n_tokens(self) -> int:
        """Tokens that count for t/s: the prompt's and the generated ones, never the depth."""
        return self.n_prompt_tokens + self.width * self.n_gen

    @property
    def n_cells(self) -> int:
        """KV cells needed, depth included."""
        return self.n_depth + self.n_tokens

    @property
    def n_cells_seq(self) -> int:
        """KV cells of one sequence, depth and a shared prompt included."""
        return self.n_depth + self.n_prompt + self.n_gen

    def n_ctx(self, n_regions: int) -> int:
        """The context needed. n_regions: 1 where all sequences share the cells; else each sequence
        has a region of equal size."""
        return self.n_cells if n_regions == 1 else n_regions * self.n_cells_seq

    def step_bytes(self, weights: float, cell: float) -> float:
        """Bytes that a generating step must read, as the mean over the steps: the weights once, and
        every cell of a sequence once, the step's own cells included. weights: bytes of all weights
        of a token. cell: bytes of K and V of a cell in all layers."""
        before = self.n_depth + self.n_prompt_tokens
        return weights + cell * (before + self.width * (self.n_gen + 1) / 2)

    @property
    def name(self) -> str:
        """`pp512`, `tg128@d4096`, `pp512+tg128`: the names that compare-llama-bench.py prints."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        at = f"@d{self.n_depth}" if self.n_depth else ""
        at += f"@{'s' if self.shared else 'b'}{self.n_seqs}" if self.n_seqs else ""
        return "+".join(parts) + at

    def __str__(self) -> str:
        return self.name


def parse(name: str | Workload) -> Workload:
    """`tg128@d4096` (or `tg128 @ d4096`, as llama-bench prints it) -> Workload(0, 128, 4096).

    Raises UsageError for text that is no test name.
    """
    if isinstance(name, Workload):
        return name
    found = _NAME.fullmatch(str(name).strip())
    if found is not None:
        pp, tg, depth, n_seqs = (int(found[key] or 0) for key in ("pp", "tg", "depth", "n_seqs"))
        both = found["pp"] is not None and found["tg"] is not None
        none_is_zero = all(found[key] is None or int(found[key]) for key in ("pp", "tg", "n_seqs"))
        if pp + tg and none_is_zero and both == bool(found["plus"]):
            return Workload(pp, tg, depth, n_seqs, found["kind"] == "s")
    meant = _meant(str(name))
    raise UsageError(
        f"test {str(name)!r} does not exist; {f'did you mean {meant}? ' if meant else ''}"
        "name it as llama-bench does: "
        "pp512, tg128, tg128@d4096 or pp512+tg128; of 8 sequences pp512+tg128@b8"
    )


def _meant(text: str) -> str | None:
    """The test with the numbers of `text` whose name is most like it."""
    first, second, third = [*re.findall(r"[1-9]\d*", text, re.ASCII), "", "", ""][:3]
    both = f"pp{first}+tg{second}"
    forms = [
        *(
            f"{kind}{first}{at}"
            for at in ("", f"@d{second}", f"@b{second}")
            for kind in ("pp", "tg")
        ),
        *(f"{both}{at}" for at in ("", f"@d{third}", f"@b{third}")),
    ]
    return nearest(text, [f for f in forms if _NAME.fullmatch(f)])


def parse_tests(tests: str | Workload | Sequence[str | Workload]) -> list[Workload]:
    """`"pp512,tg32"` or a sequence of names -> workloads; raises UsageError without any name, and
    for what is neither."""
    names: Sequence[Any]
    if isinstance(tests, Workload):
        names = [tests]
    elif isinstance(tests, str):
        names = [part for part in tests.split(",") if part.strip()]
    elif isinstance(tests, Iterable):
        names = list(tests)
    else:
        raise UsageError(f"{tests!r} names no test; give 'tg128', 'pp512,tg128' or a list of names")
    workloads = list(dict.fromkeys(parse(name) for name in names))
    if not workloads:
        raise UsageError("no test was named; name at least one, such as tg32")
    return workloads


# what tests need of an engine ---------------------------------------------------------------------


def wide_enough(workloads: Sequence[Workload], config: Config) -> Config:
    """The configuration with at least as many sequences as the widest test."""
    return replace(config, n_seqs=max(config.n_seqs, *(w.width for w in workloads)))


def long_enough(
    workloads: Sequence[Workload], toggles: Toggles, config: EngineConfig
) -> EngineConfig:
    """The configuration with at least the context of the longest test. A context that is not the
    default was asked for: then raises UsageError, as `check_fits` does, in place of a longer one.
    """
    if config.n_ctx != EngineConfig.n_ctx:
        for workload in workloads:
            check_fits(toggles, config, workload)
    regions = n_regions(toggles, config)
    return replace(config, n_ctx=max(config.n_ctx, *(w.n_ctx(regions) for w in workloads)))


def check_fits(toggles: Toggles, config: EngineConfig, workload: Workload) -> None:
    """Raises UsageError where the test needs a longer context, or more sequences, than an engine
    with these toggles and this configuration has."""
    regions = n_regions(toggles, config)
    needed = workload.n_ctx(regions)
    if needed > config.n_ctx and regions == 1:
        raise UsageError(
            f"test {workload.name} needs {needed} KV cells, but the engine has "
            f"n_ctx={config.n_ctx}; load it with n_ctx={needed} or more"
        )
    if needed > regions * (config.n_ctx // regions):
        raise UsageError(
            f"test {workload.name} needs {workload.n_cells_seq} KV cells of a sequence, but each "
            f"of {regions} (n_seqs) has {config.n_ctx // regions} of n_ctx={config.n_ctx}; load it "
            f"with n_ctx={needed} or more, or with fewer sequences"
        )
    if workload.n_seqs > config.n_seqs:
        raise UsageError(
            f"test {workload.name} needs {workload.n_seqs} sequences, but the engine has "
            f"n_seqs={config.n_seqs}; load it with n_seqs={workload.n_seqs} or more"
        )


# the tokens and the steps of a test ---------------------------------------------------------------


class Tokens(NamedTuple):
    """The token ids of one repetition, drawn before the clock starts. With several sequences the
    prompts follow each other, and `gen` holds step after step."""

    depth: list[int]
    prompt: list[int]
    gen: list[int]


def draw_tokens(
    workload: Workload, n_vocab: int, seed: int, repetition: int = 0, bos: int | None = None
) -> Tokens:
    """Random tokens: uniform ids, the same for the same test, seed and repetition.

    BOS is the first token of an empty cache and the first token of the generation, as in
    llama-bench. With several sequences BOS begins each prompt. Raises UsageError for a negative
    seed.
    """
    if seed < 0:
        raise UsageError(f"seed={seed} must be 0 or more")
    several = workload[3:] if workload.n_seqs else ()
    rng = np.random.default_rng([seed, *workload[:3], *several, repetition])
    width = workload.width
    depth, prompt, gen = (
        rng.integers(0, n_vocab, n).tolist()
        for n in (workload.n_depth, workload.n_prompt_tokens, width * workload.n_gen)
    )
    if bos is not None and workload.n_seqs:
        starts = range(0, len(prompt), max(1, workload.n_prompt))
        for i in starts:
            prompt[i] = bos
    elif bos is not None:
        for ids in (depth or prompt, gen):
            ids[:1] = [bos] * len(ids[:1])
    return Tokens(depth, prompt, gen)


def prompt_steps(workload: Workload, prompt: Sequence[int], n_ubatch: int) -> list[Work]:
    """The prompts of all sequences, one after the other, in full ubatches. As in
    llama-batched-bench only the very last token has logits."""
    ends: list[int] = [*range(0, len(prompt), max(1, workload.n_prompt)), len(prompt)]
    steps: list[Work] = []
    for begin in range(0, len(prompt), n_ubatch):
        end, work = min(begin + n_ubatch, len(prompt)), list[Entry]()
        for sequence, (first, last) in enumerate(itertools.pairwise(ends)):
            part = prompt[max(first, begin) : min(last, end)]
            if part:
                work.append((sequence, part, "last" if end == last == len(prompt) else "none"))
        steps.append(work)
    return steps


def gen_steps(workload: Workload, gen: Sequence[int], n_ubatch: int) -> list[list[Work]]:
    """For each generated token, the steps that compute it for all sequences: one step, or more
    where n_ubatch is below the number of sequences."""
    width, every = workload.width, list[list[Work]]()
    for begin in range(0, len(gen), width):
        row: Work = [(i, gen[begin + i : begin + i + 1], "last") for i in range(width)]
        every.append([row[i : i + n_ubatch] for i in range(0, width, n_ubatch)])
    return every


def share_prompt(workload: Workload, cache: KVCache) -> None:
    """Gives every sequence the cells of the first sequence, where they share a prompt."""
    for sequence in range(1, workload.n_seqs if workload.shared and workload.n_prompt else 1):
        cache.copy(0, sequence)


def acts(workload: Workload, n_ubatch: int) -> list[Act]:
    """All acts of a repetition on an empty cache; its token ids do not matter."""
    if workload.n_seqs:
        return [
            *prompt_steps(workload, range(workload.n_prompt_tokens), n_ubatch),
            lambda cache: share_prompt(workload, cache),
            *itertools.chain(
                *gen_steps(workload, range(workload.width * workload.n_gen), n_ubatch)
            ),
        ]
    found = list[Act]()
    for n in (workload.n_depth, workload.n_prompt):
        for begin in range(0, n, n_ubatch):
            end = min(begin + n_ubatch, n)
            found.append([(0, range(begin, end), "last" if end == n else "none")])
    return found + [[(0, (0,), "last")]] * workload.n_gen


def make_ready(engines: Sequence[Engine], workloads: Sequence[Workload]) -> None:
    """Compiles the kernels of all workloads on all engines, several at a time."""
    ready.make_ready(
        launched
        for engine in engines
        for workload in workloads
        for launched in engine.unready(
            engine.rehearsal.from_empty(acts(workload, engine.config.n_ubatch))
        )
    )


# one repetition -----------------------------------------------------------------------------------


class Sample(NamedTuple):
    """One repetition, with a time for every timed token.

    ns_total: from the first call until the last logits are on the host.
    token_ns, token_n: int64 (n,); entry i took token_ns[i] ns and has token_n[i] tokens. A prompt
        is one entry (of n_prompt tokens); every generated token is one entry. The sum of token_ns
        is ns_total.
    last_logits: float32 (n_vocab,), of the last token, an own copy.
    """

    ns_total: int
    token_ns: np.ndarray
    token_n: np.ndarray
    last_logits: np.ndarray

    @property
    def tokens_per_second(self) -> float:
        return float(self.token_n.sum()) * 1e9 / self.ns_total


def bos_token(opened: Engine | Loaded) -> int | None:
    """The id of BOS; None where the model's file names no BOS or says to leave it out.

    The id is read from the metadata, since a random-weight model may lack a tokenizer.
    """
    get = opened.model.file.get
    bos = get("tokenizer.ggml.bos_token_id", int, -1)
    wanted = get("tokenizer.ggml.add_bos_token", bool, True)
    return bos if wanted and 0 <= bos < opened.model.n_vocab else None


def check_untraced(engine: Engine) -> None:
    """Raises UsageError while the engine is traced, because a traced run is slower."""
    if engine.recorder is not None:
        raise UsageError(
            "the engine has a recorder, and a traced run is slower than the engine is; "
            "set engine.recorder = None before timing it"
        )


def take_sample(
    engine: Engine, workload: Workload, tokens: Tokens, left: Bar = HIDDEN, warming: bool = False
) -> Sample:
    """One timed repetition on `engine`. The cache is emptied first, and stays filled at the end.

    left: the progress bar, updated by n_cells in all. The bar may be drawn between two generated
        tokens: the clock is stopped then, and the device is idle. It is not drawn while a prompt is
        timed, since the device computes from the first ubatch to the last.
    warming: the bar is drawn during a prompt, too.

    Filling to n_depth is not timed. Neither is the wait at the end for a token that was launched
    ahead and is not needed; without the wait this token would delay the next repetition. Young
    garbage is collected before the clock starts, and the collector is off while it runs, as in
    Python's timeit: programs have no cycles to collect, and a full collection would look at all
    that the process has imported. Raises UsageError where the test does not fit the context or the
    engine is traced.
    """
    check_fits(engine.toggles, engine.config, workload)
    check_untraced(engine)
    take = _take_together if workload.n_seqs else _take_alone
    with nothing_collected():
        sample = take(engine, workload, tokens, left, warming)
        engine.synchronize()
    return sample


def _take_alone(
    engine: Engine, workload: Workload, tokens: Tokens, left: Bar, warming: bool
) -> Sample:
    """`take_sample` for one sequence: an entry for the prompt, and an entry for each token."""
    engine.reset()
    if tokens.depth:
        engine.prefill(tokens.depth, left=left)
    stamps = [0] * (1 + bool(tokens.prompt) + len(tokens.gen))
    step, i = engine.step, 0
    untold, due_ns, stood_ns = 0, left.due_ns, 0
    logits = None
    gc.collect(1)  # a full collection takes tens of ms, longer than some repetitions
    stamps[0] = now_ns()
    if tokens.prompt:
        logits = engine.prefill(tokens.prompt, left=left if warming else HIDDEN)
        i = 1
        stamps[1] = now_ns()
        untold = 0 if warming else workload.n_prompt
    for token in tokens.gen:
        logits = step((token,))
        i += 1
        now = now_ns()
        stamps[i] = now - stood_ns
        untold += 1
        if now >= due_ns:
            left.update(untold)
            untold, due_ns = 0, left.due_ns
            stood_ns = now_ns() - stamps[i]
    left.update(untold)
    return _sample(workload, tokens, stamps, logits, engine.model.n_vocab)


def _sample(
    workload: Workload, tokens: Tokens, stamps: list[int], logits: np.ndarray | None, n_vocab: int
) -> Sample:
    """stamps: before the first step, and after each entry, ns. logits: float32, the last ones."""
    width, n_prompt = workload.width, len(tokens.prompt)
    counts = [n_prompt] * bool(n_prompt) + [width] * (len(tokens.gen) // width)
    return Sample(
        stamps[-1] - stamps[0],
        np.diff(np.array(stamps, np.int64)),
        np.array(counts, np.int64),
        np.array(logits, np.float32).reshape(-1, n_vocab)[-1],
    )


def _of_each(engine: Engine, gen: list[list[Work]]) -> Iterator[np.ndarray]:
    """The last logits of each token of all sequences, as they arrive. Token ids are known
    beforehand. So a step is submitted before the previous step has ended, where the engine can have
    two."""
    under_way: deque[tuple[Pending, bool]] = deque()  # bool: the last step of a token
    most = 2 if engine.issuer.is_ahead else 1
    for works in gen:
        for work in works:
            under_way.append((engine.submit(work), work is works[-1]))
            if len(under_way) < most:
                continue
            pending, is_last = under_way.popleft()
            logits = pending.wait()
            if is_last:
                yield logits
    yield from (pending.wait() for pending, is_last in under_way if is_last)


def _take_together(
    engine: Engine, workload: Workload, tokens: Tokens, left: Bar, warming: bool
) -> Sample:
    """`take_sample` for several sequences: an entry for all prompts together, and an entry for each
    generated token of all sequences."""
    n_ubatch, submit, width = engine.config.n_ubatch, engine.submit, workload.width
    prompt = prompt_steps(workload, tokens.prompt, n_ubatch)
    gen = gen_steps(workload, tokens.gen, n_ubatch)
    engine.reset()
    stamps, stood_ns, logits = list[int](), 0, np.empty((0, engine.model.n_vocab), np.float32)
    gc.collect(1)
    stamps.append(now_ns())
    with engine.ranges.scope("prompt", "prompt", len(tokens.prompt)):
        for work in prompt:
            logits = submit(work).wait()
            if warming:
                left.update(n_tokens(work))
    if prompt:
        share_prompt(workload, engine.cache)
        stamps.append(now_ns())
    untold = 0 if warming else workload.n_prompt_tokens
    for logits in _of_each(engine, gen):  # noqa: B007, the last logits are kept
        now = now_ns()
        stamps.append(now - stood_ns)
        untold += width
        if now >= left.due_ns:
            left.update(untold)
            untold, stood_ns = 0, now_ns() - stamps[-1]
    left.update(untold)
    return _sample(workload, tokens, stamps, logits, engine.model.n_vocab)


WARM_MIN, WARM_MAX, WARM_SECONDS = 2, 8, 30.0
WARM_GAIN, WARM_GAIN_OF_ONE = 0.05, 0.2  # of all engines together, and of any one


class WarmUp(NamedTuple):
    """The result of a warm-up: how many rounds were run, and whether the times settled."""

    rounds: int
    stable: bool


def warm_up(
    engines: Sequence[Engine], workload: Workload, seed: int, bos: int | None, once: bool = False
) -> WarmUp:
    """Runs the whole test on one engine after the other, without samples, until the times settle.

    The rule has at least 2 rounds. The times have settled when no engine beats its own best round
    so far by more than 20 %, and the best rounds of all engines together gain no more than 5 %.
    (Noise makes rounds slower, warming up makes them faster. Of many engines one is often quicker
    than before by noise alone.) The warm-up gives up after 8 rounds or 30 s. once: exactly one
    round.
    """
    make_ready(engines, [workload])
    start, best = now_ns(), [0] * len(engines)
    cells = workload.n_cells * len(engines)  # of a round
    with bar(f"{workload} warm-up", cells * (1 if once else WARM_MIN), "tokens") as left:
        for n in range(1, WARM_MAX + 1):
            tokens = draw_tokens(workload, engines[0].model.n_vocab, seed, _WARM_UP + n, bos)
            left.total = max(left.total or 0, n * cells)
            samples = (take_sample(engine, workload, tokens, left, True) for engine in engines)
            times = [sample.ns_total for sample in samples]
            before, best = best, [min(t, b or t) for t, b in zip(times, best, strict=True)]
            gains = [1 - now / b if b else 1.0 for now, b in zip(best, before, strict=True)]
            gain = 1 - sum(best) / sum(before) if n > 1 else 1.0
            settled = gain <= WARM_GAIN and max(gains) <= WARM_GAIN_OF_ONE
            stable = n >= WARM_MIN and settled
            tired = n >= WARM_MIN and now_ns() - start > WARM_SECONDS * 1e9
            if stable or tired or once:
                break
    return WarmUp(n, stable)


_WARM_UP = 1 << 30  # first repetition number of a warm-up: its tokens differ from timed tokens
