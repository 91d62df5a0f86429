"""The one table of devices. No other module of the package knows a device by its name."""

from typing import NamedTuple

HOST = "host"  # computes on the host's own memory; every engine has it beside its device
AUTO = "auto"


class Device(NamedTuple):
    """A kind of device.

    module: has `open_backend(threads, ...)` and, with automatic, `probe()`: one line that names the
    device, or DeviceError with one line that says what is missing. gpu: an NVIDIA GPU, which CUPTI
    can trace. automatic: `auto` tries it, in the table's order. numbered: a machine can have
    several, and `open_backend` takes the number of one. computes: it has answers and times.
    peer_name: llama-bench's `backends` of it.
    """

    module: str
    words: str
    gpu: bool = False
    automatic: bool = False
    numbered: bool = False
    computes: bool = True
    peer_name: str = ""


DEVICES: dict[str, Device] = {
    "embedded": Device(
        "workbench.backend.cpu.device.embedded", "an asynchronous device on CPU threads"
    ),
    "cuda": Device(
        "workbench.backend.cuda.device.backend", "a GPU",
        gpu=True, automatic=True, numbered=True, peer_name="CUDA",
    ),
    HOST: Device("workbench.backend.cpu.device.host", "the CPU, each kernel when it is called",
                 peer_name="CPU"),
    "null": Device("workbench.backend.null", "computes nothing, for program and check",
                   computes=False),
}  # fmt: skip
WITHOUT_GPU = "embedded"  # what `auto` takes where no device of the table is there


def names() -> tuple[str, ...]:
    """What a user may ask for: `auto`, and every device of the table."""
    return (AUTO, *DEVICES)


def computes(name: str) -> bool:
    """Whether a device of this name has answers and times."""
    return name not in DEVICES or DEVICES[name].computes


def in_words(also_idle: bool = False) -> str:
    """`auto: ... cuda: ...`, a sentence each. also_idle: with devices that compute nothing."""
    tried = ", ".join(name for name, device in DEVICES.items() if device.automatic)
    told = {AUTO: f"{tried} where there is one, else {WITHOUT_GPU}"}
    told |= {n: d.words for n, d in DEVICES.items() if d.computes or also_idle}
    return ". ".join(f"{name}: {words}" for name, words in told.items())


def is_gpu(name: str) -> bool:
    """Whether a device of this name is a GPU; a recorded name may be one that is gone."""
    return name in DEVICES and DEVICES[name].gpu
