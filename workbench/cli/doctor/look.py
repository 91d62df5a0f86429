"""The facts of this machine that `doctor` judges. Each question fails alone: what cannot be asked
is a fact, too."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from workbench.cli.common import MODELS
from workbench.cli.doctor import findings as f
from workbench.cli.doctor.findings import Facts, Gpu
from workbench.common.errors import WorkbenchError

DISTRIBUTION = "token-workbench"
PROC = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI's numbers of the vendor, and of display and 3D controllers
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


def facts() -> Facts:
    """What is true of this machine now. Imports CuPy and CUPTI only where there is a GPU."""
    from workbench.backend import compiled
    from workbench.backend.cpu.compile import host_isas
    from workbench.benchmarks.runs.provenance import cpu_name
    from workbench.common.cores import usable_cores

    cache = compiled.cache_dir()
    models = sorted(MODELS.glob("*.gguf")) if MODELS.is_dir() else []
    disks = {os.stat(folder).st_dev: folder for folder in (str(cache), os.getcwd())}
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        system=f"{platform.system()} {platform.machine()}",
        posix=os.name == "posix",
        lacking=lacking(),
        cache=str(cache),
        cache_kept=cache.is_relative_to(Path.home() / ".cache"),
        cpu=cpu_name(),
        cores=usable_cores(),
        isa=host_isas()[0].name,
        jupyter=all(map(importlib.util.find_spec, ("jupyterlab", "ipykernel"))),
        models=len(models),
        model_bytes=sum(path.stat().st_size for path in models),
        models_at=str(MODELS),
        free={folder: shutil.disk_usage(folder).free for folder in disks.values()},
        **_of_gpu(),
    )


def lacking() -> dict[str, list[str]] | None:
    """The requirements that are not met, by extra; see `Facts.lacking`."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
        extras = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return {extra: _unmet(wanted, extra) for extra in ("", *sorted(extras))}


def _unmet(wanted: list[str], extra: str) -> list[str]:
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, wanted):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        of_core = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or (extra and of_core):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return found


def _of_gpu() -> dict[str, Any]:
    """The facts about NVIDIA GPUs."""
    version = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", _text(PROC))
    shown = {"driver": version[1] if version else None}
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        on_bus = bool(shown["driver"]) or _on_bus()
        return shown | {"has_nvidia": on_bus, "gpu_error": str(error)}
    found = shown | _of_driver(library)
    if not found["gpus"]:
        return found | {"has_nvidia": bool(shown["driver"]) or _on_bus()}
    return found | {"has_nvidia": True} | _nvrtc() | _cuda() | _nvml() | _cupti()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _on_bus() -> bool:
    """Whether PCI shows an NVIDIA GPU, with or without a driver."""
    if not PCI.is_dir():
        return False
    return any(
        _text(device / "vendor").strip() == NVIDIA and _text(device / "class").startswith(DISPLAY)
        for device in PCI.iterdir()
    )


def _of_driver(library: Any) -> dict[str, Any]:
    """The newest CUDA of the driver, and its GPUs, by the driver's own library."""
    number, count = ctypes.c_int(), ctypes.c_int()
    newest = None
    if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
        newest = (number.value // 1000, number.value % 1000 // 10)
    error = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if error:
        words = ctypes.c_char_p()
        known = library.cuGetErrorString(error, ctypes.byref(words)) == 0 and words.value
        reason = words.value.decode() if known and words.value else f"error {error}"
        return {"driver_cuda": newest, "gpus": (), "gpu_error": reason}
    return {
        "driver_cuda": newest,
        "gpus": tuple(_gpu(library, i) for i in range(count.value)),
        "gpu_error": "" if count.value else "it counts 0 GPUs",
    }


def _gpu(library: Any, index: int) -> Gpu:
    device, value, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (capability[0], capability[1]), total.value)


def _nvrtc() -> dict[str, Any]:
    try:
        from cuda.bindings import nvrtc

        major, minor = nvrtc.nvrtcVersion()[1:]
    except (ImportError, RuntimeError) as error:
        return {"nvrtc_error": _first_line(error)}
    return {"nvrtc": f"{major}.{minor}"}


def _cuda() -> dict[str, Any]:
    from workbench.backend.cuda.device.backend import probe

    try:
        probe()
    except WorkbenchError as error:
        return {"cuda_error": str(error).partition(";")[0]}
    return {"cuda_error": None}


def _nvml() -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {"nvml_error": "nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetNVMLVersion()
        driver = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"nvml_error": _first_line(error)}
    texts = [t.decode() if isinstance(t, bytes) else str(t) for t in (version, driver)]
    return dict(zip(("nvml", "driver"), texts, strict=True))


def _cupti() -> dict[str, Any]:
    from workbench.trace.cupti import collector

    try:
        collector.probe(collector.load())
    except collector.Unavailable as error:
        reason = str(error)
        return {"cupti": cupti_state(reason), "cupti_error": reason.partition(";")[0]}
    return {"cupti": f.CUPTI_OK}


def cupti_state(reason: str) -> str:
    """The word for a reason of `collector.Unavailable`."""
    for part, state in (
        ("cannot be imported", f.CUPTI_MISSING),
        ("room for one subscriber", f.CUPTI_TAKEN),
        ("PRIVILEGES", f.CUPTI_FORBIDDEN),
    ):
        if part in reason:
            return state
    return f.CUPTI_UNFIT


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
