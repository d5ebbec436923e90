"""What --help says of a config's keys: the comments beside their defaults.

  c.draft = dict(
    num_tokens=4,  # K, drafted tokens a round
  )

says it of draft.num_tokens. A comment goes on in the lines below it that are
nothing else; where a default has none beside it, they are those above it.
"""

import ast
import re
import shlex
import sys
import textwrap
import tokenize
import types
from pathlib import Path

_WIDTH = 78
_NOT_WORDS = re.compile(r"#\s*(!|noqa|type:|fmt:|pragma|-\*-)")


def show(values, module):
  """Print a config's keys with their values, and what they mean.

  Args:
    values: {"group.key": value}.
    module: of the config's file; what it imports from beside it says more.
  """
  said = {}
  for one in _files(module, Path(module.__file__).resolve().parent, set()):
    said |= read(one)  # the last is the file itself, whose words win
  for key, value in values.items():
    shown = " (not set)" if value is None else f"={shlex.quote(str(value))}"
    print(f"  --config.{key}{shown}")
    if key in said:
      indent = dict(initial_indent=" " * 6, subsequent_indent=" " * 6)
      print(textwrap.fill(said[key], _WIDTH, **indent))


def _files(module, folder, known):
  """Yield the files in a folder that a module is made of, its own last."""
  name = getattr(module, "__file__", None)
  path = name and Path(name).resolve()
  if not path or path.parent != folder or path in known:
    return
  known.add(path)
  for x in vars(module).values():
    if not isinstance(x, types.ModuleType):  # a function of one, perhaps
      x = sys.modules.get(getattr(x, "__module__", None) or "")
    yield from _files(x, folder, known)
  yield path


def read(path):
  """Return {"group.key": comment} of the Python file that sets defaults.

  Empty where there is none to be read: help must not fail over an ornament.
  """
  try:
    with tokenize.open(path) as file:
      lines = file.readlines()
    tokens = [*tokenize.generate_tokens(iter([*lines, ""]).__next__)]
    tree = ast.parse("".join(lines))
  except (OSError, SyntaxError, UnicodeError, tokenize.TokenError):
    return {}
  beside, alone = {}, {}  # {line: comment}
  for token in tokens:
    if token.type == tokenize.COMMENT and not _NOT_WORDS.match(token.string):
      kind = beside if token.line[: token.start[1]].strip() else alone
      kind[token.start[0]] = token.string.lstrip("# ").rstrip()
  found, keys = {}, [*_defaults(tree)]
  # what is above a key goes first: it may be below another one
  for key, first, last in sorted(keys, key=lambda k: k[2] in beside):
    if last in beside:
      words = [beside[last], *_block(alone, last + 1, 1)]
    else:
      words = _block(alone, first - 1, -1)[::-1]
    if words:
      found[key] = " ".join(words)
  return found


def _block(alone, line, step):
  """Take the comments from a line on, as long as there is one a line."""
  words = []
  while line in alone:
    words.append(alone.pop(line))
    line += step
  return words


def _defaults(tree):
  """Yield (key, first line, last line): `c.key = x`, `c.group = dict(...)`."""
  for node in ast.walk(tree):
    key = isinstance(node, ast.Assign) and _key(node.targets[0])
    if not key:
      continue
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
      for part in value.keywords:
        if part.arg:
          yield f"{key}.{part.arg}", part.lineno, part.value.end_lineno
    else:
      yield key, node.lineno, node.end_lineno


def _key(target):
  """'group.key' of c.group.key, "" of anything else."""
  parts = []
  while isinstance(target, ast.Attribute):
    parts.append(target.attr)
    target = target.value
  named = isinstance(target, ast.Name) and target.id != "self"
  return ".".join(parts[::-1]) if named else ""
