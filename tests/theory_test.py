"""The equations of `theory.py`: against exact arithmetic, sums over every
outcome, the shipped verifiers, and the numbers of the papers."""

import decimal
import functools
import itertools
import pathlib
import re
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from specjax import theory, verify

# Awkward ones among them; the last is the largest float64 below 1.
ALPHAS = [0, 1e-300, 1e-9, 0.1, 0.3, 0.5, 0.8, 0.95, 1 - 1e-4, 1 - 1e-9]
ALPHAS += [1 - 1e-12, 1 - 2**-53, 1]
LENGTHS = [0, 1, 2, 5, 8, 17, 100, 1000]


def _random_points(n=4000, seed=0):
  """alpha in (0, 1) and C >= 1, both ends favoured."""
  rng = np.random.default_rng(seed)
  alpha = rng.choice([rng.random(n), 1 - 10 ** -rng.uniform(0, 4, n)])
  return alpha, 10 ** rng.uniform(0, 2.5, n)


def _geometric(alpha, k):
  """[A_0..A_k] = alpha^j."""
  return np.asarray(alpha, float)[..., None] ** np.arange(k + 1)


# Acceptance


def test_acceptance_and_total_variation():
  p, q = [Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]
  float_p, float_q = np.array(p, float), np.array(q, float)
  alpha = sum(map(min, p, q))
  assert theory.acceptance(float_p, float_q) == pytest.approx(alpha, rel=1e-15)
  tv = theory.total_variation(float_p, float_q)
  assert tv == pytest.approx(1 - alpha, rel=1e-15)

  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(7), (5, 1)), rng.dirichlet(np.ones(7), 3)
  alpha = theory.acceptance(p, q)
  assert alpha.shape == (5, 3) and (alpha > 0).all() and (alpha < 1).all()
  np.testing.assert_allclose(alpha, 1 - theory.total_variation(p, q))
  for i, j in np.ndindex(5, 3):
    want = sum(min(a, b) for a, b in zip(p[i, 0], q[j], strict=True))
    assert alpha[i, j] == pytest.approx(want, rel=1e-14)
  np.testing.assert_allclose(theory.acceptance(p, p), 1)
  assert theory.acceptance([1.0, 0.0], [0.0, 1.0]) == 0  # nothing in common
  tiny = [0.5 + 1e-13, 0.5 - 1e-13]  # does not vanish in 1 - sum min
  tv = theory.total_variation(tiny, [0.5, 0.5])
  assert tv == pytest.approx(tiny[0] - 0.5, rel=1e-12)


# Tokens a round


def _exact(alpha, k):
  """E[N] and Var[N] of the closed forms in 2,500 digits."""
  with decimal.localcontext() as context:
    context.prec = 2500  # alpha = 1e-300 has 750 of them
    a = Decimal(alpha)
    if a == 1:
      return Decimal(k + 1), Decimal(0)
    mean = (1 - a ** (k + 1)) / (1 - a)
    variance = a - (2 * k + 1) * a ** (k + 1) * (1 - a) - a ** (2 * k + 2)
    return mean, variance / (1 - a) ** 2


def _relative(got, want):
  return float(abs(Decimal(float(got)) - want) / want) if want else float(got)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_tokens_a_round_in_2500_digits(alpha, x64):
  """NumPy at once, and JAX in float64 under jit."""
  mean, variance = theory.expected_tokens, theory.variance_tokens
  with jax.enable_x64(x64):
    if x64:
      mean, variance = jax.jit(mean), jax.jit(variance)
    for k in LENGTHS:
      want_mean, want_variance = _exact(alpha, k)
      assert _relative(mean(alpha, k), want_mean) <= 1e-15
      assert _relative(variance(alpha, k), want_variance) <= 2e-15


@pytest.mark.parametrize("k", [10**6, 45 * 10**6, 2**40])
def test_very_long_drafts(k):
  """As many as `optimal_length` may ask for."""
  for alpha in (0.9, 1 - 1e-6, 1 - 1e-9, 1 - 2**-53):
    mean, variance = _exact(alpha, k)
    assert _relative(theory.expected_tokens(alpha, k), mean) <= 2e-15
    assert _relative(theory.variance_tokens(alpha, k), variance) <= 1e-14


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_moments_of_the_law_of_n(k):
  """P(N = j) written out, and summed, in fractions."""
  for a in (Fraction(0), Fraction(1, 3), Fraction(4, 5), Fraction(1)):
    law = {j: a ** (j - 1) * (1 - a) for j in range(1, k + 1)}
    law[k + 1] = a**k
    assert sum(law.values()) == 1
    mean = sum(j * w for j, w in law.items())
    variance = sum(j * j * w for j, w in law.items()) - mean**2
    got = theory.expected_tokens(float(a), k)
    assert got == pytest.approx(float(mean), rel=1e-14)
    got = theory.variance_tokens(float(a), k)
    assert got == pytest.approx(float(variance), rel=1e-14)
    got = theory.expected_tokens_from_survival(_geometric(float(a), k))
    assert got == pytest.approx(float(mean), rel=1e-14)


