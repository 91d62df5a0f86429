"""Describes the interface in OpenAPI 3.1, from the table of fields."""

from __future__ import annotations

from typing import Any

from workbench import __version__
from workbench.server.api.fields import SCHEMAS
from workbench.server.api.shapes import of_vocabulary

ABOUT = {
    "/v1/completions": "Continue prompts",
    "/v1/chat/completions": "Answer a chat",
    "/completion": "Continue a prompt, in llama.cpp's words",
    "/tokenize": "Text to token ids",
    "/detokenize": "Token ids to text",
    "/apply-template": "Messages to the prompt they become",
}
GETS = {
    "/v1/models": "The model that is served",
    "/health": "Whether requests are taken: 200, else 503",
    "/metrics": "Counts and times, as Prometheus reads them",
    "/props": "Properties of the server, in llama.cpp's words",
    "/slots": "Slots of the engine, in llama.cpp's words",
    "/openapi.json": "This description",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def described(n_vocab: int) -> dict[str, Any]:
    """The document. n_vocab: tokens of the model that is served."""
    answers = {
        "200": {"description": "done"},
        "default": {
            "description": "refused",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        },
    }
    posts = {
        path: {
            "post": {
                "summary": ABOUT[path],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": of_vocabulary(schema, n_vocab)}},
                },
                "responses": answers,
            }
        }
        for path, schema in SCHEMAS.items()
    }
    gets = {path: {"get": {"summary": s, "responses": answers}} for path, s in GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Workbench", "version": __version__},
        "paths": posts | gets,
        "components": {"schemas": {"Error": ERROR}},
    }
