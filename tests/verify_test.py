"""The law of what is emitted equals the target's, by summing every outcome."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify

TOLERANCE = {jnp.float64: 1e-12, jnp.float32: 1e-6}


def tables(V, seed):
  """Conditional laws p(. | last) and q(. | last), [V, V] each, with zeros,
  equal rows, one-hot rows and disjoint supports among them."""
  rng = np.random.default_rng(seed)

  def law():
    x = rng.dirichlet(np.full(V, 0.7), V)
    x[rng.random((V, V)) < 0.25] = 0
    x[x.sum(1) == 0, 0] = 1
    return x / x.sum(1, keepdims=True)

  p, q = law(), law()
  q[0] = p[0]  # an equal row
  p[1] = np.eye(V)[rng.integers(V)]  # one-hot
  if seed % 2:
    q[1] = np.eye(V)[rng.integers(V)]
    q[2], p[2] = np.eye(V)[0], np.eye(V)[V - 1]  # disjoint
  return p, q


def round_law(verifier, p, q, last, K, dtype, edges=None):
  """{emitted tokens: probability} of one round after the token `last`.

  Sums over every draft (weight prod q) and every cell of u between the
  thresholds: a_i = min(1, p / q) at the drafted token and, for a mutant that
  tests against something else, its own `edges(p, q)`.
  """
  V = len(p)
  drafts = np.array(list(itertools.product(range(V), repeat=K))).reshape(-1, K)
  prefix = np.concatenate([np.full((len(drafts), 1), last), drafts], 1)
  P, Q = p[prefix], q[prefix[:, :K]]  # [n, K + 1, V], [n, K, V]
  n, i = np.arange(len(drafts))[:, None], np.arange(K)
  pd, qd = P[n, i, drafts], Q[n, i, drafts]
  thresholds = [np.zeros_like(qd), _ratio(pd, qd), np.ones_like(qd)]
  thresholds += [edges(pd, qd)] if edges else []
  cells = np.sort(thresholds, 0)  # [C + 1, n, K]
  law = {}
  run = jax.jit(jax.vmap(verifier))
  for choice in itertools.product(range(len(cells) - 1), repeat=K):
    low = np.stack([cells[c, :, j] for j, c in enumerate(choice)], 1)
    high = np.stack([cells[c + 1, :, j] for j, c in enumerate(choice)], 1)
    weight = (qd * (high - low)).prod(1)
    u = (low + high) / 2
    got = run(*(jnp.asarray(x, dtype) for x in (P, Q)), drafts, u.astype(dtype))
    accepted = np.asarray(got.num_accepted)
    next_probs = np.asarray(got.next_probs, np.float64)
    for row in np.flatnonzero(weight):
      for x, px in enumerate(next_probs[row]):
        key = (*drafts[row, : accepted[row]].tolist(), x)
        law[key] = law.get(key, 0) + weight[row] * px
  return law


def _ratio(p, q):
  return np.where(q > 0, np.minimum(1, p / np.where(q > 0, q, 1)), 0)


def joint_error(verifier, p, q, K, T, dtype, edges=None):
  """max |law - target law| of T tokens emitted over successive rounds."""
  V = len(p)
  laws = [round_law(verifier, p, q, last, K, dtype, edges) for last in range(V)]
  joint = {}

  def go(prefix, weight):
    if len(prefix) >= T:
      key = prefix[:T]
      joint[key] = joint.get(key, 0) + weight
      return
    for emitted, px in laws[prefix[-1] if prefix else 0].items():
      if px:
        go(prefix + emitted, weight * px)

  go((), 1.0)
  worst = 0.0
  for text in itertools.product(range(V), repeat=T):
    want = np.prod([p[a, b] for a, b in zip((0, *text), text, strict=False)])
    worst = max(worst, abs(joint.get(text, 0.0) - want))
  return worst


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("V, K", [(3, 1), (3, 2), (3, 3), (4, 2), (3, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_joint_law(V, K, seed, dtype):
  """Of K + 2 tokens through successive rounds, in float64 and float32."""
  with jax.enable_x64(True):
    p, q = tables(V, seed)
    error = joint_error(verify.token, p, q, K, K + 2, dtype)
  assert error <= TOLERANCE[dtype]


def _verdict(p, q, draft, u, verifier=verify.token, **options):
  args = (jnp.array(p, jnp.float32), jnp.array(q, jnp.float32))
  return verifier(*args, jnp.array(draft), jnp.array(u), **options)


def test_mean_accepted_of_the_paper_example():
  """V = {a, b}, p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 10/9 (Sun et al.)."""
  p = np.array([[1 / 3, 2 / 3]] * 2)
  q = np.array([[2 / 3, 1 / 3]] * 2)
  with jax.enable_x64(True):
    law = round_law(verify.token, p, q, 0, 2, jnp.float64)
  mean = sum((len(key) - 1) * weight for key, weight in law.items())
  np.testing.assert_allclose(mean, 10 / 9, atol=1e-12)


def test_block_verification_of_the_paper_example():
  """The same pair: 11/9 for block verification, p kept exactly.

  u between the thresholds, which for K = 2 are h_1 and h_2 = pi_2.
  """
  p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
  mean, first = 0.0, np.zeros(2)
  for x, y in itertools.product(range(2), repeat=2):
    pi = [1.0, min(1, p[x] / q[x])]
    pi.append(min(1, pi[1] * p[y] / q[y]))
    S = np.maximum(pi[1] * p - q, 0).sum()
    h = [S / (S + 1 - pi[1]) if S + 1 - pi[1] else 1.0, pi[2]]
    for sides in itertools.product((0, 1), repeat=2):
      cell = [
        (c / 2, c) if s else ((1 + c) / 2, 1 - c)
        for c, s in zip(h, sides, strict=True)
      ]
      weight = q[x] * q[y] * cell[0][1] * cell[1][1]
      u = [middle for middle, _ in cell]
      with jax.enable_x64(True):
        got = verify.block(
          jnp.array([p] * 3),
          jnp.array([q] * 2),
          jnp.array([x, y]),
          jnp.array(u),
        )
      mean += weight * int(got.num_accepted)
      emitted = np.eye(2)[x] if got.num_accepted else np.asarray(got.next_probs)
      first += weight * emitted
  np.testing.assert_allclose(mean, 11 / 9, atol=1e-12)
  np.testing.assert_allclose(first, p, atol=1e-12)


def test_equal_laws_accept_everything():
  p = [[0.2, 0.8]] * 3
  got = _verdict(p, p[:2], [0, 1], [0.999, 0.999])
  assert got.num_accepted == 2
  np.testing.assert_allclose(got.next_probs, p[2])


def test_no_draft_is_plain_decoding():
  """K = 0 and length = 0 are the same rule."""
  p = jnp.array([[0.3, 0.7]])
  got = verify.token(p, jnp.zeros((0, 2)), jnp.zeros((0,), int), jnp.zeros(0))
  assert got.num_accepted == 0
  np.testing.assert_array_equal(got.next_probs, p[0])
  got = _verdict([[0.3, 0.7]] * 2, [[1, 0]], [0], [0.0], length=0)
  assert got.num_accepted == 0
  np.testing.assert_allclose(got.next_probs, [0.3, 0.7])


def test_length_cuts_the_draft():
  """Behind the real tokens nothing is tested and q = 0: the bonus token."""
  p = [[0.5, 0.5], [0.1, 0.9], [0.6, 0.4]]
  got = _verdict(p, [[0.5, 0.5]] * 2, [0, 1], [0.0, 0.0], length=1)
  assert got.num_accepted == 1
  np.testing.assert_allclose(got.next_probs, [0.1, 0.9])


@pytest.mark.parametrize(
  "p, q, u",
  [
    ([0.0, 1.0], [1.0, 0.0], 0.0),  # p = 0 with u = 0 (B48)
    ([0.5, 0.5], [0.0, 1.0], 0.0),  # a token its own law does not hold
    ([0.5, 0.5], [np.nan, 0.5], 0.0),  # a broken draft (B47)
    ([0.5, 0.5], [1.5, -0.5], 0.0),  # no law: its residual would be wrong
    ([0.5, 0.5], [0.5, np.nan], 0.0),
    ([0.5, 0.5], [0.5, np.inf], 0.0),
  ],
)
@pytest.mark.parametrize("verifier", [verify.token, verify.block])
def test_what_is_never_accepted(verifier, p, q, u):
  got = _verdict([p, p], [q], [0], [u], verifier)
  assert got.num_accepted == 0
  assert np.isfinite(got.next_probs).all()


def test_vanishing_residual_is_the_target():
  """B47: p and q one-hot alike, a rejection forced by an impossible u."""
  got = _verdict([[0, 1.0]] * 2, [[0, 1.0]], [1], [1.0])
  assert got.num_accepted == 0
  np.testing.assert_array_equal(got.next_probs, [0, 1])


def test_a_broken_target_shows():
  """A law with a NaN is NaN throughout: see `sampling.probabilities`."""
  got = _verdict([[np.nan, np.nan]] * 2, [[0.5, 0.5]], [1], [0.0])
  assert got.num_accepted == 0
  assert np.isnan(got.next_probs).all()


def _wrong_q(p, q, x, u):
  """The draft is drawn from q, the test believes q ** 2."""
  return verify.token(p, q**2, x, u)


def _resample_from_p(p, q, x, u):
  got = verify.token(p, q, x, u)
  return got._replace(next_probs=p[got.num_accepted])


def _one_u(p, q, x, u):
  """One uniform for all positions: right marginals, wrong joint law."""
  return verify.token(p, q, x, jnp.broadcast_to(u[:1], u.shape))


def _bonus_from_residual(p, q, x, u):
  got = verify.token(p, q, x, u)
  rest = jnp.maximum(p[-1] - q[-1], 0) + 1e-9
  bonus = rest / rest.sum()
  law = jnp.where(got.num_accepted == len(x), bonus, got.next_probs)
  return got._replace(next_probs=law)


def _drop_unlikely(p, q, x, u):
  """Drafts that the draft itself finds unlikely are not even tested."""
  return verify.token(p, q, x, jnp.where(q[jnp.arange(len(x)), x] < 0.4, 2, u))


def _count_behind_a_reject(p, q, x, u):
  got = verify.token(p, q, x, u)
  i = jnp.arange(len(x))
  n = (u * q[i, x] < p[i, x]).sum()
  return got._replace(num_accepted=n)


def _residual_of_the_last(p, q, x, u):
  """The residual is taken at the last position, not at the rejected one."""
  got = verify.token(p, q, x, u)
  return got._replace(next_probs=verify._residual(p[-1], jnp.zeros_like(p[0])))


MUTANTS = {
  "resample from p": (_resample_from_p, None),
  "one u": (_one_u, None),
  "bonus from the residual": (_bonus_from_residual, None),
  "wrong q": (_wrong_q, lambda p, q: _ratio(p, q**2)),
  "drop unlikely": (_drop_unlikely, None),
  "count behind a reject": (_count_behind_a_reject, None),
  "residual of the last": (_residual_of_the_last, None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name):
  """B02, B05, B48: each planted fault moves the joint law of four tokens."""
  mutant, edges = MUTANTS[name]
  with jax.enable_x64(True):
    p, q = tables(3, 2)
    args = (p, q, 2, 4, jnp.float64, edges)
    assert joint_error(verify.token, *args) <= 1e-12
    assert joint_error(mutant, *args) > 1e-3
