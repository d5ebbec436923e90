"""Prefill: the slots of a full pass, and nothing else."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import load, transformer, weights

LLAMA = pathlib.Path(__file__).parent / "data" / "llama"
S = 192
LENGTHS = [1, 2, 63, 64, 65, 66, 129, 130, 191, 192]


@functools.cache
def _model():
  source = load.source(str(LLAMA / "gqa_untied"))
  params, config = weights.load(source, dtype=jnp.float32, untie=True)
  return transformer.make(config), params


@functools.cache
def _tokens():
  rng = np.random.default_rng(0)
  return rng.integers(0, 96, (len(LENGTHS), S)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(model, params, tokens, length):
  return kv.prefill(model, params, tokens, length)


@functools.partial(jax.jit, static_argnums=0)
def _one_pass(model, params, tokens):
  positions = jnp.broadcast_to(jnp.arange(S), tokens.shape)
  cache = model.init_cache(*tokens.shape)
  return model.apply(params, tokens, positions, cache)[2]


def _by_row(cache):
  """Arrays [B, S, n], the keys' and the values' of each layer."""
  out = []
  for k, v in cache:
    B = len(LENGTHS)
    k = np.moveaxis(np.asarray(k), 2, 1).reshape(B, -1, S, k.shape[1])
    v = np.asarray(v).reshape(B, -1, S, v.shape[2])
    out += [np.moveaxis(x, 1, 2).reshape(B, S, -1) for x in (k, v)]
  return out


@pytest.mark.parametrize("padding", [0, -1, 10**6])
def test_prefill(padding):
  """Slots 0 .. length - 2 of each row; whatever pads a row, no more."""
  model, params = _model()
  length = np.array(LENGTHS, np.int32)
  want = _by_row(_one_pass(model, params, _tokens()))
  padded = np.where(np.arange(S) < length[:, None], _tokens(), padding)
  got = _by_row(_prefill(model, params, padded.astype(np.int32), length))
  stored = np.arange(S) < length[:, None] - 1
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a[stored], b[stored], atol=1e-5)
    assert (a[~stored] == 0).all()
    assert (np.abs(b).max(-1) > 0).all()


def test_prefill_of_all_slots():
  """length = S + 1 stores S tokens, none of them moved (B03)."""
  model, params = _model()
  want = _by_row(_one_pass(model, params, _tokens()))
  length = np.full(len(LENGTHS), S + 1, np.int32)
  got = _by_row(_prefill(model, params, _tokens(), length))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
