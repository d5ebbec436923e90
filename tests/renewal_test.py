"""Expected rounds as a loss: against the predictor's, by enumeration, and its
gradient."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import forced, losses, predict, renewal, theory

rules = pytest.mark.parametrize("rule", ["token", "block"])


def _texts(P=4, N=12, seed=0):
  """ln rho [P, N], one word that q and one that p cannot say."""
  ratio = np.random.default_rng(seed).normal(-0.3, 1, (P, N))
  ratio[0, 3], ratio[1, 7] = -np.inf, np.inf
  return ratio


def _rounds_of(ratio, K, rule):
  """R of one text by the predictor, as a function of its ln rho [n]."""
  ratio = np.where(ratio == np.inf, -np.inf, ratio)
  log_q = forced.windows(ratio[None], K)
  A = predict.survival(np.zeros((1, len(ratio))), log_q, rule)
  return float(theory.expected_rounds_along(A)[0])


@rules
def test_the_predictor_s_rounds(rule):
  """Each run of weights > 0 is a text of its own; NaN where they are 0."""
  K, ratio = 4, _texts()
  runs = [[(0, 12)], [(2, 12)], [(0, 5), (6, 9)], []]
  weights = np.zeros(ratio.shape)
  for row, spans in zip(weights, runs, strict=True):
    for a, b in spans:
      row[a:b] = 1
  dirty = np.where(weights > 0, ratio, np.nan)
  how = dict(num_draft=K, verifier=rule)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def gradient(ratio, weights):
    r = renewal.expected_rounds(ratio, None, weights, **how)
    return r.sum(), r

  with jax.enable_x64(True):
    g, got = map(np.asarray, gradient(dirty, weights))
    _, half = gradient(dirty, weights / 2)
  np.testing.assert_allclose(half, got / 2)
  assert np.isfinite(g).all() and not g[weights == 0].any()
  assert not got[weights == 0].any()
  for row, spans in enumerate(runs):
    want = sum(_rounds_of(ratio[row, a:b], K, rule) for a, b in spans)
    np.testing.assert_allclose(got[row].sum(), want, rtol=1e-12)
    for a, _ in spans:
      assert got[row, a] == 1


@rules
def test_gradient(rule):
  """Finite differences of the predictor's rounds."""
  ratio = _texts(seed=4)[0]
  how = dict(num_draft=3, verifier=rule)
  with jax.enable_x64(True):
    loss = lambda x: renewal.expected_rounds(x, None, x * 0 + 1, **how).sum()
    at = np.where(np.isfinite(ratio), ratio, -0.5)
    gradient = np.asarray(jax.grad(loss)(jnp.asarray(at)))
  for i, step in enumerate(np.eye(12) * 1e-6):
    slope = _rounds_of(at + step, 3, rule) - _rounds_of(at - step, 3, rule)
    assert abs(slope / 2e-6 - gradient[i]) < 1e-8
  assert np.abs(gradient).max() > 0.05


def test_all_texts_of_a_chain():
  """The mean over all texts = rounds of token verification by its own law.

  From the last token a, M = min(P, Q) is the law of what is accepted and P - M
  of what the target says instead.
  """
  V, K, N = 3, 2, 5
  rng = np.random.default_rng(2)
  P, Q = rng.dirichlet(np.ones(V), V), rng.dirichlet(np.ones(V), V)
  M = np.minimum(P, Q)
  R = {n: np.zeros(V) for n in range(-K, 1)}
  for n in range(1, N + 1):
    R[n], reach = np.ones(V), np.eye(V)
    for j in range(K):
      R[n] = R[n] + reach @ (P - M) @ R[n - j - 1]
      reach = reach @ M
    R[n] = R[n] + reach @ P @ R[n - K - 1]
  x = np.array(list(itertools.product(range(V), repeat=N)))
  before = np.concatenate([np.zeros((len(x), 1), int), x[:, :-1]], 1)
  ratio, chance = np.log(Q / P)[before, x], P[before, x].prod(1)
  how = dict(num_draft=K, verifier="token")
  with jax.enable_x64(True):
    r = renewal.expected_rounds(jnp.asarray(ratio), None, x * 0.0 + 1, **how)
  np.testing.assert_allclose(chance @ np.asarray(r).sum(1), R[N][0], rtol=1e-12)


def test_endless_token_drafts_are_total_variation():
  """K >= n: a round for the start and for every rejection but the last."""
  ratio = _texts(seed=3)[2:]
  how = dict(num_draft=12, verifier="token")
  with jax.enable_x64(True):
    r = renewal.expected_rounds(jnp.asarray(ratio), None, ratio * 0 + 1, **how)
  rejected = 1 - np.exp(np.minimum(ratio, 0))
  want = 1 + rejected[:, :-1].sum(1)
  np.testing.assert_allclose(np.asarray(r).sum(1), want, rtol=1e-12)


def test_unequal_starts_are_not_the_expected_length():
  """What the two losses disagree about: easy and hard places in one text."""
  ratio = np.where(np.arange(400) % 20 < 10, 0.0, -3.0)
  one, how = np.ones(400), dict(num_draft=6, verifier="token")
  alpha = np.exp(np.minimum(ratio, 0))
  J = -losses.expected_length(ratio, alpha, one, **how).mean()
  tokens_a_call = 400 / renewal.expected_rounds(ratio, None, one, **how).sum()
  assert tokens_a_call < J / 1.5


def test_unknown_verifier():
  with pytest.raises(ValueError, match="token or block, not 'x'"):
    renewal.expected_rounds(
      np.zeros(3), None, np.ones(3), num_draft=1, verifier="x"
    )
