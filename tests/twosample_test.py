"""The two-sample test: its level, its power, and the cells it makes."""

import functools

import numpy as np
import pytest
from scipy import stats

from specjax import twosample


def _sample(rng, n, first, following):
  """Texts [n, 3] of a Markov chain."""
  x = np.zeros((n, 3), int)
  x[:, 0] = rng.choice(len(first), n, p=first)
  for t in (1, 2):
    u = rng.random((n, 1))
    x[:, t] = (following[x[:, t - 1]].cumsum(1) > u).argmax(1)
  return x


def _chain(rng, size=40):
  """A law with common and rare texts."""
  return rng.dirichlet(np.full(size, 0.2)), rng.dirichlet(
    np.full(size, 0.2), size
  )


def test_level(monkeypatch):
  """Under one law the p-values of every test are uniform, or a bit large."""
  once = functools.cache(twosample.smallest_bias)  # it takes a while
  monkeypatch.setattr(twosample, "smallest_bias", once)
  rng = np.random.default_rng(0)
  law, n, runs = _chain(rng), 256, 200
  found = [
    twosample.compare(_sample(rng, n, *law), _sample(rng, n, *law))
    for _ in range(runs)
  ]
  names = [x.name for x in found[0]]
  assert names == ["texts", "groups", "token 1", "token 2", "token 3"]
  p = np.array([[x.p_value for x in tests] for tests in found])
  for name, column in zip(names, p.T, strict=True):
    assert stats.kstest(column, "uniform").pvalue > 1e-4, name
    assert (column < 0.1).sum() <= stats.binom.ppf(1 - 1e-4, runs, 0.1), name
  levels = {x.level for x in found[0]}
  assert levels == {twosample.LEVEL / 5} and p.min() > levels.pop()
  cells = np.array([[x.cells for x in tests] for tests in found])
  assert (cells > 10).all()


@pytest.mark.parametrize("num_cells", [2, 30])
def test_power(num_cells, monkeypatch):
  """The smallest bias is seen as often as is claimed, and 0.7 of it is not."""
  once = functools.cache(twosample.smallest_bias)  # it takes a while
  monkeypatch.setattr(twosample, "smallest_bias", once)
  rng, n, runs = np.random.default_rng(1), 2000, 400
  half = rng.dirichlet(np.full(num_cells // 2, 3.0)) / 2
  w, sign = np.repeat(half, 2), np.tile([1, -1], num_cells // 2)
  smallest = twosample.smallest_bias(n, num_cells, 2e-5)

  def share(d):
    seen = 0
    for _ in range(runs):
      counts = [rng.multinomial(n, w - d / 2), rng.multinomial(n, w + d / 2)]
      cell = [np.repeat(np.arange(num_cells), x) for x in counts]
      test = twosample._test("", np.concatenate(cell), 2e-5)
      assert test.smallest_bias == smallest
      seen += test.p_value < test.level
    return seen / runs

  even = 2 * smallest * w * sign
  assert np.abs(even).sum() / 2 == pytest.approx(smallest)
  assert 0.91 <= share(even) <= 0.98
  assert share(0.7 * even) < 0.7
  if num_cells > 2:  # the same total variation in a few: seen more often
    few = np.isin(w, np.sort(half)[-5:])
    assert share(even * few / w[few].sum()) > 0.99


def test_what_few_texts_cannot_see():
  assert twosample.smallest_bias(20, 30, 1e-5) is None
  texts = np.zeros((500, 3), int)
  tests = twosample.compare(texts, texts)
  assert {(x.cells, x.p_value) for x in tests} == {(1, 1.0)}


def test_cells_back_off():
  """Common texts alone, rare ones by prefix, what is left with the smallest."""
  texts = [[1, 1]] * 12 + [[1, 2]] * 6 + [[1, 3]] * 5 + [[2, 2]] * 30
  texts = np.array([*texts, *[[4, i] for i in range(3)]])
  cell = twosample.cells(texts)
  assert cell.tolist() == [0] * 12 + [2] * 11 + [1] * 30 + [2] * 3
  many = np.concatenate([texts, [[5 + i, 0] for i in range(9)]])
  assert twosample.cells(many)[-12:].tolist() == [3] * 12


def test_groups_keep_what_tokens_have_to_do_with_each_other():
  """Uniform tokens, the second a copy of the first in half of one sample."""
  rng = np.random.default_rng(0)
  plain, other = rng.integers(0, 500, (2, 1000, 3))
  other[:500, 1] = other[:500, 0]
  p = {x.name: x.p_value for x in twosample.compare(plain, other)}
  assert p["groups"] < 1e-20 and min(p[f"token {t}"] for t in (1, 2, 3)) > 1e-3
