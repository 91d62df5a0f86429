"""The engine: tokens in, tokens out. `Engine.step` reads as a sentence; the rooms do the work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.backend.base import Backend
from workbench.backend.issue import Pending, Prepared
from workbench.config import EngineConfig, StepWait, Toggles
from workbench.engine import exclusive, opened, shown
from workbench.engine.batch import Batch, Batches, Outputs, check_prompt, prompt_shapes, step_shape
from workbench.engine.exclusive import STATE
from workbench.engine.generation import Generation, continued, prefilled
from workbench.engine.kv_cache import KVCache, check_room
from workbench.engine.loaded import Loaded, config_of
from workbench.engine.memory import Residents, Workspace
from workbench.engine.reuse import POLICIES, Key, Programs
from workbench.engine.step_programs import StepPrograms
from workbench.engine.wanted import Variants, Wanted, modes_of, resolve, said
from workbench.errors import UsageError
from workbench.graph.ir import StepShape
from workbench.model.decoder import Model
from workbench.model.sampler import Sampler, Sampling
from workbench.program.commands import Buffer, Program
from workbench.progress import HIDDEN, Bar
from workbench.trace.spans import HOST_LANE, Recorder, now_ns

if TYPE_CHECKING:
    from workbench.model.tokenizer import Tokenizer


class Engine:
    """One sequence of one model under one set of toggles.

    Not for use from several threads at once. `variant` makes another engine on the same weights.
    """

    def __init__(self, loaded: Loaded, config: EngineConfig, wanted: Wanted):
        """Use `Engine.load`. Raises DeviceError where the device cannot honour a toggle."""
        exclusive.check(loaded)
        self._ordering, programmatic = modes_of(wanted, loaded)
        self.config = config
        self.toggles = toggles = resolve(wanted, loaded)
        self.preset, self.chosen = said(wanted, toggles, loaded.device, self._ordering.sync)
        self.recorder: Recorder | None = None
        self.n_steps = 0
        self._turn = 0  # of the places that steps take in turn, also those of steps that failed
        self._events: dict[str, Any] = {}
        self._stamps: list[Callable[[], tuple[int, int]]] | None = None
        self._late: list[Callable[[], None]] = []  # device spans of steps nobody has waited for
        self._ns = dict.fromkeys(
            ("graph_ns", "split_ns", "lower_ns", "prepare_ns", "batch_ns", "issue_ns", "wait_ns"), 0
        )
        self._loaded: Loaded | None = loaded.share()
        self.cache = KVCache(config.n_ctx, config.n_kv_pad)
        self._batches = Batches(self.cache, loaded.model.n_vocab, config.n_ubatch)
        self._residents = Residents(loaded, self.cache.n_cells)
        self._step_programs = StepPrograms(
            toggles, self._ordering, programmatic, self._residents, self._spent
        )
        self._programs: Programs = POLICIES[toggles.graph_reuse](self._build)
        self._workspace = Workspace(loaded.backends, self._programs.clear)
        try:
            self._residents.allocate(loaded)
            # reserve for the largest step, so that memory grows later only for many outputs
            largest = StepShape(config.n_ubatch, 1, self.cache.n_cells)
            for turn in range(self._ordering.turns):
                self._workspace.bind(self._lower(largest, turn=turn))
        except BaseException:
            self.close()
            raise
        self._ns = dict.fromkeys(self._ns, 0)
        opened.add(self)

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
        **fields: Any,
    ) -> Engine:
        """Opens a GGUF file on a device. `fields` are those of EngineConfig (device, n_ctx, ...).

        toggles: or a preset, also by name; None is `best`, what won on devices of this kind.
        variants: toggles that variants will have, or what makes them of the engine's own. What the
        device cannot honour of these and of `toggles` is refused before any weight is read, as is
        what `check` (see Loaded) refuses.
        Raises ModelFileError for a file that cannot be believed, DeviceError for a device that is
        not there or cannot do what a toggle asks, UsageError for impossible settings.
        """
        exclusive.check()
        if config is None:
            config = config_of(fields)
        elif fields:
            raise UsageError("give either config or its fields, not both")

        def refuse(opened: Loaded) -> None:
            others = variants(resolve(toggles, opened)) if callable(variants) else variants
            for wanted in (toggles, *others):
                modes_of(wanted, opened)
            if check is not None:
                check(opened)

        loaded = Loaded(path, config, refuse).share()
        try:
            return cls(loaded, loaded.config, toggles)
        finally:
            loaded.release()

    def variant(self, toggles: Wanted) -> Engine:
        """An engine with other toggles on the same backends and weights; its cache is its own."""
        return Engine(self._open, self.config, toggles)

    def resolve(self, wanted: Wanted) -> Toggles:
        """The toggles that `variant(wanted)` would have, or its refusal of them; makes nothing."""
        modes_of(wanted, self._open)
        return resolve(wanted, self._open)

    # the step -----------------------------------------------------------------------------------

    @exclusive.door
    def step(self, tokens: Sequence[int], outputs: Outputs = "last") -> np.ndarray:
        """Computes up to n_ubatch tokens; returns their logits, float32 (n_outputs, n_vocab).

        The logits are on the host when this returns; with step_wait=outputs a step without any may
        still be under way. Raises UsageError for ids outside the vocabulary, a full context, and
        while another thread measures; nothing has changed then.
        """
        if STATE.measurement is not None:
            exclusive.check(self._loaded)
        recorder = self.recorder
        if recorder is not None and recorder.wants(self.n_steps):
            return self._traced_step(recorder, tokens, outputs)
        ns, t0 = self._ns, now_ns()
        batch = self._batches.take(tokens, outputs)
        t1 = now_ns()
        program = self._programs.get(self._key(batch.shape))  # built or reused
        t2 = now_ns()
        if self._stamps is None:
            pending = program.run(batch.values)
        else:
            pending, when = program.run_stamped(batch.values)
            self._stamps.append(when)
        t3 = now_ns()
        logits, ahead_ns = self._finish(pending, batch, outputs)
        ns["batch_ns"] += t1 - t0 + ahead_ns
        ns["issue_ns"] += t3 - t2
        t4 = now_ns()
        ns["wait_ns"] += t4 - t3 - ahead_ns
        if recorder is not None:
            recorder.untraced(len(tokens), t4 - t0)
        return logits

    @contextmanager
    def stamped(self) -> Iterator[list[tuple[int, int]]]:
        """Untraced steps in the body are stamped: at its end the list has, for each, when its first
        launch on a device began (on CUDA when the stream came to it, before it was issued) and its
        last one ended. Both in ns, differences by the device's clock, set to the host's."""
        found: list[tuple[int, int]] = []
        self._stamps = []
        try:
            yield found
        finally:
            stamps, self._stamps = self._stamps, None
            self.synchronize()
            found += [when() for when in stamps]

    def _traced_step(
        self, recorder: Recorder, tokens: Sequence[int], outputs: Outputs
    ) -> np.ndarray:
        n = self.n_steps
        with recorder.span(
            f"step {n}", "step", step=n, n_tokens=len(tokens), n_past=self.cache.n_used
        ):
            t0 = now_ns()
            batch = self._batches.take(tokens, outputs)
            self._spent("batch", t0, now_ns())
            program = self._programs.get(self._key(batch.shape))
            pending, add_device_spans = program.run_traced(batch.values, recorder, n)
            t1 = now_ns()
            logits, ahead_ns = self._finish(pending, batch, outputs)
            self._spent("batch", t1, t1 + ahead_ns, n)  # this step has that time
        self._late.append(add_device_spans)
        if self._waits(batch.shape):
            late, self._late = self._late, []
            for add in late:
                add()
        return logits

    def _key(self, shape: StepShape) -> Key:
        turn, self._turn = self._turn, (self._turn + 1) % self._ordering.turns
        return Key(shape, turn)

    def _waits(self, shape: StepShape) -> bool:
        """Whether a step of this shape ends with a wait of the host."""
        return shape.n_outputs > 0 or self._ordering.step_wait == StepWait.EVERY

    def _finish(self, pending: Pending, batch: Batch, outputs: Outputs) -> tuple[np.ndarray, int]:
        """Logits of the step under way, and the ns its host spent on the next one while the device
        computed. Where the wait fails or is interrupted, the cache is as it was before the step."""
        start = now_ns()
        self.cache.store(batch.positions, batch.cells)
        try:
            if batch.shape.n_tokens == 1 and self._waits(batch.shape):
                self._batches.look_ahead(outputs)
            ahead_ns = now_ns() - start
            logits = self._logits(pending.wait(), batch.shape)
        except BaseException:
            self.cache.take_back(batch.cells)
            raise
        self.n_steps += 1
        return logits, ahead_ns

    def _logits(self, results: dict[str, np.ndarray], shape: StepShape) -> np.ndarray:
        size = (shape.n_outputs, self.model.n_vocab)
        if shape.n_outputs == 0:
            return np.empty(size, np.float32)
        (raw,) = results.values()
        return raw.view(np.float32).reshape(size)

    @exclusive.door
    def prefill(
        self, tokens: Sequence[int], outputs: Outputs = "last", left: Bar = HIDDEN
    ) -> np.ndarray:
        """Computes a prompt in ubatches; returns the logits asked for, as `step` does. left: told
        of every ubatch; before it writes, the host waits for the device.

        Raises UsageError, before anything is computed, for a prompt that does not fit the context.
        """
        check_prompt(tokens, self.model.n_vocab, self.config.n_ctx, self.n_past)
        return prefilled(self, tokens, outputs, left)

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

        on_text is given each piece of text as soon as it is known. Generation ends after
        max_tokens (None: any), at an end-of-generation token, when the context is full, or at
        Ctrl-C, which keeps the tokens made so far. Logits that are not finite raise ModelFileError
        or WorkbenchError, which names the weight to blame.
        """
        if (prompt is None) == (tokens is None):
            raise UsageError("give either a prompt or token ids")
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens={max_tokens} must be 0 or more")
        ids = self.tokenizer.encode(prompt) if prompt is not None else list(tokens or ())
        as_text = prompt is not None or on_text is not None
        sampler = Sampler(sampling or Sampling(), seed)
        return continued(self, ids, as_text, max_tokens, sampler, on_text, stop_at_eos)

    def synchronize(self) -> None:
        """Waits for everything queued on every backend."""
        exclusive.check_others(self._loaded)
        for backend in self._open.backends:
            backend.synchronize()

    def reset(self) -> None:
        """Forgets the sequence."""
        self.cache.clear()

    # what is behind -----------------------------------------------------------------------------

    def program(self, n_tokens: int = 1, n_outputs: int = 1, n_past: int = 0) -> Program:
        """The program a step of this shape would issue. Raises UsageError where no step has it."""
        return self._lower(step_shape(n_tokens, n_outputs, n_past, self.config))

    def programs(self, n_prompt: int, n_decoded: int = 0, laps: int = 1) -> list[Program]:
        """The programs that a prompt of n_prompt tokens and n_decoded single ones after it would
        issue, one after the other, on an empty cache; and again `laps` times. Buffers of one name
        are one Buffer."""
        check_room(0, n_prompt + n_decoded, self.config.n_ctx)
        shapes = prompt_shapes(n_prompt, n_decoded, self.config.n_ubatch, self.config.n_kv_pad)
        buffers, turns = dict[str, Buffer](), self._ordering.turns
        return [self._lower(s, buffers, i % turns) for i, s in enumerate(shapes * laps)]

    @property
    def turns(self) -> int:
        """After how many steps their places come round again."""
        return self._ordering.turns

    def cycle(self, n_prompt: int, n_decoded: int = 0) -> list[Program]:
        """The programs of prompt after prompt, each with n_decoded single tokens behind it, until
        the places that steps take in turn come round: what a checker repeats. Raises UsageError for
        a prompt without tokens and for more than the context holds."""
        if n_prompt < 1:
            raise UsageError(f"a prompt of {n_prompt} tokens has no steps; give at least 1")
        steps, turns = -(-n_prompt // self.config.n_ubatch) + n_decoded, self.turns
        return self.programs(n_prompt, n_decoded, laps=math.lcm(steps, turns) // steps)

    def _lower(
        self, shape: StepShape, buffers: dict[str, Buffer] | None = None, turn: int = 0
    ) -> Program:
        """Graph, splits and program of a step shape: everything but addresses."""
        return self._step_programs.of(self._open, shape, buffers, turn)

    def _build(self, key: Key) -> Prepared:
        program = self._lower(key.shape, turn=key.turn)
        start = now_ns()
        memory = self._residents.memory | self._workspace.bind(program)
        prepared = Prepared(program, self._open.backends, memory, self._events)
        self._spent("prepare", start, now_ns())
        return prepared

    def _spent(self, phase: str, start_ns: int, end_ns: int, step: int | None = None) -> None:
        """Counts host time of a phase, and shows it in a trace: in `step`, or that to come."""
        self._ns[f"{phase}_ns"] += end_ns - start_ns
        if self.recorder is not None:
            self.recorder.add(phase, "build", HOST_LANE, start_ns, end_ns,
                              step=self.n_steps if step is None else step)  # fmt: skip

    @property
    def _open(self) -> Loaded:
        if self._loaded is None:
            raise UsageError("this engine is closed; load the model again")
        return self._loaded

    @property
    def model(self) -> Model:
        return self._open.model

    @property
    def device(self) -> str:
        return self._open.device

    @property
    def device_reason(self) -> str:
        return self._open.device_reason

    @property
    def backend(self) -> Backend:
        return self._open.backend

    @property
    def sync_mode(self) -> str:
        """The sync mode that programs are lowered with: never `auto`."""
        return self._ordering.sync

    @property
    def n_past(self) -> int:
        """Live cells."""
        return self.cache.n_used

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._open.tokenizer

    @property
    def counters(self) -> dict[str, int]:
        """Steps, programs built and reused, and ns spent by phase (sums, untraced steps)."""
        return {
            "steps": self.n_steps,
            "programs_built": self._programs.built,
            "programs_reused": self._programs.reused,
            **self._ns,
        }

    def close(self) -> None:
        """Gives memory back, and with the last engine of a model its backends. Twice is fine."""
        if self._loaded is None:
            return
        exclusive.check_others(self._loaded)
        loaded, self._loaded = self._loaded, None
        for backend in loaded.backends:
            backend.synchronize()
        self._programs.clear()
        self._workspace.free()
        self._residents.free()
        loaded.release()

    __repr__, _repr_html_ = shown.text, shown.page

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
