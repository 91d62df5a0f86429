"""From facts of a machine to findings: pure, so that a test can hand in any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.common.extras import install
from workbench.common.sizes import size

OK, MISSING, BROKEN = "ok", "missing", "broken"
LEAST_PYTHON = (3, 11)
# CUDA 13 needs a driver of this branch or a later one (NVIDIA: CUDA minor version compatibility)
LEAST_DRIVER, LEAST_CUDA = 580, (13, 0)
INSTALL_DRIVER = f"install NVIDIA driver {LEAST_DRIVER} or later, then reboot"
SHARED_CUPTI = 610  # the first driver branch with room for several CUPTI subscribers
OLDEST_GPU = (8, 0)  # compute capability that the kernels need
LEAST_FREE = 2 * 10**9  # bytes: compiled kernels, the tiny models and some run folders
NEEDS_GPU = ("gpu", "cupti")  # extras that help on a machine with a GPU only
# what libcupti answered
CUPTI_OK, CUPTI_MISSING, CUPTI_TAKEN = "ok", "missing", "taken"
CUPTI_FORBIDDEN, CUPTI_UNFIT = "not permitted", "unfit"


class Finding(NamedTuple):
    """What is true of a part of the machine.

    state: OK, MISSING or BROKEN.
    mend: the line that mends it; empty where nothing needs to be done.
    """

    part: str
    state: str
    says: str
    mend: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it. capability: compute capability."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Facts:
    """What was seen of a machine. The defaults are a machine without an NVIDIA GPU.

    python: version. system: as `Linux x86_64`. posix: whether this is a POSIX system.
    lacking: extra -> requirements of it that are not met, as `cupy-cuda13x (missing)`; the key ""
        is the core. None: the distribution itself is not installed.
    cache: folder of compiled kernels. cache_kept: whether it is the user's own folder, which stays.
    cpu, cores, isa: the processor, cores that this process may use, the instruction set of kernels.
    has_nvidia: whether an NVIDIA kernel driver is loaded, or a GPU is on the bus.
    driver: version of the kernel driver, as 580.95.05. driver_cuda: the newest CUDA that it runs.
    gpu_error: why the driver's library shows no GPU.
    nvrtc, nvml: version, or None with the reason in nvrtc_error, nvml_error.
    cuda_error: why the cuda backend cannot be opened; None where it can, or was not tried.
    cupti, cupti_error: one of the words above, and the reason.
    jupyter: whether JupyterLab and its kernel are there.
    models, model_bytes: GGUF files in the models folder. models_at: that folder.
    free: folder -> bytes free on its disk.
    """

    python: tuple[int, int, int]
    system: str
    posix: bool = True
    lacking: dict[str, list[str]] | None = field(default_factory=dict)
    cache: str = "~/.cache/workbench/kernels"
    cache_kept: bool = True
    cpu: str = "a CPU"
    cores: int = 2
    isa: str = "avx2"
    has_nvidia: bool = False
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    nvrtc: str | None = None
    nvrtc_error: str = ""
    cuda_error: str | None = None
    cupti: str = CUPTI_MISSING
    cupti_error: str = ""
    nvml: str | None = None
    nvml_error: str = ""
    jupyter: bool = True
    models: int = 0
    model_bytes: int = 0
    models_at: str = "data/models"
    free: dict[str, int] = field(default_factory=dict)


def diagnose(facts: Facts) -> list[Finding]:
    """Findings on every part, in the order in which a person would mend them."""
    return [
        *_python(facts), *_packages(facts), *_cache(facts), _cpu(facts), *_disk(facts),
        _jupyter(facts), _models(facts), *_gpu(facts),
    ]  # fmt: skip


def _python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    least = ".".join(map(str, LEAST_PYTHON))
    if facts.python[:2] < LEAST_PYTHON:
        yield Finding("Python", BROKEN, f"{version}; {least} is the oldest that works",
                      f"install Python {least} or later, then make setup PYTHON=...")  # fmt: skip
    else:
        yield Finding("Python", OK, version)
    if facts.posix:
        yield Finding("system", OK, facts.system)
    else:
        yield Finding("system", BROKEN, f"{facts.system} is no POSIX system",
                      "use Linux, or WSL 2 on Windows")  # fmt: skip


def _packages(facts: Facts) -> Iterator[Finding]:
    if facts.lacking is None:
        yield Finding("packages", BROKEN, "token-workbench is not installed in this Python",
                      install("lab,serve"))  # fmt: skip
        return
    for extra, lacking in facts.lacking.items():
        part = f"extra {extra}" if extra else "packages"
        if not lacking:
            yield Finding(part, OK, "all that it needs" if extra else "all that the core needs")
        elif not extra:
            yield Finding(part, BROKEN, ", ".join(lacking), install("lab,serve"))
        elif extra in NEEDS_GPU and not facts.has_nvidia:
            yield Finding(part, MISSING, "of use with an NVIDIA GPU only")
        else:
            yield Finding(part, MISSING, ", ".join(lacking), install(extra))


def _cache(facts: Facts) -> Iterator[Finding]:
    if facts.cache_kept:
        yield Finding("compiler cache", OK, facts.cache)
    else:
        yield Finding(
            "compiler cache", BROKEN,
            f"~/.cache/workbench cannot be written; kernels are kept in {facts.cache}, and may "
            "be compiled again by every process",
            "mkdir -p ~/.cache/workbench && chown -R $USER ~/.cache/workbench",
        )  # fmt: skip


def _cpu(facts: Facts) -> Finding:
    said = f"{facts.cpu}, {facts.cores} cores, kernels for {facts.isa}"
    if facts.isa == "generic":
        return Finding("CPU", OK, f"{said}: no AVX2, so kernels are portable and slower")
    return Finding("CPU", OK, said)


def _disk(facts: Facts) -> Iterator[Finding]:
    for folder, free in facts.free.items():
        said = f"{size(free)} free at {folder}"
        if free < LEAST_FREE:
            yield Finding("disk", BROKEN, f"{said}; {size(LEAST_FREE)} are soon used",
                          "make room, or work on another disk")  # fmt: skip
        else:
            yield Finding("disk", OK, said)


def _jupyter(facts: Facts) -> Finding:
    if facts.jupyter:
        return Finding("Jupyter", OK, "JupyterLab and its kernel; make lab opens the notebooks")
    return Finding("Jupyter", MISSING, "no JupyterLab: no notebooks, no report", install("lab"))


def _models(facts: Facts) -> Finding:
    if facts.models:
        said = f"{facts.models} files in {facts.models_at}, {size(facts.model_bytes)}"
        return Finding("models", OK, said)
    return Finding("models", MISSING, f"none in {facts.models_at}", "workbench model tiny")


# a GPU, from the driver up ------------------------------------------------------------------------


def _gpu(facts: Facts) -> Iterator[Finding]:
    if not facts.has_nvidia:
        said = "no NVIDIA GPU: --device auto is the embedded device, on this CPU"
        mend = f"if there is one, {INSTALL_DRIVER}; a container needs --gpus all"
        yield Finding("GPU", MISSING, said, mend)
        return
    driver = _driver(facts)
    yield driver
    if not facts.gpus:
        if driver.state == OK:
            why = facts.gpu_error or "it counts 0"
            mend = "see nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all"
            yield Finding("GPU", BROKEN, f"the driver shows none ({why})", mend)
        return
    for gpu in facts.gpus:
        yield _one_gpu(gpu)
    gpu_extra = install("gpu")
    if facts.nvrtc:
        yield Finding("NVRTC", OK, f"{facts.nvrtc}, compiles the kernels")
    else:
        yield Finding("NVRTC", BROKEN, facts.nvrtc_error or "not installed", gpu_extra)
    if facts.cuda_error is None:
        yield Finding("device cuda", OK, "--device auto is this GPU")
    else:
        yield Finding("device cuda", BROKEN, facts.cuda_error, gpu_extra)
    if facts.nvml:
        yield Finding("NVML", OK, f"{facts.nvml}: clocks, power and energy are recorded")
    else:
        said = facts.nvml_error or "nvidia-ml-py is not installed"
        yield Finding("NVML", MISSING, f"{said}: runs lack clocks, power and energy", gpu_extra)
    yield _cupti(facts)


def _branch(driver: str) -> int:
    """580 for 580.95.05; 0 for a text that begins with no number."""
    first = driver.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _driver(facts: Facts) -> Finding:
    least = f"{LEAST_DRIVER} is the least, for CUDA {LEAST_CUDA[0]}"
    if facts.driver is None and facts.driver_cuda is None:
        said = f"an NVIDIA GPU, and no driver that answers; {least}"
        return Finding("driver", BROKEN, said, INSTALL_DRIVER)
    cuda = "" if facts.driver_cuda is None else f", CUDA {'.'.join(map(str, facts.driver_cuda))}"
    said = f"{facts.driver or 'of unknown version'}{cuda}; {least}"
    old_cuda = facts.driver_cuda is not None and facts.driver_cuda < LEAST_CUDA
    old_branch = facts.driver is not None and 0 < _branch(facts.driver) < LEAST_DRIVER
    # a forward compatibility package gives an older driver a newer CUDA: then CUDA decides
    too_old = old_cuda if facts.driver_cuda is not None else old_branch
    return Finding("driver", BROKEN if too_old else OK, said, INSTALL_DRIVER if too_old else "")


def _one_gpu(gpu: Gpu) -> Finding:
    said = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
    said += size(gpu.memory_bytes)
    if gpu.capability < OLDEST_GPU:
        return Finding(
            "GPU", BROKEN, f"{said}; the kernels need {OLDEST_GPU[0]}.{OLDEST_GPU[1]}",
            "--device embedded, or an A100, an RTX 30 or later",
        )  # fmt: skip
    return Finding("GPU", OK, said)


def _cupti(facts: Facts) -> Finding:
    without = "profile and the notebooks then draw spans of events"
    mends = {
        CUPTI_MISSING: install("cupti"),
        CUPTI_TAKEN: "run without nsys, ncu, compute-sanitizer and torch.profiler, or with a "
                     f"driver of branch {SHARED_CUPTI} or later",
        CUPTI_FORBIDDEN: "on the host, as root: echo 'options nvidia "
                         "NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-prof.conf"
                         ", then reboot; in a container --cap-add SYS_ADMIN",
        CUPTI_UNFIT: "install the cupti-python of the driver's CUDA version (nvidia-smi shows it)",
    }  # fmt: skip
    if facts.cupti == CUPTI_OK:
        return Finding("CUPTI", OK, "profile shows each kernel by its own times")
    said = {CUPTI_TAKEN: "taken by another profiler", CUPTI_FORBIDDEN: "not permitted",
            CUPTI_UNFIT: "does not fit", CUPTI_MISSING: "not installed"}[facts.cupti]  # fmt: skip
    reason = f" ({facts.cupti_error})" if facts.cupti_error else ""
    return Finding("CUPTI", MISSING, f"{said}{reason}; {without}", mends[facts.cupti])
