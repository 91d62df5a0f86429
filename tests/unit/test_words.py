"""One word per meaning: the names that the package binds keep to the table of words.

A file binds classes, functions, arguments, variables and attributes. Names of libraries
(`str.split`, `np.array_split`) are only used, so they are not looked at. Values of toggles, flags
of the command line and keys of JSON are strings, and keep their names.

What is said in docstrings and comments keeps to nouns: "the driver's events", not "those of".
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "workbench"


class Word(NamedTuple):
    """A word, in its forms, that may be part of a name only where it has its one meaning.

    instead: what to write for anything else. there: the files with that meaning, by the beginning
    of their paths. names: allowed everywhere, as regular expressions.
    """

    forms: str
    meaning: str
    instead: str
    there: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


TIMELINES = ("trace/", "report/", "lab/", "engine/look/watch.py")
RINGS = ("engine/", "program/layout.py", "program/lower.py", "program/events.py")
WORDS = [
    Word("place places placed", "no noun", "layout, range, address, backend, row",
         names=("in_place",)),  # an adverb: where it lies already
    Word("plan plans planned", "a captured device graph with its policy", "layout, grid, matrix",
         ("backend/", "config/", "engine/", "program/check/", "program/events.py",
          "program/plans.py", "trace/", "answers/")),
    Word("turn turns", "which of a ring's copies a step takes", "period, behind, each",
         (*RINGS, "program/sync_modes.py")),
    Word("slot slots", "a server's seat for a sequence", "entry",
         ("config/", "engine/slots/", "server/", "traffic/", "cli/serve", "answers/")),
    Word("lane lanes", "a row of a timeline", "worker, element", TIMELINES),
    Word("splitk", "nothing", "kv_parts, k_parts"),
    Word("split splits", "what one backend computes of the graph", "k_parts, warps_per_row",
         ("backend/issue/prepared.py", "backend/issue/bind.py", "backend/plan/life.py",
          "benchmarks/", "config/", "engine/", "program/", "report/", "trace/",
          "answers/")),
    Word("segment segments", "host calls, or the work of a device split", "part",
         ("backend/issue/prepared.py", "engine/look/watch.py",
          "backend/cuda/")),  # there a struct of the kernels: the rows of one of several products
]  # fmt: skip
# names that have one of these words for the sake of something outside the package
OF_OTHERS = {
    "model/tokenizer/pretokenizers.py": {"splits": "the `Split` of a pre-tokenizer"},
    "model/synth/vocab.py": {"every_split": "a word in two, for a merge of a tokenizer"},
    "model/tokenizer/tokenizer.py": {"split": "a word in two, for a merge of a tokenizer"},
    "model/synth/shapes.py": {"turns": "of a chat template"},
}


@cache
def files() -> dict[str, ast.Module]:
    """Path below the package -> what is in the file."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def bound(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that a file binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def words_of(name: str) -> set[str]:
    """`_LastTurn2` and `last_turn` have the words `last` and `turn`; `split_k` has `splitk`."""
    return {
        part.lower()
        for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.replace("split_k", "splitk"))
    }


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.forms.split()[0])
def test_a_word_in_a_name_has_one_meaning(word):
    forms = set(word.forms.split())
    lapses = [
        f"workbench/{path}:{line}: {name}"
        for path, tree in files().items()
        if not path.startswith(word.there)
        for line, name in bound(tree)
        if forms & words_of(name)
        and not name.startswith("__")
        and name not in OF_OTHERS.get(path, {})
        and not any(re.search(allowed, name) for allowed in word.names)
    ]
    rule = f"`{word.forms}` means: {word.meaning}; write {word.instead}"
    assert not lapses, "\n".join([rule, *lapses])


def test_a_run_is_a_folder_with_its_samples():
    """So a class called Run stands in `benchmarks`."""
    runs = [
        f"workbench/{path}:{node.lineno}: {node.name}"
        for path, tree in files().items()
        if not path.startswith("benchmarks/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "run" in words_of(node.name)
    ]
    assert not runs, "\n".join(runs)


def test_a_class_has_a_name_of_its_own():
    stand = defaultdict(list)
    for path, tree in files().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                stand[node.name].append(f"workbench/{path}:{node.lineno}")
    twice = {name: where for name, where in stand.items() if len(where) > 1}
    assert not twice


def test_names_are_taken_apart_as_they_are_read():
    assert words_of("_LastTurn2") == {"last", "turn"}
    assert words_of("N_SLOTS") == {"n", "slots"}
    assert words_of("displacement") == {"displacement"}
    assert words_of("split_k") == {"splitk"}
    tree = ast.parse("class A:\n    def b(self, c): self.d = e = c.split(f)")
    assert {name for _, name in bound(tree)} == {"A", "b", "self", "c", "d", "e"}


PHRASES = re.compile(r"\b(that of|those of|of which|of whom|the (former|latter))\b", re.I)


def said(source: str) -> Iterator[tuple[int, str]]:
    """Every docstring and every block of comments in a file, as one line, with its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, " ".join(text.split())
    block: list[str] = []
    end = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != end + 1 and block:
                yield end, " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            end = token.start[0]
    if block:
        yield end, " ".join(block)


def test_docstrings_and_comments_say_nouns():
    lapses = [
        f"workbench/{path.relative_to(PACKAGE)}:{line}: {found[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in said(path.read_text())
        if (found := PHRASES.search(text))
    ]
    assert not lapses, "say the noun:\n" + "\n".join(lapses)


def test_what_is_said_is_found_across_lines():
    source = '"""One,\nthose\n  of two."""\nx = 1  # that\n# of which\ny = 2\n'
    assert [text for _, text in said(source) if PHRASES.search(text)] == [
        "One, those of two.", "that of which",
    ]  # fmt: skip