def test_numbers_of_the_papers():
  # Leviathan et al. 2023, Table 1: operations and speed-up at no draft cost
  table = {
    (0.6, 2): (1.53, 1.96),
    (0.7, 3): (1.58, 2.53),
    (0.8, 2): (1.23, 2.44),
    (0.8, 5): (1.63, 3.69),
    (0.9, 2): (1.11, 2.71),
    (0.9, 10): (1.60, 6.86),
  }
  for (alpha, k), (operations, speed) in table.items():
    S = theory.speedup(alpha, k, np.inf)
    assert round(float((k + 1) / S), 2) == operations
    assert round(float(S), 2) == speed
  # Sun et al. 2025: 10/9 accepted tokens for token verification
  alpha = theory.acceptance([1 / 3, 2 / 3], [2 / 3, 1 / 3])
  assert theory.expected_tokens(alpha, 2) - 1 == pytest.approx(10 / 9)
  # Chen et al. 2023: 14.1 ms a step, 1.8 ms a draft step, k = 4, 2.46 times
  assert theory.speedup(0.85, 4, 14.1 / 1.8) == pytest.approx(2.46, rel=0.01)


# Rounds a text


def _rounds_of_a_markov_chain(n, law):
  """Expected steps until absorption: tokens still missing are its states."""
  transition = np.zeros((n, n))
  for missing in range(1, n + 1):
    for j, w in enumerate(law, 1):
      if missing - j >= 1:
        transition[missing - 1, missing - j - 1] += w
  if not n:
    return 0.0
  return np.linalg.solve(np.eye(n) - transition, np.ones(n))[n - 1]


@pytest.mark.parametrize("K", [0, 1, 3, 6])
def test_expected_rounds_is_the_absorption_time_of_a_markov_chain(K):
  rng = np.random.default_rng(K)
  for _ in range(5):
    survival = np.concatenate([[1], np.sort(rng.random(K))[::-1]])
    law = survival - np.append(survival[1:], 0)
    n = np.array([0, 1, 2, K + 1, K + 2, 20])
    want = [_rounds_of_a_markov_chain(m, law) for m in n]
    got = theory.expected_rounds(n, survival)
    np.testing.assert_allclose(got, want, rtol=1e-13)
    along = np.broadcast_to(survival, (20, K + 1))  # all starts alike
    got = theory.expected_rounds_along(along)
    assert got == pytest.approx(want[-1], rel=1e-13)


def test_finite_length():
  """Tokens a round fall short of E[N], by what the renewal theorem says."""
  survival = _geometric(0.8, 5)
  for n, want in ((32, 3.486), (128, 3.636)):
    assert round(float(n / theory.expected_rounds(n, survival)), 3) == want
  mean = theory.expected_tokens_from_survival(survival)
  assert round(float(mean), 3) == 3.689
  second = np.sum((2 * np.arange(6) + 1) * survival)  # E[N^2]
  about = 32 / mean + (second - mean) / (2 * mean**2)
  assert abs(theory.expected_rounds(32, survival) - about) < 3e-4


# The renewal recursion, against the verifiers that ship


def _random_pair(V, seed):
  """Conditional laws p(. | last), q(. | last) [V, V], with zeros."""
  rng = np.random.default_rng(seed)
  p, q = rng.dirichlet(np.full(V, 0.7), (2, V))
  p[0, 1] = q[1, 0] = 0
  q[2] = p[2]
  return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def _sticky_pair():
  """Two tokens of easy text (alpha .95), two of hard (alpha .3)."""
  inside = {"p": [(0.525, 0.475), (0.85, 0.15)]}
  inside["q"] = [law[::-1] for law in inside["p"]]
  stay, pair = 0.97, []
  for laws in inside.values():
    groups = [
      np.concatenate(
        [(stay if h == g else 1 - stay) * np.array(laws[h]) for h in (0, 1)]
      )
      for g in (0, 1)
    ]
    pair.append(np.stack([groups[0], groups[0], groups[1], groups[1]]))
  # leaving is equally likely under both, so that alpha is what it says
  p, q = pair
  q[:2, 2:], q[2:, :2] = p[:2, 2:], p[2:, :2]
  return p, q


def _thresholds(name, P, Q, draft):
  """t [K]: the verifier tests u_i < t_i. P [K + 1, V], Q [K, V]."""
  K = len(draft)
  at = [
    (P[i, x] / Q[i, x] if Q[i, x] > 0 else 0.0) for i, x in enumerate(draft)
  ]
  if name == "token":
    return np.minimum(1, at)
  pi, h = 1.0, []
  for i in range(K):
    pi = min(1, pi * at[i])
    if i + 1 == K:
      h.append(pi)
      continue
    S = np.maximum(pi * P[i + 1] - Q[i + 1], 0).sum()
    h.append(S / (S + 1 - pi) if S + 1 - pi > 0 else 1.0)
  return np.array(h)


