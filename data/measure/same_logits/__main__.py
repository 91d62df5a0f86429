"""Are the logits of this checkout those of commit dcb7d40, bit for bit?

    python -m data.measure.same_logits compare              embedded and host, both on this machine
    python -m data.measure.same_logits compare --sample 25  some of the cases, in under a minute
    python -m data.measure.same_logits compare --device cuda --out FILE       on a machine with one
    python -m data.measure.same_logits record FILE...       into data/results/same-logits.json
    python -m data.measure.same_logits collect [--gpu]      cases.json anew, from the tests

The old commit is checked out under data/runs/same-logits. Where there is no git, `--old` and
`--new` name two folders. `compare` exits with 1 where a case is not as it was and no line of
`expected.json` says why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.measure.same_logits import cases, trees
from data.measure.same_logits.compare import compare, read
from data.measure.same_logits.record import RECORD, cases_hash, merged, unexplained

REPLAY = Path(__file__).with_name("replay.py")
SUITES = {  # what `make test`, `make test-slow` and `make test-gpu` run
    "test": ["-m", "not slow and not gpu and not exhaustive"],
    "test-slow": ["-m", "slow and not gpu and not exhaustive"],
}
GPU_SUITES = {"test-gpu": ["tests/gpu", "-m", "gpu"]}


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
        if name == "collect":
            command.add_argument("--gpu", action="store_true", help="of the GPU tests alone")
            command.add_argument("--workers", type=int, default=2)
            command.add_argument("--logs", type=Path, help="folder that the logs are written to")
        if name == "cases":
            command.add_argument("logs", type=Path, nargs="+")
        if name == "compare":
            command.add_argument("--new", type=Path, default=trees.ROOT)
            command.add_argument("--device", default="", help="in place of every case's own")
            command.add_argument("--sample", type=int, default=0, help="so many of the cases")
            command.add_argument("--kept", action="store_true",
                                 help="the old commit's replay of last time")  # fmt: skip
            command.add_argument("--out", type=Path, help="file for the result")
        if name == "record":
            command.add_argument("results", type=Path, nargs="+")
    return made


def collect(args: argparse.Namespace) -> int:
    """Runs the old commit's tests, each engine noted, and writes the cases."""
    old = args.old or trees.checked_out(args.home)
    name = "gpu" if args.gpu else "cpu"
    logs = args.logs or args.home / f"log-{name}"
    logs.mkdir(parents=True, exist_ok=True)
    parallel = [] if args.gpu else ["-n", str(args.workers), "--dist", "loadfile"]
    for suite, chosen in (GPU_SUITES if args.gpu else SUITES).items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        environment = trees.environment(old, trees.HOOK) | {"SAME_LOGITS_LOG": str(logs.resolve())}
        status = subprocess.run([*command, *parallel, *chosen], cwd=old, env=environment).returncode
        print(f"{suite}: pytest ended with {status}", file=sys.stderr)
    if args.logs:
        return 0
    return write_cases(args, [args.home / "log-cpu", args.home / "log-gpu"])


def write_cases(args: argparse.Namespace, folders: list[Path]) -> int:
    old = args.old or trees.checked_out(args.home)
    models = trees.models(args.home / "models", old)
    logs = cases.Logs([], [], set())
    for folder in filter(Path.exists, folders):
        own = cases.read_logs(folder)
        logs.engines.extend(own.engines)
        logs.refused.extend(own.refused)
        logs.toggles.update(own.toggles)
    found, seen = cases.collected(logs, models)
    packed = cases.packed(found)
    used = {f"{row[1]}.gguf" for row in packed["cases"]}
    cases.FILE.write_text(cases.written({
        "commit": trees.OLD,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seen": dict(seen),
        "models": {k: v for k, v in models.items() if k in used},
        **packed,
    }))  # fmt: skip
    devices = Counter(row[0] for row in packed["cases"])
    print(f"{len(packed['cases'])} cases {dict(devices)}, {len(packed['toggles'])} toggles, "
          f"{dict(seen)}")  # fmt: skip
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


def run_compare(args: argparse.Namespace) -> int:
    old = (args.old or trees.checked_out(args.home)).resolve()
    new = args.new.resolve()
    text = json.loads(cases.FILE.read_text())
    folder = args.home / "models"
    held = trees.models(folder, old, text["models"])
    for name, digest in text["models"].items():
        if held.get(name) != digest:
            sys.exit(f"{folder / name} is not the model that the cases were collected with; "
                     f"delete it, and `compare` writes it anew")  # fmt: skip
    wanted = sampled([*cases.unpacked(text)], args.sample)
    if args.device:
        wanted = [c for c in wanted if c["device"] != "host"]
    else:
        wanted = [c for c in wanted if c["device"] != "cuda"]
    start = time.perf_counter()
    work = args.home / f"{new.name}-{args.device or 'here'}{args.sample or ''}"
    work.mkdir(parents=True, exist_ok=True)
    listed = work / "cases.json"
    is_as_kept = listed.exists() and json.loads(listed.read_text()) == wanted
    listed.write_text(json.dumps(wanted))
    for name, tree in (("old", old), ("new", new)):
        out = work / f"{name}.jsonl"
        if name == "old" and args.kept and is_as_kept and out.exists():
            continue
        trees.python(tree, REPLAY.resolve(), tree, listed.resolve(), folder.resolve(),
                     out.resolve(), *([args.device] if args.device else []))  # fmt: skip
    found = compare(wanted, read(work / "old.jsonl"), read(work / "new.jsonl"), args.device)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "old": {"commit": {"hash": trees.OLD}, "sources": trees.sources(old)},
        "new": {"commit": trees.commit_of(new), "sources": trees.sources(new)},
        "machine": machine(args.device),
        "cases_hash": cases_hash(),
        "cases": len(wanted),
        "all": not args.sample,
        "seconds": round(time.perf_counter() - start, 1),
        **found,
    }
    shown = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(shown + "\n")
    (work / "result.json").write_text(shown + "\n")
    for device, counts in found["counts"].items():
        print(f"{device}: {', '.join(f'{v} {k}' for k, v in counts.items())}")
    others = unexplained(found["others"])
    for other in others[:20]:
        print(f"case {other['case']} ({other['device']}, {other['model']}) {other['was']}: "
              f"{other['what']}")  # fmt: skip
    known = len(found["others"]) - len(others)
    print(f"{known} known differences, {len(others)} others; {work / 'result.json'}")
    return 1 if others else 0


def run_record(args: argparse.Namespace) -> int:
    results = [json.loads(path.read_text()) for path in args.results]
    RECORD.write_text(json.dumps(merged(results), indent=1) + "\n")
    print(RECORD)
    return 0


def main() -> int:
    args = parser().parse_args()
    return {
        "collect": collect,
        "cases": lambda a: write_cases(a, a.logs),
        "compare": run_compare,
        "record": run_record,
    }[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
