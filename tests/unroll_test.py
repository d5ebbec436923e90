"""A feature head in training sees what it will see when it decodes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feature_test import _config, _params

from specjax import loop, request, types
from specjax.drafters import feature

V, SLOTS = 97, 64
LENGTHS = 14, 1, 6
TOKENS = np.random.default_rng(0).integers(0, V, (3, SLOTS))


def _taps(config, dtype=np.float32):
  shape = (*TOKENS.shape, len(config.features), config.layers.width)
  return np.random.default_rng(1).normal(0, 1, shape).astype(dtype)


def decoded(drafter, params, tokens, taps, row, start, depths, how=None):
  """q [N, J, V] of rounds that begin behind `start` [N] tokens of rows [N].

  All draws are the text's, or by how = (own [V] of them, a temperature).
  """
  slots = tokens.shape[1]
  own, temperature = how or (np.arange(tokens.max() + 1), 1.0)
  ahead = np.minimum(start[:, None] + np.arange(depths), slots - 1)
  draws = jnp.asarray(own[tokens[row[:, None], ahead]])
  ask = request.make([[1]] * len(row), max_new=1, temperature=temperature)

  @jax.jit
  def run(params, tokens, taps, start):
    state = drafter.init(params, tokens, start, taps, slots)
    noise = types.Noise(lambda i, q: draws[:, i], None, None)
    law = loop.of_draft(ask.sampling)
    context = types.Context(tokens, start, law, depths)
    return drafter.propose(params, state, context, noise)[0].probs

  return run(params, tokens[row], taps[row], start)


@functools.cache
def _unroll(config, depths):
  def run(params, tokens, taps):
    a = feature.unroll(config, params, tokens, taps, depths)
    return a, jax.nn.softmax(feature.head(config, params, a))

  return jax.jit(run)


CASES = list(itertools.product([1, 2], [(1,), (0, 2, 3)], [1, 3, 5]))
QUICK = {(1, (0, 2, 3), 3), (2, (1,), 5)}
CASES = [
  pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
  for case in CASES
]


@pytest.mark.parametrize("layers, features, depths", CASES)
def test_the_laws_of_decoding(layers, features, depths):
  """At every place of ragged rows, whatever its round began with.

  Depth j at place i is the j-th draft of the round that begins behind place
  i - j + 1. Padding changes nothing.
  """
  config = _config(features, layers=layers)
  params, taps = _params(config), _taps(config)
  row, start = np.array(
    [(r, s) for r, n in enumerate(LENGTHS) for s in range(1, n + 1)]
  ).T
  want = decoded(
    feature.make(config, V), params, TOKENS, taps, row, start, depths
  )
  real = np.arange(SLOTS) < np.array(LENGTHS)[:, None]
  for pad in (0, 5):
    tokens = np.where(real, TOKENS, pad)
    a, got = _unroll(config, depths)(params, tokens, taps)
    assert a.shape == (*TOKENS.shape, depths, config.layers.width)
    seen = 0
    for n, (r, s) in enumerate(zip(row, start, strict=True)):
      for j in range(min(depths, LENGTHS[r] - s + 1)):
        here = got[r, s - 1 + j, j]
        np.testing.assert_allclose(here, want[n, j], atol=1e-5)
        seen += 1
    assert seen > depths * 3
  if depths > 1:  # and the depths do not agree by themselves
    assert np.abs(got[0, 4, 0] - got[0, 4, 1]).max() > 0.01