def _round_law(name, p, q, last, K):
  """[K + 1, V]: how many tokens one shipped round accepts, and which token is
  its last one, summed over every draft and both sides of every threshold."""
  V = len(p)
  weights, args = [], []
  for draft in itertools.product(range(V), repeat=K):
    before = [last, *draft]
    P, Q = p[before], q[before[:K]].reshape(K, V)
    t = _thresholds(name, P, Q, draft)
    for above in itertools.product((0, 1), repeat=K):
      above = np.array(above, int)
      u = np.where(above, (t + 1) / 2, t / 2)
      w = np.where(above, 1 - t, t).prod()
      weights.append(w * Q[np.arange(K), list(draft)].prod())
      args.append((P, Q, np.array(draft, int), u))
  stacked = [np.stack(x) for x in zip(*args, strict=True)]
  got = jax.jit(jax.vmap(getattr(verify, name)))(*stacked)
  law = np.zeros((K + 1, V))
  weighted = np.array(weights)[:, None] * np.nan_to_num(got.next_probs)
  np.add.at(law, np.asarray(got.num_accepted), weighted)
  np.testing.assert_allclose(law.sum(), 1, rtol=1e-12)
  return law


def _enumerated_rounds(name, p, q, K, n):
  """Expected rounds until n tokens behind the token 0, and until 0..n."""
  with jax.enable_x64(True):
    laws = [_round_law(name, p, q, last, K) for last in range(len(p))]
  rounds = np.zeros((n + 1, len(p)))  # by tokens missing and last token
  for missing in range(1, n + 1):
    for last, law in enumerate(laws):
      more = sum(
        law[accepted] @ rounds[missing - accepted - 1]
        for accepted in range(min(K + 1, missing - 1))
      )
      rounds[missing, last] = 1 + more
  return rounds[:, 0]


def _survival_along(name, p, q, text, K, beyond=0.0):
  """A_{s,j} [n, K + 1] of a text behind the token 0, one by one."""
  n = len(text)
  last = (0, *text)
  A = np.full((n, K + 1), beyond)
  for s in range(n):
    A[s, 0], product, path = 1, 1.0, [1.0]
    for j in range(1, min(K, n - s) + 1):
      x = last[s + j]
      rho = q[last[s + j - 1], x] / p[last[s + j - 1], x]
      product *= min(1, rho)
      path.append(path[-1] * rho)
      A[s, j] = product if name == "token" else min(path)
    if n - s < K:
      A[s, n - s + 1 :] = min(beyond, A[s, n - s])
  return A


def _mean_rounds_along(name, p, q, K, n, beyond):
  """sum over texts of p(text) rounds(text)."""
  total, survivals = [], []
  for text in itertools.product(range(len(p)), repeat=n):
    w = np.prod([p[a, b] for a, b in itertools.pairwise((0, *text))])
    if w:
      total.append(w)
      survivals.append(_survival_along(name, p, q, text, K, beyond))
  rounds = theory.expected_rounds_along(np.stack(survivals))
  assert rounds.shape == (len(total),)
  return np.dot(total, rounds)


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("K, n", [(0, 3), (1, 5), (2, 6), (3, 6), (4, 3)])
def test_renewal_is_the_shipped_verifiers_rounds(name, K, n):
  """Whatever A is said to be behind the text's end."""
  p, q = _random_pair(3, seed=K)
  want = _enumerated_rounds(name, p, q, K, n)[n]
  for beyond in (0.0, 1.0):
    got = _mean_rounds_along(name, p, q, K, n, beyond)
    assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", ["token", "block"])
def test_renewal_where_the_mean_over_positions_is_wrong(name):
  """Sticky easy and hard text: exact by enumeration; the mean is 10 % off."""
  (p, q), K = _sticky_pair(), 4
  alphas = theory.acceptance(p, q)
  np.testing.assert_allclose(alphas, [0.9515, 0.9515, 0.321, 0.321])
  rounds = _enumerated_rounds(name, p, q, K, 400)
  got = _mean_rounds_along(name, p, q, K, 5, beyond=0.0)
  assert got == pytest.approx(rounds[5], abs=1e-12)

  texts = _sample(p, 300, 400)
  survivals = np.stack([_survival_along(name, p, q, x, K) for x in texts])
  got = theory.expected_rounds_along(survivals)
  error = got.std() / np.sqrt(len(texts))
  assert abs(got.mean() - rounds[400]) < 4 * error < 0.04 * rounds[400]
  by_mean = 400 / survivals[:, : 400 - K].sum(-1).mean()
  assert by_mean < 0.9 * rounds[400]


