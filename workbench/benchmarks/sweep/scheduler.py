"""Groups of cells on the workers of a `dask.distributed` scheduler, one device a worker.

    dask scheduler                                               one, anywhere
    dask worker ADDRESS --nthreads 1 --resources "device=1"      one for each device
    workbench sweep ... --scheduler ADDRESS --out FOLDER

A worker measures a group into a folder of its own and sends the run back; only the sweep's process
writes into the sweep's folder, once for each group. So a worker that dies has written nothing. The
scheduler gives its group to another worker, and a group that two workers have measured is kept
once. Model files must lie at the same path on every worker.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.benchmarks.energy.windows import EnergyAsked
from workbench.benchmarks.runs import results
from workbench.benchmarks.sweep.cells import Cell, CellGroup
from workbench.benchmarks.sweep.measured import OneEngine, measure_group, refusals
from workbench.common.errors import UsageError, WorkbenchError

DEVICE = {"device": 1}  # what a group needs of a worker
REACHED_S = 10.0
HOST_AND_PORT = ("tcp", "tls", "ws", "wss")  # schemes of an address that ends in host:port


class Measured(NamedTuple):
    """A group as a worker has measured it.

    error: why it has not been measured.
    """

    run: dict[str, Any]
    samples: pd.DataFrame
    error: WorkbenchError | None = None


def _unmeasured(error: WorkbenchError) -> Measured:
    return Measured({}, pd.DataFrame(), error)


def measured_apart(
    group: CellGroup,
    repetitions: int,
    seed: int,
    varying: Collection[str],
    energy: EnergyAsked = False,
) -> Measured:
    """Measures a group on this machine; nothing is left on its disk."""
    engines = OneEngine()
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        out = Path(folder) / group.name
        try:
            measure_group(
                engines.of(group.cells[0]), group, out, repetitions, seed, varying, energy=energy
            )
        except WorkbenchError as error:
            return _unmeasured(error)
        finally:
            engines.close()
        found = results.load_run(out)
    return Measured(found.run, found.samples)


class Workers:
    """The workers of a scheduler; `workers_of` makes it."""

    def __init__(self, client: Any):
        self._client = client

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Within, a scheduler that is lost becomes one line: its futures are cancelled, or the
        client says that it is closed."""
        from concurrent.futures import CancelledError

        from distributed.comm import CommClosedError

        try:
            yield
        except (CancelledError, CommClosedError, OSError) as error:
            raise WorkbenchError(
                "the scheduler is lost; what was measured is kept: start a scheduler again, and go "
                "on with the same command and --resume (in Python resume=True)"
            ) from error

    def refusals(self, cells: Mapping[str, Cell], energy: EnergyAsked = False) -> dict[str, str]:
        """As `measured.refusals`, on a worker."""
        with self._reached():
            future = self._client.submit(
                refusals, dict(cells), energy, resources=DEVICE, pure=False
            )
            found: dict[str, str] = future.result()
        return found

    def measured(
        self,
        groups: Sequence[CellGroup],
        repetitions: int,
        seed: int,
        varying: Collection[str],
        energy: EnergyAsked = False,
    ) -> Iterator[tuple[CellGroup, Measured]]:
        """The groups, each as soon as it is measured. A group whose workers died again and again
        comes as failed (the scheduler's setting `allowed-failures`).

        Raises WorkbenchError where the scheduler is lost."""
        from distributed import as_completed

        futures = {
            self._client.submit(
                measured_apart, group, repetitions, seed, tuple(varying), energy,
                resources=DEVICE, pure=False,
            ): group
            for group in groups
        }  # fmt: skip
        with self._reached():
            for future in as_completed(list(futures), loop=self._client.loop):
                group = futures.pop(future)
                error = future.exception()
                if error is not None:
                    said = " ".join(str(error).split()) or type(error).__name__
                    yield group, _unmeasured(WorkbenchError(f"its worker failed: {said}"))
                else:
                    yield group, future.result()
                future.release()


@contextmanager
def workers_of(address: str) -> Iterator[Workers]:
    """The workers of the scheduler at `address`. Raises UsageError where none answers there, and
    where no worker offers a device."""
    from distributed import Client

    try:
        _check_address(address)
        client = Client(address, timeout=REACHED_S, set_as_default=False)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UsageError(
            f"no scheduler answers at {address!r} ({said}); start one with `dask scheduler`"
        ) from error
    # what it logs of a lost scheduler is a traceback, beside the line that says so
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    with client:
        known = client.scheduler_info(n_workers=-1)["workers"].values()
        if not any(worker["resources"].get("device") for worker in known):
            raise UsageError(
                f"none of the {len(known)} workers at {address} offers a device; start each as "
                f"dask worker {address} --nthreads 1 --resources device=1"
            )
        yield Workers(client)


def _check_address(address: str) -> None:
    """Raises ValueError for an address that no scheduler can have. A Client that is asked for such
    a one stays half made: it waits for 20 s as Python ends, and prints a traceback."""
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import get_backend

    scheme, place = parse_address(address)
    get_backend(scheme)
    if scheme in HOST_AND_PORT:
        _, port = parse_host_port(place)
        if not 0 < port < 1 << 16:
            raise ValueError(f"no port has the number {port}")
