"""`workbench doctor` on machines that are not here: each is a set of facts."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys

import pytest

from workbench.cli.doctor import findings as f
from workbench.cli.doctor import look
from workbench.cli.doctor.findings import BROKEN, MISSING, OK, Facts, Gpu, diagnose
from workbench.common.extras import EXTRAS, install
from workbench.trace.cupti import collector

EVERY = {"": [], **{extra: [] for extra in EXTRAS}}
LAPTOP = Facts(python=(3, 12, 1), system="Linux x86_64", lacking=EVERY, models=2, model_bytes=5000,
               free={"/": 10**11})  # fmt: skip
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85 * 10**9)
SERVER = dataclasses.replace(
    LAPTOP, has_nvidia=True, driver="580.95.05", driver_cuda=(13, 0), gpus=(H100,), nvrtc="13.0",
    nvml="13.580.95", cupti=f.CUPTI_OK,
)  # fmt: skip


def test_a_laptop_and_a_server_that_work():
    assert {one.state for one in diagnose(LAPTOP)} == {OK, MISSING}
    (gpu,) = [one for one in diagnose(LAPTOP) if one.state == MISSING]
    assert gpu.part == "GPU" and "embedded device" in gpu.says
    assert f"install NVIDIA driver {f.LEAST_DRIVER} or later" in gpu.mend
    found = diagnose(SERVER)
    assert {one.state for one in found} == {OK} and not any(one.mend for one in found)
    parts = [one.part for one in found]
    for part in ("Python", "packages", "compiler cache", "CPU", "disk", "Jupyter", "models",
                 "driver", "GPU", "NVRTC", "device cuda", "NVML", "CUPTI"):  # fmt: skip
        assert part in parts
    assert "580.95.05, CUDA 13.0; 580 is the least" in found[parts.index("driver")].says


# machine, what differs, part, state, words of the finding, words of the line that mends it
ILL = [
    (LAPTOP, {"python": (3, 10, 2)}, "Python", BROKEN, "3.10.2; 3.11 is the oldest", "install Pyt"),
    (LAPTOP, {"posix": False}, "system", BROKEN, "no POSIX system", "WSL 2"),
    (LAPTOP, {"lacking": None}, "packages", BROKEN, "is not installed", install("lab,serve")),
    (LAPTOP, {"lacking": EVERY | {"": ["numba 0.60 is not >=0.65"]}}, "packages", BROKEN,
     "numba 0.60 is not >=0.65", install("lab,serve")),
    (LAPTOP, {"lacking": EVERY | {"serve": ["uvicorn is not installed"]}}, "extra serve", MISSING,
     "uvicorn", install("serve")),
    (LAPTOP, {"lacking": EVERY | {"gpu": ["cupy is not installed"]}}, "extra gpu", MISSING,
     "with an NVIDIA GPU only", ""),
    (LAPTOP, {"cache": "/tmp/k", "cache_kept": False}, "compiler cache", BROKEN, "/tmp/k", "mkdir"),
    (LAPTOP, {"isa": "generic"}, "CPU", OK, "no AVX2", ""),
    (LAPTOP, {"free": {"/home": 10**8}}, "disk", BROKEN, "100.00 MB free at /home", "make room"),
    (LAPTOP, {"jupyter": False}, "Jupyter", MISSING, "no notebooks", install("lab")),
    (LAPTOP, {"models": 0}, "models", MISSING, "none in data/models", "workbench model tiny"),
    (LAPTOP, {"has_nvidia": True}, "driver", BROKEN, "580 is the least, for CUDA 13", "driver 580"),
    (SERVER, {"driver": "570.1", "driver_cuda": (12, 8)}, "driver", BROKEN,
     "570.1, CUDA 12.8; 580 is the least", "install NVIDIA driver 580 or later"),
    (SERVER, {"driver": "570.1", "driver_cuda": None}, "driver", BROKEN, "570.1; 580 is", "580"),
    (SERVER, {"driver": "570.1", "driver_cuda": (13, 0)}, "driver", OK, "CUDA 13.0", ""),
    (SERVER, {"driver": None}, "driver", OK, "of unknown version, CUDA 13.0", ""),
    (SERVER, {"gpus": (), "gpu_error": "no CUDA-capable device"}, "GPU", BROKEN,
     "no CUDA-capable device", "--gpus all"),
    (SERVER, {"gpus": (Gpu("Tesla T4", (7, 5), 16 * 10**9),)}, "GPU", BROKEN,
     "7.5, 16.00 GB; the kernels need 8.0", "--device embedded"),
    (SERVER, {"lacking": EVERY | {"gpu": ["cupy is not installed"]}}, "extra gpu", MISSING,
     "cupy is not installed", install("gpu")),
    (SERVER, {"nvrtc": None, "nvrtc_error": "no libnvrtc"}, "NVRTC", BROKEN, "no libnvrtc",
     install("gpu")),
    (SERVER, {"cuda_error": "cuda needs CuPy"}, "device cuda", BROKEN, "CuPy", install("gpu")),
    (SERVER, {"nvml": None}, "NVML", MISSING, "nvidia-ml-py is not installed", install("gpu")),
    (SERVER, {"cupti": f.CUPTI_MISSING}, "CUPTI", MISSING, "spans of events", install("cupti")),
    (SERVER, {"cupti": f.CUPTI_TAKEN, "cupti_error": "nsys"}, "CUPTI", MISSING,
     "taken by another profiler (nsys)", "branch 610 or later"),
    (SERVER, {"cupti": f.CUPTI_FORBIDDEN}, "CUPTI", MISSING, "not permitted",
     "NVreg_RestrictProfilingToAdminUsers=0"),
    (SERVER, {"cupti": f.CUPTI_UNFIT}, "CUPTI", MISSING, "does not fit", "cupti-python of the"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "differs", "part", "state", "says", "mend"), ILL)
def test_each_thing_that_is_wrong_names_what_mends_it(machine, differs, part, state, says, mend):
    found = diagnose(dataclasses.replace(machine, **differs))
    (one,) = [one for one in found if one.part == part]
    assert one.state == state and says in one.says and mend in one.mend
    assert bool(one.mend) == bool(mend)
    assert {other.state for other in found if other.part != part} <= {OK, MISSING}


def test_below_a_driver_that_shows_no_gpu_nothing_is_judged():
    found = diagnose(dataclasses.replace(SERVER, gpus=(), nvrtc=None, cupti=f.CUPTI_UNFIT))
    assert not {"NVRTC", "CUPTI", "NVML", "device cuda"} & {one.part for one in found}


@pytest.fixture
def on(call, monkeypatch):
    """`on(facts, ...)`: `workbench doctor ...` on a machine with these facts."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(facts: Facts, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(look, "facts", lambda: facts)
        status, out, err = call("doctor", *words)
        assert err == ""
        return status, out

    return run


