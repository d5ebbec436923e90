"""The toy pairs of `benchmarks.objectives`: their optimum, what they show."""

import functools

import jax
import numpy as np
import pytest
from scipy import optimize

from benchmarks import toys
from specjax import forced, predict, theory


@functools.cache
def _toy(seed=0):
  return toys.make(seed)


def _some_draft(toy, seed=5):
  noise = np.random.default_rng(seed).normal(size=toy.P.shape)
  return toys.softmax(np.log(toy.P) + noise)


def test_tokens_a_call_are_those_of_long_texts():
  """The stationary law of round starts, against rounds counted to 3,000."""
  toy = _toy()
  P, Q, K = toy.P, _some_draft(toy), toys.K
  M = np.minimum(P, Q)
  reach = [np.linalg.matrix_power(M, j) for j in range(K + 1)]
  R = [np.zeros(toys.V)] * (K + 1)
  for _ in range(3000):
    now = 1 + reach[K] @ P @ R[-K - 1]
    for j in range(K):
      now = now + reach[j] @ (P - M) @ R[-j - 1]
    R.append(now)
  alpha, tokens, alike = toys.exact(P, Q)
  np.testing.assert_allclose(1000 / (R[-1] - R[-1001]), tokens, rtol=1e-9)
  mu = toys.stationary(P)
  np.testing.assert_allclose(mu @ P, mu, atol=1e-12)
  np.testing.assert_allclose(alpha, mu @ theory.acceptance(P, Q), rtol=1e-12)
  assert alike > tokens  # rounds start where it is hard


def test_block_is_the_renewal_form_of_texts():
  toy = _toy()
  Q = _some_draft(toy)
  mean, low, high = toys.block(toy, Q)
  assert low < mean < high < low * 1.1
  before, x = toy.held_out[:, :-1], toy.held_out[:, 1:]
  log_p, log_q = np.log(toy.P)[before, x], np.log(Q)[before, x]
  log_q = forced.windows(log_q, toys.K)
  length = np.full(len(x), x.shape[1])
  texts = predict.Texts(length, log_p, log_q, np.ones_like(log_p))
  want = predict.predict(texts, "block").tokens
  np.testing.assert_allclose((mean, low, high), [x[-1] for x in want])
  token = predict.predict(texts, "token").tokens
  assert token.low[-1] < toys.exact(toy.P, Q)[1] < token.high[-1]
  assert mean > token.mean[-1]
  whole = 512 / np.ceil(512 / (toys.K + 1))
  np.testing.assert_allclose(toys.block(toy, toy.P), whole, rtol=1e-9)


def test_the_best_laws_of_classes():
  """Against a linear program, class by class."""
  toy = _toy()
  mu, Q = toys.stationary(toy.P), toys.best_of_classes(toy)
  np.testing.assert_allclose(Q.sum(1), 1)
  V, total = toys.V, 0.0
  for c in range(toys.CLASSES):
    rows = np.flatnonzero(toy.classes == c)
    assert np.ptp(Q[rows], 0).max() == 0
    n = len(rows) * V  # kept[x, y] <= q[y], <= P[x, y]; then q
    gain = np.append(np.repeat(-mu[rows], V), np.zeros(V))
    below = np.concatenate([np.eye(n), -np.tile(np.eye(V), (len(rows), 1))], 1)
    found = optimize.linprog(
      gain,
      A_ub=below,
      b_ub=np.zeros(n),
      A_eq=[np.append(np.zeros(n), np.ones(V))],
      b_eq=[1],
      bounds=[*((0, p) for p in toy.P[rows].ravel()), *[(0, 1)] * V],
    )
    total -= found.fun
  np.testing.assert_allclose(toys.exact(toy.P, Q)[0], total, rtol=1e-9)


def _trained(kind, name, steps):
  """alpha, tokens a call and E[N] of all starts alike, at its best rate."""
  made, keys = [_toy()], jax.random.split(jax.random.key(0), 1)
  schedule, rates = toys.SCHEDULES[name], (0.1, 0.3)
  Q = toys.train(kind, schedule, steps, made, keys, rates, toys.SURE)
  return toys.exact(made[0].P, Q[0, toys.best_rate(made, Q)])


def test_kl_then_tv():
  """A draft that starts wrong: better than KL alone and than TV alone."""
  KL, TV, both = (
    _trained("rank", name, 400)[1] for name in ("KL", "TV", "KL > TV")
  )
  print(KL, TV, both)
  assert both > 1.1 * KL and both > 1.1 * TV


@pytest.mark.slow
def test_rounds_not_lengths():
  """All starts alike: more of E[N] so counted, fewer tokens a call."""
  TV, length, rounds = (
    _trained("classes", f"KL > {name}", 1500)
    for name in ("TV", "length, token", "rounds, token")
  )
  best = toys.exact(_toy().P, toys.best_of_classes(_toy()))
  assert best[0] - 0.005 < TV[0] < best[0] + 1e-9
  assert length[2] > TV[2] + 0.05 and length[1] < TV[1] - 0.05
  assert rounds[1] > TV[1] - 0.01
