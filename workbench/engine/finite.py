"""Logits that are not finite: one line that names the cause.

The check costs one sum of a row of logits, outside of the step. So no step is slower for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.common.errors import ModelFileError, WorkbenchError
from workbench.model.gguf.finite import first_not_finite

if TYPE_CHECKING:
    from workbench.model.decoder import Model


def is_finite(row: np.ndarray) -> bool:
    """Whether every value of `row` is finite. One sum answers for nearly every row."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(row, axis=None)) or np.isfinite(row).all())


def first_bad_row(logits: np.ndarray) -> int | None:
    """The first row of `logits`, float32 (n, n_vocab), that is not finite; None if all are."""
    if is_finite(logits):
        return None
    return int(np.argmin(np.isfinite(logits).all(axis=1)))


def require_finite(model: Model, row: np.ndarray, position: int) -> None:
    """Raises where `row`, the logits after the token at `position`, is not finite.

    ModelFileError names the first weight that is not finite. WorkbenchError says that all weights
    are finite.
    """
    if not is_finite(row):
        raise not_finite(model, position)


def not_finite(model: Model, position: int) -> WorkbenchError:
    """The error for logits that are not finite after the token at `position`. Reads the weights
    once to find the cause."""
    said = f"{model.path}: the logits after token {position} are not finite"
    weight = first_not_finite(model.file)
    if weight is not None:
        return ModelFileError(
            f"{said}: {weight}; the file is damaged or was converted wrongly: download or write it "
            "again"
        )
    return WorkbenchError(
        f"{said}, though every weight is: an activation overflowed; try --activations float, or "
        "another quantisation of the model"
    )
