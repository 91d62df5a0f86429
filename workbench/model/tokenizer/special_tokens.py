"""Tokens that are special by their text, and tokens that end generation.

Files often give such tokens a wrong type. So llama.cpp recognises them by their texts, whatever
type they have (`llama_vocab::impl::load`). The texts and the exceptions here are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

# texts of tokens that end a turn or an answer, and print nothing
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # after `tokenizer.ggml.`

# texts that are always printed, and always one token, even if special tokens are not parsed
SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Role(NamedTuple):
    """The role of a token in filling gaps in code.

    keys: metadata keys that name the token; the last key counts.
    texts: texts of the token, if no key names it. Such a token prints nothing.
    ends: whether the token ends generation.
    """

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    ends: bool = False


ROLES = (
    Role(("fim_pre_token_id", "prefix_token_id"),
         ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
          "<|code_prefix|>", "<|prefix|>")),
    Role(("fim_suf_token_id", "suffix_token_id"),
         ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
          "<|code_suffix|>", "<|suffix|>")),
    Role(("fim_mid_token_id", "middle_token_id"),
         ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
          "<|code_middle|>", "<|middle|>")),
    Role(("fim_pad_token_id",),
         ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True),
    Role(("fim_rep_token_id",),
         ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), ends=True),
    Role(("fim_sep_token_id",), ("<|file_sep|>",), ends=True),
)  # fmt: skip


class NoEnd(NamedTuple):
    """A text that does not end generation if certain other ends exist.

    beside: sets of other ends; one end of each set must exist.
    type: the type of the token then.
    """

    text: str
    beside: tuple[tuple[str, ...], ...]
    type: int


_CALLS = ("<|call|>", "<|calls|>")
NO_ENDS = (
    NoEnd("<|end|>", (_CALLS, ("<|return|>", "<|flush|>")), USER_DEFINED),
    NoEnd("</s>", (("<|tool_response>",),), NORMAL),
)


class Special(NamedTuple):
    """The special tokens of a file.

    ends: ids that end generation.
    types: by id, the types of tokens whose text decides the type.
    """

    ends: frozenset[int]
    types: dict[int, int]


def special_tokens(ids: Mapping[str, int], named: Mapping[str, int]) -> Special:
    """Finds the special tokens.

    ids: the id of each token, by its text.
    named: the ids that the file names, by the key after `tokenizer.ggml.`.
    """

    def found(texts: Iterable[str]) -> list[int]:
        return [ids[text] for text in texts if text in ids]

    ends = set(found(END_TEXTS))
    types = dict.fromkeys(ends, CONTROL)
    for role in ROLES:
        given = [named[key] for key in role.keys if key in named][-1:]
        tokens = given or found(role.texts)
        if not given:
            types |= dict.fromkeys(tokens, CONTROL)
        if role.ends:
            ends.update(tokens)
    types |= dict.fromkeys(found(SHOWN_TEXTS), USER_DEFINED)
    ends.update(named[key] for key in END_KEYS if key in named)
    for text, beside, kind in NO_ENDS:
        if ids.get(text) in ends and all(ends.intersection(found(any_of)) for any_of in beside):
            ends.discard(ids[text])
            types[ids[text]] = kind
    return Special(frozenset(ends), types)
