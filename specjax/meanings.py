"""What --help says of a config's keys: the comments beside their defaults.

  c.draft = dict(
    num_tokens=4,  # K, drafted tokens a round
  )

says it of draft.num_tokens. A comment goes on in the lines below it that are
nothing else; where a default has none beside it, they are those above it.
"""

import ast
import shlex
import textwrap
import tokenize
import types

_WIDTH = 78


def show(values, module):
  """Print a config's keys with their values, and what they mean.

  Args:
    values: {"group.key": value}.
    module: of the config's file; what it imports may say more.
  """
  beside = [x for x in vars(module).values() if isinstance(x, types.ModuleType)]
  said = {}
  for one in [*beside, module]:  # the file's own words win
    said |= read(getattr(one, "__file__", None) or "")
  for key, value in values.items():
    shown = " (not set)" if value is None else f"={shlex.quote(str(value))}"
    print(f"  --config.{key}{shown}")
    if key in said:
      indent = dict(initial_indent=" " * 6, subsequent_indent=" " * 6)
      print(textwrap.fill(said[key], _WIDTH, **indent))


def read(path):
  """Return {"group.key": comment} of the Python file that sets defaults.

  Empty where there is no such file.
  """
  if not str(path).endswith(".py"):
    return {}
  with tokenize.open(path) as file:
    lines = file.readlines()
  beside, alone = {}, {}  # {line: comment}
  for token in tokenize.generate_tokens(iter(lines).__next__):
    if token.type == tokenize.COMMENT:
      kind = beside if token.line[: token.start[1]].strip() else alone
      kind[token.start[0]] = token.string.lstrip("# ").rstrip()
  found, keys = {}, [*_defaults(ast.parse("".join(lines)))]
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
    if not isinstance(node, ast.Assign):
      continue
    key = ".".join(ast.unparse(node.targets[0]).split(".")[1:])
    if not key:
      continue
    value = node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
      for part in value.keywords:
        yield f"{key}.{part.arg}", part.lineno, part.value.end_lineno
    else:
      yield key, node.lineno, node.end_lineno
