"""Notes every engine that a process makes, and every step that it takes.

Python imports this file by itself in each process whose PYTHONPATH has this folder, the processes
that a test starts included. It notes nothing unless SAME_LOGITS_LOG names a folder. Each process
writes a file of its own there, a line for each of these:

    T toggles                     Toggles were made
    E number {engine}             an engine was made
    X {attempt}                   an engine was refused
    S number tokens outputs past  an engine took a step; past: tokens in its cache before
    P number tokens outputs past  an engine took a prompt, and its steps are not noted
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import sys

FOLDER = os.environ.get("SAME_LOGITS_LOG", "")
PLAIN = ("EmbeddedDevice", "HostBackend", "NullBackend", "CudaBackend")


class Log:
    """The file of this process; a forked child opens its own."""

    def __init__(self) -> None:
        self.pid = 0
        self.file = -1
        self.engines = 0
        self.toggles: set[str] = set()

    def write(self, line: str) -> None:
        if self.pid != os.getpid():
            self.pid = os.getpid()
            name = os.path.join(FOLDER, f"{self.pid}.log")
            self.file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self.file, f"{line}\n".encode())


LOG = Log()


def test_name() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]


@functools.cache
def _sha256(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_of(path: object) -> dict[str, str]:
    try:
        found = os.stat(str(path))
        digest = _sha256(str(path), found.st_size, found.st_mtime_ns)
    except OSError:
        digest = ""
    return {"file": os.path.basename(str(path)), "sha256": digest}


def watch_engine(module: object) -> None:
    """Wraps `Engine.load`, `__init__`, `step` and `prefill` of workbench.engine.engine."""
    engine_class = module.Engine  # type: ignore[attr-defined]
    init, step, prefill = engine_class.__init__, engine_class.step, engine_class.prefill
    load = engine_class.load.__func__

    def noted_init(self, loaded, config, toggles):
        about = {
            "test": test_name(),
            "model": model_of(loaded.model.path),
            "config": config.to_dict(),
            "toggles": toggles.to_dict(),
            "device": loaded.device,
            "backends": [type(b).__name__ for b in loaded.backends],
        }
        about["plain"] = all(name in PLAIN for name in about["backends"])
        try:
            init(self, loaded, config, toggles)
        except Exception as error:
            about["error"] = [type(error).__name__, str(error)]
            LOG.write(f"X {json.dumps(about)}")
            raise
        LOG.engines += 1
        self.__dict__["_noted"] = LOG.engines
        LOG.write(f"E {LOG.engines} {json.dumps(about)}")

    def noted_load(cls, path, **asked):
        try:
            return load(cls, path, **asked)
        except Exception as error:
            toggles, config = asked.get("toggles"), asked.get("config")
            fields = {k: v for k, v in asked.items() if isinstance(v, str | int | tuple)}
            with contextlib.suppress(Exception):
                about = {
                    "test": test_name(),
                    "model": model_of(path),
                    "config": config.to_dict() if config is not None else fields,
                    "toggles": None if toggles is None else toggles.to_dict(),
                    "error": [type(error).__name__, str(error)],
                }
                LOG.write(f"X {json.dumps(about)}")
            raise

    def noted_step(self, tokens, outputs="last"):
        past = self.n_past
        logits = step(self, tokens, outputs)
        if not self.__dict__.get("_in_prompt"):
            LOG.write(f"S {self.__dict__.get('_noted', 0)} {len(tokens)} {outputs} {past}")
        return logits

    def noted_prefill(self, tokens, outputs="last"):
        past = self.n_past
        self.__dict__["_in_prompt"] = True
        try:
            logits = prefill(self, tokens, outputs)
        finally:
            self.__dict__["_in_prompt"] = False
        LOG.write(f"P {self.__dict__.get('_noted', 0)} {len(tokens)} {outputs} {past}")
        return logits

    engine_class.__init__ = noted_init
    engine_class.load = classmethod(noted_load)
    engine_class.step = noted_step
    engine_class.prefill = noted_prefill


def watch_toggles(module: object) -> None:
    """Wraps the check that every `Toggles` passes when it is made."""
    toggles_class = module.Toggles  # type: ignore[attr-defined]
    check = toggles_class.__post_init__

    def noted(self):
        check(self)
        line = json.dumps(self.to_dict())
        if type(self) is toggles_class and line not in LOG.toggles:
            LOG.toggles.add(line)
            LOG.write(f"T {json.dumps({'test': test_name(), 'toggles': self.to_dict()})}")

    toggles_class.__post_init__ = noted


WATCHED = {"workbench.engine.engine": watch_engine, "workbench.config": watch_toggles}


class Finder(importlib.abc.MetaPathFinder):
    """Finds a watched module as Python does, and wraps what it defines once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_watch(module: object) -> None:
            run(module)  # type: ignore[arg-type]
            WATCHED[name](module)

        spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


if FOLDER:
    os.makedirs(FOLDER, exist_ok=True)
    sys.meta_path.insert(0, Finder())
