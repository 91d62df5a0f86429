"""Damaged model files, many of them: ModelFileError or a model, and nothing else. What Python
allocates is at most 7 times the file (see test_gguf) plus 64 KiB for the objects."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.gguf_files import build, pair, tensor, text, u32, write
from tests.oracles.dequantize import dequantize
from tests.profiles import examples
from workbench.common.errors import ModelFileError
from workbench.model.gguf.expand import expanded, loaded_as, loaded_bytes
from workbench.model.gguf.file import GGUFFile, StringArray, model_hash, open_gguf
from workbench.model.gguf.inspect import summary
from workbench.model.gguf.walk import shown

HUGE = [0, 1, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**61, 2**62,
        2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]  # fmt: skip
u64 = struct.Struct("<Q").pack
POSITION = st.integers(0, 2**20)  # taken modulo the file's length
# how many bytes go, and what comes in their place: bytes, a bit that is turned, other bytes moved
HOW = [
    (st.just(1), st.binary(min_size=1, max_size=1)),
    (st.just(1), st.integers(0, 7)),
    (st.just(8), (st.sampled_from(HUGE) | st.integers(0, 2**64 - 1)).map(u64)),
    (st.just(4), (st.integers(0, 45) | st.integers(0, 2**32 - 1)).map(struct.Struct("<I").pack)),
    (st.just(0), st.binary(min_size=1, max_size=40)),
    (st.integers(1, 64), st.just(b"")),
    (st.just(24), POSITION),
    (st.just(2**21), st.just(b"")),
]
DAMAGE = st.tuples(POSITION, st.one_of(st.tuples(n, new) for n, new in HOW))


@cache
def original() -> tuple[bytes, int]:
    """A small model with every kind of metadata, and where its tensor data starts."""
    weights = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    keys = {
        "general.name": "fuzz é", "general.alignment": 32, "llama.block_count": 1,
        "llama.expert_used_count": 2, "flag": True, "f": 0.5, "flags": [True, False, True],
        "tokenizer.ggml.tokens": [f"tök{i}" for i in range(40)],
        "tokenizer.ggml.token_type": [1] * 40,
        "tokenizer.ggml.merges": [f"a b{i}" for i in range(30)],
    }  # fmt: skip
    tensors = [("token_embd.weight", weights, "F32"), ("blk.0.attn_norm.weight", weights[0], "F32")]
    for name, kind in (
        ("blk.0.ffn_up_exps.weight", "Q4_0"), ("output.weight", "Q8_0"),
        ("blk.0.attn_k.weight", "Q5_1"),
    ):  # fmt: skip
        data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
        tensors.append((name, data, kind))
    with TemporaryDirectory() as directory:
        path = write(Path(directory) / "m.gguf", tensors, keys)
        with open_gguf(path) as file:
            return path.read_bytes(), file.data_offset


def damage(content: bytearray, at: int, how: tuple[int, bytes | int]) -> None:
    length, (n, new) = max(len(content), 1), how
    at %= length
    if isinstance(new, int) and n == 1:
        new = bytes(b ^ (1 << new) for b in content[at : at + 1])
    elif isinstance(new, int):
        new = content[new % length : new % length + n]
    content[at : at + n] = new


def opens_or_refuses(content: bytes, path: Path) -> None:
    """Opens the file and reads all of it, or it is refused properly."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with open_gguf(path) as file:
            peak = tracemalloc.get_traced_memory()[1]
            read_all(file)
        assert summary(path).lines()
    except ModelFileError as error:
        peak = tracemalloc.get_traced_memory()[1]
        assert str(error).isprintable() and len(str(error)) < 1000
    finally:
        tracemalloc.stop()
        assert peak < 7 * len(content) + (64 << 10)


