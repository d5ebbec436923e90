"""What a person calls a draft."""

import re


def label(row):
  """What a person calls a draft, of a run "a/draft", and its sampling."""
  given = without_copies(row["draft"])
  parts = given.partition("#")[0].rstrip("/").split("/")
  name = "/".join(parts[-2 if parts[-1] == "draft" else -1 :])
  words = [_runs(name) if _LAYERS.fullmatch(name) else name]
  words += ["and copies"] * (given != row["draft"])
  asked = row["sampling"]
  names = (("temperature", "T"), ("top_p", "top-p"))
  words += [f"{short} {asked[k]:g}" for k, short in names if k in asked]
  return " ".join(words)


COPIES = "+ngram"  # behind the weights of a head that copies first


def without_copies(name):
  return name.removesuffix(COPIES)


_LAYERS = re.compile(r"\d+(\+\d+)*")


def _runs(layers):
  """0+1+2+3+9 as 0..3+9: some thirty numbers would fill a picture."""
  found = []
  for i in map(int, layers.split("+")):
    if found and found[-1][1] == i - 1:
      found[-1][1] = i
    else:
      found.append([i, i])
  short = lambda a, b: f"{a}..{b}" if b - a > 1 else f"{a}+{b}" if b > a else a
  return "+".join(str(short(a, b)) for a, b in found)