def _sample(p, num_texts, n):
  """Texts of n tokens behind the token 0."""
  rng = np.random.default_rng(0)
  cdf, last, texts = p.cumsum(1), np.zeros(num_texts, int), []
  for _ in range(n):
    last = (rng.random((num_texts, 1)) > cdf[last][:, :-1]).sum(1)
    texts.append(last)
  return np.stack(texts, 1).tolist()


def test_block_verification_of_the_paper_example():
  """11/9 accepted tokens: E_p[min_{i<=j} rho_1 .. rho_i] summed over j."""
  p, q = np.array([[1 / 3, 2 / 3]] * 2), np.array([[2 / 3, 1 / 3]] * 2)
  mean = dict(token=0.0, block=0.0)
  for name, text in itertools.product(mean, itertools.product((0, 1), (0, 1))):
    A = _survival_along(name, p, q, text, 2)[0]
    mean[name] += p[0, text[0]] * p[0, text[1]] * A
  for name, want in (("token", 10 / 9), ("block", 11 / 9)):
    got = theory.expected_tokens_from_survival(mean[name]) - 1
    assert got == pytest.approx(want, rel=1e-14)


def test_texts_of_different_lengths():
  """num_tokens cuts them, and what pads them does not matter."""
  rng = np.random.default_rng(0)
  A = np.sort(rng.random((6, 9, 4)))[..., ::-1].copy()
  A[..., 0] = 1
  length = np.array([0, 1, 2, 5, 8, 9])
  got = theory.expected_rounds_along(A, num_tokens=length)
  want = [
    theory.expected_rounds_along(a[:m]) for a, m in zip(A, length, strict=True)
  ]
  np.testing.assert_allclose(got, want, rtol=1e-14)
  assert got[0] == 0 and got[1] == 1
  for a, m in zip(A, length, strict=True):
    a[m:, 1:] = rng.random()
  again = theory.expected_rounds_along(A, num_tokens=length)
  np.testing.assert_array_equal(got, again)


# Speed-up and the best length

# k* (S*) by alpha and C
TABLE = """
.50 | 0 (1.00) | 1 (1.20) | 2 (1.40) | 2 (1.46) | 3 (1.58) | 3 (1.63) |\
 4 (1.72) | 4 (1.79) | 5 (1.88)
.60 | 1 (1.07) | 2 (1.31) | 3 (1.58) | 3 (1.67) | 4 (1.84) | 4 (1.92) |\
 5 (2.06) | 6 (2.17) | 7 (2.30)
.70 | 1 (1.13) | 2 (1.46) | 4 (1.85) | 4 (1.98) | 5 (2.24) | 6 (2.35) |\
 7 (2.58) | 8 (2.76) | 9 (2.97)
.80 | 2 (1.22) | 3 (1.69) | 5 (2.27) | 6 (2.47) | 7 (2.89) | 8 (3.09) |\
 9 (3.48) | 11 (3.82) | 14 (4.23)
.85 | 2 (1.29) | 4 (1.85) | 6 (2.59) | 7 (2.85) | 9 (3.43) | 10 (3.70) |\
 12 (4.26) | 14 (4.75) | 17 (5.39)
.90 | 3 (1.38) | 6 (2.09) | 9 (3.07) | 10 (3.43) | 12 (4.26) | 13 (4.67) |\
 16 (5.55) | 19 (6.37) | 24 (7.49)
.95 | 5 (1.51) | 9 (2.47) | 13 (3.90) | 15 (4.48) | 19 (5.87) | 21 (6.60) |\
 26 (8.27) | 31 (9.95) | 40 (12.54)
"""


def test_table_of_best_lengths():
  cost_ratios = [2, 4, 8, 10, 16, 20, 32, 50, 100]
  for line in TABLE.strip().split("\n"):
    alpha, *cells = line.split(" | ")
    best = theory.optimal_length(float(alpha), cost_ratios)
    pairs = zip(best.k, best.speedup, strict=True)
    assert [f"{k} ({S:.2f})" for k, S in pairs] == [c.strip() for c in cells]


def test_best_length_against_every_length():
  """4,000 random points: no k does better, and one less or more does worse."""
  alpha, C = _random_points()
  best = theory.optimal_length(alpha, C)
  assert best.k.max() < 2999
  k = np.arange(3000)[:, None]
  S = np.cumsum(alpha**k, 0) / (1 + k / C)
  np.testing.assert_allclose(best.speedup, S.max(0), rtol=1e-12)
  np.testing.assert_array_equal(best.k, S.argmax(0))
  x = np.maximum(best.k_continuous, 0)
  assert ((best.k == np.floor(x)) | (best.k == np.ceil(x))).all()
  # dS/dk = 0 at k_continuous, as a share of the terms that it is made of
  x = best.k_continuous
  up = -(alpha ** (x + 1)) * np.log(alpha) * (1 + x / C)
  down = (1 - alpha ** (x + 1)) / C
  np.testing.assert_allclose(up, down, rtol=1e-11)


