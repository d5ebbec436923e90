"""The law is the one asked for, and a draw follows it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from specjax import sampling
from specjax.types import Sampling


def _params(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  return Sampling(
    jnp.float32(temperature),
    jnp.int32(top_k),
    jnp.float32(top_p),
    jnp.float32(min_p),
  )


_law = jax.jit(sampling.probabilities)


@pytest.mark.parametrize("V", [1, 5, 300, 4096])
def test_agrees_with_sorting(V):
  """Against sort-and-cut in NumPy over every combination of options."""
  rng = np.random.default_rng(V)
  for temperature, top_k, top_p, min_p in itertools.product(
    (0.0, 0.3, 1.0, 1.7), (0, 1, 3, 50), (1e-8, 0.5, 0.9, 1.0), (0.0, 0.1, 1.0)
  ):
    logits = rng.normal(0, 3, V).astype(np.float32)
    options = dict(
      temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    want = reference.probabilities(logits, **options)
    got = _law(logits, _params(**options))
    np.testing.assert_allclose(got, want, atol=2e-6, err_msg=str(options))


@pytest.mark.parametrize(
  "p, top_p, kept",
  [
    ([0.5, 0.41, 0.09], 0.9, 2),
    ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
    ([0.4, 0.3, 0.2, 0.1], 1e-8, 1),
    ([0.4, 0.3, 0.2, 0.1], 0.999999, 4),
  ],
)
def test_top_p_keeps_the_token_that_crosses(p, top_p, kept):
  """B14: the smallest set with at least top_p of the mass, never empty."""
  got = _law(jnp.log(jnp.array(p)), _params(top_p=top_p))
  assert int((got > 0).sum()) == kept
  assert (np.flatnonzero(got) == np.arange(kept)).all()


@pytest.mark.parametrize("top_p", [1e-8, 1e-3, 0.999999, 1.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_extreme_top_p_on_a_large_vocabulary(top_p, dtype):
  """B14: V = 32k, narrow logits; the argmax always survives."""
  logits = jax.random.normal(jax.random.key(0), (32_000,)).astype(dtype)
  p = _law(logits, _params(top_p=top_p))
  assert p.dtype == jnp.float32
  np.testing.assert_allclose(p.sum(), 1, atol=1e-5)
  assert p[logits.argmax()] == p.max() > 0
  if top_p == 1:
    assert (p > 0).all()


def test_what_means_off():
  """top_k in {0, -1, V, V + 5}, top_p = 1 and min_p = 0 change no bit."""
  logits = jax.random.normal(jax.random.key(1), (50,))
  plain = _law(logits, _params())
  for top_k in (0, -1, 50, 55):
    np.testing.assert_array_equal(_law(logits, _params(top_k=top_k)), plain)


def test_ties_at_the_threshold_are_kept():
  logits = jnp.log(jnp.array([0.4, 0.2, 0.2, 0.2]))
  assert int((_law(logits, _params(top_k=2)) > 0).sum()) == 4


def test_zero_temperature_is_the_first_argmax():
  """One-hot, first of the ties, and not a very sharp softmax."""
  logits = jnp.array([0.0, 3.0, 3.0, 1.0])
  p = _law(logits, _params(temperature=0, top_p=0.5, top_k=1))
  np.testing.assert_array_equal(p, [0, 1, 0, 0])
  p = _law(logits.at[0].set(-jnp.inf), _params(temperature=0))
  np.testing.assert_array_equal(p, [0, 1, 0, 0])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_nan(bad, temperature):
  """B47: never a silent token. -inf is a banned token, not a fault."""
  logits = jnp.array([0.0, bad, 1.0])
  assert jnp.isnan(_law(logits, _params(temperature))).all()
  fine = _law(jnp.array([0.0, -jnp.inf, 1.0]), _params(temperature))
  assert jnp.isfinite(fine).all() and fine[1] == 0
  assert jnp.isnan(_law(jnp.full(3, -jnp.inf), _params(temperature))).all()


def test_float64_stays_float64():
  with jax.enable_x64(True):
    logits = jnp.array([0.1, 2.0, 1.5, -3.0], jnp.float64)
    options = dict(temperature=0.7, top_k=3, top_p=0.95)
    p = sampling.probabilities(logits, _params(**options))
    assert p.dtype == jnp.float64
    want = reference.probabilities(
      logits, temperature=np.float32(0.7), top_k=3, top_p=0.95
    )
    np.testing.assert_allclose(p, want, atol=1e-15)


def test_a_row_does_not_see_its_neighbours_options():
  """Bitwise: what a row's law is does not depend on what others ask for."""
  logits = jax.random.normal(jax.random.key(2), (4, 1000)) * 3
  options = [(1, 0, 1, 0), (0, 0, 1, 0), (0.8, 40, 0.9, 0), (1.5, 0, 0.7, 0.05)]
  rows = [_params(*option) for option in options]
  together = jax.jit(jax.vmap(sampling.probabilities))(
    logits, jax.tree.map(lambda *x: jnp.stack(x), *rows)
  )
  for i, row in enumerate(rows):
    alone = jax.jit(jax.vmap(sampling.probabilities))(
      logits[i : i + 1], jax.tree.map(lambda x: x[None], row)
    )
    np.testing.assert_array_equal(together[i], alone[0])


@pytest.mark.parametrize("V", [3, 256, 257, 1000])
def test_draw_has_the_law(V):
  """On an even grid of u each token gets its share to one grid step."""
  rng = np.random.default_rng(V)
  p = rng.dirichlet(np.full(V, 0.3)).astype(np.float32)
  p[rng.integers(0, V, V // 3)] = 0
  p /= p.sum()
  n = 20_000
  u = (jnp.arange(n) + 0.5) / n
  tokens = np.asarray(jax.jit(jax.vmap(sampling.draw, (None, 0)))(p, u))
  share = np.bincount(tokens, minlength=V) / n
  np.testing.assert_allclose(share, p, atol=1.5 / n)
  assert (np.diff(tokens) >= 0).all()  # the inverse of a CDF is monotone


def test_draw_never_takes_an_impossible_token():
  """B48: at u = 0 and at the largest u, with zeros all around."""
  draw = jax.jit(sampling.draw)
  largest = np.float32(1 - 2**-24)
  for V, alive in ((5, [2]), (600, [300]), (600, [0, 599]), (513, [255, 256])):
    p = np.zeros(V, np.float32)
    p[alive] = 1 / len(alive)
    assert int(draw(p, jnp.float32(0))) == alive[0]
    assert int(draw(p, jnp.float32(largest))) == alive[-1]


def test_draw_is_safe_under_rounding():
  """2e5 draws from laws with tiny masses and zeros never hit a zero."""
  key = jax.random.key(0)
  p = jax.random.uniform(key, (5000,)) ** 40
  p = jnp.where(jax.random.bernoulli(key, 0.5, (5000,)), p, 0)
  u = jax.random.uniform(jax.random.key(1), (200_000,))
  u = u.at[:1000].set(1 - jnp.arange(1000) * 2.0**-24)
  tokens = jax.lax.map(lambda u: sampling.draw(p, u), u, batch_size=1000)
  assert (p[tokens] > 0).all()
