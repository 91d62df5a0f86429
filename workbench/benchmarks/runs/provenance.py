"""Where a number comes from: everything a run folder records about versions, machine and model.

Programs and files are recorded by name, without paths, and GPUs without serial numbers
(`nameless.py`). An unknown value is `"unknown"` or null, and its key is never left out. Two run
folders are compared key by key, perhaps years apart and on machines that no longer exist.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.benchmarks.runs.nameless import card_number, portable
from workbench.common.checkout import UNKNOWN, commit
from workbench.common.cores import usable_cores
from workbench.common.errors import DeviceError

if TYPE_CHECKING:
    from workbench.backend.base import Backend
    from workbench.engine.engine import Engine

DISTRIBUTION = "token-workbench"  # recorded as `workbench`
PACKAGES = (
    "workbench", "numpy", "numba", "llvmlite", "scipy", "pandas", "pyarrow", "gguf", "tokenizers",
    "cupy-cuda13x", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc",
)  # fmt: skip


def utc_now() -> str:
    """The time now as RFC 3339 in UTC to the second: `2025-11-21T00:56:01Z`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def versions() -> dict[str, str | None]:
    """Installed versions of Python and of PACKAGES; null: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            wanted = DISTRIBUTION if name == "workbench" else name
            found[name] = importlib.metadata.version(wanted)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def cpu_name() -> str:
    """The processor's name, as llama-bench prints it in cpu_info."""
    info = _read("/proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine() or UNKNOWN


def cpu() -> dict[str, Any]:
    """Name, cores, usable cores, frequency governor, frequencies in MHz, and the instruction sets
    that matter to the kernels."""
    base = "/sys/devices/system/cpu/cpu0/cpufreq/"
    khz = {k: _read(base + k) for k in ("cpuinfo_max_freq", "scaling_cur_freq")}
    info = _read("/proc/cpuinfo") or ""
    now = re.search(r"^cpu MHz\s*:\s*(\d+)", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "asimd", "asimddp")
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "governor": _read(base + "scaling_governor") or UNKNOWN,
        "mhz": {k: int(v) // 1000 for k, v in khz.items() if v and v.isdigit()}
        | ({"now": int(now[1])} if now else {}),
        "features": [f for f in wanted if flags and f in flags[1].split()],
    }


def machine() -> dict[str, Any]:
    """Platform, CPU, memory, load average at this moment, and every NVIDIA GPU the driver shows."""
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu(),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
    } | state()


def state() -> dict[str, Any]:
    """The load average, and the state of every GPU: these change while a run is measured."""
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {"load_average": load, "gpus": gpus()}


def gpus() -> list[dict[str, Any]]:
    """Name, driver, memory, clocks (MHz), power (W), temperature, throttle reasons of every GPU;
    `card` tells the GPUs apart.

    Empty without a GPU or without nvidia-ml-py. A query that the driver refuses gives null.
    """
    try:
        import pynvml as nvml  # the module that nvidia-ml-py installs
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, handle) | {"driver": driver} for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, query: Any, *args: Any) -> Any:
    try:
        value = query(*args)
    except nvml.NVMLError:
        return None
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    clocks = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    limit = _ask(nvml, nvml.nvmlDeviceGetPowerManagementLimit, handle)
    draw = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "name": _ask(nvml, nvml.nvmlDeviceGetName, handle),
        "card": card_number(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)),
        "memory_bytes": None if memory is None else int(memory.total),
        "clock_mhz": {
            k: _ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, c) for k, c in clocks.items()
        },
        "max_clock_mhz": {
            k: _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, c) for k, c in clocks.items()
        },
        "power_limit_w": None if limit is None else limit / 1000,
        "power_w": None if draw is None else draw / 1000,
        "temperature_c": _ask(
            nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        ),
        "throttle_reasons": _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
    }


def model(engine: Engine) -> dict[str, Any]:
    """The model file of an engine: its identity and sizes, and the bytes of weights that a token
    reads."""
    m = engine.model
    names = (
        "hash", "architecture", "name", "quant", "n_params", "n_layer", "n_embd", "n_vocab",
        "file_bytes", "weight_bytes_per_token",
    )  # fmt: skip
    return {"file": Path(m.path).name} | {name: getattr(m, name) for name in names}


def engine(engine: Engine) -> dict[str, Any]:
    """How an engine was made: its configuration, its device and the reason for it, and its NVTX
    ranges."""
    config = engine.config.to_dict()
    made = device(config, engine.device, engine.device_reason, engine.backend)
    return made | {"nvtx": engine.ranges.words}


def device(config: dict[str, Any], name: str, reason: str, backend: Backend) -> dict[str, Any]:
    """`engine` of run.json: the configuration, the device, the reason for it, and its host
    waits."""
    return {
        "config": config,
        "device": name,
        "device_reason": reason,
        "device_description": backend.description,
        "waiting": backend.waiting,
        "idle_sync_us": _idle_sync_us(backend),
        "timer": _timer(backend),
    }


def _timer(backend: Backend) -> dict[str, int] | None:
    """The device's clock, which gives the stamps: its tick, and its error against the host's clock,
    in ns. None: the device has no clock of its own, or its clock does not answer."""
    try:
        clock = backend.clock()
    except DeviceError:
        return None
    return None if clock is None else {"tick_ns": clock.tick_ns, "error_ns": clock.error_ns}


def _idle_sync_us(backend: Backend) -> float:
    """The time of a host wait on an idle stream: median of 200, in us."""
    sync = backend.sync_stream(0)
    taken = []
    for _ in range(200):
        start = time.perf_counter_ns()
        sync()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken) / 1e3


def command() -> list[str]:
    """The command line of this process as a person would type it again: `workbench ab ...`, also
    where it was `python -m workbench ab ...`, which Python hands on as `__main__.py ab ...`."""
    first, rest = Path(sys.argv[0] if sys.argv else ""), sys.argv[1:]
    if first.name != "__main__.py":
        return list(sys.argv)
    spec = sys.modules["__main__"].__spec__
    package = (spec and spec.parent) or first.parent.name
    return [package, *rest] if package == "workbench" else ["python", "-m", package, *rest]


def collect(engine_: Engine | None = None) -> dict[str, Any]:
    """The part of `run.json` that every kind of run has alike: command, commit, versions, machine,
    and with an engine also `model` and `engine`."""
    found = {
        "command": command(),
        "commit": commit(),
        "versions": dict(versions()),
        "machine": machine(),
    }
    if engine_ is not None:
        found |= {"model": model(engine_), "engine": engine(engine_)}
    return dict(portable(found))