def test_break_even_is_exact():
  alpha, C = _random_points(seed=1)
  best = theory.optimal_length(alpha, C)
  pays = alpha > theory.break_even_alpha(C)
  np.testing.assert_array_equal(best.k > 0, pays)
  np.testing.assert_array_equal(theory.speedup(alpha, 1, C) > 1, pays)
  assert 0 < pays.sum() < len(pays)
  assert theory.optimal_length(0.25, 4.0) == (0, pytest.approx(0.416, 0.01), 1)
  for C in (0.5, 1):  # a draft as slow as the target
    assert theory.optimal_length([0, 0.5, 1], C).k.tolist() == [0, 0, 0]
    assert (theory.optimal_length([0, 0.5, 1], C).speedup == 1).all()
  assert theory.break_even_alpha(0.5) == 2


def test_bounds():
  alpha, C = _random_points(seed=2)
  bound = theory.speedup_bound(alpha, C)
  for k in range(200):
    S = theory.speedup(alpha, k, C)
    assert (bound * (1 + 1e-14) >= S).all()
    assert ((k + 1) / (1 + k / C) * (1 + 1e-14) >= S).all()
  best = theory.optimal_length(alpha, C)
  some = best.k > 0
  margin = 1 + 1e-12
  assert (best.speedup <= alpha**best.k * C * margin)[some].all()
  assert (best.speedup * margin >= alpha ** (best.k + 1) * C)[some].all()
  assert theory.speedup_bound(1.0, 7.0) == 7
  assert theory.speedup_bound(0.5, np.inf) == 2
  assert theory.speedup_bound(0.5, 0.1) == 1  # k = 0


def test_monotone():
  alpha = np.linspace(0.01, 0.99, 99)[:, None]
  C = np.geomspace(1, 200, 50)
  best = theory.optimal_length(alpha, C)
  assert best.k.shape == best.speedup.shape == (99, 50)
  for axis in (0, 1):
    assert (np.diff(best.k, axis=axis) >= 0).all()
    assert (np.diff(best.speedup, axis=axis) >= 0).all()


@pytest.mark.parametrize("C", [1 + 1e-9, 1.0001, 1.5, 2, 8, 32, 1000, 1e6])
def test_lambert_in_80_digits(C):
  """k_continuous solves y - ln y = 1 + L (C - 1): one Newton step from it, in
  80 digits, hardly moves it."""
  for alpha in ALPHAS[1:-1]:
    x = theory.optimal_length(alpha, C).k_continuous
    with decimal.localcontext() as context:
      context.prec = 80
      L = -Decimal(alpha).ln()
      w = (Decimal(float(x)) + 1) * L  # ln y
      step = w.exp() - w - 1 - L * (Decimal(C) - 1)
      step /= (w.exp() - 1) * L
      error = float(abs(step) / (abs(Decimal(float(x))) + 1))
    assert error <= 4e-16


def test_lambert_of_scipy():
  """Where the argument of W does not underflow."""
  alpha, C = _random_points(seed=3)
  L = -np.log(alpha)
  ok = L * (C - 1) < 600
  alpha, C, L = alpha[ok], C[ok], L[ok]
  W = scipy.special.lambertw(-np.exp(-1 - L * (C - 1)), -1).real
  got = theory.optimal_length(alpha, C).k_continuous
  # near the branch point, C = 1, scipy's own argument is the one that is coarse
  np.testing.assert_allclose(got, np.log(-W) / L - 1, rtol=1e-5, atol=1e-5)
  far = L * (C - 1) > 0.1
  want = (np.log(-W) / L - 1)[far]
  np.testing.assert_allclose(got[far], want, rtol=1e-12, atol=1e-12)


def test_best_length_at_the_ends():
  with np.errstate(all="raise"):
    assert theory.optimal_length(0.0, 10.0) == (0, -1, 1)
    best = theory.optimal_length(1.0, 10.0)  # the more the better
    assert best.k >= 2**52 and best.k_continuous == np.inf
    assert best.speedup == pytest.approx(10)
    best = theory.optimal_length(1 - 1e-9, 1e6)
    about = np.sqrt(2 * (1e6 - 1) / 1e-9)
    assert best.k_continuous == pytest.approx(about, rel=0.02)
    assert theory.optimal_length(1e-9, 1e6).k == 0
    assert theory.optimal_length(1e-5, 1e6).k == 1


# Measured costs


def _slow_speedup(A, c, v, o):
  """S(k), k = 0..K, one at a time."""
  return [sum(A[: k + 1]) / (v[k] + sum(c[:k]) + o[k]) for k in range(len(A))]


