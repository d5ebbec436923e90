"""Drafts whose law depends on where a round began: losses by depth.

Depth j of position i is the j-th draft of the round that begins behind
i - j + 1 and judges the same token as every other depth there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_test import ALONG, EVERY, IDS, B, D, T, V, _batch, _shapes, _total

from specjax import losses, objective, reach, renewal

J, SHARES = 3, (1.0, 0.5, 0.25)
every_loss = pytest.mark.parametrize("name", EVERY)
rules = pytest.mark.parametrize("rule", ["token", "block"])


def _deep(seed=21, dtype=np.float64):
  """`_batch`, and the draft's hidden states [B, T, J, D]; a hole in a row."""
  batch = _batch(dtype=dtype)
  weights = batch[2]
  weights[1] = np.where(weights[1] > 0, weights[1], 1)
  weights[1, 4] = 0
  student = np.random.default_rng(seed).normal(0, 1, (B, T, J, D))
  return batch, student.astype(dtype)


def _real(weights, i, j):
  """Whether a round that began j positions before i comes to i."""
  return i >= j and (weights[i - j : i + 1] > 0).all()


@every_loss
def test_alike_at_all_depths(name):
  """One depth is what no depth is; a row's loss is so of any number of them.

  Bit for bit, with the gradients by head and states.
  """
  batch, _ = _deep(dtype=np.float32)
  student, head = batch[0][1], batch[1][1]

  def total(head, student, J, share):
    deep = jnp.repeat(student[:, :, None], J, 2) if J else student
    sums = _total(name, head, deep, batch, chunk=4, depth_weights=share)
    return sums.loss, sums

  of = jax.grad(total, (0, 1), has_aux=True)
  of = jax.jit(of, static_argnums=(2, 3))
  want = of(head, student, 0, (1.0,))
  if name not in ALONG:
    got = of(head, student, 1, (0.3,))
    jax.tree.map(np.testing.assert_array_equal, got, want)
  else:
    got = of(head, student, J, SHARES)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, got, want)
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("name", [x for x in EVERY if x not in ALONG])
def test_positions_by_depth(name, ids):
  """The definition, depth by depth: shares of the sum, alpha of the first."""
  batch, student = _deep()
  (teacher, _), heads, weights, _ = batch
  head = heads[1][:, : len(ids) if ids else V]
  with jax.enable_x64(True):
    how = dict(ids=ids, chunk=4, depth_weights=SHARES)
    got = _total(name, head, jnp.asarray(student), batch, **how)
    logits = teacher @ heads[0], student @ head
    loss = functools.partial(getattr(losses, name), **EVERY[name])
    each = [loss(logits[0], logits[1][:, :, j], ids=ids) for j in range(J)]
    alpha = losses.acceptance(logits[0], logits[1][:, :, 0], ids=ids)
    alpha = (weights * np.asarray(alpha)).sum()
  want = sum(
    weights[b, i] * SHARES[j] / sum(SHARES) * float(each[j][b, i])
    for b, i, j in np.ndindex(B, T, J)
    if _real(weights[b], i, j)
  )
  np.testing.assert_allclose(got, (want, weights.sum(), alpha), rtol=1e-12)


def _ratios(seed=5):
  """ln rho, alpha [2, T, J] and weights [2, T]; what cannot be said, too."""
  rng = np.random.default_rng(seed)
  ratio, alpha = rng.normal(-0.3, 1, (2, 12, J)), rng.random((2, 12, J))
  ratio[0, 3, 1], ratio[1, 7] = -np.inf, np.inf
  weights = np.ones((2, 12))
  weights[0, :2] = weights[0, 9] = weights[1, 11] = 0
  return ratio, alpha, weights


def _kept(ratio, weights, s, j, rule):
  """A_{s,j} of one row by its definition: depth i judges place s + i."""
  product, least = 1.0, 1.0
  for i in range(j):
    n = s + i
    there = n < len(weights) and weights[n] > 0 and ratio[n, i] != np.inf
    rho = np.exp(ratio[n, i]) if there else 0.0
    product *= min(1, rho) if rule == "token" else rho
    least = min(least, product)
  return least


@rules
def test_a_round_is_judged_by_its_own_depths(rule):
  """E[N] of each start and the rounds of a text, in loops."""
  ratio, alpha, weights = _ratios()
  how = dict(num_draft=J, verifier=rule)
  with jax.enable_x64(True):
    args = jnp.asarray(ratio), jnp.asarray(alpha), jnp.asarray(weights)
    length = np.asarray(losses.expected_length(*args, **how))
    starts = np.asarray(renewal.expected_rounds(*args, **how))
  for row, (a, w) in enumerate(zip(alpha, weights, strict=True)):
    A = lambda s, j: _kept(ratio[row], weights[row], s, j, rule)  # noqa: B023
    chance = np.zeros(12)
    for s in range(12):
      if not w[s]:
        assert length[row, s] == starts[row, s] == 0
        continue
      if rule == "token":
        tested = lambda i: a[i] if i[0] < 12 and w[i[0]] else 0.0  # noqa: B023
        parts = [A(s, j) * tested((s + j, j)) for j in range(J)]
        want = 1 + sum(parts)
      else:
        want = sum(A(s, j) for j in range(J + 1))
      np.testing.assert_allclose(-length[row, s], want, rtol=1e-12)
      if s == 0 or not w[s - 1]:
        chance[s] = 1
      for n in range(1, J + 2):  # N tokens a round
        if s + n < 12 and (w[s : s + n + 1] > 0).all():
          ends = A(s, n - 1) - (A(s, n) if n <= J else 0)
          chance[s + n] += chance[s] * ends
      np.testing.assert_allclose(starts[row, s], chance[s], rtol=1e-12)


