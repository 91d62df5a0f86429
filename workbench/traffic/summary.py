"""The figures of several settings under load in one table."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.common.tables import Table
from workbench.traffic.latency import Figures

# heading, key, digits
_COLUMNS = (
    ("ok", "completed", 0), ("failed", "failed", 0), ("req/s", "request_throughput", 2),
    ("good/s", "request_goodput", 2), ("out t/s", "output_throughput", 1),
    ("total t/s", "total_token_throughput", 1), ("peak", "max_concurrent_requests", 0),
    ("TTFT ms", "mean_ttft_ms", 2), ("median", "median_ttft_ms", 2), ("P99", "p99_ttft_ms", 2),
    ("TPOT ms", "mean_tpot_ms", 2), ("P99 TPOT", "p99_tpot_ms", 2), ("P99 ITL", "p99_itl_ms", 2),
    ("E2EL ms", "mean_e2el_ms", 1), ("P99 E2EL", "p99_e2el_ms", 1), ("lag ms", "mean_lag_ms", 2),
)  # fmt: skip


def table_of(settings: Sequence[tuple[str, Figures]]) -> Table:
    """A row for each setting, by its name. Figures that no setting has are left out."""
    made = [
        {"setting": name} | {head: found[key] for head, key, _ in _COLUMNS}
        for name, found in settings
    ]
    table = Table(made, columns=["setting", *(head for head, _, _ in _COLUMNS)])
    table = Table(table.dropna(axis=1, how="all"))
    table.attrs = {"keys": ["setting"], "digits": {head: n for head, _, n in _COLUMNS}}
    return table