def test_speedup_from_costs():
  rng = np.random.default_rng(0)
  for K in (0, 1, 4):
    A = np.sort(rng.random((5, 1, K + 1)))[..., ::-1]
    A[..., 0] = 1
    c, v = rng.random((3, K)), 1 + np.sort(rng.random((5, 1, K + 1)))
    o = rng.random((3, 1))
    got = theory.speedup_from_costs(A, c, v, o)
    best = theory.optimal_length_from_costs(A, c, v, o)
    assert got.shape == (5, 3, K + 1) and best.k.shape == (5, 3)
    for i, j in np.ndindex(5, 3):
      want = _slow_speedup(A[i, 0], c[j], v[i, 0], [o[j, 0]] * (K + 1))
      np.testing.assert_allclose(got[i, j], want, rtol=1e-14)
      want[0] = 1  # plain decoding, without the loop's overhead
      assert best.k[i, j] == np.argmax(want)
      assert best.speedup[i, j] == pytest.approx(max(want), rel=1e-14)


def test_flat_costs_are_the_iid_formula():
  alpha, C = _random_points(100)
  K = 40
  A = _geometric(alpha, K)
  got = theory.speedup_from_costs(A, 1 / C[:, None], 1.0)
  want = theory.speedup(alpha[:, None], np.arange(K + 1), C[:, None])
  np.testing.assert_allclose(got, want, rtol=1e-13)
  closed = theory.optimal_length(alpha, C)
  best = theory.optimal_length_from_costs(A, 1 / C[:, None], 1.0)
  inside = closed.k < K
  np.testing.assert_array_equal(best.k[inside], closed.k[inside])
  assert best.k_continuous is None


def test_marginal_rule():
  """With convex costs the first token that is not worth it ends the search;
  with bumps it may not, and the best is still found."""
  rng = np.random.default_rng(1)
  early = 0
  for bumps in (False, True):
    for _ in range(300):
      K = 12
      A = np.cumprod(np.r_[1, np.sort(rng.uniform(0.3, 1, K))[::-1]])
      c = np.sort(rng.uniform(0, 0.2, K))
      dv = rng.uniform(0, 0.3, K)
      v = 1 + np.r_[0, np.cumsum(dv if bumps else np.sort(dv))]
      S = _slow_speedup(A, c, v, [0] * (K + 1))
      k = 0
      while k < K and A[k + 1] > S[k] * (c[k] + v[k + 1] - v[k]):
        k += 1
      best = theory.optimal_length_from_costs(A, c, v)
      assert best.speedup == pytest.approx(max(S), rel=1e-14)
      early += best.k != k
      assert bumps or best.k == k
  assert early  # else the bumps were none


def test_overhead_may_forbid_speculation():
  A = _geometric(0.8, 5)
  assert theory.optimal_length_from_costs(A, 0.1, 1.0).k == 5
  best = theory.optimal_length_from_costs(A, 0.1, 1.0, overhead=3.0)
  assert best == (0, None, 1)
  # k = 1 is not the easiest: with o = 0.5 it loses and k = 5 wins
  S = theory.speedup_from_costs(_geometric(0.6, 5), 0.1, 1.0, 0.6)
  assert S[1] < 1 < S[3]


def test_choose_draft():
  """The best draft is not the one with the largest alpha."""
  drafts = [
    theory.Candidate("large", 0.82, 6),
    ("base", 0.80, 12),
    ("small", 0.75, 40),
    ("useless", 0.3, 2),
    ("as small", 0.75, 40),
  ]
  ranked = theory.choose_draft(drafts)
  names = [draft.name for draft in ranked]
  assert names == ["small", "as small", "base", "large", "useless"]
  for draft in ranked:
    best = theory.optimal_length(draft.alpha, draft.cost_ratio)
    assert (draft.k, draft.speedup) == (best.k, best.speedup)
  assert ranked[-1].k == 0 and ranked[-1].speedup == 1
  assert theory.choose_draft([]) == []


# NumPy or JAX, at once or traced