def read_all(file: GGUFFile) -> None:
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            assert len(value.tolist()) == len(value)
    for name, info in file.tensors.items():
        assert info.offset + info.nbytes <= file.file_bytes
        if (to := loaded_as(info.dtype, "f16")) != info.dtype:
            try:
                assert expanded(file.data(name), info, to).nbytes == loaded_bytes(info, "f16")
            except ModelFileError as error:
                assert str(error).isprintable() and shown(name) in str(error)
            continue
        with np.errstate(all="ignore"):
            weights = dequantize(file.data(name), info.dtype, info.shape)
        assert weights.shape == info.shape
    assert len(model_hash(file)) == 64


@settings(max_examples=examples(600), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(DAMAGE, min_size=1, max_size=4), st.booleans())
def test_damaged_files(tmp_path, changes, in_header):
    """Positions anywhere, or before the tensor data, where every byte means something."""
    content, data_offset = original()
    damaged = bytearray(content)
    for at, how in changes:
        damage(damaged, at % data_offset if in_header else at, how)
    opens_or_refuses(bytes(damaged), tmp_path / "m.gguf")


@given(st.binary(max_size=200), st.sampled_from([b"", b"GGUF\x03\0\0\0"]))
@settings(suppress_health_check=list(HealthCheck))
def test_any_bytes(tmp_path, content, header):
    opens_or_refuses(header + content, tmp_path / "m.gguf")


N = 3


def in_parts(path: Path, a_part: int, n_tensors: int = 5) -> Path:
    """A model of n_tensors, in parts of `a_part` tensors (0: in one file), by the gguf package."""
    keys = {"general.name": "in parts", "tokenizer.ggml.tokens": ["t0", "t1"]}
    tensors = [(f"blk.{i}.w", np.full((2, 8), i, np.float32), "F32") for i in range(n_tensors)]
    return write(path, tensors, keys, a_part=a_part)


@cache
def originals() -> dict[str, bytes]:
    """The parts of one model, by name."""
    with TemporaryDirectory() as directory:
        in_parts(Path(directory) / "m.gguf", 2)
        return {p.name: p.read_bytes() for p in sorted(Path(directory).iterdir())}


