"""What the README promises, each promise held by a test that names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def promised() -> list[str]:
    readme = (TESTS.parent / "README.md").read_text()
    section = readme.split("\n## Promises\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^- \*\*(P\d+)\*\*", section, re.MULTILINE)


def named() -> dict[str, list[str]]:
    """Promise → the tests whose docstrings name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for promise in re.findall(r"\bPromise (P\d+)\b", ast.get_docstring(node) or ""):
                    found.setdefault(promise, []).append(f"{path.name}::{node.name}")
    return found


def test_promises_are_numbered_in_order() -> None:
    numbers = promised()
    assert numbers == [f"P{number}" for number in range(1, len(numbers) + 1)]
    assert numbers


def test_each_promise_has_a_test_and_each_test_names_one_that_exists() -> None:
    assert sorted(named()) == sorted(promised())
