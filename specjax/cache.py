"""The key/value cache: a pytree of arrays that goes in and comes out.

Slot s of a row holds the key and value of the token at position s. Going back
to a shorter prefix is arithmetic on the row's length and touches nothing:
slots behind it are stale, invisible to every earlier position, and written
again before a later one could see them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PREFILL = 64  # prompt tokens a prefill step; slots are a multiple of it


class KV(NamedTuple):
  """One layer. Layers stay separate arrays: slices of a stack are copies.

  B and G are one axis, so that the arrays enter the attention's products as
  they are. With two axes and B = 1, XLA's CPU backend reshapes first and
  copies the whole cache in every step to do so. Keys lie slot-last because
  the scores contract head_dim.
  """

  k: jax.Array  # [B * G, head_dim, S]
  v: jax.Array  # [B * G, S, head_dim]


def init(*, batch, slots, layers, kv_heads, head_dim, dtype):
  """Return an empty cache, one `KV` a layer."""
  rows = batch * kv_heads
  return tuple(
    KV(
      k=jnp.zeros((rows, head_dim, slots), dtype),
      v=jnp.zeros((rows, slots, head_dim), dtype),
    )
    for _ in range(layers)
  )


def from_tokens(k, v):
  """Return the `KV` of k and v [B, T, G, head_dim], token t in slot t."""
  B, T, G, d = k.shape
  return KV(
    k=k.transpose(0, 2, 3, 1).reshape(B * G, d, T),
    v=v.transpose(0, 2, 1, 3).reshape(B * G, T, d),
  )


def write(layer, k, v, positions):
  """Store k and v [B, T, G, head_dim] at their positions [B, T].

  A position outside [0, S) writes nothing: a frozen row asks for that, and a
  start past the end would otherwise be clamped onto live entries.
  """
  B, T, G, d = k.shape
  rows = jnp.arange(B * G)[:, None]  # [B * G, 1]
  at = jnp.repeat(positions, G, axis=0)  # [B * G, T]
  options = dict(mode="drop", wrap_negative_indices=False)

  def per_head(x, dtype):  # [B * G, T, head_dim]
    return x.astype(dtype).transpose(0, 2, 1, 3).reshape(B * G, T, d)

  return KV(
    k=layer.k.at[rows, :, at].set(per_head(k, layer.k.dtype), **options),
    v=layer.v.at[rows, at].set(per_head(v, layer.v.dtype), **options),
  )


def prefill(model, params, tokens, length):
  """Return a cache that holds tokens 0 .. length - 2 of each row.

  They are fed PREFILL at a time. How often is data, so that a prompt's length
  compiles nothing; padding is not stored.

  Args:
    model: a `Target`; params: its parameters.
    tokens: [B, S] int32, S slots, a multiple of PREFILL.
    length: [B] int32; a row of 1 or less needs nothing.
  """
  B, S = tokens.shape

  def feed(carry):
    at, cache = carry
    chunk = lax.dynamic_slice_in_dim(tokens, at, PREFILL, axis=1)
    positions = at + jnp.arange(PREFILL)
    real = positions < length[:, None] - 1
    _, _, cache = model.apply(
      params, chunk, jnp.where(real, positions, S), cache
    )
    return at + PREFILL, cache

  _, cache = lax.while_loop(
    lambda carry: carry[0] < length.max() - 1,
    feed,
    (jnp.int32(0), model.init_cache(B, S)),
  )
  return cache


def num_slots(cache):
  """S of a cache."""
  return cache[0].v.shape[1]


def visible(positions, slots):
  """Mask [B, T, S]: slot s is seen by a query at position >= s."""
  return jnp.arange(slots) <= positions[..., None]


def num_bytes(*, batch, slots, layers, kv_heads, head_dim, dtype):
  """Bytes that `init` with the same arguments allocates."""
  per_layer = 2 * batch * slots * kv_heads * head_dim
  return layers * per_layer * jnp.dtype(dtype).itemsize
