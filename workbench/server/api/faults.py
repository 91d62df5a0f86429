"""The errors that a client gets in place of an answer, in OpenAI's shape."""

from __future__ import annotations

import json
import math
from typing import Any

# status -> `type` of the error
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "unavailable_error",
}

FAILED_HERE = "the server failed; its log says how"


class ApiError(Exception):
    """An error in place of an answer.

    message: what is wrong, and what to do.
    param: the field.
    retry_after_s: when to try again, where the server was full.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes the error travel from another process."""
        made = (self.status, self.message, self.param, self.code, self.retry_after_s)
        return ApiError, made

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        found = {}
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return found


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it is."""
    return ApiError(400, message, param, code)