def test_the_longest_name_of_a_part_is_told_from_its_text(on):
    printed = on(LAPTOP)[1]
    assert all(f" {one.part} " in printed for one in diagnose(LAPTOP))
    assert " extra distributed " in printed


def test_the_command_prints_findings_and_tells_by_its_status(on):
    status, out = on(SERVER)
    assert status == 0 and "mend:" not in out and len(out.splitlines()) < 30
    old = dataclasses.replace(SERVER, driver="570.1", driver_cuda=(12, 8), jupyter=False)
    status, out = on(old)
    lines = out.splitlines()
    assert status == 1 and max(map(len, lines)) <= 80
    at = next(i for i, line in enumerate(lines) if line.startswith("broken  driver "))
    assert lines[at + 1].strip() == "mend: install NVIDIA driver 580 or later, then reboot"
    assert [line.split()[:2] for line in lines if line.startswith("missing")] == [
        ["missing", "Jupyter"]
    ]
    status, out = on(old, "--json")
    made = json.loads(out)
    assert status == 1 and not made["works"] and made["facts"]["gpus"][0]["name"] == H100.name
    assert {one["part"]: one["state"] for one in made["findings"]}["driver"] == BROKEN
    assert on(LAPTOP)[0] == 0 and json.loads(on(LAPTOP, "--json")[1])["works"]


