"""The transformer computes what the reference implementation computes."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import load, rope, transformer, weights
from specjax.types import Target

DATA = pathlib.Path(__file__).parent / "data"
TINY = sorted(path.name for path in (DATA / "llama").iterdir())


@functools.partial(jax.jit, static_argnums=0)
def _run(target, params, tokens, positions, cache):
  hidden, _, cache = target.apply(params, tokens, positions, cache)
  return jax.nn.log_softmax(target.unembed(params, hidden)), cache


def _log_probs(model, tokens, cache=None, start=0):
  """[B, T, V] float32 and the cache, for tokens at start, start + 1, ..."""
  B, T = tokens.shape
  positions = jnp.broadcast_to(start + jnp.arange(T), (B, T))
  return _run(model.target, model.params, jnp.asarray(tokens), positions, cache)


class Tiny(NamedTuple):
  target: Target
  params: dict
  config: transformer.Config


def _tiny(name, untie=False):
  opened = load.source(str(DATA / "llama" / name))
  params, config = weights.load(opened, dtype=jnp.float32, untie=untie)
  return Tiny(transformer.make(config), params, config)


@pytest.mark.parametrize("name", TINY)
def test_agrees_with_transformers(name):
  """At every one of 200 positions, in one pass without a cache."""
  reference = np.load(DATA / "llama" / name / "reference.npz")
  model = _tiny(name)
  ours, _ = _log_probs(model, reference["tokens"])
  np.testing.assert_allclose(ours, reference["logprobs"], atol=1e-4)


def test_untied_copy_of_a_tied_head():
  """`untie` changes where the head is read from and not one logit."""
  tokens = np.load(DATA / "llama/gqa_tied/reference.npz")["tokens"]
  tied, untied = _tiny("gqa_tied"), _tiny("gqa_tied", untie=True)
  assert tied.config.tied and "head" not in tied.params
  assert not untied.config.tied and "head" in untied.params
  want, _ = _log_probs(tied, tokens)
  got, _ = _log_probs(untied, tokens)
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", ["gqa_tied", "mha_llama3"])
@pytest.mark.parametrize("chunk", [1, 3, 200])
def test_cache_changes_nothing(name, chunk):
  """One pass = one by one = in chunks of 3, with a longer cache (B45)."""
  model = _tiny(name)
  tokens = np.load(DATA / "llama" / name / "reference.npz")["tokens"]
  B, T = tokens.shape
  whole, _ = _log_probs(model, tokens)
  cache = model.target.init_cache(B, T + 7)
  parts = []
  for at in range(0, T, chunk):
    part = tokens[:, at : at + chunk]
    ours, cache = _log_probs(model, part, cache, at)
    parts.append(ours)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)


def test_stale_slots_are_invisible():
  """Huge values in every slot that was not written change nothing (T4).

  Not NaN: a masked value is multiplied by a weight of 0, as in every common
  attention, and 0 * NaN is NaN.
  """
  model = _tiny("gqa_untied")
  tokens = np.load(DATA / "llama/gqa_untied/reference.npz")["tokens"][:, :40]
  clean = model.target.init_cache(2, 64)
  dirty = tuple(
    kv.KV(k=layer.k.at[:, :, 40:].set(1e6), v=layer.v.at[:, 40:].set(1e6))
    for layer in clean
  )
  want, _ = _log_probs(model, tokens, clean)
  got, _ = _log_probs(model, tokens, dirty)
  np.testing.assert_array_equal(got, want)


def test_causal_by_gradient():
  """The hidden state at position 5 has no gradient in later embeddings."""
  model = _tiny("gqa_untied")
  tokens = jnp.arange(10)[None]
  positions = tokens

  def hidden(embed):
    params = {**model.params, "embed": embed}
    return model.target.apply(params, tokens, positions, None)[0][0, 5].sum()

  moved = jnp.abs(jax.grad(hidden)(model.params["embed"])).sum(1)  # [V]
  assert (moved[:6] > 0).all()
  assert (moved[6:] == 0).all()


def test_a_position_outside_the_cache_writes_nothing():
  """Neither past the end nor before the start: no clamp, no wrap (B03)."""
  empty = kv.init(
    batch=2, slots=8, layers=1, kv_heads=1, head_dim=2, dtype=jnp.float32
  )[0]
  new = jnp.ones((2, 3, 1, 2))
  positions = jnp.array([[6, 7, 8], [-1, 0, 1]])
  written = kv.write(empty, new, new, positions)
  want = [[0, 0, 0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]]
  np.testing.assert_array_equal(written.k[:, 0], want)
  np.testing.assert_array_equal(written.v[:, :, 1], want)


def test_taps_are_layer_outputs():
  """The last layer's tap, normalised, is the hidden state."""
  model = _tiny("gqa_tied")
  tokens = jnp.arange(6)[None]
  hidden, taps, _ = model.target.apply(
    model.params, tokens, tokens, None, features=(0, 1)
  )
  assert taps.shape == (1, 6, 2, 64)
  scale = model.params["norm"]["scale"]
  last = taps[:, :, 1]
  eps = model.config.norm_eps
  norm = jnp.sqrt(jnp.square(last).mean(-1, keepdims=True) + eps)
  np.testing.assert_allclose(last / norm * scale[None, None], hidden, atol=1e-5)
  assert not np.allclose(taps[:, :, 0], taps[:, :, 1])


