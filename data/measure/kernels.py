"""Runs of `bench-kernels` for data/results: every type and shape, and the batches of an 8B model.

    kernels           8 types x 21 shapes, batch 1, launched plainly and programmatically
    kernels-batches   8 types x 6 shapes of llama-3-8b, batches 2 to 128

A product of several tokens is bound by memory or by tensor cores: `product_tflops` of the run says
what the latter reach on a large product.
"""

from __future__ import annotations

from collections.abc import Sequence

from data.measure.session import Session, add_to_result, product_tflops
from workbench.backend.base import choose_device, open_backend
from workbench.bench.kernel_bench import Plan, bench_kernels
from workbench.bench.kernel_cases import TYPES, Shape, parse_shapes
from workbench.report import roofline

BATCHES = (2, 4, 8, 9, 16, 32, 64, 128)


def kernels(session: Session) -> None:
    record(session, "kernels", parse_shapes("all"), (1,))


def kernels_batches(session: Session) -> None:
    record(session, "kernels-batches", parse_shapes("8b"), BATCHES)


def record(session: Session, name: str, shapes: Sequence[Shape], batches: Sequence[int]) -> None:
    """One run folder of kind `kernels`, with its picture."""
    if session.quick:
        shapes, batches = parse_shapes("qwen3-30b-a3b.gate"), batches[:2]
    on_gpu = session.device == "cuda"
    folder = session.folder(name, needs="product_tflops" if on_gpu else "")
    if folder is None:
        return
    chosen, reason = choose_device(session.device)
    backend = open_backend(chosen, 0)
    try:
        rate = {"product_tflops": product_tflops(backend)} if on_gpu else {}
        made = bench_kernels(
            backend, Plan(TYPES, shapes, batches, session.quick), folder, reason=reason,
            on_row=lambda row: print(row, flush=True), on_note=lambda s: print(s, flush=True),
        )  # fmt: skip
    finally:
        backend.close()
    if made.interrupted:
        raise KeyboardInterrupt
    roofline.save(made.run, folder)
    add_to_result(folder, **rate)
