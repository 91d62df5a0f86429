"""Writes models of any real shape with random weights.

A scheduling question needs a model of the right shape, not one that knows anything. Files are
complete GGUF v3: llama.cpp loads them. Weights have about zero mean and standard deviation
1/sqrt(columns), so activations stay of order one through any number of layers. Norm weights and
biases differ enough from 1 and 0 that a test notices where they are left out.

A file is a function of (preset, quant, head, seed). Its metadata keeps these four under
`workbench.synth`, and a file that already holds them is used again.
"""

import json
import math
import zlib
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np

from workbench.common.errors import ModelFileError, UsageError
from workbench.common.output import check_writable, is_replaced, writing
from workbench.common.progress import BYTES, bar
from workbench.graph.ir import DType
from workbench.model.synth import shapes as presets
from workbench.model.synth.vocab import build_vocab, corpus

_VERSION = 1  # of what a record produces: raise it when the same record gives other bytes
_CHUNK_BYTES = 16 << 20
_RECORD_KEY = "workbench.synth"


def file_name(preset: str, quant: str) -> str:
    """The name of a model's file in the folder of models."""
    return f"{preset}-{quant}.gguf"


# What the model `auto` is. A tiny model leaves a GPU idle, and its answer is that of no model in
# use.
ON_GPU, ON_CPU = ("llama-3.2-1b", "Q4_K"), ("tiny-llama", "Q8_0")
TINY: list[tuple[str, str, str]] = [
    (file_name(preset, quant), preset, quant)
    for preset, quants in (
        ("tiny-llama", presets.QUANTS),
        ("tiny-qwen3", presets.QUANTS),
        ("tiny-llama-spm", ("F16", "Q4_0")),
        ("tiny-llama-bias", ("F32", "Q8_0")),
        ("tiny-qwen2", ("F32", "Q8_0")),
    )
    for quant in quants
]


