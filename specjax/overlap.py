"""Has a draft been trained on the prompts that it is judged by?

A text's runs of 13 words are compared, the usual test of contamination (Brown
et al. 2020, appendix C). An export keeps a hash of each run in its training
prompts, so that anybody can ask this of it, without the prompts.
"""

import hashlib
import re
from pathlib import Path

import numpy as np

from specjax.errors import UserError
from specjax.models import tokenizer

FILE = "prompt_13grams.npy"  # in an export's folder
WORDS = 13
_WORD = re.compile(r"\w+")


def grams(text):
  """Return the [N] uint64 hashes of the runs of 13 words in a text.

  Case and what stands between words do not matter. A shorter text has none.
  """
  words = _WORD.findall(text.casefold())
  runs = range(len(words) - WORDS + 1)
  found = [_hash(" ".join(words[i : i + WORDS])) for i in runs]
  return np.array(found, np.uint64)


def _hash(run):
  digest = hashlib.blake2b(run.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "little")


def of(tok, trajectories):
  """Return the hashes of some training prompts, sorted, each once.

  Where there is no prompt but a given text, they are the text's.

  Args:
    tok: the target's `Tokenizer`; trajectories: `Trajectories`, all of a run's.
  """
  t = trajectories
  texts = {
    tuple(row[: begin if np.isfinite(warm) else stop].tolist())
    for row, begin, stop, warm in zip(
      t.tokens, t.prompt_length, t.length, t.temperature, strict=True
    )
  }
  parts = [grams(tokenizer.decode(tok, ids)) for ids in texts]
  return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def told(hashes):
  """Say to people what is kept of the prompts."""
  return f"hashes of their {len(hashes):,} runs of {WORDS} words: `{FILE}`"


def write(folder, hashes):
  """Write the hashes into an export's folder."""
  np.save(Path(folder) / FILE, hashes.astype("<u8"))


def read(folder):
  """Return the hashes in an export's folder, None if it has none.

  Raises:
    UserError: the file is damaged.
  """
  path = Path(folder) / FILE
  if not path.is_file():
    return None
  try:
    found = np.load(path, allow_pickle=False)
  except (OSError, ValueError, EOFError) as e:
    raise _damaged(path) from e
  if found.dtype != "<u8" or found.ndim != 1 or (found[1:] <= found[:-1]).any():
    raise _damaged(path)
  return found


def _damaged(path):
  return UserError(
    f"{path} is damaged; copy the whole folder again, or export the draft again"
  )


def shared(hashes, texts):
  """Return [N] bool: whether a text has a run that was trained on."""
  found = [grams(text) for text in texts]
  # the many are searched once
  known = np.intersect1d(np.concatenate([hashes[:0], *found]), hashes)
  return np.array([np.isin(runs, known).any() for runs in found], bool)


def of_run(hashes, batches):
  """Return what a draft was trained on of the prompts that it is judged by.

  Args:
    hashes: of `read`; batches: list of `answers.Batch`.

  Returns:
    {"prompts": how many, "shared": the ids of those that share a run}; None
    where the draft keeps no hashes.
  """
  if hashes is None:
    return None
  asked = {a.turn.index: a.turn.prompt for b in batches for a in b.answers}
  prompts = list(asked.values())
  texts = [
    " ".join([*(m["content"] for m in p.history), *p.turns]) for p in prompts
  ]
  found = shared(hashes, texts)
  ids = [p.id for p, was in zip(prompts, found, strict=True) if was]
  return {"prompts": len(prompts), "shared": ids}


def rows(found):
  """Return what `of_run` found as rows of a table, none where it is None."""
  if found is None:
    return []
  ids, n = found["shared"], found["prompts"]
  which = f" ({', '.join(ids[:3])}{', ...' * (len(ids) > 3)})" if ids else ""
  said = f"on {len(ids) or 'none'} of {n} prompts{which}"
  return [("trained", f"{said}, by runs of {WORDS} words")]