def name(part: int, of: int = N, stem: str = "m") -> str:
    return f"{stem}-{part:05d}-of-{of:05d}.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder with the parts of one model, 2 + 2 + 1 tensors."""
    in_parts(tmp_path / "m.gguf", 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [name(i + 1) for i in range(N)]
    return tmp_path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    said = str(caught.value)
    assert said.isprintable() and said.startswith(str(path.parent))
    return said


def test_any_part_opens_the_model(parts, tmp_path):
    hashes = {model_hash(in_parts(tmp_path / "whole.gguf", 0))}
    paths = [parts / name(k + 1) for k in range(N)]
    for path in paths:
        with open_gguf(path) as file:
            assert [t.part for t in file.tensors.values()] == [0, 0, 1, 1, 2]
            for k, tensor_name in enumerate(file.tensors):
                assert tensor_name == f"blk.{k}.w" and file.tensors[tensor_name].shape == (2, 8)
                assert (file.data(tensor_name).view("<f4") == k).all()
            assert file.metadata["general.name"] == "in parts"
            assert file.path == str(path) and [f.path for f in file.files] == [*map(str, paths)]
            sizes = [f.nbytes for f in file.files]
            assert sizes == [p.stat().st_size for p in paths] and file.file_bytes == sum(sizes)
            hashes |= {model_hash(file), model_hash(path)}
        found = summary(path)
        assert len(found.files) == N and "in 3 files" in found.lines()[0]
    assert len(hashes) == 2, "one for the parts, whichever is opened, and one for the whole"


def test_parts_that_are_not_there_or_misnamed_are_named(parts, tmp_path):
    shutil.copy(parts / name(2), parts / "model.gguf")
    said = refusal(parts / "model.gguf")
    assert "part 2 of 3 of a model is not called so; give all parts their names back" in said
    shutil.copy(parts / name(2), parts / name(3))
    assert f"{name(3)}: part 2 of 3 of a model is not called so" in refusal(parts / name(3))
    assert f"{name(3)}: split.no is 1, 2 is expected of part 3 of 3" in refusal(parts / name(1))
    (tmp_path / "other").mkdir()
    in_parts(tmp_path / "other" / "m.gguf", 2, n_tensors=6)
    shutil.copy(tmp_path / "other" / name(3), parts / name(3))
    assert "split.tensors.count is 6, 5 is expected of part 3" in refusal(parts / name(1))
    (parts / name(2)).rename(parts / "blob")  # as a download cache keeps them
    (parts / name(2)).symlink_to(parts / "blob")
    assert "split.tensors.count is 6" in refusal(parts / name(1))
    (parts / name(2)).unlink()
    assert f"part 2 of 3 is missing; put {name(2)} into the same" in refusal(parts / name(1))
    (parts / name(3)).unlink()
    assert "part 2 of 3 (and 1 more) is missing" in refusal(parts / name(1))
    path = two_parts(tmp_path, split_keys(0), split_keys(1), names=("w", "w"))
    assert f"{name(2, 2)}: tensor w is in part 1, too" in refusal(path)


def split_keys(no: int, count: int = 2, n_tensors: int = 2) -> list[bytes]:
    return [u32("split.no", no), u32("split.count", count), u32("split.tensors.count", n_tensors)]


def two_parts(folder: Path, first: list[bytes], second: list[bytes], names=("v", "w")) -> Path:
    for i, keys in enumerate((first, second)):
        content = build(keys, [tensor(names[i], (8,))], bytes(32))
        (folder / name(i + 1, 2)).write_bytes(content)
    return folder / name(1, 2)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (split_keys(0), [], "metadata key split.no is missing, and this is a part"),
        (split_keys(0)[:2], split_keys(1), "split.tensors.count is missing"),
        (split_keys(0)[1:], split_keys(1), "metadata key split.no is missing"),
        (split_keys(0, n_tensors=3), split_keys(1, n_tensors=3), "parts hold 2 tensors and say 3"),
        (split_keys(0, count=70000), split_keys(1), "split.count is 70000, not a number of parts"),
        ([pair("split.count", 7, b"\1")], split_keys(1), "split.count is True, not a number"),
        ([pair("split.count", 8, text("2\n"))], split_keys(1), "not a number of parts"),
        ([split_keys(0)[1], pair("split.no", 8, text("a"))], split_keys(1), "split.no is a, not"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(tmp_path, first, second, said):
    assert said in refusal(two_parts(tmp_path, first, second))


PART = st.integers(0, N - 1)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(DAMAGE, min_size=1, max_size=3), st.lists(PART, min_size=3, max_size=3), PART)
def test_damaged_parts(changes, where, opened):
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        damaged = {own: bytearray(content) for own, content in originals().items()}
        for (at, how), part in zip(changes, where, strict=False):
            damage(damaged[name(part + 1)], at, how)
        for own, content in damaged.items():
            (folder / own).write_bytes(content)
        try:
            with open_gguf(folder / name(opened + 1)) as file:
                read_all(file)
                assert {f.path for f in file.files} <= {str(folder / own) for own in damaged}
            assert summary(folder / name(opened + 1)).lines()
        except ModelFileError as error:
            assert str(error).isprintable() and len(str(error)) < 1000


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.permutations(range(N)), st.sets(PART), PART)
def test_only_all_parts_by_their_names_make_a_model(order, gone, opened):
    contents = list(originals().values())
    with TemporaryDirectory() as directory:
        for i, k in enumerate(order):
            if i not in gone:
                (Path(directory) / name(i + 1)).write_bytes(contents[k])
        path = Path(directory) / name(opened + 1)
        if not gone and list(order) == list(range(N)):
            with open_gguf(path) as file:
                assert len(file.tensors) == 5
        else:
            assert refusal(path)
