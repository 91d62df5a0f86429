"""How an engine shows itself: a line or two on a terminal, a table in a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

CLOSED = "a closed engine"


def text(engine: Engine) -> str:
    """Two lines: the model and the device; the toggles, the sync mode and the cells in use."""
    if engine._loaded is None:
        return f"<Engine: {CLOSED}>"
    used, n_ctx = engine.n_past, engine.config.n_ctx
    return (
        f"<Engine: {_model(engine)}; {_device(engine)}\n"
        f" {engine.chosen}; sync mode {engine.sync_mode}; {used} of {n_ctx} cells used>"
    )


def page(engine: Engine) -> str:
    """The same for a notebook, with the table of toggles."""
    if engine._loaded is None:
        return f"<p>{CLOSED}</p>"
    used, n_ctx = engine.n_past, engine.config.n_ctx
    about = f"{engine.preset}; sync mode {engine.sync_mode}; {used} of {n_ctx} cells used"
    return (
        f"<p>{html.escape(_model(engine))}<br>{html.escape(_device(engine))}<br>"
        f"{html.escape(about)}</p>{engine.toggles._repr_html_()}"
    )


def _model(engine: Engine) -> str:
    m = engine.model
    per_token = m.weight_bytes_per_token / 1e6
    return f"{m.name} {m.quant}, {m.n_layer} layers, {per_token:,.1f} MB of weights a token"


def _device(engine: Engine) -> str:
    return f"{engine.backend.description} ({engine.device_reason})"
