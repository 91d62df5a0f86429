"""What is replayed: the engines that a commit's tests made, read from the logs of `hook/`.

A case is a model, the fields of EngineConfig, and every toggle written out. It has the sequences
that engines of the tests went through: prompts and steps on an empty cache.

* An engine of the tests on a device that computes nothing, or that copies as no device does, is a
  case of the embedded device: its toggles are what counts.
* `unsafe` is off in every case: an ordering that is known to race has no answer to compare, and is
  refused by both commits or by neither.
* Toggles that the tests made without an engine are a case with a small model and one sequence.
* Engines on files that are no tiny model, or are changed ones, are left out, and counted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# of `make test` and `make test-slow`; and what the GPU tests add, on cuda alone
FILE, GPU_FILE = (Path(__file__).with_name(f"cases{name}.json") for name in ("", "-gpu"))
MOST_TOKENS = 600  # of a sequence that is replayed; what came behind them is counted
ELSEWHERE = ("device", "unsafe")  # fields of EngineConfig that a case does not keep
ALONE = {  # toggles without an engine
    "model": "tiny-llama-Q8_0.gguf",
    "config": {
        "n_ctx": 128, "n_ubatch": 8, "n_kv_pad": 32, "threads": 2, "n_devices": 1,
        "n_gpu_layers": -1, "override_tensor": [],
    },
}  # fmt: skip
MOST_PROMPT = 64  # tokens in a ubatch for which a default sequence fills more than one

# [what, tokens, outputs, times]: `prefill` or `step`, and how often in a row
Call = tuple[str, int, str, int]
Sequence = tuple[Call, ...]


class Key(NamedTuple):
    """A combination: the texts are JSON with sorted keys."""

    device: str
    model: str
    config: str
    toggles: str


class Engine:
    """One engine of the logs."""

    def __init__(self, about: Mapping[str, Any]):
        self.about = about
        self.sequences: list[list[Call]] = []
        self._past = -1  # what the cache must hold for the next call to belong to the sequence
        self.broken = 0  # calls whose past nobody noted

    def call(self, what: str, tokens: int, outputs: str, past: int) -> None:
        if past == 0:
            self.sequences.append([])
        elif past != self._past:
            self.broken += 1
            self._past = -1
            return
        self._past = past + tokens
        own = self.sequences[-1]
        if own and own[-1][:3] == (what, tokens, outputs):
            own[-1] = (what, tokens, outputs, own[-1][3] + 1)
        else:
            own.append((what, tokens, outputs, 1))


class Logs(NamedTuple):
    engines: list[Engine]
    refused: list[dict[str, Any]]
    toggles: set[str]  # made, as JSON


LETTERS = string.ascii_lowercase


def text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def read_logs(folder: Path) -> Logs:
    """What the processes of a test run noted in `folder`."""
    found = Logs([], [], set())
    for path in sorted(folder.glob("*.log")):
        own: dict[str, Engine] = {}
        for line in path.read_text().splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "T":
                found.toggles.add(text(json.loads(rest)["toggles"]))
            elif kind == "X":
                found.refused.append(json.loads(rest))
            elif kind == "E":
                number, _, about = rest.partition(" ")
                own[number] = Engine(json.loads(about))
                found.engines.append(own[number])
            else:
                number, tokens, outputs, past = rest.split()
                if number in own:  # 0 is an engine that a test made without __init__
                    what = "prefill" if kind == "P" else "step"
                    own[number].call(what, int(tokens), outputs, int(past))
    return found


def n_tokens(sequence: Iterable[Call]) -> int:
    return sum(tokens * times for _, tokens, _, times in sequence)


def cut(sequence: Iterable[Call], most: int = MOST_TOKENS) -> Sequence:
    """The calls that fit into `most` tokens; at least the first."""
    kept: list[Call] = []
    left = most
    for what, tokens, outputs, times in sequence:
        fits = max(0 if kept else 1, min(times, left // tokens))
        if fits:
            kept.append((what, tokens, outputs, fits))
        left -= fits * tokens
        if fits < times:
            break
    return tuple(kept)


def is_prefix(short: Sequence, long: Sequence) -> bool:
    """Whether the calls of `short` are the first ones of `long`."""
    *head, last = short
    if tuple(head) != long[: len(head)] or len(long) < len(short):
        return False
    other = long[len(head)]
    return last[:3] == other[:3] and last[3] <= other[3]


def distinct(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Without those whose calls begin another one: longer ones compute their arrays, too."""
    kept: list[Sequence] = []
    for sequence in sorted(set(sequences), key=lambda s: (-n_tokens(s), s)):
        if not any(is_prefix(sequence, long) for long in kept):
            kept.append(sequence)
    return kept


def default_sequence(config: Mapping[str, Any]) -> Sequence:
    """Of an engine that no test gave a token: a prompt of more than one ubatch where they are
    small, then three tokens."""
    ubatch, room = config.get("n_ubatch", 512), config.get("n_ctx", 2048)
    prompt = max(1, min(ubatch + 3 if ubatch <= MOST_PROMPT else 19, room - 3))
    steps = min(3, room - prompt)
    return (("prefill", prompt, "last", 1), *([("step", 1, "last", steps)] if steps else []))


