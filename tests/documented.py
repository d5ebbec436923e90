"""The keys that docs/records.md names, beside those that a run writes."""

import re
from pathlib import Path

_DOC = Path(__file__).parent.parent / "docs" / "records.md"


def keys(heading):
  """{"", "speculative", ...: set of the keys below it} of a section's table."""
  text = _DOC.read_text()
  (section,) = re.findall(
    rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S
  )
  found = {}
  for name in re.findall(r"^\| `([\w.]+)` \|", section, re.M):
    above, _, key = name.rpartition(".")
    found.setdefault(above, set()).add(key)
  return found


def check(heading, written):
  """Every table of keys is the very set that is there, unless it is null."""
  for path, names in keys(heading).items():
    found = written
    for key in filter(None, path.split(".")):
      found = found and found[key]
      found = found[0] if isinstance(found, list) else found
    assert found is None or set(found) == names, (heading, path)
