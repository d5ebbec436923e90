"""Acceptance is counted from the tokens that were emitted, and nothing else."""

import numpy as np
import pytest

from specjax import metrics, types

NAN = np.nan


def _output(*rows, width=16):
  """Rows are lists of rounds; a round is (accepted, emitted, overlaps).

  Overlaps are those of the emitted tokens that a law was compared for; the
  others, as the bonus token, have none.
  """
  shape = (len(rows), width)
  out = types.Output(
    tokens=np.full(shape, -1),
    length=np.zeros(len(rows), int),
    finish_reason=np.zeros(len(rows), int),
    logprobs=None,
    round=np.full(shape, -1),
    accepted=np.zeros(shape, bool),
    overlap=np.full(shape, NAN, np.float32),
    stats=types.Stats(steps=0),
  )
  for i, rounds in enumerate(rows):
    at = 0
    for number, (accepted, emitted, overlaps) in enumerate(rounds):
      out.tokens[i, at : at + emitted] = 7
      out.round[i, at : at + emitted] = number
      out.accepted[i, at : at + accepted] = True
      out.overlap[i, at : at + len(overlaps)] = overlaps
      at += emitted
    out.length[i] = at
  return out


def _same(got, want):
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
  "rounds, K, want",
  [
    # two accepted, the third rejected: its position was tested too
    ([(2, 3, [0.5, 0.5, 0.25])], 4, (1, 3, [0, 0, 1, 0, 0], [1, 1, 1, 0])),
    # rejected at once
    ([(0, 1, [0.25])], 4, (1, 1, [1, 0, 0, 0, 0], [1, 0, 0, 0])),
    # wholly accepted: the bonus token was compared with nothing
    ([(2, 3, [0.5, 0.5])], 2, (1, 3, [0, 0, 1], [1, 1])),
    # an end token in the block: d1, d2, end of six that would have matched
    ([(3, 3, [0.5, 0.5, 1])], 5, (1, 3, [0, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0])),
    # nothing was drafted: the token is the target's own
    ([(0, 1, [])], 3, (1, 1, [1, 0, 0, 0], [0, 0, 0])),
    # K = 0 is plain decoding
    ([(0, 1, []), (0, 1, [])], 0, (2, 2, [2], [])),
    # max_new cuts the second round inside its accepted prefix
    (
      [(2, 3, [1, 1]), (1, 1, [0.5])],
      2,
      (2, 4, [0, 1, 1], [2, 1]),
    ),
    ([], 2, (0, 0, [0, 0, 0], [0, 0])),  # a row that asked for nothing
  ],
)
def test_one_row(rounds, K, want):
  """B02: a block that is cut counts what it emitted, position by position."""
  got = metrics.acceptance(_output(rounds), K)
  _same(got[:4], want)
  overlaps = np.zeros(K)
  for _, _, values in rounds:
    overlaps[: len(values)] += values
  np.testing.assert_allclose(got.overlap, overlaps)


def test_rows_that_ended_add_nothing():
  """B02: one ends in round 1, its neighbour goes on for ten more."""
  short = [(1, 2, [0.5, 0.5]), (0, 1, [0.1])]
  long = [(1, 2, [0.5, 0.5])] * 4
  alone = [metrics.acceptance(_output(row), 2) for row in (short, long, [])]
  together = metrics.acceptance(_output(short, long, []), 2)
  _same(together, metrics.add(alone, 2))
  assert (together.rounds, together.tokens) == (2 + 4, 3 + 8)


def test_rows_whose_rounds_are_not_consecutive_numbers():
  """Which number a round has says nothing, only which tokens share one."""
  out = _output([(1, 2, [0.5, 0.5]), (0, 1, [0.1])])
  later = out._replace(round=np.where(out.round < 0, -1, 3 * out.round + 5))
  _same(metrics.acceptance(out, 2), metrics.acceptance(later, 2))


def test_ratios():
  """vLLM's: by position over all rounds; alpha over those that got there."""
  rounds = [
    (2, 3, [1.0, 0.5]),  # both accepted, and a bonus token
    (1, 2, [0.5, 0.25]),
    (0, 1, [0.25]),
    (0, 1, []),  # nothing was drafted
  ]
  found = metrics.acceptance(_output(rounds), 2)
  assert found.tokens_per_call == 7 / 4
  assert found.by_position == [2 / 4, 1 / 4]
  assert found.alpha_by_position == [1.75 / 3, 0.75 / 2]
  assert found.alpha == 2.5 / 5
  assert found.tokens == found.rounds + found.histogram @ np.arange(3)


def test_nothing_to_tell():
  for found in (metrics.acceptance(_output([]), 2), metrics.add([], 2)):
    assert found.tokens_per_call is None and found.alpha is None
    assert found.by_position == [None, None] == found.alpha_by_position
