"""The shapes of fields' values: JSON schemas, from which the table of fields is made."""

from __future__ import annotations

from typing import Any

from workbench.server.api.schema import Schema

MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 16, 500, 128
MAX_CHOICES, MAX_PROMPTS = 128, 128
MAX_LOGPROBS = 20
INT32 = 2**31 - 1
AS_MANY = -1  # llama.cpp's word for as many tokens as fit


def number(kind: str, least: float | None = None, most: float | None = None) -> Schema:
    """A number, or null for the server's default."""
    made: Schema = {"type": [kind, "null"]}
    if least is not None:
        made["minimum"] = least
    if most is not None:
        made["maximum"] = most
    return made


def one_of(*values: Any) -> Schema:
    """One of these values, or null."""
    return {"enum": [None, *values]}


FLAG: Schema = {"type": ["boolean", "null"]}
TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": ["string", "null"]}
NOTHING = one_of("", [], {})  # the empty text, list and object
NULL = one_of()
OBJECTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}}
# `of_vocabulary` adds the largest id
ID: Schema = {"type": "integer", "format": "token-id", "minimum": 0, "maximum": INT32}
IDS: Schema = {"type": "array", "items": ID, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
PROMPT: Schema = {"title": "a text or a list of token ids", "anyOf": [TEXT, IDS]}
PROMPTS: Schema = {
    "title": "a text, a list of token ids, or a list of up to "
    f"{MAX_PROMPTS} texts or lists of token ids",
    "anyOf": [TEXT, IDS, _MANY | {"items": TEXT}, _MANY | {"items": IDS}],
}
_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
STOP: Schema = {
    "title": f"a text or a list of up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
    "anyOf": [
        _STOP_TEXT,
        {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS},
        {"type": "null"},
    ],
}
# an id without a token ends no answer, so any number is allowed
STOP_IDS: Schema = {
    "type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0, "maximum": INT32},
    "maxItems": MAX_STOP_IDS,
}
N_TOKENS: Schema = {
    "title": f"at least 0, or {AS_MANY} for as many as fit",
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": INT32}, one_of(AS_MANY)],
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 10_000,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "title": "a text or a list of parts of type text",
                "anyOf": [
                    WORD,
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"enum": ["text"]}, "text": TEXT},
                        },
                    },
                ],
            },
        },
    },
}


def of_vocabulary(schema: Any, n_vocab: int) -> Any:
    """A schema whose token ids are below n_vocab."""
    if isinstance(schema, list):
        return [of_vocabulary(part, n_vocab) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: of_vocabulary(part, n_vocab) for name, part in schema.items()}
    return made | {"maximum": n_vocab - 1} if made.get("format") == ID["format"] else made