A3 = _geometric(np.array([0.3, 0.8]), 3)  # [2, 4]
COSTS = (A3, np.array([0.1, 0.2, 0.1]), np.array([1, 1.1, 1.3, 1.4]), 0.05)
P = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
GRID = (np.array([[0.0], [0.5], [0.99], [1.0]]), np.array([0, 1, 4, 33]))
CALLS = {
  "acceptance": (theory.acceptance, P, P[::-1]),
  "total_variation": (theory.total_variation, P, P[::-1]),
  "expected_tokens": (theory.expected_tokens, *GRID),
  "variance_tokens": (theory.variance_tokens, *GRID),
  "expected_tokens_from_survival": (theory.expected_tokens_from_survival, A3),
  "expected_rounds": (theory.expected_rounds, np.array([[0], [9], [40]]), A3),
  "expected_rounds_along": (theory.expected_rounds_along, A3),
  "speedup": (theory.speedup, *GRID, 8.0),
  "speedup_from_costs": (theory.speedup_from_costs, *COSTS),
  "optimal_length": (
    theory.optimal_length,
    GRID[0],
    np.array([0.5, 1.0, 2.0, 30.0]),
  ),
  "optimal_length_from_costs": (theory.optimal_length_from_costs, *COSTS),
  "break_even_alpha": (theory.break_even_alpha, np.array([0.5, 3.0])),
  "speedup_bound": (theory.speedup_bound, GRID[0], np.array([0.5, 3.0])),
}


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_jit_is_numpy(call, x64):
  """The same numbers, in the precision of what is given; all args traced."""
  function, *args = CALLS[call]
  want = function(*args)
  assert all(not isinstance(x, jax.Array) for x in jax.tree.leaves(want))
  with jax.enable_x64(x64):
    args = jax.tree.map(jnp.asarray, args)
    dtype, tolerance = (jnp.float64, 1e-13) if x64 else (jnp.float32, 2e-5)
    for run in (function, jax.jit(function)):
      got = run(*args)
      for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == np.shape(y)
        if np.issubdtype(np.asarray(y).dtype, np.integer):
          most = 2**52 if x64 else 2**23  # alpha = 1: the more the better
          x, y = np.minimum(x, most), np.minimum(y, most)
        else:
          assert x.dtype == dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_precision_is_that_of_the_arguments():
  dtype = lambda f, *args: jax.eval_shape(lambda: f(*args)).dtype
  assert isinstance(theory.expected_tokens(0.5, 3), np.float64)
  assert theory.expected_tokens(np.float32(0.5), 3).dtype == np.float64
  bfloat16 = jnp.asarray(0.5, jnp.bfloat16)
  assert dtype(theory.speedup, bfloat16, 3, 8) == jnp.float32
  assert dtype(theory.speedup, 0.5, jnp.arange(3), 8) == jnp.float32
  with jax.enable_x64(True):
    alpha, A = jnp.asarray(0.5, jnp.float32), jnp.asarray(A3, jnp.float32)
    assert dtype(theory.break_even_alpha, alpha) == jnp.float32
    assert dtype(theory.expected_rounds, 9, A) == jnp.float32
    assert dtype(theory.expected_rounds, jnp.asarray(9), A3) == jnp.float64


def test_vmap():
  """Over alpha and over texts, some arguments known and some not."""
  alpha = np.linspace(0, 1, 7)
  run = jax.jit(jax.vmap(lambda a: theory.speedup(a, 4, 10.0)))
  np.testing.assert_allclose(run(alpha), theory.speedup(alpha, 4, 10.0), 1e-6)
  along = np.stack([A3, A3[::-1]])
  got = jax.jit(jax.vmap(theory.expected_rounds_along))(along)
  np.testing.assert_allclose(got, theory.expected_rounds_along(along), 1e-6)


@pytest.mark.parametrize("k", [0, 1, 2, 5, 33])
def test_gradient_of_the_speedup(k):
  """dE[N]/dalpha = sum j alpha^(j-1), at the ends too."""
  with jax.enable_x64(True):
    slope = jax.jit(jax.grad(theory.speedup))
    for alpha in (0, 1e-300, 1e-9, 0.5, 0.9, 1 - 1e-6, 1 - 1e-12, 1):
      # 0 ** 0 is 1
      want = sum(j * alpha ** (j - 1) for j in range(1, k + 1)) / (1 + k / 8)
      got = slope(float(alpha), k, 8.0)
      assert float(got) == pytest.approx(want, rel=1e-13)


def _check_gradient(f, x):
  got = jax.jit(jax.grad(f))(x)
  f = jax.jit(f)
  for i, e in enumerate(1e-6 * np.eye(len(x))):
    want = float(f(x + e) - f(x - e)) / 2e-6
    assert float(got[i]) == pytest.approx(want, rel=1e-5, abs=1e-8)


def test_other_gradients():
  """Those of finite differences: theory can be a loss."""
  best = lambda x: theory.optimal_length(x[0], x[1]).speedup
  rounds = lambda x: theory.expected_rounds(20, jnp.append(jnp.ones(1), x))
  along = lambda x: theory.expected_rounds_along(
    jnp.stack([jnp.ones_like(x), x, x**2], 1)
  )
  with jax.enable_x64(True):
    for alpha in (0.2, 0.7, 0.999):
      _check_gradient(best, jnp.asarray([alpha, 12.0]))
    _check_gradient(rounds, jnp.asarray([0.9, 0.7, 0.4, 0.4 - 1e-5]))
    _check_gradient(along, jnp.asarray([0.3, 0.5, 0.8, 0.9, 0.2, 0.4]))
    slope = jax.jit(jax.grad(best))
    for alpha in (0.0, 1e-300, 1 / 12, 1 - 1e-12, 1.0):
      for C in (0.5, 1.0, 12.0):
        assert np.isfinite(slope(jnp.asarray([alpha, C]))).all()


