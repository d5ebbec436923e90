"""How much a round accepts, from the law of the shipped code and on paper.

A_j is the probability that the first j drafted tokens are accepted. Given the
text that was emitted, x ~ p, with rho_i = q_i(x_i) / p_i(x_i):

  token   P(tau >= j | x) = prod_{i <= j} min(1, rho_i)
  block   P(tau >= j | x) = min_{i <= j} rho_1 ... rho_i, at most 1

which is how the acceptance of a draft is predicted from a text alone.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_test

V, K = 3, 3
MAKERS = [round_test.bigram_case, round_test.lm_case]


def case_of(make, verifier, seed=0, dense=True):
  """Its law is of K tokens: those that a first round drafts."""
  case = make(V, K, seed, jnp.float64, dense)
  return case._replace(verifier=verifier, length=K)


def _laws_along(case, text):
  """p and q [K, V] behind each prefix of a text."""
  seen = (0, 0, *text)  # the token before the first counts as 0
  places = [seen[i : i + 2] for i in range(len(text))]
  return np.array([[x[at] for at in places] for x in (case.p, case.q)])


def survival_given(case, text):
  """P(tau >= j | text) [K + 1], by the formulas above."""
  P, Q = _laws_along(case, text)
  i = np.arange(K)
  rho = Q[i, text] / P[i, text]
  if case.verifier == "token":
    return np.concatenate([[1.0], np.cumprod(np.minimum(1, rho))])
  return np.minimum.accumulate(np.concatenate([[1.0], np.cumprod(rho)]))


def survival_of_drafts(case):
  """A [K + 1] as a sum over drafts, which knows nothing of what is emitted.

  token: E_q prod min(1, p_i / q_i); block: E_q pi_j, where pi_j is the least
  of the products of p_i / q_i that end at j (Sun et al. 2025).
  """
  A = np.zeros(K + 1)
  for draft in itertools.product(range(V), repeat=K):
    P, Q = _laws_along(case, draft)
    i = np.arange(K)
    chance = Q[i, draft].prod()
    if not chance:
      continue
    ratio = P[i, draft] / Q[i, draft]
    if case.verifier == "token":
      kept = np.concatenate([[1.0], np.cumprod(np.minimum(1, ratio))])
    else:
      ends = [[ratio[i:j].prod() for i in range(j)] for j in range(K + 1)]
      kept = np.array([min(1.0, *(e or [1.0])) for e in ends])
    A += chance * kept
  return A


def joint_survival(case):
  """{text of K tokens: P(text and tau >= j) [K + 1]}, of the shipped code."""
  laws = round_test.by_first_round(case)
  texts = set().union(*laws)
  exactly = {x: np.array([law.get(x, 0.0) for law in laws]) for x in texts}
  return {x: w[::-1].cumsum()[::-1] for x, w in exactly.items()}


def check_survival(verifier, make=round_test.lm_case):
  with jax.enable_x64(True):
    case = case_of(make, verifier)
    joint = joint_survival(case)
  law = round_test.target_law(case.p, K)
  possible = {text for text, weight in law.items() if weight}
  assert possible == {text for text, w in joint.items() if w[0]}
  A = 0
  for text in possible:
    given = joint[text] / law[text]
    want = survival_given(case, text)
    np.testing.assert_allclose(given, want, rtol=0, atol=1e-12)
    A += joint[text]
  np.testing.assert_allclose(A, survival_of_drafts(case), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_survival_given_the_text(verifier, make):
  """P(tau >= j | text), and its mean A_j as a sum over drafts."""
  check_survival(verifier, make)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_mean_accepted_is_the_sum_of_survival(verifier, seed):
  """E[accepted] = sum_j A_j, with tables of many zeros."""
  with jax.enable_x64(True):
    case = case_of(round_test.lm_case, verifier, seed, dense=False)
    laws = round_test.by_first_round(case)
  mean = sum(tau * sum(law.values()) for tau, law in enumerate(laws))
  want = survival_of_drafts(case)[1:].sum()
  np.testing.assert_allclose(mean, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", MAKERS)
def test_block_verification_accepts_more_behind_every_prefix(make):
  """token <= block <= min(1, rho_1 ... rho_j), text by text."""
  gain = 0
  with jax.enable_x64(True):
    case = case_of(make, "block")
    block = joint_survival(case)
    token = joint_survival(case._replace(verifier="token"))
  law = round_test.target_law(case.p, K)
  for text in block:
    P, Q = _laws_along(case, text)
    i = np.arange(K)
    most = np.minimum(1, np.cumprod(Q[i, text] / P[i, text]))
    assert (token[text] <= block[text] + 1e-12).all()
    assert (block[text][1:] <= law[text] * most + 1e-12).all()
    gain += (block[text] - token[text]).sum()
  assert gain > 0.01
