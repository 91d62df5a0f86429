"""The one table of devices. No other module of the package knows a device by its name."""

from typing import NamedTuple

HOST = "host"  # computes on the host's own memory; every engine has it in addition to its device
AUTO = "auto"


class Device(NamedTuple):
    """A kind of device.

    module: has `open_backend(threads, ...)`. Where `automatic`, it also has `probe()`, which
        returns a line that names the device, or raises DeviceError with a line that says what is
        missing.
    gpu: an NVIDIA GPU, which CUPTI can trace.
    automatic: `auto` tries this device, in the order of the table.
    numbered: a machine can have several, and `open_backend` takes a number.
    computes: the device gives answers, and has times.
    peer_name: what llama-bench's column `backends` calls it.
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
WITHOUT_GPU = "embedded"  # what `auto` means where this machine has no automatic device


def names() -> tuple[str, ...]:
    """The names that a user may give: `auto`, and every device of the table."""
    return (AUTO, *DEVICES)


def computes(name: str) -> bool:
    """Whether a device of this name gives answers and has times."""
    return name not in DEVICES or DEVICES[name].computes


def in_words(also_idle: bool = False) -> str:
    """`auto: ... cuda: ...`, a sentence each. also_idle: also devices that compute nothing."""
    tried = ", ".join(name for name, device in DEVICES.items() if device.automatic)
    told = {AUTO: f"{tried} where there is one, else {WITHOUT_GPU}"}
    told |= {n: d.words for n, d in DEVICES.items() if d.computes or also_idle}
    return ". ".join(f"{name}: {words}" for name, words in told.items())


def is_gpu(name: str) -> bool:
    """Whether a device of this name is a GPU. A recorded name may be that of a device which does
    not exist any more."""
    return name in DEVICES and DEVICES[name].gpu
