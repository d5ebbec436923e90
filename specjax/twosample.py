"""Whether plain and speculative decoding sample one law: texts, then a test.

Many short answers to one prompt are drawn both ways, with seeds of their own.
A two-sample chi-square test says how likely the difference of their counts is
if the law is one, and how large a bias it would have seen.
"""

import contextlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from specjax import agreement, generate, metrics

LEVEL = 1e-4  # how often all tests of one call together blame a right law
POWER = 0.95  # the probability with which `Result.smallest_bias` is seen
ROWS = 16  # texts of a batch; its cache is held three times
_LEAST = 10  # counts of a cell, both samples together: 5 expected in each
_GROUPS = 4  # of a token's ids; 64 cells of three tokens


class Result(NamedTuple):
  """What one test found."""

  name: str  # see `compare`
  cells: int
  p_value: float  # 1 where there is but one cell
  level: float  # below it the samples are of two laws
  # least total variation between the cells that is seen with probability
  # POWER; None: not even that of two laws without a text in common
  smallest_bias: float | None


def law(case, samples, verifier, *, temperature, length, track):
  """Test that texts after the first prompt have one law; return what is found.

  Args:
    case: an `agreement.Case`.
    samples: n, how many texts each way.
    verifier: of `types.VERIFIERS`, but not "coupled", whose texts are equal.
    length: T, at most so many tokens a text.
    track: wraps the range of batches, for a progress bar.
  """
  first, began = case.asked[0], time.perf_counter()
  length = min(length, case.max_new, case.model.target.context - len(first.ids))

  def ask(number):
    seeds = (first.seed + number * ROWS + np.arange(ROWS)) % 2**32
    copies = [agreement.Asked(first.id, first.ids, int(x)) for x in seeds]
    return agreement.make_request(
      case, copies, temperature=temperature, max_new=length, batch=ROWS
    )

  sides, counts = ([], []), []
  with contextlib.closing(track(range(-(-samples // ROWS)))) as batches:
    join = agreement.joiner(case, verifier)
    size = dict(length=length, slots=case.slots)
    model = case.model
    drawn = texts(model.target, model.params, ask, join, batches, **size)
    for outputs in drawn:
      for side, output in zip(sides, outputs, strict=True):
        side.append(output.tokens)
      counts.append(metrics.acceptance(outputs[1], case.pair.opened.num_draft))
  tests = compare(*(np.concatenate(side)[:samples] for side in sides))
  total = metrics.add(counts, case.pair.opened.num_draft)
  return {
    "fault": any(test.p_value < test.level for test in tests),
    "prompt": first.id,
    "samples": samples,
    "tokens": length,
    "temperature": temperature,
    "verifier": verifier,
    "level": LEVEL,
    "power": POWER,
    "tests": [test._asdict() for test in tests],
    "tested": int(total.tested.sum()),
    "accepted": int(total.histogram @ np.arange(len(total.histogram))),
    "seconds": time.perf_counter() - began,
  }


def texts(target, params, ask, join, batches, *, length, slots):
  """Yield what plain and speculative decoding say, batch by batch.

  The prompt is fed once; each batch decodes a copy of the state behind it.

  Args:
    target: a `Target`; params: its parameters.
    ask: (batch number) -> a `Request` of ROWS copies of one prompt; its seeds
      are those of no other number.
    join: (request, plain tokens [B, N]) -> the `types.Draft`.
    batches: iterable of 0, 1, 2, ...
    length: T, the tokens of a text; slots: of the cache.

  Yields:
    Two `Output`s, plain and speculative, of independent noise.
  """
  size = dict(max_new_tokens=length, slots=slots)
  first = ask(0)
  draft = join(first, np.full((len(first.length), length), -1, np.int32))
  plain_start = generate.start(target, params, first, **size)
  start = generate.start(target, params, first, draft=draft, **size)

  def run(state, number, draft):
    # a copy, since `advance` takes the state that it is given
    state = jax.tree.map(jnp.copy, state)._replace(key=ask(number).key)
    state = generate.advance(target, params, state, steps=length, draft=draft)
    return generate.output(state, length)

  for i in batches:
    plain = run(plain_start, 2 * i, None)
    yield plain, run(start, 2 * i + 1, join(first, plain.tokens))


def compare(plain, speculative):
  """Test that two samples are of one law, in several ways.

  A large vocabulary has more texts than any sample, so that most are seen once
  and tell nothing alone. Hence T + 2 tests, the level LEVEL shared equally:

    texts: whole texts, rare ones pooled by `cells`: common texts, the joint
      law as it is.
    groups: each token replaced by one of _GROUPS groups of ids of about equal
      counts: how tokens depend on each other where nothing is common.
    token t: the t-th token alone.

  Cells and groups are made from the counts of both samples together. Given
  those, which sample a text is from is pure chance if the law is one, so that
  choosing them this way costs no level.

  Args:
    plain, speculative: [n, T] int, as many of each, -1 behind a text's end.

  Returns:
    A list of `Result`.
  """
  both = np.concatenate([plain, speculative])
  views = {"texts": both, "groups": _groups(both)}
  if both.shape[1] > 1:
    views |= {f"token {t + 1}": x[:, None] for t, x in enumerate(both.T)}
  level = LEVEL / len(views)
  return [_test(name, cells(x), level) for name, x in views.items()]


def cells(values):
  """Return the cell [n] of each of values [n, T], by backing off.

  A text that was seen _LEAST times is a cell. Of the others, those that share
  all but the last token are one, if they are so many together; then those
  that share all but the last two, and so on to the empty prefix. A remainder
  of less joins the smallest cell.
  """
  n, T = values.shape
  cell, made = np.full(n, -1), 0
  prefixes = np.concatenate([np.zeros((n, 1), values.dtype), values], 1)
  for width in range(T + 1, 0, -1):
    left = np.flatnonzero(cell < 0)
    _, which, counts = np.unique(
      prefixes[left, :width], axis=0, return_inverse=True, return_counts=True
    )
    number = np.where(counts >= _LEAST, made + np.cumsum(counts >= _LEAST), 0)
    cell[left] = number[which.reshape(-1)] - 1
    made = max(made, cell.max() + 1)
  if made and (cell < 0).any():
    cell[cell < 0] = np.bincount(cell[cell >= 0]).argmin()
  return np.maximum(cell, 0)


def _groups(values):
  """Each id of values [n, T] as one of _GROUPS groups, the same in all columns.

  Ids are dealt out from the most common one on, to the lightest group.
  """
  _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
  group, weight = np.zeros(len(counts), int), np.zeros(_GROUPS, int)
  for i in np.argsort(-counts, kind="stable"):
    group[i] = weight.argmin()
    weight[group[i]] += counts[i]
  return group[which].reshape(values.shape)


def _test(name, cell, level):
  """sum (a - b)^2 / (a + b) over the cells' counts, chi-square of C - 1."""
  n, C = len(cell) // 2, cell.max() + 1
  a, b = np.bincount(cell[:n], minlength=C), np.bincount(cell[n:], minlength=C)
  if C < 2:
    return Result(name, 1, 1.0, level, None)
  p_value = stats.chi2.sf(((a - b) ** 2 / (a + b)).sum(), C - 1)
  return Result(name, int(C), float(p_value), level, smallest_bias(n, C, level))


def smallest_bias(n, num_cells, level):
  """The total variation that is seen with probability POWER, at least.

  Of n texts each way, from laws w - d / 2 and w + d / 2 over the cells, the
  counts' difference has mean n d and their sum 2 n w, so that the statistic
  is about non-central chi-square with

    lambda = n / 2 sum d_i^2 / w_i >= n / 2 (sum |d_i|)^2 = 2 n TV^2.

  By Cauchy and Schwarz a bias spread evenly, |d_i| = 2 TV w_i, is the one that
  is hardest to see; any other of the same TV is seen more often. What moves
  mass inside a cell alone is not seen at all.

  Returns:
    The least such TV, None if it is above 1.
  """
  df = num_cells - 1
  critical = stats.chi2.isf(level, df)
  missing = lambda x: stats.ncx2.cdf(critical, df, x) - (1 - POWER)
  most = 2.0 * n  # TV = 1
  if missing(most) > 0:
    return None
  # not from 0, where scipy's non-central law is not defined
  return float(np.sqrt(optimize.brentq(missing, 1e-6, most) / (2 * n)))