def key_of(about: Mapping[str, Any]) -> Key:
    device = "host" if about["config"].get("device") == "host" else "embedded"
    if about["config"].get("device") == "cuda":
        device = "cuda"
    config = {k: v for k, v in about["config"].items() if k not in ELSEWHERE}
    return Key(device, about["model"]["file"], text(config), text(about["toggles"]))


def collected(logs: Logs, models: Mapping[str, str]) -> tuple[dict[Key, list[Sequence]], Counter]:
    """The cases and how many engines were what. models: file name to SHA-256 of the tiny ones."""
    found: dict[Key, list[Sequence]] = {}
    seen: Counter[str] = Counter()

    def is_tiny(about: Mapping[str, Any]) -> bool:
        model = about["model"]
        return models.get(model["file"], "") == model["sha256"] != ""

    used: set[str] = set()
    for engine in logs.engines:
        about = engine.about
        seen["engines made"] += 1
        if not is_tiny(about):
            seen["engines left out: on another file than a tiny model"] += 1
            continue
        if not about["plain"]:
            seen["engines on devices that copy as none does: cases of the embedded one"] += 1
        elif about["device"] == "null":
            seen["engines on the device that computes nothing: cases of the embedded one"] += 1
        if about["config"]["unsafe"]:
            seen["engines with unsafe on: cases with it off"] += 1
        seen["calls left out: what the cache held is not known"] += engine.broken
        key = key_of(about)
        used.add(key.toggles)
        own = found.setdefault(key, [])
        for sequence in engine.sequences:
            seen["sequences cut"] += n_tokens(sequence) > MOST_TOKENS
            own.append(cut(sequence))
    for about in logs.refused:
        if about.get("toggles") and is_tiny(about) and "n_ctx" in about["config"]:
            seen["engines refused"] += 1
            used.add(text(about["toggles"]))
            found.setdefault(key_of(about), [])
    fields = Counter(tuple(json.loads(t)) for t in logs.toggles).most_common(1)[0][0]
    for toggles in sorted(logs.toggles - used):
        if tuple(json.loads(toggles)) != fields:  # a test's own class of toggles
            continue
        seen["toggles without an engine"] += 1
        key = Key("embedded", ALONE["model"], text(ALONE["config"]), toggles)  # type: ignore[arg-type]
        found.setdefault(key, [])
    whole = {
        key: distinct(sequences) or [default_sequence(json.loads(key.config))]
        for key, sequences in found.items()
    }
    return whole, seen


def packed(cases: Mapping[Key, list[Sequence]]) -> dict[str, Any]:
    """As JSON: what repeats is in a table. Toggles are a letter for each field, an index
    (a, b, ...) into its `values`. Cases that differ in toggles alone share a row."""
    every = [json.loads(text) for text in sorted({key.toggles for key in cases})]
    values = {name: sorted({toggles[name] for toggles in every}) for name in every[0]}
    configs: dict[str, int] = {}
    sequences: dict[Sequence, int] = {}
    rows: dict[str, set[str]] = {}
    for key in sorted(cases):
        config = configs.setdefault(key.config, len(configs))
        own = [sequences.setdefault(s, len(sequences)) for s in cases[key]]
        row = json.dumps([key.device, key.model.removesuffix(".gguf"), config, own])
        letters = (LETTERS[values[k].index(v)] for k, v in json.loads(key.toggles).items())
        rows.setdefault(row, set()).add("".join(letters))
    return {
        "values": values,
        "configs": [json.loads(c) for c in configs],
        "sequences": [list(map(list, s)) for s in sequences],
        "cases": [[*json.loads(row), " ".join(sorted(own))] for row, own in rows.items()],
    }


def unpacked(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The cases of a file, each whole, with its number."""
    numbers = itertools.count()
    for device, model, config, sequences, rows in found["cases"]:
        for letters in rows.split():
            toggles = zip(found["values"].items(), letters, strict=True)
            yield {
                "case": f"{found['of']} {next(numbers)}",
                "device": device,
                "model": f"{model}.gguf",
                "config": found["configs"][config],
                "toggles": {k: values[LETTERS.index(letter)] for (k, values), letter in toggles},
                "sequences": [found["sequences"][s] for s in sequences],
            }


def files(device: str) -> list[Path]:
    """What is replayed on `device`, which is empty for the cases' own on a machine without GPU."""
    return [FILE, *([GPU_FILE] if device == "cuda" and GPU_FILE.exists() else [])]


def read_files(device: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The cases for `device`, and the SHA-256 of the models."""
    wanted, models = list[dict[str, Any]](), dict[str, str]()
    for path in files(device):
        found = json.loads(path.read_text())
        models |= found["models"]
        wanted += unpacked(found)
    left_out = "host" if device else "cuda"
    return [case for case in wanted if case["device"] != left_out], models


def files_hash(device: str) -> str:
    """SHA-256 of what `read_files` reads."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files(device))).hexdigest()


def written(found: Mapping[str, Any]) -> str:
    """A file of cases: an entry of a table a line."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], list | dict):
            rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
