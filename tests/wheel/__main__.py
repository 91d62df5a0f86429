"""The wheel, built and tried outside of the checkout: `python -m tests.wheel [3.11 3.12 ...]`.

It is installed into a clean environment of each Python that is found here, with an empty home and
an empty folder to work in. There the commands of COMMANDS run as a user types them. What needs an
extra is typed before the extras are installed: it must end with one line that names the extra.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
MODEL = "data/models/tiny-llama-Q8_0.gguf"
N_NOTEBOOKS = len([*(ROOT / "notebooks").glob("*.ipynb")])
SHORT = ["-p", "repeats", "3", "-p", "workload", "tg4"]
# a command, the status that it ends with, and a text that it must print
WITHOUT_EXTRAS = [
    (["workbench", "--version"], 0, "0."),
    (["workbench", "model", "tiny"], 0, "tiny models in data/models"),
    (["workbench", "run", "-m", MODEL, "-p", "The engine waits", "-n", "8"], 0, "8 tokens"),
    (["workbench", "bench", "-m", MODEL, "-p", "16", "-n", "8", "-r", "2"], 0, "tg8"),
    (["workbench", "notebooks", "copy", "notebooks"], 0, f"{N_NOTEBOOKS} notebooks in notebooks"),
    (["workbench", "report", "00_tour"], 1, "pip install 'token-workbench[lab]'"),
    (["workbench", "serve", "-m", MODEL], 1, "pip install 'token-workbench[serve]'"),
]
NOTEBOOKS = ("00_tour", "02_sync_modes")  # the second reads what was recorded
WITH_EXTRAS = [
    (["workbench", "report", *NOTEBOOKS, *SHORT], 0, f"{len(NOTEBOOKS)} reports in"),
    (["workbench", "serve-bench", "-m", MODEL, "--n-requests", "16"], 0, "Successful requests"),
]
TIMEOUT_S = 600


def interpreters(wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The version and the path of each wanted Python that starts here."""
    for version in wanted:
        places = [shutil.which(f"python{version}") or "", sys.executable]
        places += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for place in filter(None, places):
            told = "import sys; print('%d.%d' % sys.version_info[:2], sys._base_executable)"
            done = subprocess.run([place, "-c", told], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.split()[0] == version:
                yield version, done.stdout.split()[1]
                break


def built(folder: Path) -> Path:
    """The wheel of this checkout."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps",
         "-w", folder, ROOT],
        check=True,
    )  # fmt: skip
    (wheel,) = folder.glob("token_workbench-*.whl")
    return wheel


class Environment:
    """A virtual environment without anything of the checkout's, and an empty home."""

    def __init__(self, version: str, python: str, folder: Path):
        self._version = version
        self._work, self._bin = folder / "work", folder / "venv" / "bin"
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        for made in ("work", "home"):
            (folder / made).mkdir()
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._environment = kept | {
            "PATH": f"{self._bin}:/usr/bin:/bin", "HOME": str(folder / "home"), "LANG": "C.UTF-8"
        }  # fmt: skip

    def expects(self, arguments: Sequence[str], status: int, text: str) -> None:
        """Runs a command. Raises AssertionError, with what it printed, where it does not do what it
        should."""
        begun = time.monotonic()
        done = subprocess.run(
            [self._bin / arguments[0], *arguments[1:]], cwd=self._work, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said, command = done.stdout, " ".join(arguments)
        wanted = f"{command}: status {done.returncode} where {status} is expected, and {text!r} in:"
        if done.returncode != status or text not in said:
            raise AssertionError(f"{wanted}\n{said[-4000:]}")
        if status and ("Traceback" in said or not said.splitlines()[-1].startswith("error: ")):
            raise AssertionError(f"not an error of one line: {command}\n{said}")
        print(f"{self._version} {time.monotonic() - begun:6.1f} s  {command}", flush=True)


def tried(wheel: Path, version: str, python: str, folder: Path) -> None:
    environment = Environment(version, python, folder)
    install = ["python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install += ["--no-compile", "-c"]  # what is imported is compiled then
    for extras, commands in (("", WITHOUT_EXTRAS), ("[lab,serve]", WITH_EXTRAS)):
        environment.expects([*install, str(ROOT / "constraints.txt"), f"{wheel}{extras}"], 0, "")
        for command in commands:
            environment.expects(*command)


def main(wanted: Sequence[str]) -> None:
    found = list(interpreters(wanted or PYTHONS))
    if not found:
        sys.exit(f"none of Python {', '.join(wanted or PYTHONS)} is here")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(found)) as pool:
        wheel = built(Path(folder))
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        tries = [
            pool.submit(tried, wheel, version, python, Path(folder) / version)
            for version, python in found
        ]
        try:
            for one in as_completed(tries):
                one.result()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            pool.shutdown(cancel_futures=True)
            sys.exit(str(error))
    print("as it should be on Python " + ", ".join(version for version, _ in found))


if __name__ == "__main__":
    main(sys.argv[1:])
