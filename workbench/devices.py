"""The one table of devices. No other module of the package knows a device by its name."""

from __future__ import annotations

from typing import NamedTuple

HOST = "host"  # computes on the host's own memory; every engine has it beside its device
AUTO = "auto"


class Device(NamedTuple):
    """A kind of device.

    module: has `open_backend(threads, ...)` and, with automatic, `probe()`: one line that names the
    device, or DeviceError with one line that says what is missing. gpu: an NVIDIA GPU, which CUPTI
    can trace. automatic: `auto` tries it, in the table's order. numbered: a machine can have
    several, and `open_backend` takes the number of one. peer_name: llama-bench's `backends` of it.
    """

    module: str
    words: str
    gpu: bool = False
    automatic: bool = False
    numbered: bool = False
    peer_name: str = ""


DEVICES: dict[str, Device] = {
    "embedded": Device(
        "workbench.backend.cpu.embedded", "an asynchronous device on this machine's cores"
    ),
    "cuda": Device(
        "workbench.backend.cuda.backend", "an NVIDIA GPU",
        gpu=True, automatic=True, numbered=True, peer_name="CUDA",
    ),
    HOST: Device("workbench.backend.cpu.host", "this machine's cores, one call after the other",
                 peer_name="CPU"),
    "null": Device("workbench.backend.null", "computes nothing"),
}  # fmt: skip
WITHOUT_GPU = "embedded"  # what `auto` takes where no device of the table is there


def is_gpu(name: str) -> bool:
    """Whether a device of this name is a GPU; a recorded name may be one that is gone."""
    return name in DEVICES and DEVICES[name].gpu
