"""The model-file reader: what it reads, each way in which it refuses a file, what a file is called,
and how many bytes of it a token reads."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.model.gguf_files import GOOD, Value, build, items, pair, tensor, text, u32, write
from workbench.common.errors import ModelFileError
from workbench.graph.ir import F32, Q4_0, Q6_K, WEIGHT_DTYPES
from workbench.model.gguf.file import StringArray, model_hash, open_gguf
from workbench.model.gguf.inspect import summary

SCALARS = {"UINT8": 255, "INT8": -128, "INT16": -3, "UINT64": 2**64 - 1, "INT64": -(2**62),
           "FLOAT32": 0.5, "FLOAT64": 0.1, "BOOL": True, "STRING": "Größe 模型"}  # fmt: skip
ARRAYS = {"ints": [1, -2, 3], "floats": [0.5, 1.5], "bools": [True, False],
          "strings": ["a", "", "é中😀", "\x00"]}  # fmt: skip


def test_reads_what_gguf_wrote(tmp_path):
    def keys(writer):
        for kind, value in SCALARS.items():
            writer.add_key_value(kind, value, Value[kind])
        for name, values in ARRAYS.items():
            writer.add_array(name, values)

    tensors = [(f"t.{d.name}", d, (3, 256)) for d in WEIGHT_DTYPES] + [("cube", F32, (2, 3, 5))]
    path = write(tmp_path / "m.gguf", tensors, keys)
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        assert (file.version, file.alignment) == (3, 32)
        assert file.file_bytes == path.stat().st_size
        m = file.metadata
        assert {kind: m[kind] for kind in SCALARS} == SCALARS and m["BOOL"] is True
        assert {name: m[name].tolist() for name in ARRAYS} == ARRAYS
        assert m["ints"].dtype == np.int32
        strings = m["strings"]
        assert list(strings) == ARRAYS["strings"] and len(strings) == 4
        assert strings[2] == strings[-2] == "é中😀" and strings[1:3] == ["", "é中😀"]
        assert "a" in strings and strings.index("") == 1
        with pytest.raises(IndexError):
            strings[4]
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert (ours.dtype.name, ours.n_elements) == (
                theirs.tensor_type.name,
                theirs.n_elements,
            )
            assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
            data = file.data(theirs.name)
            np.testing.assert_array_equal(data, theirs.data.view(np.uint8).reshape(-1))
            assert data.dtype == np.uint8 and not data.flags.writeable and not data.flags.owndata


PIECES = [b"", b"a", b"x" * 70_000, b"y" * 300, b"\xe4", b"\xb8\xad", *map(str.encode, "é中😀\0")]


@pytest.fixture(scope="module")
def file_of_strings(tmp_path_factory):
    return tmp_path_factory.mktemp("strings") / "m.gguf"


@given(st.lists(st.sampled_from(PIECES) | st.text().map(str.encode) | st.binary(max_size=3)))
@example([b"\xe4", b"\xb8\xad"])
@example([*[b"a"] * 6000, b"\xe4\xb8", b"\xad"])
def test_each_string_of_an_array_is_read_or_named(file_of_strings, strings):
    """Strings are checked many at once: a character whose bytes lie in two of them is none."""
    array = items(8, len(strings), b"".join(map(text, strings)))
    file_of_strings.write_bytes(build([pair("s", 9, array)]))
    bad = [i for i, one in enumerate(strings) if not is_utf8(one)]
    if bad:
        with pytest.raises(ModelFileError, match=f"string {bad[0]} of metadata key s is not UTF-8"):
            open_gguf(file_of_strings)
    else:
        with open_gguf(file_of_strings) as file:
            assert [one.encode() for one in file.metadata["s"]] == strings


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_get_is_typed(tmp_path):
    keys = {"count": 2, "eps": 0.5, "flag": True, "ints": [1, 2], "tokens": ["a"]}
    with open_gguf(write(tmp_path / "m.gguf", [], keys)) as file:
        for key, value in keys.items():
            assert file.get(key, type(value)) == value
        assert file.get("count", float) == 2.0 and file.get("flag", bool) is True
        assert file.get("ints", np.ndarray).tolist() == [1, 2]
        assert file.get("tokens", StringArray)[0] == "a"
        assert file.get("absent", int, None) is None and file.get("absent", int, 7) == 7
        for key, kind in (("eps", int), ("flag", int), ("count", bool), ("ints", int),
                          ("general.architecture", list)):  # fmt: skip
            with pytest.raises(ModelFileError, match=f"'{key}' holds .*{kind.__name__} is wanted"):
                file.get(key, kind)
        with pytest.raises(ModelFileError, match=r"m\.gguf: metadata key 'absent' is missing"):
            file.get("absent", int)
        with pytest.raises(ModelFileError, match="tensor 'w' is missing"):
            file.data("w")


HUGE, NEGATIVE = 2**62, 2**64 - 5
ROW = bytes(32)

BAD = {
    "magic": (build(magic=b"GGML"), "not a GGUF file: b'GGML'", 0),
    "version 1": (build(version=1), "GGUF version 1, only 2 and 3", 4),
    "big-endian": (build(version=0x03000000), "big-endian", 4),
    "tensor count": (build(n_tensors=HUGE), f"tensor count is {HUGE}, more than", 8),
    "tensor count < 0": (build(n_tensors=NEGATIVE), "tensor count is -5 (negative)", 8),
    "key too long": (build([u32("k" * 65536, 1)]), "length 65536, but 65535 is the limit", 24),
    "key twice": (build([u32("a", 1), u32("a", 1)]), "key a appears twice", 24 + 17),
    "value type": (build([pair("a", 13, ROW)]), "key a has unknown type 13", 33),
    "bool": (build([pair("a", 7, b"\x02")]), "a is a bool with value 2", 37),
    "bool array": (build([pair("a", 9, items(7, 3, b"\0\1\7"))]), "neither 0 nor 1", 51),
    "string length": (build([pair("a", 8, struct.pack("<Q", HUGE))]), f"has length {HUGE}", 37),
    "string not UTF-8": (build([pair("a", 8, text(b"ok\xc3("))]), "key a is not UTF-8", 47),
    "array type": (build([pair("a", 9, items(77, 1, ROW))]), "array of unknown type 77", 37),
    "array length": (build([pair("a", 9, items(4, HUGE, ROW))]), f"a has {HUGE} items", 41),
    "string in array": (
        build([pair("a", 9, items(8, 2, text("b") + struct.pack("<Q", NEGATIVE)))]),
        "string 1 of metadata key a has length -5 (negative)", 58,
    ),
    "string in array not UTF-8": (  # one character split over two strings
        build([pair("a", 9, items(8, 2, text(b"b\xc3") + text(b"\xa9")))]),
        "string 0 of metadata key a is not UTF-8", 58,
    ),
    "nested too deep": (
        build([pair("a", 9, items(9, 1, items(9, 1, items(9, 1, items(9, 1, items(4, 0))))))]),
        "nests arrays too deep", 37 + 3 * 12,
    ),
    "nested too many in all": (
        build([pair(c, 9, items(9, 40000, items(4, 0) * 40000)) for c in "ab"]),
        "b nests arrays too deep or too often", 480062,
    ),
    "alignment 24": (build([u32("general.alignment", 24)]), "general.alignment is 24", 24),
    "name length": (build((), [struct.pack("<Q", HUGE) + ROW]), f"name has length {HUGE}", 24),
    "name twice": (build((), [tensor(), tensor(offset=32)], ROW * 2), "tensor w appears twice", 57),
    "5 dims": (build((), [tensor(dims=(1,) * 5)], ROW), "w has 5 dimensions", 33),
    "dim 0": (build((), [tensor(dims=(8, 0))], ROW), "dimensions 8x0, none may be 0", 37),
    "dims overflow": (  # 2^64 elements: 0 in 64 bits
        build((), [tensor(dims=(2**32, 2**32))], ROW), "more than the file can hold", 37,
    ),
    "tensor type": (build((), [tensor(kind=99)], ROW), "tensor w has unknown type 99", 45),
    "Q8_K": (build((), [tensor(dims=(256,), kind=15)], bytes(292)), "type Q8_K, not supported", 45),
    "block": (build((), [tensor(dims=(8, 4), kind=2)], ROW), "rows of 8, not a multiple", 37),
    "misaligned": (build((), [tensor(offset=8)], ROW * 2), "offset 8, not a multiple", 49),
    "past the end": (build((), [tensor(dims=(9,))], ROW), "ends at byte 100, past the end", 24),
    "overlap": (
        build((), [tensor("v", (9,)), tensor("w", (8,), offset=32)], ROW * 2),
        "tensors v and w overlap", 96 + 32,
    ),
}  # name -> file, part of the message, byte offset that it names  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line(case, tmp_path):
    content, message, offset = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    line = str(caught.value)
    assert message in line
    assert f" at byte {offset}; " in line, line
    assert line.startswith(str(path)) and "\n" not in line and line.isprintable()


def test_the_good_file_is_good_and_no_part_of_it(tmp_path):
    path = tmp_path / "m.gguf"
    for version in (2, 3):
        path.write_bytes(GOOD[:4] + struct.pack("<I", version) + GOOD[8:])
        with open_gguf(path) as file:
            assert file.version == version
            assert file.tensors["w"].shape == (2, 8) and file.tensors["v"].dtype == Q4_0
            assert file.metadata["l"].tolist() == ["p", "é"]
            data = file.data("w")
        path.unlink()
        assert not data.any(), "data outlives the file"
    for n in range(1, len(GOOD)):
        path.write_bytes(GOOD[:n])
        with pytest.raises(ModelFileError, match=r" at byte \d+; (the file is|convert)"):
            open_gguf(path)


def test_tensors_may_lie_in_another_order_than_listed(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(build((), [tensor("v", offset=32), tensor("w")], bytes(32) + b"\1" * 32))
    with open_gguf(path) as file:
        assert file.data("v").all() and not file.data("w").any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "is a directory"),
        (lambda p: p.touch(), r"is empty \(0 bytes\)"),
        (lambda p: os.mkfifo(p), "no regular file"),
        (lambda p: p.symlink_to(p), "cannot be opened"),
    ],
    ids=["absent", "directory", "empty", "pipe", "loop"],
)
def test_what_is_no_file_is_refused(make, message, tmp_path):
    make(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=message):
        open_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="cannot be opened"):
        open_gguf("with\0zero")


# Python's cost of the smallest things a file can hold: stated in gguf_walk as under 1 KiB for each
# key, tensor and nested array, and for the rest a small multiple of the file.
GREEDY = {
    "keys and tensors": build(
        [pair(f"{i}", 0, b"\1") for i in range(2000)],
        [tensor(f"{i}", (1,), 0, 32 * i) for i in range(2000)],
        bytes(32 * 2000),
    ),
    "empty strings": build([pair("a", 9, items(8, 1 << 17, bytes(8 << 17)))]),
    "a wide string": build([pair("a", 8, text("a" * (1 << 20) + "😀"))]),
    "wide strings": build([pair("a", 9, items(8, 8, text("a" * (1 << 17) + "😀") * 8))]),
    "claimed numbers": build([pair("a", 9, items(0, 1 << 20, bytes(1 << 19)))]),
    "claimed strings": build([pair("a", 9, items(8, 1 << 17, b"\1\0\0\0\0\0\0\0x" * (1 << 16)))]),
}


@pytest.mark.parametrize("case", GREEDY)
def test_allocation_is_bounded_by_the_file(case, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(GREEDY[case])
    tracemalloc.start()
    try:
        open_gguf(path).close()
    except ModelFileError:
        assert case.startswith("claimed")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    limit = {"a wide string": 7, "keys and tensors": 20}.get(case, 2)
    assert peak < limit * len(GREEDY[case]) + (64 << 10)


def test_hash_of_a_large_file_reads_samples(tmp_path):
    """A sparse file of 1 GiB: blocks from its first byte to its last, and every tensor's start."""
    n, k = 1 << 28, (1 << 28) // 24 * 8
    path = tmp_path / "m.gguf"
    path.write_bytes(build((), [tensor("v", (k,)), tensor("w", (n - k,), offset=4 * k)]))
    start = path.stat().st_size
    os.truncate(path, start + 4 * n)
    seen = {model_hash(path)}
    for at in (start, start + 4 * n - 1, start + 4 * k):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"\1")
        seen.add(model_hash(path))
    assert len(seen) == 4


