"""One table knows the devices by name: `workbench/common/devices.py`. Everybody else asks it."""

from __future__ import annotations

import ast
from pathlib import Path

from workbench.common import devices

PACKAGE = Path(devices.__file__).parent
# strings that are equal to a device's name and say something else, or whose own name it is
OTHERS = {
    "program/commands.py": {"host"},  # a space of memory
    "config/table.py": {"host"},  # who draws tokens: the host, or any device
    "server/api/openapi.py": {"null"},  # of JSON
    "server/api/schema.py": {"null"},
    "server/api/fields.py": {"null"},
    "server/api/shapes.py": {"null"},
    "benchmarks/runs/nameless.py": {"host"},  # a part of an address
    "trace/spans.py": {"host"},  # the lane of what the host does
    "trace/lanes.py": {"host"},  # the process of that lane
    "benchmarks/times/token_parts.py": {"host"},  # the part of a token that is the host's
    "backend/cpu/device/host.py": {"host"},
    "backend/cpu/device/embedded.py": {"embedded"},
    "backend/cuda/device/backend.py": {"cuda"},
    "backend/null.py": {"null"},
}


def test_no_other_file_names_a_device():
    lapses = [
        f"workbench/{path}:{node.lineno}: {node.value}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if (path := str(file.relative_to(PACKAGE))) != "devices.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and node.value in devices.DEVICES.keys() - OTHERS.get(path, set())
    ]
    assert not lapses, "ask workbench/common/devices.py:\n" + "\n".join(lapses)


def test_what_the_table_says_of_devices():
    assert devices.names() == ("auto", "embedded", "cuda", "host", "null")
    assert [name for name in devices.DEVICES if devices.is_gpu(name)] == ["cuda"]
    assert [name for name in devices.DEVICES if not devices.computes(name)] == ["null"]
    assert devices.computes("auto") and not devices.is_gpu("auto")
    assert not devices.is_gpu("a device that is gone")
    words = devices.in_words()
    assert words.startswith("auto: cuda where there is one, else embedded. embedded: ")
    assert "null" not in words and "null: computes nothing" in devices.in_words(also_idle=True)
