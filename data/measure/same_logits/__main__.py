"""Are the logits of this checkout equal to commit dcb7d40's, bit for bit?

    python -m data.measure.same_logits compare              embedded and host, both on this machine
    python -m data.measure.same_logits compare --sample 25  some of the cases, in under a minute
    python -m data.measure.same_logits compare --device cuda --out FILE       on a machine with one
    python -m data.measure.same_logits record FILE...       into data/results/same-logits.json
    python -m data.measure.same_logits collect [--gpu]      cases.json anew, from the old tests
    python -m data.measure.same_logits cases [--gpu]        the same, of what was collected last

The old commit is checked out under data/runs/same-logits. Where there is no git, `--old` and
`--new` name two folders. `compare` exits with 1 where a case is not as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.measure.same_logits import cases, changed_files, trees
from data.measure.same_logits.compare import compare, read
from data.measure.same_logits.record import RECORD, merged

REPLAY, CHANGED = (Path(__file__).resolve().with_name(f"{n}.py") for n in ("replay", "changed"))
SUITES = {  # what `make test`, `make test-slow` and `make test-gpu` run
    "test": ["-m", "not slow and not gpu and not exhaustive"],
    "test-slow": ["-m", "slow and not gpu and not exhaustive"],
}
GPU_FILES = ("engine", "cupti", "debug_arena", "devices", "backend", "planted_bug", "measured")
GPU_SUITES = {  # GPU tests that make engines
    "test-gpu": [*(f"tests/gpu/test_cuda_{name}.py" for name in GPU_FILES), "-m", "gpu"]
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m data.measure.same_logits",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("collect", "cases", "compare", "record"):
        command = commands.add_parser(name)
        command.add_argument("--home", type=Path, default=trees.HOME,
                             help="folder of the old checkout, models and replays")  # fmt: skip
        command.add_argument("--old", type=Path, help="checkout of the old commit")
        if name in ("collect", "cases"):
            command.add_argument("--gpu", action="store_true", help="of the GPU tests alone")
            command.add_argument("--workers", type=int, default=2)
        if name == "compare":
            command.add_argument("--new", type=Path, default=trees.ROOT)
            command.add_argument("--device", default="", help="in place of every case's own")
            command.add_argument("--sample", type=int, default=0, help="so many of the cases")
            command.add_argument("--kept", action="store_true",
                                 help="the old commit's replay of last time")  # fmt: skip
            command.add_argument("--workers", type=int, default=1,
                                 help="processes of each; more than one: both at once")  # fmt: skip
            command.add_argument("--out", type=Path, help="file for the result")
        if name == "record":
            command.add_argument("results", type=Path, nargs="+")
    return made


def collect(args: argparse.Namespace) -> int:
    """Runs the old commit's tests, each engine noted, and writes the cases."""
    old = (args.old or trees.checked_out(args.home)).resolve()
    logs = (args.home / f"log-{'gpu' if args.gpu else 'cpu'}").resolve()
    shutil.rmtree(logs, ignore_errors=True)
    for suite, chosen in (GPU_SUITES if args.gpu else SUITES).items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                   "-n", str(args.workers), "--dist", "loadfile", *chosen]  # fmt: skip
        environment = trees.environment(old, trees.HOOK) | {"SAME_LOGITS_LOG": str(logs)}
        status = subprocess.run(command, cwd=old, env=environment).returncode
        print(f"{suite}: pytest ended with {status}", file=sys.stderr)
    return write_cases(args)


def write_cases(args: argparse.Namespace) -> int:
    """The cases of logs that `collect` left."""
    old = (args.old or trees.checked_out(args.home)).resolve()
    models = trees.models(args.home / "models", old)
    found, seen = cases.collected(
        cases.read_logs(args.home / f"log-{'gpu' if args.gpu else 'cpu'}"), models
    )
    if args.gpu:
        found = {key: sequences for key, sequences in found.items() if key.device == "cuda"}
    packed = cases.packed(found)
    used = {f"{row[1]}.gguf" for row in packed["cases"]}
    file = cases.GPU_FILE if args.gpu else cases.FILE
    file.write_text(cases.written({
        "of": "gpu" if args.gpu else "cpu",
        "commit": trees.OLD,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seen": dict(seen),
        "models": {k: v for k, v in models.items() if k in used},
        **packed,
    }))  # fmt: skip
    devices = Counter(key.device for key in found)
    print(f"{file.name}: {len(found)} cases {dict(devices)}, "
          f"{len({key.toggles for key in found})} toggles, {dict(seen)}")  # fmt: skip
    return 0


def machine(device: str) -> str:
    """The processor, or the GPU, that both replays ran on."""
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores"


