"""The engine: tokens in, tokens out. `Engine.step` reads as a sentence; the rooms do the work."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.backend.base import Backend
from workbench.common.errors import UsageError
from workbench.common.paths import path_of
from workbench.common.progress import HIDDEN, Bar, bar
from workbench.config import EngineConfig, Toggles, asked_toggles
from workbench.engine import exclusive, ready
from workbench.engine.batch import Batches, Outputs, Work, check_prompt, step_shape
from workbench.engine.bound import BoundPrograms
from workbench.engine.cache.growth import growth_of
from workbench.engine.cache.kv_cache import KVCache, n_regions
from workbench.engine.choose import Variants, Wanted, as_preset, choose, resolve
from workbench.engine.exclusive import STATE, USERS
from workbench.engine.finite import require_finite
from workbench.engine.generation import CONTEXT_FULL, END_OF_TEXT, INTERRUPTED, Generation
from workbench.engine.load import Fit, Loaded, config_of
from workbench.engine.look.nvtx_ranges import ranges_of
from workbench.engine.look.phases import PhaseCounts, PhaseTimes, per_step
from workbench.engine.look.ranged import chosen
from workbench.engine.look.stamps import Stamp, Stamps
from workbench.engine.look.watch import PLAIN, Watch
from workbench.engine.memory import Residents
from workbench.engine.opened import Opened
from workbench.engine.programs import programs_of, reuse_of
from workbench.engine.rehearsal import Rehearsal
from workbench.engine.slots import draws
from workbench.engine.slots.padding import sizes_of
from workbench.engine.step import Pending, Steps, issuer_of
from workbench.engine.step_programs import StepPrograms
from workbench.graph.ir import Node, StepShape
from workbench.model.decoder import Model
from workbench.model.sampler import Sampler, Sampling
from workbench.program.commands import Program
from workbench.trace.spans import HOST_LANE, Recorder, now_ns

if TYPE_CHECKING:
    from workbench.model.tokenizer.tokenizer import Tokenizer


MADE_READY = 1024  # for how many tokens kernels are compiled before the first of them
CLOSED = "a closed engine"


class Engine:
    """Sequences of one model under one set of toggles.

    `submit` takes the next tokens of several sequences. `step`, `prefill` and `generate` are for
    one sequence, number 0 unless told otherwise. `cache` copies, removes, shifts and keeps
    sequences. `variant` makes another engine on the same weights. An engine is not for use from
    several threads at once. `load` opens one, and `with` or `close` closes it.

    loaded: the model on its backends, which several engines share.
    config: everything but the toggles.
    wanted: the toggles, as `load` takes them.
    """

    period = 1  # after how many steps without a wait the rings begin again

    def __init__(self, loaded: Loaded, config: EngineConfig, wanted: Wanted):
        """Use `Engine.load`. Raises DeviceError where the device cannot honour a toggle."""
        exclusive.check(loaded)
        have = choose(wanted, loaded)
        self.config, self.toggles, self._ordering = config, have.toggles, have.ordering
        self.settled = have.settled  # the toggles with a value for each `auto` that is no step's
        self.wanted, self.preset, self.chosen = as_preset(wanted), have.preset, have.words
        self.ranges = ranges_of(config.nvtx)
        self._spent = self.ranges.clock(self._count, lambda: self.n_steps)
        self._counts = PhaseCounts()
        self.period = self._ordering.period
        self._loaded: Loaded | None = loaded.share()
        model, reuse, regions = (
            loaded.model,
            reuse_of(have.toggles),
            n_regions(have.toggles, config),
        )
        growth = growth_of(have.toggles, config, regions)
        self.cache = KVCache(
            config.n_ctx, growth.pad, config.n_seqs, reuse.in_a_row, regions, growth,
            model.hparams.window,
        )  # fmt: skip
        batches = Batches(
            self.cache, model.n_vocab, config.n_ubatch, self._spent,
            partial(reuse.values, model.n_layer), sizes_of(have.toggles),
        )  # fmt: skip
        self.draws = batches.draws
        self.rehearsal = Rehearsal(self.cache, batches.sizes, config.n_ubatch)
        last_tokens = draws.last_tokens(have.toggles, loaded, config.n_seqs)
        self._residents = Residents(loaded, self.cache.n_cells, last_tokens)
        self._step_programs = StepPrograms(loaded, have, self._residents, self._spent, config)
        self.issuer = issuer_of(have, loaded, self._counts)
        self.bound = BoundPrograms(
            loaded, self._residents, self.issuer, lambda: self._made, self._forget
        )
        programs = programs_of(have.toggles, self.bound.build, self._spent)
        self.steps = Steps(self.cache, batches, programs, self.issuer)
        self.look(None, PLAIN)
        try:
            self.bound.reserve(self.cache, config.n_ubatch, self.period)
        except BaseException:
            self.close()
            raise
        self._counts.clear()  # the programs that memory was reserved for are no step's
        OPENED.add(self)

    @classmethod
    @exclusive.door
    def load(
        cls,
        path: str | Path,
        *,
        toggles: Wanted = None,
        config: EngineConfig | None = None,
        variants: Variants = (),
        check: Callable[[Loaded], None] | None = None,
        fit: Fit | None = None,
        **fields: Any,
    ) -> Engine:
        """Opens a GGUF file on a device. Returns the engine, which the caller closes (`with`).

        path: the file (of a file in parts, the first), or `auto`: a model of a real shape on a
            GPU, a tiny model on any other device. Its weights are random, and it is written where
            it is not there yet (`engine/load.py`).
        toggles: Toggles, or a preset, also by name. None is `best`: what won on devices of this
            kind. A mapping, as `{"sync": "packed"}`, or a text, as `sync=packed pdl=on`, changes
            `best`; a preset's name before the changes changes that preset.
        config, fields: an EngineConfig, or its fields (device, n_ctx, ...). n_seqs is 1 unless it
            is given.
        variants: toggles that variants will have, or a function from the engine's own to these.
        check: see `Loaded`.
        fit: makes the configuration follow from the toggles.

        Toggles, variants and `check` may refuse. They do so before any weight is read. Raises
        ModelFileError for a file that cannot be believed, UsageError for impossible settings, and
        DeviceError for a device that is not there or cannot do what a toggle asks.
        """
        exclusive.check()
        path_of(path, "the path of a GGUF file, or 'auto'")
        if config is None:
            config = config_of(fields)
        elif fields:
            raise UsageError("give either config or its fields, not both")

        def refuse(loaded: Loaded) -> None:
            own = resolve(toggles, loaded)
            if fit is not None:
                loaded.config = fit(own, loaded.config)
            ranges_of(loaded.config.nvtx)
            others = variants(own) if callable(variants) else variants
            for wanted in (toggles, *others):
                choose(wanted, loaded)
            if check is not None:
                check(loaded)

        loaded = Loaded(path, config, refuse).share()
        try:
            return cls(loaded, loaded.config, toggles)
        finally:
            loaded.release()

    def variant(self, toggles: Wanted) -> Engine:
        """An engine with other toggles on the same backends and weights; its cache is its own.

        toggles: as `load` takes them. Changes (`sync=packed`, or a mapping) are of this engine's
            own toggles. None: `best`.

        Raises UsageError and DeviceError as `load` does.
        """
        return Engine(self._open, self.config, self._asked(toggles))

    def resolve(self, wanted: Wanted) -> Toggles:
        """The toggles that `variant(wanted)` would have. Raises UsageError and DeviceError as
        `variant` does, and makes nothing."""
        return choose(self._asked(wanted), self._open).toggles

    def _asked(self, wanted: Wanted) -> Wanted:
        """`wanted`, with changes made to this engine's preset, or to its toggles."""
        return None if wanted is None else asked_toggles(wanted, self.wanted or self.toggles)

    # the step -----------------------------------------------------------------------------------

    def submit(self, work: Work, draws: bool = False) -> Pending:
        """Issues a step: up to n_ubatch tokens of one or more sequences.

        work: for each sequence its number, its next token ids, and which of their logits are wanted
            (`last`, `all` or `none`).
        draws: the results are tokens that the device draws (`engine/slots/draws.py`).

        Returns a Pending, whose `wait` returns the logits, float32 (n_outputs, n_vocab).
        A step that is still under way is waited for first, because the next step writes the inputs
        and the result memory that it uses. Raises UsageError for ids outside the vocabulary, a
        sequence that does not exist, a full context, and while another thread measures; then
        nothing has changed.
        """
        if STATE.measurement is not None:
            exclusive.check(self._loaded)
        if draws and not self.can_draw:
            raise UsageError("this engine's device draws no tokens; use sampling=device")
        step = self.steps.next(work, draws)  # made ahead, or its batch and its program
        pending = self.issuer.run(step, self.steps.look_ahead)  # eager, replayed or gated
        self.steps.store(step, self._counts)  # the cells are the sequences' now
        return pending

    def step(
        self, tokens: Sequence[int], outputs: Outputs = "last", sequence: int = 0
    ) -> np.ndarray:
        """Computes up to n_ubatch tokens of one sequence. outputs and sequence are as in `prefill`.
        Returns their logits, float32 (n_outputs, n_vocab), on the host. With step_wait=outputs a
        step without outputs may still be under way. Raises UsageError as `submit` does.
        """
        thread = get_ident()
        if thread in USERS:
            return self.submit([(sequence, tokens, outputs)]).wait()
        try:  # what `exclusive.door` does, without its call: the device stands still meanwhile
            USERS[thread] = "Engine.step"
            return self.submit([(sequence, tokens, outputs)]).wait()
        finally:
            USERS.pop(thread, None)

    # who looks on -------------------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder | None:
        """What collects the spans of steps; None for nothing."""
        return self.issuer.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.look(recorder, self.untraced)

    def look(self, recorder: Recorder | None, untraced: Watch) -> None:
        """Chooses who watches from the next step on. untraced: who watches steps that are not
        traced."""
        self.untraced = untraced
        self.steps.forget_coming()
        watch_of = chosen(self.ranges, recorder, untraced, self._coming)
        self.issuer.look(recorder, watch_of, recorder is not None or untraced.alone)

    def _coming(self) -> tuple[int, int]:
        """The number of the step that comes, and the cells that are in use before it."""
        return self.n_steps + len(self.issuer.under_way), self.cache.n_used

    @contextmanager
    def stamped(self) -> Iterator[list[Stamp]]:
        """Stamps the untraced steps of the body. At its end the list has for each step, in ns, when
        the first kernel began and the last kernel ended: by the device's clock, set to the host's
        (`Stamps`)."""
        stamps = Stamps(self.bound.stamped)
        self.look(self.recorder, stamps)
        try:
            yield stamps.found
            self.issuer.end_all_but(0)
        finally:
            self.look(self.recorder, PLAIN)
            self.synchronize()
            stamps.find()

    # prompts and tokens -------------------------------------------------------------------------

    def make_ready(self, shapes: Iterable[StepShape]) -> None:
        """Compiles what steps of these shapes launch, and says so where it took long."""
        ready.make_ready(self.unready(shapes))

    def unready(self, shapes: Iterable[StepShape]) -> list[tuple[Backend, Node]]:
        """What steps of these shapes launch and no earlier call was asked for, for
        `ready.make_ready`. Nothing where steps are traced, because a trace shows what a first step
        does."""
        return self.bound.unready(shapes) if self.recorder is None else []

    @exclusive.door
    def prefill(
        self,
        tokens: Sequence[int],
        outputs: Outputs = "last",
        left: Bar = HIDDEN,
        sequence: int = 0,
    ) -> np.ndarray:
        """Computes a prompt in ubatches. Returns the logits asked for, as `step` does.

        tokens: token ids, as many as the context has room for.
        outputs: the tokens whose logits are wanted: `last`, `all` or `none`.
        sequence: the number of the sequence that they belong to.
        left: told of every ubatch. Before it writes to a terminal, the host waits for the device.

        Raises UsageError, before anything is computed, for a prompt that does not fit the context.
        """
        check_prompt(tokens, self.model.n_vocab, self.cache.room)
        self.cache.check_steps(sequence, len(tokens), self.config.n_ubatch)
        parts = self._ubatches(tokens)
        self.make_ready(self.rehearsal.alone(sequence, sizes_of_steps(parts, outputs)))
        rows = []
        with self.ranges.scope("prompt", "prompt", len(tokens)):
            for part in parts:
                last = part is parts[-1]
                wanted: Outputs = "none" if outputs == "last" and not last else outputs
                rows.append(self.step(part, wanted, sequence))
                if not last and now_ns() >= left.due_ns:
                    self.synchronize()  # a step without outputs may still be under way
                left.update(len(part))
        return rows[-1] if outputs == "last" else np.concatenate(rows)

    def _ubatches(self, ids: Sequence[int]) -> list[Sequence[int]]:
        n = self.config.n_ubatch
        return [ids[i : i + n] for i in range(0, len(ids), n)]

    @exclusive.door
    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        max_tokens: int | None = 32,
        sampling: Sampling | None = None,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
        stop_at_eos: bool = True,
    ) -> Generation:
        """Continues `prompt` (tokenised by the model's own tokenizer) or `tokens` from here.
        Returns a Generation: token ids, text, times in us, and why it ended.

        sampling: how a token is drawn from logits; None: the most likely token.
        seed: of the draws.
        on_text: given each piece of text as soon as it is known.
        max_tokens: how many tokens at most; None: any number.
        stop_at_eos: an end-of-generation token ends the generation.

        Generation also ends when the context is full, and at Ctrl-C, which keeps the tokens made so
        far. Logits that are not finite raise ModelFileError or WorkbenchError, which names the
        weight to blame. Raises UsageError for both or neither of prompt and tokens, and for a
        prompt that does not fit the context.
        """
        from workbench.model.tokenizer.tokenizer import StreamDecoder

        if (prompt is None) == (tokens is None):
            raise UsageError("give either a prompt or token ids")
        if prompt is not None and not isinstance(prompt, str):
            kind = type(prompt).__name__
            raise UsageError(f"{kind} is no text; give token ids as tokens=[1, 2, 3]")
        if isinstance(tokens, str) or (tokens is not None and not isinstance(tokens, Iterable)):
            raise UsageError(f"tokens={tokens!r} is no list of ids; give a text as prompt")
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens={max_tokens} must be 0 or more")
        ids = self.tokenizer.encode(prompt) if prompt is not None else list(tokens or ())
        as_text = prompt is not None or on_text is not None
        stops = self.tokenizer.eog_ids if stop_at_eos and as_text else frozenset()
        decoder = StreamDecoder(self.tokenizer) if as_text else None
        sampler = Sampler(sampling or Sampling(), seed)
        room = self.cache.left() - len(ids) + 1  # the last token needs no cell
        most = room + 1 if max_tokens is None else max_tokens
        made, pieces = Generation(), []

        def say(piece: str) -> None:
            pieces.append(piece)
            if on_text is not None and piece:
                on_text(piece)

        try:
            if ids:
                steps = sizes_of_steps(self._ubatches(ids), "last")
                steps += [(1, 1)] * max(0, min(most, room, MADE_READY) - 1)
                self.make_ready(self.rehearsal.alone(0, steps))
            with bar("prompt", len(ids), "tokens") as left:
                start = now_ns()
                logits = self.prefill(ids, left=left)
                made.prefill_us = (now_ns() - start) / 1e3
            count = bar("generating", min(most, room), "tokens")  # or the text shows as it comes
            with nullcontext(HIDDEN) if on_text else count as left:
                while len(made.tokens) < most:
                    require_finite(self.model, logits[-1], self.cache.length() - 1)
                    token = sampler(logits[-1])
                    if token in stops:
                        made.stopped = END_OF_TEXT
                        break
                    made.tokens.append(token)
                    if decoder is not None:
                        say(decoder.feed(token))
                    if len(made.tokens) == most:
                        break
                    if not self.cache.left():
                        made.stopped = CONTEXT_FULL
                        break
                    start = now_ns()
                    logits = self.step([token])
                    made.token_us.append((now_ns() - start) / 1e3)
                    left.update()
        except KeyboardInterrupt:
            made.stopped = INTERRUPTED
            self.synchronize()  # the step cut short still reads staging memory
        if decoder is not None:
            say(decoder.flush())
            made.text = "".join(pieces)
        return made

    def synchronize(self) -> None:
        """Waits for everything queued on every backend."""
        exclusive.check_others(self._loaded)
        self.issuer.release()
        for backend in self._open.backends:
            backend.synchronize()

    def reset(self) -> None:
        """Forgets every sequence."""
        self.cache.clear()

    # programs, counters, memory -----------------------------------------------------------------

    def program(
        self, n_tokens: int = 1, n_outputs: int = 1, n_past: int = 0, n_seqs: int = 1
    ) -> Program:
        """The program that a step of this shape would issue: n_tokens of n_seqs sequences, each
        with n_past tokens before, and n_outputs rows of logits. Raises UsageError where no step has
        this shape."""
        shape = step_shape(
            n_tokens, n_outputs, n_past, self.config.n_ubatch, self.cache.growth, self.cache.room,
            n_seqs,
        )  # fmt: skip
        return self._made.of(shape, cell=n_past)

    def programs(self, n_prompt: int, n_decoded: int = 0, laps: int = 1) -> list[Program]:
        """The programs of a prompt and n_decoded single tokens after it, on an empty cache; all of
        it `laps` times. Buffers of one name are one Buffer."""
        return self._made.several(n_prompt, n_decoded, laps)

    def programs_of(self, shapes: Iterable[StepShape]) -> Iterator[Program]:
        """The programs of steps of these shapes, one after the other. Where steps of a shape may
        follow each other without a wait, a program for each turn of the rings."""
        for shape in shapes:
            program = self._made.of(shape)
            yield program
            for turn in range(1, 1 if program.waited else self.period):
                yield self._made.of(shape, turn)

    def cycle(self, n_prompt: int, n_decoded: int = 0) -> list[Program]:
        """The programs of a prompt and n_decoded tokens after it, as a checker repeats them: the
        host waits at the end. Raises UsageError for no tokens, and for too many."""
        return self._made.cycle(n_prompt, n_decoded)

    @property
    def _made(self) -> StepPrograms:
        assert self._open is not None  # raises for a closed engine
        return self._step_programs

    def _forget(self) -> None:
        """Drops everything that holds addresses of the workspace, which are about to change."""
        self.steps.forget_coming()
        self.steps.programs.clear()
        self.issuer.forget()

    def _count(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Counts host time of a phase, and shows it in a trace, with the number of the step."""
        self._counts.add(phase, end_ns - start_ns)
        if self.recorder is not None:
            self.recorder.add(phase, "build", HOST_LANE, start_ns, end_ns, step=self.n_steps)

    @property
    def _open(self) -> Loaded:
        if self._loaded is None:
            raise UsageError("this engine is closed; load the model again")
        return self._loaded

    @property
    def model(self) -> Model:
        """The model: what its file says of it, and its weights."""
        return self._open.model

    @property
    def device(self) -> str:
        """The device that the engine was opened on, as `cuda` or `embedded`: never `auto`."""
        return self._open.device

    @property
    def device_reason(self) -> str:
        """Why it is this device: as asked for, or what `auto` found."""
        return self._open.device_reason

    @property
    def backend(self) -> Backend:
        """The backend that computes the last layers."""
        return self._open.backend

    @property
    def backends(self) -> list[Backend]:
        """The host's backend, and one for each device."""
        return self._open.backends

    @property
    def sync_mode(self) -> str:
        """The sync mode that programs are lowered with: never `auto`."""
        return self._ordering.sync

    @property
    def can_draw(self) -> bool:
        """Whether the device draws tokens (sampling=device)."""
        return self._residents.last_tokens is not None

    @property
    def n_steps(self) -> int:
        """Steps that have ended."""
        return self.issuer.n_steps

    @property
    def n_past(self) -> int:
        """Cells of the cache that sequences own."""
        return self.cache.n_used

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's own tokenizer. Raises ModelFileError where the file describes none."""
        return self._open.tokenizer

    @property
    def counters(self) -> dict[str, int]:
        """Counts of steps, of programs (built, reused, refused by an input, on one stream because
        branches failed their check), of phases (n and ns), and of plans (`Plans.counts`)."""
        programs, counts = self.steps.programs, self._counts
        return {
            "steps": self.n_steps,
            "untraced_steps": self.issuer.n_untraced,
            "programs_built": programs.built,
            "programs_reused": programs.reused,
            "programs_refused": programs.n_refused,
            "programs_unforked": self._step_programs.n_unforked,
            **{f"{phase}_ns": ns for phase, ns in counts.ns.items()},
            **{f"{phase}_n": n for phase, n in counts.n.items()},
            **self.issuer.plans.counts,
        }

    def phases(self, since: dict[str, int] | None = None) -> PhaseTimes:
        """The host's time for each phase, in us per step. since: `counters` of an earlier moment;
        only later steps count then."""
        return per_step(self.counters, since)

    def close(self) -> None:
        """Gives memory back, and with the last engine of a model its backends. A second call does
        nothing."""
        if self._loaded is None:
            return
        exclusive.check_others(self._loaded)
        loaded, self._loaded = self._loaded, None
        self.issuer.fail()
        self.issuer.release()
        for backend in loaded.backends:
            backend.synchronize()
        self._forget()
        self.issuer.free()
        self.bound.free()
        loaded.release()
        OPENED.remove(self)

    def __repr__(self) -> str:
        """Two lines: the model and the device; the toggles, the sync mode, the cells in use."""
        if self._loaded is None:
            return f"<Engine: {CLOSED}>"
        model, device = self._about()
        return f"<Engine: {model}; {device}\n {self.chosen}; {self._used()}>"

    def _repr_html_(self) -> str:
        """As `repr`, for a notebook, with the table of toggles."""
        if self._loaded is None:
            return f"<p>{CLOSED}</p>"
        lines = [*self._about(), f"{self.preset}; {self._used()}"]
        return f"<p>{'<br>'.join(map(html.escape, lines))}</p>{self.toggles._repr_html_()}"

    def _about(self) -> tuple[str, str]:
        m, per_token = self.model, self.model.weight_bytes_per_token / 1e6
        return (
            f"{m.name} {m.quant}, {m.n_layer} layers, {per_token:,.1f} MB of weights a token",
            f"{self.backend.description} ({self.device_reason})",
        )

    def _used(self) -> str:
        return f"sync mode {self.sync_mode}; {self.n_past} of {self.config.n_ctx} cells used"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sizes_of_steps(parts: list[Sequence[int]], outputs: Outputs) -> list[tuple[int, int]]:
    """The tokens and the outputs of each step of a prompt. parts: its ubatches."""
    if outputs == "last":
        return [*[(len(part), 0) for part in parts[:-1]], (len(parts[-1]), 1)]
    return [(len(part), len(part) if outputs == "all" else 0) for part in parts]


OPENED: Opened[Engine] = Opened()
