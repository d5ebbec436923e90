"""A point of a sweep -> the name of its folder, and no other point's.

A name is safe in a file system, also one that does not tell upper case from
lower case, and in a shell, and it is bounded in length.
"""

import hashlib
import json
import re

_LONGEST = 100  # characters of a folder's name
# What a name may say as it is: no upper case, and no @, which begins a hash.
_PLAIN = re.compile(r"[a-z0-9_.]+=[a-z0-9_.+-]*")


def name(overrides):
  """Return the folder's name of a point, another one for every other point.

  "draft.num_tokens=2,sampling.temperature=0.7"; what is too long or cannot be
  in a name is cut or replaced, and a hash of the point follows a @.
  """
  if not overrides:
    return "default"
  pieces = [f"{key}={_text(x)}" for key, x in sorted(overrides.items())]
  text = ",".join(pieces)
  exact = all(map(_PLAIN.fullmatch, pieces)) and all(
    map(_is_told, overrides.values())
  )
  if exact and len(text) <= _LONGEST:
    return text
  whole = json.dumps(overrides, sort_keys=True, default=repr)
  mark = "@" + hashlib.sha256(whole.encode()).hexdigest()[:12]
  safe = re.sub(r"[^a-z0-9_.+=,-]+", "-", text.lower())
  return safe[: _LONGEST - len(mark)] + mark


def _is_told(value):
  """Whether no other value of the same key has the same `_text`."""
  if isinstance(value, tuple):
    return bool(value) and {*map(type, value)} <= {int, float}
  return value != "none"


def _text(value):
  if value is None or isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    text = str if _is_told(value) else _short
    return "+".join(map(text, value))
  return str(value)


def _short(value):
  return f"{value:.3g}" if isinstance(value, float) else _text(value)
