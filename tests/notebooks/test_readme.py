"""README's lines of Python do what they say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_python_of_the_first_screen_runs(tiny_models, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "models").symlink_to(tiny_models)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("rounds=10", "rounds=5").replace("tg32", "tg4"), {})  # the same, but short
    out = capsys.readouterr().out
    assert "copy_boundary" in out and "A/A control" in out
    assert (tmp_path / "token.pftrace.gz").read_bytes()[:2] == b"\x1f\x8b"
