"""Values of files that nobody has checked: what is amiss counts as absent."""

import json
import math
import os
import re

TAIL = 15  # lines of a log that are shown


class Unreadable(Exception):
  """A file that is not what it should be; the message says why."""


def read(path):
  """The JSON object in a file."""
  if not path.is_file():  # to open a pipe would be to wait
    raise Unreadable("it is not there" if not path.exists() else "not a file")
  try:
    found = json.loads(path.read_bytes())
  except OSError as e:
    raise Unreadable(e.strerror or str(e)) from e
  except (ValueError, RecursionError):
    raise Unreadable("it is no whole JSON file") from None
  if not isinstance(found, dict):
    raise Unreadable("its JSON is not an object")
  return found


def natural(text):
  """A key that sorts k=10 behind k=9."""
  return [
    (0, int(x), "") if x.isdecimal() else (1, 0, x)
    for x in re.split(r"(\d+)", text)
  ]


def tail(path, lines=TAIL):
  """Return the last lines of a log as a terminal would leave them."""
  try:
    with open(path, "rb") as file:
      file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
      text = file.read().decode("utf-8", errors="replace")
  except OSError as e:
    return f"(no log: {e.strerror})"
  text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|.)", "", text)
  shown = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
  shown = ["".join(c for c in x if c.isprintable() or c == "\t") for x in shown]
  return "\n".join([line for line in shown if line.strip()][-lines:])


def texts(value):
  """A command as a tuple of texts, () if it is something else."""
  return tuple(map(str, value)) if isinstance(value, list) else ()


def printable(text):
  """Text without what a terminal or a picture would obey."""
  return "".join(c if c.isprintable() else " " for c in text)


def at(found, path):
  """The value at "a.b" of nested dicts, None if there is none."""
  for key in path.split("."):
    found = found.get(key) if isinstance(found, dict) else None
  return found


def number(x):
  """The finite number that x is, else None."""
  plain = isinstance(x, int | float) and not isinstance(x, bool)
  return x if plain and abs(x) < 1e300 and math.isfinite(x) else None


def numbers(x):
  """The numbers at the head of a list, [] of anything else."""
  some = [number(i) for i in x] if isinstance(x, list) else []
  return some[: some.index(None)] if None in some else some


def config_of(record):
  """A record's resolved config as {"draft.name": value}."""
  found = record.get("config", {})
  return dict(_flat(found)) if isinstance(found, dict) else {}


def _flat(found, prefix=""):
  for key, value in found.items():
    if isinstance(value, dict) and value:
      yield from _flat(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def said(value):
  """A config's value in few characters."""
  if isinstance(value, str):
    return value
  if isinstance(value, float) and number(value) is not None:
    return f"{value:.6g}"
  return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
