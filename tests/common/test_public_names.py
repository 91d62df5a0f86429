"""What `import workbench as wb` shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

EVERYTHING = """
import pkgutil, importlib, types
import workbench as wb
for found in pkgutil.walk_packages(wb.__path__, "workbench."):
    if found.name.rpartition(".")[2] != "__main__":
        importlib.import_module(found.name)
shown = [name for name in dir(wb) if not name.startswith("__")]
print(*shown)
print(*(name for name in shown if isinstance(getattr(wb, name), types.ModuleType)))
"""


@pytest.mark.long
def test_no_public_name_is_a_module_once_all_are_imported():
    said = subprocess.check_output([sys.executable, "-c", EVERYTHING], text=True)
    shown, modules = said.split("\n")[:2]
    assert {"Engine", "Toggles", "ab", "lab", "profile"} <= set(shown.split())
    assert not [name for name in shown.split() if name.startswith("_")] and modules == ""