def test_this_machine_works(call):
    """Its own facts: what these tests run on has Python, packages, a cache, and is not broken."""
    facts = look.facts()
    assert facts.python[:2] == sys.version_info[:2] and facts.cores >= 1 and facts.isa
    assert (
        facts.lacking is not None and facts.lacking[""] == [] and set(EXTRAS) < set(facts.lacking)
    )
    states = {one.part: one.state for one in diagnose(facts)}
    assert states["Python"] == states["packages"] == states["CPU"] == OK
    status, out, _ = call("doctor")
    assert status == (BROKEN in states.values()) and "Python" in out


def test_requirements_that_are_not_met_are_named(monkeypatch):
    wanted = ["numpy>=999", "nothing-of-the-name; extra == 'lab'", "pytest>=1; extra == 'dev'"]
    assert look._unmet(wanted, "")[0].endswith("is not >=999") and len(look._unmet(wanted, "")) == 1
    assert look._unmet(wanted, "lab") == ["nothing-of-the-name is not installed"]
    assert look._unmet(wanted, "dev") == []
    monkeypatch.setattr(look, "DISTRIBUTION", "nothing-of-the-name")
    assert look.lacking() is None


class Library:
    """libcuda.so.1 of a machine with these GPUs. error: what cuInit returns."""

    def __init__(self, *gpus: Gpu, error: int = 0):
        self.gpus, self.error = gpus, error

    def cuDriverGetVersion(self, number):
        number._obj.value = 13010
        return 0

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def cuGetErrorString(self, error, words):
        words._obj.value = b"no CUDA-capable device is detected"
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index

    def cuDeviceGetName(self, name, size, device):
        name.value = self.gpus[device.value].name.encode()

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = self.gpus[device.value].memory_bytes

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.gpus[device.value].capability[attribute - 75]


def test_gpus_are_asked_of_the_driver_itself():
    """Without any Python package for GPUs."""
    t4 = Gpu("Tesla T4", (7, 5), 16 * 10**9)
    assert look._of_driver(Library(H100, t4)) == {
        "driver_cuda": (13, 1), "gpus": (H100, t4), "gpu_error": ""
    }  # fmt: skip
    found = look._of_driver(Library(error=100))
    assert not found["gpus"] and found["gpu_error"] == "no CUDA-capable device is detected"


def test_a_gpu_without_a_driver_is_seen_on_the_bus(tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    for name, text in (("PROC", "version"), ("PCI", "pci")):
        monkeypatch.setattr(look, name, tmp_path / text)
    assert not look._of_gpu()["has_nvidia"]
    (tmp_path / "pci/0000:01").mkdir(parents=True)
    (tmp_path / "pci/0000:01/vendor").write_text("0x10de\n")
    (tmp_path / "pci/0000:01/class").write_text("0x030200\n")
    found = look._of_gpu()
    assert found["has_nvidia"] and found["driver"] is None and "libcuda" in found["gpu_error"]
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n"
    )
    assert look._of_gpu()["driver"] == "580.95.05"
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\n"
    )
    assert look._of_gpu()["driver"] == "580.159.04"


def test_refusals_of_cupti_have_words():
    class Refused(Exception):
        status = 35

    class Cupti:
        class Result:
            ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 1
            ERROR_NOT_INITIALIZED, ERROR_NOT_COMPATIBLE = 2, 3

        cuptiError = Refused

    def reason(error: Exception) -> str:
        with pytest.raises(collector.Unavailable) as refused, collector._answered(Cupti, "it"):
            raise error
        return str(refused.value)

    denied = Refused("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    assert look.cupti_state(reason(denied)) == f.CUPTI_FORBIDDEN
    denied.status = 1
    assert look.cupti_state(reason(denied)) == f.CUPTI_TAKEN
    denied.status = 3
    denied.args = ("version",)
    assert look.cupti_state(reason(denied)) == f.CUPTI_UNFIT
    assert look.cupti_state("cupti-python cannot be imported (x); y") == f.CUPTI_MISSING