def test_llama3_frequencies():
  """Low ones are divided by 8, high ones kept, as transformers has them."""
  scaling = dict(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
  )
  args = dict(theta=10000.0, scaling=scaling)
  plain = np.array(rope.inv_freq(16, kind="default", **args))
  scaled = np.array(rope.inv_freq(16, kind="llama3", **args))
  ratio = scaled / plain
  assert ratio[0] == 1
  np.testing.assert_allclose(ratio[-1], 1 / 8)
  assert (np.diff(ratio) <= 1e-12).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_weights(dtype):
  """Weights and cache are narrow, logits float32 and near the wide ones."""
  opened = load.source(str(DATA / "llama" / "gqa_untied"))
  params, config = weights.load(opened, dtype=dtype)
  target = transformer.make(config, dtype)
  reference = np.load(DATA / "llama" / "gqa_untied" / "reference.npz")
  tokens = reference["tokens"][:, :40]
  cache = target.init_cache(2, 64)
  narrow = {jnp.dtype(dtype)}
  assert {x.dtype for x in jax.tree.leaves((params, cache))} == narrow
  model = Tiny(target, params, config)
  got, after = _log_probs(model, tokens, cache)
  assert got.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(after)} == narrow
  error = np.abs(got - reference["logprobs"][:, :40]).max()
  assert 1e-4 < error < 0.5


@pytest.mark.parametrize("name", ["prose", "code", "chat"])
def test_smollm2_agrees_with_transformers(smollm2, name):
  """The real model: top 64 log-probabilities and normaliser to 1e-3."""
  reference = np.load(DATA / "smollm2.npz")
  tokens = reference[f"{name}_tokens"]
  target, params = smollm2.target, smollm2.params
  positions = jnp.arange(len(tokens))[None]

  @jax.jit
  def run(params, tokens):
    hidden, _, _ = target.apply(params, tokens, positions, None)
    return target.unembed(params, hidden)[0]

  logits = np.asarray(run(params, jnp.asarray(tokens)[None]), np.float64)
  largest = logits.max(-1)
  lognorm = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
  top = np.take_along_axis(logits, reference[f"{name}_top"].astype(int), 1)
  ours = top - lognorm[:, None]
  np.testing.assert_allclose(ours, reference[f"{name}_logprobs"], atol=1e-3)
  np.testing.assert_allclose(lognorm, reference[f"{name}_lognorm"], atol=1e-3)


def test_equal_configs_share_a_target():
  """Loading twice must not compile twice."""
  assert _tiny("gqa_tied").target is _tiny("gqa_tied").target
  other = transformer.make(_tiny("bias").config)
  assert other is not _tiny("gqa_tied").target
