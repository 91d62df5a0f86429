"""As a pytest plugin: of the files that are given only the chosen tests run, in their order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

LISTED = "WORKBENCH_CHOSEN_TESTS"  # the path of a JSON list of their names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A name that no test has any more is passed over."""
    found = {item.nodeid: item for item in items}
    items[:] = [found[name] for name in json.loads(Path(os.environ[LISTED]).read_text())
                if name in found]  # fmt: skip
