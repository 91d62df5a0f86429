"""Two checkouts side by side: where the old one lies, what runs in which, and their models."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOOK = Path(__file__).with_name("hook")
OLD = "dcb7d40f56e4df97ca505dc284354dcd8fd67e2a"
HOME = ROOT / "data" / "runs" / "same-logits"  # the old checkout, the models, what was replayed
WRITE_MODELS = """
import sys
try:
    from workbench.model.synth.models import write_tiny_models
except ImportError:  # the old commit has it elsewhere
    from workbench.model.synth import write_tiny_models
write_tiny_models(sys.argv[1])
"""


def checked_out(home: Path) -> Path:
    """The old commit's checkout in `home`, cloned from this repository where it is missing.

    Raises subprocess.CalledProcessError where git cannot.
    """
    tree = home / OLD[:7]
    if not (tree / "workbench" / "__init__.py").exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", ROOT, tree], check=True)
        subprocess.run(["git", "-C", tree, "checkout", "-q", OLD], check=True)
    return tree


def commit_of(tree: Path) -> dict[str, object]:
    """Hash of a checkout's commit, `unknown` without git; whether a tracked file differs."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", tree, *args], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if git("rev-parse", "--show-toplevel") != str(tree.resolve()):
        return {"hash": "unknown", "dirty": None}
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "workbench", "kernels")
    return {"hash": git("rev-parse", "HEAD"), "dirty": bool(changed)}


def sources(tree: Path) -> str:
    """SHA-256 over names and contents of the package and the kernels."""
    files = [*(tree / "kernels").glob("*.cu*"), *(tree / "workbench").rglob("*.py"),
             *(tree / "workbench").glob("*.json")]  # fmt: skip
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(tree).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment(tree: Path, *more: Path) -> dict[str, str]:
    """With the package of `tree` before any other to import."""
    kept = {k: v for k, v in os.environ.items() if k != "SAME_LOGITS_LOG"}
    path = [*map(str, (tree, *more)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


def started(tree: Path, *arguments: object) -> subprocess.Popen[bytes]:
    """This interpreter with the package of `tree`."""
    command = [sys.executable, "-P", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(tree), cwd=tree)


def finished(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Waits for all of them. Raises SystemExit where one failed; none is left behind."""
    running = list(processes)
    try:
        failed = [p.args for p in running if p.wait()]
    finally:
        for process in running:
            process.kill()
    if failed:
        raise SystemExit(f"{len(failed)} of {len(running)} processes failed: {failed[0]!r}")


def models(folder: Path, tree: Path, wanted: Iterable[str] = ()) -> dict[str, str]:
    """File name to SHA-256 of the tiny models, which the package of `tree` writes into `folder`
    where one of `wanted` is missing."""
    names = set(wanted)
    if not names or not all((folder / name).exists() for name in names):
        finished([started(tree, "-c", WRITE_MODELS, folder.resolve())])
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.gguf"))
    }
