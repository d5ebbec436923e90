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


@pytest.mark.parametrize("batch, wide", [(1, 4), (2, 2), (3, 1)])
def test_wide_steps(batch, wide):
  """In few rows a step feeds more; what it stores is the same."""
  model, params = _model()
  slots = 1216  # a last wide step reaches behind them
  assert max(kv.widths(batch, slots)) == wide * kv.PREFILL
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 96, (batch, slots)).astype(np.int32)
  run = jax.jit(
    functools.partial(kv.prefill_taps, model, params, features=(0, 1))
  )
  positions = jnp.broadcast_to(jnp.arange(slots), tokens.shape)
  _, want_taps, want = model.apply(
    *(params, tokens, positions, model.init_cache(batch, slots)),
    features=(0, 1),
  )
  rows = lambda x: np.asarray(x).reshape(batch, -1, *x.shape[1:])
  for longest in (1, 2, 65, 66, 129, 130, 257, 386, 641, 1154, 1216, 1217):
    length = np.minimum(longest, 1 + 71 * np.arange(batch)[::-1]).astype("i4")
    length[0] = longest
    cache, taps = run(tokens, length)
    stored = np.arange(slots) < length[:, None] - 1
    np.testing.assert_allclose(
      taps[stored], np.asarray(want_taps)[stored], atol=1e-5
    )
    for layers in zip(cache, want, strict=True):
      got, full = map(kv.joined, layers)
      pairs = (got.k, full.k), (got.v.swapaxes(1, 2), full.v.swapaxes(1, 2))
      for a, b in pairs:
        a, b = (np.moveaxis(rows(x), -1, 1) for x in (a, b))
        np.testing.assert_allclose(a[stored], b[stored], atol=1e-5)
        assert (a[~stored] == 0).all()
  assert run._cache_size() == 1


class _Counter:
  """A model whose cache counts the steps of each width."""

  def init_cache(self, batch, slots):
    return jnp.zeros(300, jnp.int32)

  def apply(self, params, tokens, positions, cache, *, features):
    return None, None, cache.at[tokens.shape[1]].add(1)


@pytest.mark.parametrize(
  "length, steps",
  [
    (1, {}),
    (2, {64: 1}),
    (66, {64: 2}),
    (129, {64: 2}),
    (130, {256: 1}),
    (257, {256: 1}),
    (258, {256: 1, 64: 1}),
    (386, {256: 2}),
    (1089, {256: 4, 64: 1}),
  ],
)
def test_wide_steps_where_half_is_left(length, steps):
  tokens = jnp.zeros((1, 1088), jnp.int32)
  count = kv.prefill(_Counter(), None, tokens, jnp.array([length]))
  assert {i: int(count[i]) for i in np.flatnonzero(count)} == steps


@pytest.mark.parametrize(
  "batch, slots, want",
  [
    (1, 1024, [256, 64]),
    (1, 960, [64]),
    (2, 512, [128, 64]),
    (2, 448, [64]),
    (3, 4096, [64]),
    (300, 4096, [64]),
  ],
)
def test_widths(batch, slots, want):
  assert kv.widths(batch, slots) == want
