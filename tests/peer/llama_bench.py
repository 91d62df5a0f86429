"""llama.cpp's llama-bench with CUDA as a process: where it is, what it loads, what it says.

`find` takes what `PEER=path` names: the program, a folder that holds it (as it is or in `bin/`), or
an archive of such a folder. Without a path it builds one by `build-cuda.sh`, once. The libraries of
CUDA that the program needs may be anywhere: `library_folders` says where it looked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / ".venv-peer"
BUILT, UNPACKED = HERE / "cuda", HERE / "cuda-unpacked"
PROGRAM, RECORD = "llama-bench", "build.json"
NEEDED = re.compile(rb"lib(?:cudart|cublas)\.so\.\d+")
OTHERS = re.compile(r"^(GGML|LLAMA)_")  # variables that change what llama.cpp does
SECONDS = 300  # the most that one process may take


class LlamaBench(NamedTuple):
    """The program. libraries: folders it is given beside its own. about: what run.json says."""

    program: Path
    libraries: tuple[Path, ...]
    about: dict[str, Any]

    def run(
        self, model: Path, tests: Sequence[str], repetitions: int, env: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """llama-bench's rows of the tests, ppN or tgN, in its order: prompts first. Raises
        RuntimeError, in one line, where it fails or says something else."""
        done = self.call([str(self.program), *arguments(model, tests, repetitions)], env)
        try:
            rows = json.loads(done.stdout)
            names = [name_of(row) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"{self.program} printed no rows: {last_line(done)}") from error
        if done.returncode or sorted(names) != sorted(tests):
            raise RuntimeError(
                f"{self.program} ended with {done.returncode} and rows {names}: {last_line(done)}"
            )
        for row in rows:
            if len(row["samples_ns"]) != repetitions or min(row["samples_ns"]) <= 0:
                raise RuntimeError(f"{self.program}: {name_of(row)} has times {row['samples_ns']}")
        return rows

    def call(
        self, command: Sequence[str], env: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program of the build to its end. Raises RuntimeError where it cannot be started,
        and where it takes too long."""
        try:
            return subprocess.run(
                command, env={**self.environment(), **env}, capture_output=True, text=True,
                timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(command)} took over {SECONDS} s") from error
        except OSError as error:
            raise RuntimeError(f"{self.program} cannot be started: {error}") from error

    def environment(self) -> dict[str, str]:
        """This process's variables without llama.cpp's own; one GPU; the program's libraries."""
        kept = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
        folders = [self.program.parent, *self.libraries]
        given = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        path = ":".join([*map(str, folders), *given])
        return kept | {"LD_LIBRARY_PATH": path, "CUDA_VISIBLE_DEVICES": visible}

    def described(self) -> LlamaBench:
        """With `about`: version, build, hash of program and libraries, names of CUDA's folders."""
        done = self.call([str(self.program), "--version"])
        found = re.search(r"version: (.+)", done.stderr + done.stdout)
        if done.returncode or found is None:
            raise RuntimeError(f"{self.program} --version: {last_line(done)}")
        every, folders = _files(self.program), self.program.parents[:2]
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in every}
        # what `build-cuda.sh` wrote beside `bin/`: package, compilers, options
        record = next((at / RECORD for at in folders if (at / RECORD).is_file()), None)
        build = f"unknown: no {RECORD} beside the program"
        about = {
            "program": self.program.name, "version": found[1], "files": hashes,
            "build": json.loads(record.read_text()) if record else build,
            "libraries": [folder.name for folder in self.libraries],
        }  # fmt: skip
        return self._replace(about=about)


def arguments(model: Path | str, tests: Sequence[str], repetitions: int) -> list[str]:
    """What llama-bench is called with: everything on the GPU, flash attention on."""
    prompts, gens = (
        ",".join(t[2:] for t in tests if t.startswith(kind)) or "0" for kind in ("pp", "tg")
    )
    return ["-m", str(model), "-ngl", "99", "-fa", "1", "-p", prompts, "-n", gens,
            "-r", str(repetitions), "-o", "json"]  # fmt: skip


def name_of(row: Mapping[str, Any]) -> str:
    """`pp512` or `tg128`."""
    return f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a process said last of an error, else at all."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1]


def find(path: Path | None) -> LlamaBench:
    """The program of a path, built where there is none; raises RuntimeError, in one line."""
    program = _program(path) if path is not None else build()
    return LlamaBench(program, library_folders(program), {}).described()


def _program(path: Path) -> Path:
    """As an absolute path: processes are started elsewhere."""
    given = path.resolve()
    if given.is_file() and tarfile.is_tarfile(given):
        shutil.rmtree(UNPACKED, ignore_errors=True)
        with tarfile.open(given) as archive:
            archive.extractall(UNPACKED, filter="data")
        given = UNPACKED
    for program in (given, given / PROGRAM, given / "bin" / PROGRAM):
        if program.is_file() and os.access(program, os.X_OK):
            return program
    raise RuntimeError(
        f"{path}: no {PROGRAM} there, nor in its bin/; give the program, its folder or an archive"
    )


def build(check: bool = False) -> Path:
    """The program in `.venv-peer/cuda`, built there where it is missing. check: only whether it is
    there, or could be built. Raises RuntimeError, in one line, for what is missing."""
    program = BUILT / "bin" / PROGRAM
    if program.is_file() and (BUILT / RECORD).is_file():
        return program
    if not check:
        print(f"{PROGRAM} is built in {BUILT} (half an hour on two cores, once)", file=sys.stderr)
    done = subprocess.run(
        [Path(__file__).with_name("build-cuda.sh"), BUILT], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHON": sys.executable} | ({"CHECK_ONLY": "1"} if check else {}),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the build failed"])[-1])
    return program


def library_folders(program: Path) -> tuple[Path, ...]:
    """Folders that hold what the program needs of CUDA and its own folder lacks; raises
    RuntimeError, naming where it looked, for a library that is nowhere."""
    needed = sorted(
        {n.decode() for path in _files(program) for n in NEEDED.findall(path.read_bytes())}
    )
    folders = list(dict.fromkeys(_candidates(program)))
    found: dict[Path, None] = {}
    for name in needed:
        folder = next((f for f in folders if (f / name).exists()), None)
        if folder is None:
            looked = ", ".join(str(f) for f in folders if f.is_dir())
            raise RuntimeError(
                f"missing: {name}, which {program.name} needs; looked in {looked}; install the "
                "wheels nvidia-cublas and nvidia-cuda-runtime, or set LD_LIBRARY_PATH"
            )
        found[folder] = None
    return tuple(folder for folder in found if folder != program.parent)


def _candidates(program: Path) -> Iterator[Path]:
    """Where CUDA's libraries may be: beside the program, named by hand, wheels, toolkits."""
    yield program.parent
    yield from (Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p)
    sites = [Path(p) for p in sys.path if p]
    for site in [*sites, program.parents[1] / "cublas"]:
        yield from sorted(site.glob("nvidia/*/lib"))
        yield from sorted(site.glob("torch/lib"))
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    for home in homes:
        yield from (home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib")))
    yield from (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


def _files(program: Path) -> list[Path]:
    """The program and the libraries beside it, each once: links left out."""
    beside = sorted(program.parent.glob("lib*.so*"))
    return [program, *(path for path in beside if not path.is_symlink())]
