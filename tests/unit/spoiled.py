"""Activity records as CUPTI can deliver them when something is wrong: each function takes the
records of a window and spoils them in one way."""

from __future__ import annotations

from tests.unit.fake_cupti import ActivityKind

KERNEL, COPY, TAG = (
    ActivityKind.CONCURRENT_KERNEL, ActivityKind.MEMCPY, ActivityKind.EXTERNAL_CORRELATION,
)  # fmt: skip


def of_kind(records: list, *kinds: ActivityKind) -> list:
    return [r for r in records if r.kind in kinds]


def without_the_last_kernel(records: list) -> list:
    last = of_kind(records, KERNEL)[-1]
    return [r for r in records if r is not last]


def without_half(records: list) -> list:
    return records[: len(records) // 2]


def without_a_part_of_a_product(records: list) -> list:
    return [r for r in records if getattr(r, "name", "") != "splitKreduce"]


def with_a_second_copy(records: list) -> list:
    first = of_kind(records, COPY)[0]
    return [*records, type(first)(**vars(first))]


def with_another_name(records: list) -> list:
    last = of_kind(records, KERNEL)[-1]
    last.name, last.grid_x = "memset_kernel", 99
    return records


def with_stale_names(records: list) -> list:
    """A name of an unloaded module's kernel for each that is no product's of cuBLAS."""
    for r in of_kind(records, KERNEL):
        if r.name not in ("ampere_gemm", "splitKreduce"):
            r.name = "add" if r.name == "half_rows" else "half_rows"
    return records


def with_fewer_bytes(records: list) -> list:
    of_kind(records, COPY)[0].bytes = 4
    return records


def with_a_zero_end(records: list) -> list:
    of_kind(records, KERNEL)[2].end = 0
    return records


def with_a_call_without_times(records: list) -> list:
    call = of_kind(records, ActivityKind.DRIVER)[3]
    call.start = call.end = 0
    return records


def out_of_order(records: list) -> list:
    first, second = of_kind(records, COPY)[:2]
    first.start, first.end, second.start, second.end = (
        second.start, second.end, first.start, first.end,
    )  # fmt: skip
    return records


def on_another_stream(records: list) -> list:
    of_kind(records, KERNEL)[0].stream_id = 99
    return records


def on_another_device(records: list) -> list:
    of_kind(records, KERNEL)[0].device_id = 1
    return records


def without_correlation(records: list) -> list:
    return [r for r in records if r.kind != TAG]


def with_work_of_somebody_else(records: list) -> list:
    first = of_kind(records, KERNEL)[0]
    return [*records, type(first)(**vars(first) | {"correlation_id": 7, "name": "theirs"})]


def unreadable(records: list) -> list:
    del of_kind(records, KERNEL)[0].stream_id
    return records


def with_an_early_kernel(records: list) -> list:
    of_kind(records, KERNEL)[0].start -= 30_000_000
    return records