def write_model(
    preset: str,
    quant: str,
    out: Path | str,
    *,
    head: str | None = None,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Write a model of shape `preset` in the types of `quant` to `out`; returns `out`.

    head: type of the output head instead of the one `llama-quantize` would choose. An existing
    file made from the same arguments is kept; any other is overwritten only with `force`.
    The file appears under its name only when it is complete.

    Raises UsageError for an unknown preset, quant or head type, and for a file that is in the way.
    It also does where the disk is too small or does not let us write.
    """
    shape, quant, out = presets.find_preset(preset), presets.quant_name(quant), Path(out)
    head = presets.quant_name(head) if head is not None else None
    record = _record(preset, quant, head, seed)
    if is_replaced(out) and not force:
        if read_record(out) == record:
            return out
        raise UsageError(
            f"{out} exists and is not this model; choose another name, or overwrite it with --force"
        )
    typed = [
        (spec, presets.tensor_type(spec, shape, quant, head)) for spec in presets.tensors(shape)
    ]
    total = sum(_nbytes(spec, dtype) for spec, dtype in typed)
    check_writable(out, parents=True, n_bytes=total)
    with writing(out, parents=True) as file:
        writer = _begun(file, preset, shape, quant, typed, record)
        with bar(out.name, total, BYTES) as left:
            for spec, dtype in typed:
                for chunk in _chunks(spec, dtype, shape, seed):
                    file.write(np.ascontiguousarray(chunk).data.cast("B"))
                    left.update(chunk.nbytes)
                writer.write_padding(file, _nbytes(spec, dtype))
    return out


def write_tiny_models(directory: Path | str) -> list[Path]:
    """Write every model of TINY into `directory`; those already there and current are kept.

    Overwrites its own older files, never a file that this module did not write (UsageError).
    """
    made = []
    with bar("tiny models", len(TINY), "models") as left:
        for _, preset, quant in TINY:
            made.append(write_named(directory, preset, quant))
            left.update()
    return made


def models_folder() -> Path:
    """`data/models`. A notebook runs in `notebooks/`, and its models are beside that folder."""
    inside = Path.cwd().name == "notebooks"
    return Path("..", "data", "models") if inside else Path("data", "models")


def write_named(directory: Path | str, preset: str, quant: str) -> Path:
    """Write one model under its usual name, as `write_tiny_models` does; returns its path. A file
    that is there and current is kept.

    quant: the canonical name. Raises what `write_model` raises.
    """
    path = Path(directory) / file_name(preset, quant)
    found = read_record(path)
    if found == _record(preset, quant, None, 0):
        return path
    return write_model(preset, quant, path, force=found is not None)


def read_record(path: Path) -> str | None:
    """The record of a file this module wrote, as JSON text; None for any other file, or none."""
    from workbench.model.gguf.file import open_gguf

    try:
        with open_gguf(path) as file:
            value = file.metadata.get(_RECORD_KEY)
    except ModelFileError:
        return None
    return value if isinstance(value, str) else None


def _record(preset: str, quant: str, head: str | None, seed: int) -> str:
    fields = {"preset": preset, "quant": quant, "head": head, "seed": seed, "version": _VERSION}
    fields["corpus"] = zlib.crc32(corpus().encode())
    return json.dumps(fields, sort_keys=True)


def _nbytes(spec: presets.TensorSpec, dtype: DType) -> int:
    return math.prod(spec.shape[:-1]) * dtype.row_bytes(spec.shape[-1])


def _chunks(
    spec: presets.TensorSpec, dtype: DType, preset: presets.Preset, seed: int
) -> Iterator[np.ndarray]:
    """The bytes of one tensor, some rows at a time; independent of every other tensor."""
    from workbench.model.gguf.quants import random_blocks

    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.kind == "rope":
        yield presets.rope_factors(preset)
    elif spec.kind == "norm":
        yield (1 + 0.1 * rng.standard_normal(spec.shape)).astype(np.float32)
    elif spec.kind == "bias":
        yield (0.2 * rng.standard_normal(spec.shape)).astype(np.float32)
    else:
        rows, cols = spec.shape
        step = max(1, _CHUNK_BYTES // (4 * cols))
        for first in range(0, rows, step):
            yield random_blocks(rng, dtype, min(step, rows - first), cols, 1 / math.sqrt(cols))


def _begun(
    file: BufferedWriter,
    name: str,
    preset: presets.Preset,
    quant: str,
    typed: list[tuple[presets.TensorSpec, DType]],
    record: str,
) -> Any:
    """Writes metadata and the list of tensors; the writer pads the tensors that follow."""
    import gguf

    writer = gguf.GGUFWriter(None, preset.arch)
    _add_metadata(writer, name, preset, quant)
    writer.add_string(_RECORD_KEY, record)
    for spec, dtype in typed:
        writer.add_tensor_info(
            spec.name,
            spec.shape,
            np.dtype(np.float32),  # any type but uint8: the shape is in elements
            _nbytes(spec, dtype),
            raw_dtype=gguf.GGMLQuantizationType[dtype.name],
        )
    writer.fout, writer.state = [file], gguf.WriterState.EMPTY  # as if it had opened a path
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(file, file.tell())
    return writer


def _add_metadata(writer: Any, name: str, preset: presets.Preset, quant: str) -> None:
    p, vocab = preset, build_vocab(preset)
    writer.add_type("model")
    writer.add_name(f"{name} with random weights")
    writer.add_file_type(presets.QUANTS[quant].file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(p.n_layer)
    writer.add_context_length(p.n_ctx)
    writer.add_embedding_length(p.n_embd)
    writer.add_feed_forward_length(p.n_ff)
    writer.add_head_count(p.n_head)
    writer.add_head_count_kv(p.n_head_kv)
    writer.add_key_length(p.head_dim)
    writer.add_value_length(p.head_dim)
    writer.add_layer_norm_rms_eps(p.eps)
    writer.add_rope_freq_base(p.rope_base)
    writer.add_rope_dimension_count(p.head_dim)
    if p.window:
        writer.add_sliding_window(p.window)
    writer.add_vocab_size(p.n_vocab)
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
    if vocab.merges:
        writer.add_token_merges(vocab.merges)
    writer.add_bos_token_id(vocab.bos)
    writer.add_eos_token_id(vocab.eos)
    writer.add_add_bos_token(vocab.add_bos)
