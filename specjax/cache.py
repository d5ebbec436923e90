"""The key/value cache: a pytree of arrays that goes in and comes out.

Slot s of a row holds the key and value of the token at position s. Going back
to a shorter prefix is arithmetic on the row's length and touches nothing:
slots behind it are stale, invisible to every earlier position, and written
again before a later one could see them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KV(NamedTuple):
  """One layer. Layers stay separate arrays: slices of a stack are copies."""

  k: jax.Array  # [B, G, S, head_dim]: a head's slots lie together, which
  v: jax.Array  # [B, G, S, head_dim]  halves the cost of attention on a CPU


def init(*, batch, slots, layers, kv_heads, head_dim, dtype):
  """Return an empty cache, one `KV` a layer."""
  shape = (batch, kv_heads, slots, head_dim)
  return tuple(
    KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers)
  )


def write(layer, k, v, positions):
  """Store k and v [B, T, G, head_dim] at their positions [B, T].

  A position outside [0, S) writes nothing: a frozen row asks for that, and a
  start past the end would otherwise be clamped onto live entries.
  """
  rows = jnp.arange(positions.shape[0])[:, None]  # [B, 1]

  def put(buffer, new):
    return buffer.at[rows, :, positions].set(
      new.astype(buffer.dtype), mode="drop", wrap_negative_indices=False
    )

  return KV(put(layer.k, k), put(layer.v, v))


def visible(positions, slots):
  """Mask [B, T, S]: slot s is seen by a query at position >= s."""
  return jnp.arange(slots) <= positions[..., None]


def num_bytes(*, batch, slots, layers, kv_heads, head_dim, dtype):
  """Bytes that `init` with the same arguments allocates."""
  per_layer = 2 * batch * slots * kv_heads * head_dim
  return layers * per_layer * jnp.dtype(dtype).itemsize
