"""Pre-tokenizers: how byte-level BPE splits text into words before merging. A GGUF file names one.

The patterns are facts of the models' published tokenizer.json. They were checked against
llama.cpp's ids on prose, code and random Unicode. (tekken's pattern is Mistral's own. llama.cpp
approximates it, and differs where combining marks follow letters of another script.)
"""

from typing import Any, NamedTuple

from workbench.common.errors import ModelFileError
from workbench.model.gguf.walk import shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How text is split into words before merging: each pattern splits the pieces of the last.

    ignore_merges: a word that is a token becomes that token, whatever the merges would build.
    add_bos: whether a BOS token comes first, if the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_TAIL}"

# values of `tokenizer.ggml.pre` -> their pre-tokenizer
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: how
    for names, how in {
        "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "gpt-2 phi-2 mpt olmo": PreTokenizer((_GPT2,)),
        "llama-bpe llama3 llama-v3 falcon3": PreTokenizer(
            (_LLAMA3,), ignore_merges=True, add_bos=True
        ),
        "smaug-bpe dbrx": PreTokenizer((_LLAMA3,)),
        "qwen2 deepseek-r1-qwen stablelm2 megrez": PreTokenizer((rf"{_WORDS}|\p{{N}}{_TAIL}",)),
        "smollm starcoder refact command-r": PreTokenizer((r"\p{N}", _GPT2)),
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
        "deepseek-coder": PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
        ),
        "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    }.items()
    for name in names.split()
}


def pre_tokenizer(name: str) -> Any:
    """The `tokenizers` pre-tokenizer called `name`; raises ModelFileError for an unknown one.

    A guess would be worse than the error: with the wrong split a model still answers, but badly.
    """
    from tokenizers import Regex, pre_tokenizers

    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"pre-tokenizer {shown(name)!r} (metadata key 'tokenizer.ggml.pre') is not known; use "
            f"--tokens with ids, or a model with one of {', '.join(PRE_TOKENIZERS)}"
        )
    splits = [
        pre_tokenizers.Split(Regex(p), behavior="isolated") for p in PRE_TOKENIZERS[name].patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])
