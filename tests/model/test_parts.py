"""A model in several files: any part opens it, and parts that do not fit are refused in a line."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.gguf_files import build, items, pair, tensor, text, u32
from tests.model.test_gguf_fuzz import DAMAGE, damage, read_all
from tests.profiles import examples
from workbench.common.errors import ModelFileError
from workbench.model.gguf.file import model_hash, open_gguf
from workbench.model.gguf.inspect import summary

N = 3


def write(path: Path, a_part: int, n_tensors: int = 5, value: float = 0.0) -> Path:
    """A model of n_tensors, in parts of `a_part` tensors (0: in one file), by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=a_part)
    writer.add_name("in parts")
    writer.add_token_list([f"t{i}" for i in range(9)])
    for i in range(n_tensors):
        writer.add_tensor(f"blk.{i}.w", np.full((2, 8), i + value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def originals() -> dict[str, bytes]:
    """The parts of one model, by name."""
    with TemporaryDirectory() as directory:
        write(Path(directory) / "m.gguf", 2)
        return {p.name: p.read_bytes() for p in sorted(Path(directory).iterdir())}


def name(part: int, of: int = N, stem: str = "m") -> str:
    return f"{stem}-{part:05d}-of-{of:05d}.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder with the parts of one model, 2 + 2 + 1 tensors."""
    for own, content in originals().items():
        (tmp_path / own).write_bytes(content)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [name(i + 1) for i in range(N)]
    return tmp_path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    said = str(caught.value)
    assert said.isprintable() and said.startswith(str(path.parent))
    return said


def test_any_part_opens_the_model(parts, tmp_path):
    whole = write(tmp_path / "whole.gguf", 0)
    hashes = {model_hash(whole)}
    for i in range(N):
        with open_gguf(parts / name(i + 1)) as file, open_gguf(whole) as one:
            assert list(file.tensors) == list(one.tensors) == [f"blk.{k}.w" for k in range(5)]
            assert [t.part for t in file.tensors.values()] == [0, 0, 1, 1, 2]
            for k in range(5):
                assert (file.data(f"blk.{k}.w").view("<f4") == k).all()
                assert file.tensors[f"blk.{k}.w"].shape == (2, 8)
            assert file.metadata["general.name"] == "in parts"
            assert file.metadata["tokenizer.ggml.tokens"].tolist() == [f"t{k}" for k in range(9)]
            assert file.path == str(parts / name(i + 1))
            assert [f.path for f in file.files] == [str(parts / name(k + 1)) for k in range(N)]
            assert file.file_bytes == sum(f.nbytes for f in file.files)
            assert file.file_bytes == sum((parts / name(k + 1)).stat().st_size for k in range(N))
            hashes.add(model_hash(file))
        hashes.add(model_hash(parts / name(i + 1)))
        found = summary(parts / name(i + 1))
        assert len(found.files) == N and "in 3 files" in found.lines()[0]
    assert len(hashes) == 2, "one for the parts, whichever is opened, and one for the whole"


def test_a_first_part_may_hold_metadata_alone(tmp_path):
    """As `llama-gguf-split --no-tensor-first-split` writes it; keys of 16 bits, in that order."""

    def split(i: int, n_tensors: int, count: int = 2) -> list[bytes]:
        two = [pair("split.no", 2, i.to_bytes(2, "little")),
               pair("split.count", 2, count.to_bytes(2, "little"))]  # fmt: skip
        return [*two, pair("split.tensors.count", 5, n_tensors.to_bytes(4, "little"))]

    architecture = pair("general.architecture", 8, text("llama"))
    (tmp_path / name(1, 2)).write_bytes(build([architecture, *split(0, 1)]))
    (tmp_path / name(2, 2)).write_bytes(build(split(1, 1), [tensor("w", (8,))], bytes(32)))
    with open_gguf(tmp_path / name(1, 2)) as file:
        assert file.metadata["general.architecture"] == "llama" and file.tensors["w"].part == 1
    (tmp_path / name(1, 1)).write_bytes(build([*split(0, 1, 1)], [tensor("w", (8,))], bytes(32)))
    with open_gguf(tmp_path / name(1, 1)) as file:
        assert file.tensors["w"].part == 0 and len(file.files) == 1


def test_parts_that_are_not_there_or_misnamed_are_named(parts, tmp_path):
    shutil.copy(parts / name(2), parts / "model.gguf")
    said = refusal(parts / "model.gguf")
    assert "part 2 of 3 of a model is not called so; give all parts their names back" in said
    shutil.copy(parts / name(2), parts / name(3))
    assert f"{name(3)}: part 2 of 3 of a model is not called so" in refusal(parts / name(3))
    assert f"{name(3)}: split.no is 1, 2 is expected of part 3 of 3" in refusal(parts / name(1))
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "m.gguf", 2, n_tensors=6)
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
        (split_keys(0), split_keys(1)[1:], "metadata key split.no is missing"),
        (split_keys(0)[:2], split_keys(1), "split.tensors.count is missing"),
        (split_keys(0)[1:], split_keys(1), "metadata key split.no is missing"),
        (split_keys(0, n_tensors=3), split_keys(1, n_tensors=3), "parts hold 2 tensors and say 3"),
        (split_keys(0, n_tensors=1), split_keys(1, n_tensors=1), "parts hold 2 tensors and say 1"),
        (split_keys(0, count=70000), split_keys(1), "split.count is 70000, not a number of parts"),
        ([pair("split.count", 9, items(4, 0))], split_keys(1), "split.count is [], not a number"),
        ([pair("split.count", 7, b"\1")], split_keys(1), "split.count is True, not a number"),
        ([pair("split.count", 8, text("2\n"))], split_keys(1), "not a number of parts"),
        ([pair("split.count", 5, b"\xfe\xff\xff\xff")], split_keys(1), "split.count is -2, not"),
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
        for (how, at, value), part in zip(changes, where, strict=False):
            damaged[name(part + 1)] = damage(damaged[name(part + 1)], how, at, value)
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
