"""What tests need of an engine: sequences, and cells for the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from workbench.config import EngineConfig, Toggles
from workbench.engine.kv_cache import n_regions
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.bench.workload import Workload

Config = TypeVar("Config", bound=EngineConfig)


def wide_enough(workloads: Sequence[Workload], config: Config) -> Config:
    """The configuration with as many sequences as the widest of the tests names."""
    return replace(config, n_seqs=max(config.n_seqs, *(w.width for w in workloads)))


def long_enough(
    workloads: Sequence[Workload], toggles: Toggles, config: EngineConfig
) -> EngineConfig:
    """The configuration with as long a context as the longest of the tests needs."""
    regions = n_regions(toggles, config)
    return replace(config, n_ctx=max(config.n_ctx, *(w.n_ctx(regions) for w in workloads)))


def check_fits(toggles: Toggles, config: EngineConfig, workload: Workload) -> None:
    """Raises UsageError where the test is longer than the context of an engine with these, and
    where it has more sequences than the engine."""
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
