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


def _draws(p, n, seed=0):
  keys = jax.random.split(jax.random.key(seed), n)
  draw = lambda key: sampling.draw(jnp.asarray(p, jnp.float32), key)
  return np.asarray(jax.lax.map(draw, keys, batch_size=1000))


@pytest.mark.parametrize("V", [1, 3, 256, 257, 700])
def test_draw_has_the_law(V):
  """Chi-square of 1e5 draws, a third of the tokens impossible."""
  rng = np.random.default_rng(V)
  p = rng.dirichlet(np.full(V, 0.3))
  p[rng.integers(0, V, V // 3)] = 0
  p /= p.sum()
  n = 100_000
  count = np.bincount(_draws(p, n), minlength=V)
  assert (count[p == 0] == 0).all()
  order = np.argsort(-p)
  big = order[: max(int((p > 10 / n).sum()), 1)]
  want, got = n * p[big], count[big].astype(float)
  rest = n - want.sum()
  if rest > 5:
    want, got = np.append(want, rest), np.append(got, n - got.sum())
  chi2, dof = ((got - want) ** 2 / want).sum(), len(want) - 1
  # Wilson-Hilferty: the normal deviate of a chi-square, 3.7 is 1e-4
  z = ((chi2 / max(dof, 1)) ** (1 / 3) - 1 + 2 / (9 * max(dof, 1))) / np.sqrt(
    2 / (9 * max(dof, 1))
  )
  assert z < 3.7, (chi2, dof)


def test_draw_is_the_two_level_argmax():
  """Equal to its definition in NumPy, noise and all; blocks of 256."""
  p = np.random.default_rng(0).dirichlet(np.full(600, 0.1)).astype(np.float32)
  blocks = np.pad(p, (0, 168)).reshape(3, 256)
  for seed in range(20):
    outer, inner = jax.random.split(jax.random.key(seed))
    gumbel = lambda key, n: np.asarray(
      jax.random.gumbel(key, (n,), jnp.float32, mode="high")
    )
    with np.errstate(divide="ignore"):
      block = np.argmax(np.log(blocks.sum(1)) + gumbel(outer, 3))
      token = np.argmax(np.log(blocks[block]) + gumbel(inner, 256))
    assert sampling.draw(p, jax.random.key(seed)) == block * 256 + token


def test_draw_reaches_rare_tokens_and_no_impossible_one():
  """B48; a mass of 1e-6 is drawn as often as it should be."""
  p = np.zeros(1000)
  p[[3, 999]] = [1 - 1e-3, 1e-3]
  tokens = _draws(p, 100_000)
  assert set(tokens) == {3, 999}
  assert 60 < (tokens == 999).sum() < 140


def test_draw_is_stable_under_rounding():
  """The same key on logits that differ by rounding: another token with a
  probability of a few TV. Batches of different sizes differ like this."""
  V, n = 5000, 20_000
  logits = 2 * jax.random.normal(jax.random.key(1), (V,))
  off = 1e-3 * jax.random.normal(jax.random.key(2), (V,))
  p, q = (np.asarray(jax.nn.softmax(x)) for x in (logits, logits + off))
  tv = np.abs(p - q).sum() / 2
  share = (_draws(p, n) != _draws(q, n)).mean()
  assert 0 < share < 4 * tv, (share, tv)
