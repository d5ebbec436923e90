"""The page of faults met elsewhere names tests that are there."""

import ast
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parent
PAGE = TESTS.parent / "docs" / "exactness.md"
ROW = re.compile(r"\| (B\d\d) \| (.+) \| (.+) \|")


def _rows():
  text = PAGE.read_text().partition("## Faults met elsewhere")[2]
  return [
    match.groups() for match in map(ROW.fullmatch, text.split("\n")) if match
  ]


def _docstrings(name):
  tree = ast.parse((TESTS / f"{name}.py").read_text())
  kinds = ast.FunctionDef | ast.ClassDef
  nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
  return " ".join(ast.get_docstring(node) or "" for node in nodes)


def test_there_are_rows():
  numbers = [number for number, _, _ in _rows()]
  assert len(numbers) > 25 and numbers == sorted(set(numbers))


@pytest.mark.parametrize("number, what, where", _rows())
def test_a_fault_has_its_tests(number, what, where):
  """Each file that the row names has a test whose docstring has the number."""
  for name in where.split(", "):
    assert number in _docstrings(name.strip("`")), (number, name)