def sampled(found: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """n of the cases, evenly through the list; long sequences are left to the whole run."""
    short = [c for c in found if sum(map(cases.n_tokens, c["sequences"])) <= 300]
    return [short[i * len(short) // n] for i in range(n)] if 0 < n < len(short) else found


def replay_all(
    sides: dict[str, Path],
    wanted: list[dict[str, Any]],
    work: Path,
    models: Path,
    device: str,
    workers: int,
) -> None:
    """Replays the cases in both checkouts, one after the other, or with several workers at once;
    `old.jsonl` and `new.jsonl` in `work` are what came of it. A worker has neighbours in the order
    of models and settings, so that few workers compile the same kernels."""
    processes = []
    near = sorted(wanted, key=lambda case: (case["model"], json.dumps(case["config"])))
    for name, tree in sides.items():
        parts = []
        for i in range(workers):
            parts.append(work / f"{name}-{i}")
            part = parts[-1].with_suffix(".json")
            own = near[i * len(near) // workers : (i + 1) * len(near) // workers]
            part.write_text(json.dumps(own))
            arguments = [tree, part, models, parts[-1].with_suffix(".jsonl")]
            of_device = [device] if device else []
            processes.append(trees.started(
                tree, REPLAY, *(path.resolve() for path in arguments), *of_device
            ))  # fmt: skip
        if workers == 1:
            trees.finished(processes)
            processes.clear()
    trees.finished(processes)
    for name in sides:
        made = (work / f"{name}-{i}.jsonl" for i in range(workers))
        (work / f"{name}.jsonl").write_text("".join(path.read_text() for path in made))


def ask(old: Path, new: Path, home: Path) -> list[dict[str, str]]:
    """What was changed on purpose after the old commit: each question with both answers."""
    folder = (home / "changed").resolve()
    changed_files.write(home / "models", folder)
    answers = []
    for name, tree in (("old", old), ("new", new)):
        out = folder / f"{name}.json"
        trees.finished([trees.started(tree, CHANGED, tree, folder, out)])
        answers.append(json.loads(out.read_text()))
    before, after = answers
    return [{"what": k, "old": answer, "new": after[k]} for k, answer in before.items()]


def run_compare(args: argparse.Namespace) -> int:
    old = (args.old or trees.checked_out(args.home)).resolve()
    new = args.new.resolve()
    wanted, models = cases.read_files(args.device)
    wanted = sampled(wanted, args.sample)
    folder = args.home / "models"
    held = trees.models(folder, old, models)
    for name, digest in models.items():
        if held.get(name) != digest:
            sys.exit(f"{folder / name} is not the model that the cases were collected with; "
                     f"delete it, and `compare` writes it anew")  # fmt: skip
    start = time.perf_counter()
    work = args.home / f"{new.name}-{args.device or 'here'}{args.sample or ''}"
    work.mkdir(parents=True, exist_ok=True)
    listed = work / "cases.json"
    is_as_kept = listed.exists() and json.loads(listed.read_text()) == wanted
    listed.write_text(json.dumps(wanted))
    sides = {"old": old, "new": new}
    if args.kept and is_as_kept and (work / "old.jsonl").exists():
        del sides["old"]
    replay_all(sides, wanted, work, folder, args.device, args.workers)
    found = compare(wanted, read(work / "old.jsonl"), read(work / "new.jsonl"), args.device)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "old": {"commit": {"hash": trees.OLD}, "sources": trees.sources(old)},
        "new": {"commit": trees.commit_of(new), "sources": trees.sources(new)},
        "machine": machine(args.device),
        "cases_hash": cases.files_hash(args.device),
        "cases": len(wanted),
        "all": not args.sample,
        "seconds": round(time.perf_counter() - start, 1),
        "changed_on_purpose": [] if args.device or args.sample else ask(old, new, args.home),
        **found,
    }
    shown = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(shown + "\n")
    (work / "result.json").write_text(shown + "\n")
    for device, counts in found["counts"].items():
        print(f"{device}: {', '.join(f'{v} {k}' for k, v in counts.items())}")
    for other in found["others"][:20]:
        print(f"case {other['case']} ({other['device']}, {other['model']}) {other['was']}: "
              f"{other['what']}")  # fmt: skip
    for row in result["changed_on_purpose"]:
        print(f"{row['what']}: {row['old']} -> {row['new']}")
    print(f"{len(found['others'])} cases are not as they were; {work / 'result.json'}")
    return 1 if found["others"] else 0


def run_record(args: argparse.Namespace) -> int:
    results = [json.loads(path.read_text()) for path in args.results]
    RECORD.write_text(json.dumps(merged(results), indent=1) + "\n")
    print(RECORD)
    return 0


def main() -> int:
    args = parser().parse_args()
    return {
        "collect": collect,
        "cases": write_cases,
        "compare": run_compare,
        "record": run_record,
    }[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
