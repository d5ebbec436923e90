"""What a speculative run's tokens tell about its draft, in vLLM's definitions.

Everything is recomputed from an `Output`, so that what an end token or a limit
cut off is not counted and the tokens of all rounds add up to the answer's.
"""

from typing import NamedTuple

import numpy as np


class Acceptance(NamedTuple):
  """Counts over some rows; add two of them field by field with `add`."""

  rounds: int  # target calls of rows that emitted something
  tokens: int  # emitted, the target's own included
  histogram: np.ndarray  # [K + 1] int, rounds with so many accepted
  tested: np.ndarray  # [K] int, rounds that compared laws at position i
  overlap: np.ndarray  # [K] float64, sum over them of sum min(p, q)

  @property
  def tokens_per_call(self):
    """Mean acceptance length, the target's own token included."""
    return _ratio(self.tokens, self.rounds)

  @property
  def by_position(self):
    """[K] accepted at position i / rounds."""
    at_least = self.histogram[::-1].cumsum()[::-1][1:]
    return [_ratio(n, self.rounds) for n in at_least.tolist()]

  @property
  def alpha_by_position(self):
    """[K] mean of sum min(p, q) over the rounds that got to position i."""
    pairs = zip(self.overlap.tolist(), self.tested.tolist(), strict=True)
    return [_ratio(overlap, tested) for overlap, tested in pairs]

  @property
  def alpha(self):
    """The same mean over all tested positions: 1 - TV(p, q)."""
    return _ratio(float(self.overlap.sum()), int(self.tested.sum()))


def acceptance(output, num_draft):
  """Count a speculative `Output`.

  A round's tokens are those with one value of `round`. Its accepted ones come
  first; positions behind its first rejection were not tested and do not count,
  since their prefix is not the target's.
  """
  K = num_draft
  histogram, tested = np.zeros(K + 1, int), np.zeros(K, int)
  overlap, rounds = np.zeros(K), 0
  rows = zip(
    output.length, output.round, output.accepted, output.overlap, strict=True
  )
  for length, round_, accepted, row_overlap in rows:
    _, first, which = np.unique(
      round_[:length], return_index=True, return_inverse=True
    )
    position = np.arange(length) - first[which]  # inside its round, from 0
    rounds += len(first)
    num_accepted = np.bincount(which, accepted[:length], len(first))
    histogram += np.bincount(num_accepted.astype(int), minlength=K + 1)
    real = ~np.isnan(row_overlap[:length])
    tested += np.bincount(position[real], minlength=K)
    overlap += np.bincount(
      position[real], row_overlap[:length][real].astype(float), K
    )
  tokens = int(output.length.sum())
  return Acceptance(rounds, tokens, histogram, tested, overlap)


def add(parts, num_draft):
  """The sum of some `Acceptance`s of one K, none of them included."""
  K = num_draft
  total = Acceptance(0, 0, np.zeros(K + 1, int), np.zeros(K, int), np.zeros(K))
  for part in parts:
    total = Acceptance(*(a + b for a, b in zip(total, part, strict=True)))
  return total


def _ratio(a, b):
  return a / b if b else None