BAD = {
  "alpha > 1": lambda: theory.expected_tokens(1.01, 3),
  "alpha < 0": lambda: theory.variance_tokens([0.5, -0.01], 3),
  "alpha nan": lambda: theory.speedup(np.nan, 3, 8),
  "k < 0": lambda: theory.expected_tokens(0.5, -1),
  "k is no whole number": lambda: theory.speedup(0.5, 1.5, 8),
  "k nan": lambda: theory.expected_tokens(0.5, np.nan),
  "k inf": lambda: theory.expected_tokens(0.5, np.inf),
  "k of 31 digits": lambda: theory.variance_tokens(0.5, 10**30),
  "n inf": lambda: theory.expected_rounds(np.inf, A3),
  "C = 0": lambda: theory.speedup(0.5, 3, 0.0),
  "C < 0": lambda: theory.break_even_alpha(-2.0),
  "C nan": lambda: theory.speedup_bound(0.5, np.nan),
  "C inf": lambda: theory.optimal_length(0.5, np.inf),
  "best alpha": lambda: theory.optimal_length(1.5, 8.0),
  "best C": lambda: theory.optimal_length(0.5, [8.0, -1.0]),
  "bound alpha": lambda: theory.speedup_bound(-0.5, 8.0),
  "candidate": lambda: theory.choose_draft([("a", 0.5, 8), ("b", 2, 8)]),
  "p sums to .9": lambda: theory.acceptance([0.5, 0.4], [0.5, 0.5]),
  "q negative": lambda: theory.total_variation([0.5, 0.5], [1.5, -0.5]),
  "p nan": lambda: theory.acceptance([np.nan, 0.5], [0.5, 0.5]),
  "two vocabularies": lambda: theory.acceptance(P, [1.0]),
  "laws are scalars": lambda: theory.acceptance(1.0, 1.0),
  "A_0 < 1": lambda: theory.expected_tokens_from_survival([0.9, 0.5]),
  "A increases": lambda: theory.expected_rounds(9, [1, 0.5, 0.6]),
  "A negative": lambda: theory.expected_rounds(9, [1, -0.5]),
  "A nan": lambda: theory.expected_tokens_from_survival([1, np.nan]),
  "A empty": lambda: theory.expected_tokens_from_survival([]),
  "A scalar": lambda: theory.expected_tokens_from_survival(1.0),
  "n < 0": lambda: theory.expected_rounds(-1, A3),
  "one start": lambda: theory.expected_rounds_along([1, 0.5]),
  "n too long": lambda: theory.expected_rounds_along(A3, num_tokens=3),
  "a bad start": lambda: theory.expected_rounds_along(A3[:, 1:]),
  "draft_cost < 0": lambda: theory.speedup_from_costs(A3, -0.1, 1.0),
  "draft_cost [2]": lambda: theory.speedup_from_costs(A3, [0.1, 0.1], 1.0),
  "verify_cost 0": lambda: theory.speedup_from_costs(A3, 0.1, 0.0),
  "verify_cost [3]": lambda: theory.speedup_from_costs(A3, 0.1, [1, 1, 1]),
  "overhead [2]": lambda: theory.speedup_from_costs(A3, 0.1, 1, [0, 0]),
  "no cost": lambda: theory.speedup_from_costs(A3, 0.0, 1.0, -1.0),
  "A of costs": lambda: theory.optimal_length_from_costs([0.5], 0.1, 1.0),
  "JAX": lambda: theory.expected_tokens(jnp.asarray([0.5, 2.0]), 3),
  "traced alpha": lambda: jax.jit(
    functools.partial(theory.speedup, cost_ratio=-1.0)
  )(0.5, 3),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
  with pytest.raises(ValueError, match="must|no best|differ"):
    BAD[name]()


def test_what_is_traced_is_not_looked_at():
  assert np.isfinite(jax.jit(theory.expected_tokens)(1.01, 3))


def test_the_page_shows_what_it_prints(capsys):
  page = pathlib.Path(__file__).parent.parent / "docs/theory.md"
  commands = r"```\n\$ python -c '\n(.*?)'\n(.*?)```"
  shown = re.findall(commands, page.read_text(), re.S)
  assert len(shown) == 6
  number = r"-?\d+\.?\d*"
  for command, want in shown:
    exec(command, {})
    got = capsys.readouterr().out
    assert re.sub(number, "", got) == re.sub(number, "", want)
    pairs = (map(float, re.findall(number, x)) for x in (got, want))
    np.testing.assert_allclose(*map(list, pairs), rtol=1e-9)
