"""Damaged model files, many of them: ModelFileError or a model, and nothing else.

Each example takes a file that the gguf package wrote, damages it (bytes changed, cut, inserted,
lengths and counts replaced by huge ones, parts moved) and opens it as a stranger's file is opened.
Whatever opens is read to its end. What Python allocates is measured: at most 7 times the file (a
string of one wide character in the worst place, see test_gguf) plus 64 KiB for the objects.
"""

from __future__ import annotations

import struct
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracles.dequantize import dequantize
from tests.profiles import examples
from workbench.common.errors import ModelFileError
from workbench.model.gguf.expand import expanded, loaded_as, loaded_bytes
from workbench.model.gguf.file import GGUFFile, StringArray, model_hash, open_gguf
from workbench.model.gguf.inspect import summary
from workbench.model.gguf.walk import shown

HUGE = [0, 1, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**61, 2**62,
        2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]  # fmt: skip
POSITION = st.integers(0, 2**20)  # taken modulo the file's length
DAMAGE = st.one_of(
    st.tuples(st.just("byte"), POSITION, st.integers(0, 255)),
    st.tuples(st.just("bit"), POSITION, st.integers(0, 7)),
    st.tuples(st.just("u64"), POSITION, st.sampled_from(HUGE) | st.integers(0, 2**64 - 1)),
    st.tuples(st.just("u32"), POSITION, st.integers(0, 45) | st.integers(0, 2**32 - 1)),
    st.tuples(st.just("insert"), POSITION, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("delete"), POSITION, st.integers(1, 64)),
    st.tuples(st.just("move"), POSITION, POSITION),
    st.tuples(st.just("cut"), POSITION, st.none()),
)


@cache
def original() -> tuple[bytes, int]:
    """A small model with every kind of metadata, and where its tensor data starts."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("fuzz é")
        writer.add_custom_alignment(32)
        writer.add_block_count(1)
        writer.add_expert_used_count(2)
        writer.add_bool("flag", True)
        writer.add_float64("f64", 0.5)
        writer.add_token_list([f"tök{i}" for i in range(40)])
        writer.add_token_types([1] * 40)
        writer.add_token_merges([f"a b{i}" for i in range(30)])
        writer.add_array("flags", [True, False, True])
        rng = np.random.default_rng(0)
        weights = rng.standard_normal((4, 64), np.float32)
        writer.add_tensor("token_embd.weight", weights)
        writer.add_tensor("blk.0.attn_norm.weight", weights[0])
        for name, kind in (
            ("blk.0.ffn_up_exps.weight", "Q4_0"), ("output.weight", "Q8_0"),
            ("blk.0.attn_k.weight", "Q5_1"),
        ):  # fmt: skip
            of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(weights, of), raw_dtype=of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with open_gguf(path) as file:
            return path.read_bytes(), file.data_offset


def damage(content: bytearray, how: str, at: int, value) -> bytearray:
    at %= max(len(content), 1)
    if how == "byte":
        content[at : at + 1] = bytes([value])
    elif how == "bit":
        content[at : at + 1] = bytes(b ^ (1 << value) for b in content[at : at + 1])
    elif how in ("u64", "u32"):
        new = struct.pack("<Q" if how == "u64" else "<I", value)
        content[at : at + len(new)] = new
    elif how == "insert":
        content[at:at] = value
    elif how == "delete":
        del content[at : at + value]
    elif how == "move":
        other = value % max(len(content), 1)
        content[at : at + 24] = content[other : other + 24]
    else:
        del content[at:]
    return content


def opens_or_refuses(content: bytes, path: Path) -> bool:
    """Opens the file and reads all of it; False where it was refused properly."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with open_gguf(path) as file:
            peak = tracemalloc.get_traced_memory()[1]
            read_all(file)
        assert summary(path).lines()
        return True
    except ModelFileError as error:
        peak = tracemalloc.get_traced_memory()[1]
        assert str(error).isprintable() and len(str(error)) < 1000
        return False
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
    for how, at, value in changes:
        damaged = damage(damaged, how, at % data_offset if in_header else at, value)
    opens_or_refuses(bytes(damaged), tmp_path / "m.gguf")


@given(st.binary(max_size=200), st.sampled_from([b"", b"GGUF\x03\0\0\0"]))
@settings(suppress_health_check=list(HealthCheck))
def test_any_bytes(tmp_path, content, header):
    opens_or_refuses(header + content, tmp_path / "m.gguf")