TINY = [("token_embd.weight", Q4_0, (100, 256)), ("output_norm.weight", F32, (256,))]
for layer in range(2):
    TINY.append((f"blk.{layer}.attn_q.weight", Q4_0, (256, 256)))
    TINY.append((f"blk.{layer}.attn_norm.weight", F32, (256,)))
LLAMA = {
    "general.name": "tiny", "llama.block_count": 2, "llama.attention.head_count_kv": [2, 4],
    "tokenizer.ggml.tokens": [str(i) for i in range(100)],
}  # fmt: skip


def test_summary_of_an_untied_model(tmp_path):
    path = write(tmp_path / "m.gguf", [*TINY, ("output.weight", Q6_K, (100, 256))], LLAMA)
    s = summary(path)
    row, matrix = 256 // 32 * 18, 256 * 256 // 32 * 18
    assert s.weight_bytes_per_token == row + 2 * matrix + 3 * 1024 + 100 * 210
    assert s.parameters == 2 * 100 * 256 + 2 * 256 * 256 + 3 * 256 and not s.tied_output
    assert s.hash == model_hash(path) and s.file_bytes == path.stat().st_size
    assert s.hyperparameters == {"layers": 2, "kv_heads": "2..4", "vocabulary": 100}
    assert [(t.dtype, t.n_tensors) for t in s.types] == [("Q4_0", 3), ("Q6_K", 1), ("F32", 3)]
    assert ("blk.*.attn_q.weight", 2, 2 * matrix) in [
        (t.name, t.n_tensors, t.bytes) for t in s.tensors
    ]
    assert json.loads(json.dumps(s.to_dict()))["tensors"][0]["shape"] == [100, 256]
    tied = summary(write(tmp_path / "tied.gguf", TINY, LLAMA))  # it reads the whole embedding
    assert tied.tied_output and tied.weight_bytes_per_token == 100 * 144 + 2 * matrix + 3 * 1024
    printed = "\n".join(s.lines())
    assert all(part in printed for part in ("tiny (llama)", s.hash, "256 x 256", "read per"))
