"""One side of the comparison, in a process of its own: llama.cpp, or this engine.

Usage: `python worker.py llama.cpp|workbench`. Requests come on stdin, one JSON object a line; each
is answered by one on stdout. llama-cpp-python can live in an environment of its own.

    {"do": "about"}                                       -> {"version": ..., "settings": {...}}
    {"do": "load", "model": PATH, "threads": N, "n_ctx": C, "n_ubatch": U}
          llama.cpp only: "exact": true for an F32 cache and attention without flash's F16 sums
          workbench only: "expand": what types without kernels become
    {"do": "quantize", "model": PATH, "out": PATH, "ftype": "Q2_K", "keep_split": bool}
          llama.cpp only
    {"do": "logits", "tokens": [...], "out": FILE.npy, "one_by_one": bool}
          teacher-forced from an empty cache; float32 (len(tokens), n_vocab) into FILE
    {"do": "decode", "tokens": [...]}                     -> {"token_ns": [...]}
          from an empty cache, one token a step; a token ends when its float32 logits are in a
          NumPy array on the host. No sampling.
    {"do": "prefill", "tokens": [...]}                    -> {"step_ns": [...]}
          the same of one step of all tokens, and the last one's logits

A request that fails is answered by {"error": "..."}.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import numpy as np

Reply = dict[str, Any]


class LlamaCpp:
    """llama.cpp through llama-cpp-python's ctypes layer. Flash attention on, F16 KV cache, weights
    mapped, nothing offloaded; the batch is made once, and a step fills it in."""

    def __init__(self) -> None:
        import llama_cpp

        self.lib = llama_cpp
        # the callback must outlive every call into the library
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = self.context = self.batch = None
        self.n_vocab = self.n_past = 0

    def about(self) -> Reply:
        info = self.lib.llama_print_system_info().decode().split()
        settings = {"flash_attn": True, "type_k": "F16", "type_v": "F16", "use_mmap": True}
        version = f"llama-cpp-python {self.lib.__version__}"
        return {"version": version, "settings": settings | {"system_info": " ".join(info)}}

    def load(
        self, model: str, threads: int, n_ctx: int, n_ubatch: int, exact: bool = False
    ) -> Reply:
        self.close()
        lib = self.lib
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(model.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        settings = lib.llama_context_default_params()
        settings.n_ctx = n_ctx
        settings.n_batch = settings.n_ubatch = n_ubatch
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if exact:
            settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            settings.type_k = settings.type_v = lib.GGML_TYPE_F32
        settings.no_perf = True
        self.context = lib.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {model}")
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(n_ubatch, 0, 1)
        self.reset()
        return {"n_vocab": self.n_vocab}

    def reset(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.n_past = 0

    def step(self, tokens: list[int], every: bool) -> np.ndarray:
        batch, n = self.batch, len(tokens)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.n_past + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = every or i == n - 1
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self.n_past += n
        # llama_get_logits waits for the computation; its memory is llama.cpp's, hence the copy
        pointer = self.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (n if every else 1, self.n_vocab)).copy()

    def quantize(self, model: str, out: str, ftype: str, keep_split: bool) -> None:
        lib = self.lib
        settings = lib.llama_model_quantize_default_params()
        settings.nthread = 2
        settings.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{ftype}")
        settings.keep_split = keep_split
        if lib.llama_model_quantize(model.encode(), out.encode(), ctypes.byref(settings)) != 0:
            raise RuntimeError(f"llama.cpp does not quantise {model} to {ftype}")

    def close(self) -> None:
        lib, held = self.lib, (self.batch, self.context, self.model)
        frees = lib.llama_batch_free, lib.llama_free, lib.llama_model_free
        for one, free in zip(held, frees, strict=True):
            if one is not None:
                free(one)
        self.model = self.context = self.batch = None


class Workbench:
    """This engine on its embedded device, with every exact mechanism on."""

    TOGGLES = {"sync": "auto", "copy_stream": "compute", "graph_reuse": "set_rows"}  # noqa: RUF012

    def __init__(self) -> None:
        import workbench

        self.workbench = workbench
        self.engine: Any = None

    def about(self) -> Reply:
        from importlib.metadata import version

        settings = {"device": "embedded", "toggles": self.TOGGLES}
        return {"version": f"workbench {version('token-workbench')}", "settings": settings}

    def load(self, model: str, **config: Any) -> Reply:
        self.close()
        toggles = self.workbench.Toggles(**self.TOGGLES)
        self.engine = self.workbench.Engine.load(
            model, device="embedded", toggles=toggles, **config
        )
        device, sync = self.engine.backend.description, str(self.engine.sync_mode)
        return {"n_vocab": self.engine.model.n_vocab, "device": device, "sync": sync}

    def reset(self) -> None:
        self.engine.reset()

    def step(self, tokens: list[int], every: bool) -> np.ndarray:
        # a copy, as on the other side: whether step's array outlives the next step is its affair
        return self.engine.step(tokens, outputs="all" if every else "last").copy()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


# `step` appends tokens to the cache; its logits, (n, n_vocab), of all or the last, are the caller's
Side = LlamaCpp | Workbench


def logits(side: Side, tokens: list[int], out: str, one_by_one: bool) -> Reply:
    """Logits of every position, in one step or token by token, into the file `out`."""
    side.reset()
    groups = [[token] for token in tokens] if one_by_one else [tokens]
    rows = np.concatenate([side.step(group, True) for group in groups])
    np.save(out, rows)
    return {"shape": list(rows.shape), "finite": bool(np.isfinite(rows).all())}


def timed(side: Side, steps: list[list[int]]) -> list[int]:
    """Nanoseconds of each step, from an empty cache. Checks that the logits are finite."""
    side.reset()
    step_ns = []
    for tokens in steps:
        start = time.perf_counter_ns()
        row = side.step(tokens, False)
        step_ns.append(time.perf_counter_ns() - start)
        if not np.isfinite(row).all():
            raise RuntimeError("logits are not finite")
    return step_ns


def serve(side: Side) -> None:
    """Answers requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if name == "logits":
                reply = logits(side, **request)
            elif name == "decode":
                reply = {"token_ns": timed(side, [[t] for t in request["tokens"]])}
            elif name == "prefill":
                reply = {"step_ns": timed(side, [request["tokens"]])}
            else:
                reply = getattr(side, name)(**request) or {}
        except Exception as error:  # the other process reports it and stops
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
    side.close()


if __name__ == "__main__":
    serve({"llama.cpp": LlamaCpp, "workbench": Workbench}[sys.argv[1]]())