SMOOTH = [
  *((name, EVERY[name]) for name in ("forward_kl", "js", "total_variation")),
  *((name, EVERY[name]) for name in ("reverse_kl", "negative_log_acceptance")),
  *(
    (name, dict(num_draft=J, verifier=rule))
    for name in ALONG
    for rule in ("token", "block")
  ),
]


@pytest.mark.parametrize("name, options", SMOOTH)
def test_finite_differences(name, options):
  """By the states of each depth and by the head, in float64."""
  batch, student = _deep()
  (teacher, _), heads, weights, labels = batch

  def total(head, student):
    return objective.total(
      ((name, 1.0, options),),
      0.5,
      jnp.asarray(teacher),
      student,
      jnp.asarray(weights),
      jnp.asarray(labels),
      teacher_unembed=lambda x: x @ heads[0],
      student_unembed=lambda x: x @ head,
      depth_weights=SHARES,
      chunk=4,
    ).loss

  with jax.enable_x64(True):
    at = jnp.asarray(heads[1]), jnp.asarray(student)
    value, gradients = jax.jit(total), jax.jit(jax.grad(total, (0, 1)))(*at)
    rng = np.random.default_rng(0)
    for which, (x, g) in enumerate(zip(at, gradients, strict=True)):
      assert np.abs(g).max() > 0.01
      for place in rng.integers(0, x.shape, (12, x.ndim)):
        step = np.zeros(x.shape)
        step[tuple(place)] = 1e-6
        moved = [[*at], [*at]]
        moved[0][which], moved[1][which] = x + step, x - step
        slope = (value(*moved[0]) - value(*moved[1])) / 2e-6
        np.testing.assert_allclose(g[tuple(place)], slope, rtol=1e-5, atol=1e-7)
    for b, i, j in np.ndindex(B, T, J):  # no round comes there
      if not _real(weights[b], i, j):
        assert not np.asarray(gradients[1][b, i, j]).any()


@pytest.mark.parametrize("name", ["forward_kl", "expected_length"])
def test_masked_depths_leak_nothing(name):
  """NaN states at every depth of a position of weight 0."""
  batch, student = _deep(dtype=np.float32)
  masked = (batch[2] == 0)[..., None, None]
  dirty = np.where(masked, np.nan, student).astype(np.float32)
  how = dict(chunk=4, depth_weights=SHARES)
  f = lambda head, student: _total(name, head, student, batch, **how)[0]
  f = jax.jit(jax.value_and_grad(f, (0, 1)))
  got, want = (f(batch[1][1], x) for x in (dirty, student))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert np.isfinite(got[0]) and not got[1][1][masked[..., 0, 0]].any()


def test_the_teachers_head_is_paid_once_a_position():
  """B40: depths cost the draft's head alone."""
  batch, student = _deep(dtype=np.float32)
  how = dict(chunk=2, depth_weights=SHARES)
  f = lambda head, x: _total("total_variation", head, x, batch, **how)[0]
  program = jax.make_jaxpr(jax.grad(f, (0, 1)))(batch[1][1], student)
  products = [
    shape for kind, shape in _shapes(program.jaxpr) if kind == "dot_general"
  ]
  assert products.count((B, 2, V)) == products.count((B, 2, J, V)) == 1
  assert len(products) == 4  # the draft's, twice backward


def test_depths_that_cannot_be():
  batch, student = _deep(dtype=np.float32)
  with pytest.raises(ValueError, match="3 depths need as many depth_weights"):
    _total("forward_kl", batch[1][1], student, batch, depth_weights=(1.0,))
  ratio, alpha, weights = map(jnp.asarray, _ratios())
  for loss in ALONG.values():
    with pytest.raises(ValueError, match="num_draft=4 needs as many depths"):
      loss(ratio, alpha, weights, num_draft=4)


def test_by_start():
  """x[s + j] at depth j, and the end behind the last."""
  x = np.arange(8.0).reshape(4, 2)
  np.testing.assert_array_equal(
    reach.by_start(x, 2, -1), [[0, 3], [2, 5], [4, 7], [6, -1]]
  )
  alike = np.arange(3.0)[:, None]
  np.testing.assert_array_equal(
    reach.by_start(alike, 2, -1), [[0, 1], [1, 2], [2, -1]]
  )
