"""Matrices in blocks of columns are the same matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from specjax.models import load, matrix, transformer

BLOCK = 64


def _matrix(inner, outer):
  rng = np.random.default_rng(inner * outer)
  return rng.normal(size=(inner, outer)).astype(np.float32)


@pytest.mark.parametrize(
  "inner, outer, parts",
  [(48, 64, 1), (48, 192, 1), (48, 100, 1), (1024, 192, 2), (1024, 128, 1)]
  + [(1025, 192, 1), (1536, 576, 2)],
)
@pytest.mark.parametrize("rows", [1, 2, 5, matrix._FEW, 100])
def test_product(inner, outer, parts, rows):
  """For few and many rows; 100 columns are no blocks of 64 and stay whole."""
  w = _matrix(inner, outer) * inner**-0.5
  x = _matrix(inner, rows).T.reshape(1, rows, inner)
  stored = matrix.in_blocks(w, BLOCK)
  assert stored.shape == matrix.shape(inner, outer, BLOCK)
  if stored.ndim == 3:
    assert matrix._parts(len(stored), inner) == parts
  assert (stored.ndim == 3) == (outer % BLOCK == 0)
  np.testing.assert_array_equal(matrix.whole(stored), w)
  got = matrix.product(jnp.asarray(x), jnp.asarray(stored))
  assert got.shape == (1, rows, outer)
  np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)


def test_product_keeps_the_dtype_it_is_asked_for():
  for inner in (48, 1024):
    w = jnp.asarray(matrix.in_blocks(_matrix(inner, 64), BLOCK), jnp.bfloat16)
    for rows in (1, 100):
      x = jnp.ones((rows, inner), jnp.bfloat16)
      assert matrix.product(x, w).dtype == jnp.bfloat16
      assert matrix.product(x, w, jnp.float32).dtype == jnp.float32


def _models():
  """The same random weights, whole and in blocks, untied as on a CPU."""
  opened = load.random(tiny.get_config().architecture)
  for block in (0, BLOCK):
    params, config = opened.read(
      dtype=jnp.float32, untie=True, block=block, track=None
    )
    target = transformer.make(config)
    yield load.Model(target, params, opened.tokenizer, opened.config, config)


def _logits(model, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _, _ = model.target.apply(model.params, tokens, positions, None)
  return model.target.unembed(model.params, hidden)


@pytest.mark.parametrize("width", [1, 5, 100])
@pytest.mark.parametrize("ids", [None, tuple(range(128)), tuple(range(9))])
def test_model(width, ids):
  """A target, a slice of its layers, and one with a trimmed head."""
  tokens = jnp.arange(width)[None] % 7
  parts = [load.part(m, layers=(2, 0), ids=ids) for m in _models()]
  for pair in (list(_models()), parts):
    whole, blocks = pair
    assert {x.ndim for x in jax.tree.leaves(blocks.params)} == {1, 2, 3}
    np.testing.assert_allclose(
      _logits(blocks, tokens), _logits(whole, tokens), rtol=1e-4, atol=1e-5
    )
    shapes = jax.tree.map(jnp.shape, blocks.params)
    wanted = jax.tree.map(jnp.shape, transformer.shapes(blocks.loaded))
    assert shapes == wanted


def test_a_file_is_read_into_blocks(smollm2_gguf):
  """On a CPU, every matrix of the real model but the embedding."""
  opened = load.opened(str(smollm2_gguf))
  assert load.block_here() == BLOCK
  config = load.weights.as_loaded(opened.config, True, BLOCK)
  dims = jax.tree.map(lambda x: len(x.shape), transformer.shapes(config))
  assert dims.pop("embed") == 2 and dims.pop("head") == 3
  assert {dims["layer_7"][k]["kernel"] for k in ("qkv", "out", "down")} == {3}
