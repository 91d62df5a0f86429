"""README's commands, typed after `make report`: with the tiny models, without a GPU."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import pytest

from tests.server.command import served

ROOT = Path(__file__).resolve().parents[2]
(BLOCK,) = re.findall(r"```sh\n(\. \.venv.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SETUP, *LINES = BLOCK.splitlines()
# the same commands, but short
SHORTER = (
    (r"-p \d+", "-p 16"), (r"-n \d+", "-n 4"), (r"1,8(,32)?", "1,2"), (r"\btg\d+", "tg4"),
    (r"--(until|rounds) \S+", "--rounds 5"), (r"synth llama\S+", "synth tiny-llama"),
    (r"--concurrency", "--n-requests 4 --concurrency"),
)  # fmt: skip


def words(line: str) -> list[str]:
    """What the shell passes on, after the line that names the model."""
    (model,) = re.findall(r"\bM=(\S+)", SETUP)
    for long_one, short in SHORTER:
        line = re.sub(long_one, short, line)
    return shlex.split(line.replace("$M", model), comments=True)


@pytest.fixture
def clone(tiny_models, tmp_path, monkeypatch) -> Path:
    """A folder with what `make report` leaves."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "models").symlink_to(tiny_models)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_page_of_a_room_is_linked_from_another():
    pages = [
        ROOT / "README.md",
        *ROOT.glob("[a-z]*/README.md"),
        *ROOT.glob("workbench/*/**/README.md"),
    ]
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text())
    }
    rooms = set(pages[1:])
    assert len(rooms) > 8 and rooms <= linked


def test_there_is_one_of_each_kind():
    commands = [words(line)[1] for line in LINES]
    assert {"run", "bench", "ab", "profile", "check", "program", "serve", "model"} <= {*commands}
    assert all(words(line)[0] == "workbench" for line in LINES)
    assert all("$M" in line for line in LINES if " model " not in line), "the tiny model"


@pytest.mark.long
@pytest.mark.parametrize("line", [one for one in LINES if " serve " not in one])
def test_a_command_of_readme_can_be_typed(line, clone, call):
    status, out, err = call(*words(line)[1:])
    assert status == 0, err
    files = [path for path in clone.iterdir() if path.name != "data"]
    assert out.strip() or files, "it prints its result, or writes it"
    assert "is unknown" not in out, "the matrix is told how long it takes"


@pytest.mark.long
def test_the_server_of_readme_serves(clone, tmp_path, monkeypatch):
    (line,) = (one for one in LINES if " serve " in one)
    _, *given = words(re.sub(r"--port \d+", "", line))
    with served(clone, *given[1:], module=("workbench", "serve")) as (_, address, _):
        # Tokens are drawn at random here, and one of them may be the end of the text.
        asked = {"prompt": "The engine waits", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
