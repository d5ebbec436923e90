"""The key/value cache: a pytree of arrays that goes in and comes out.

Slot s of a row holds the key and value of the token at position s. Going back
to a shorter prefix is arithmetic on the row's length and touches nothing:
slots behind it are stale, invisible to every earlier position, and written
again before a later one could see them.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PREFILL = 64  # fewest prompt tokens a prefill step; slots are a multiple of it
_SHORTEST = 256  # slots of the first of several parts
_WIDEST = 256  # the most tokens of a wide step, those of all rows together


class KV(NamedTuple):
  """One layer. Layers stay separate arrays: slices of a stack are copies.

  B and G are one axis, so that the arrays enter the attention's products as
  they are. With two axes and B = 1, XLA's CPU backend reshapes first and
  copies the whole cache in every step to do so. On a mesh of devices they are
  two, each over an axis of its own: what reads a cache takes either. Keys lie
  slot-last because the scores contract head_dim.
  """

  k: jax.Array  # [B * G, head_dim, S] or [B, G, head_dim, S]
  v: jax.Array  # [B * G, S, head_dim] or [B, G, S, head_dim]


class Pieces(NamedTuple):
  """One layer whose slots are in several `KV`, as `spans` has them.

  So it is on one CPU, with more than 256 slots: a step attends to the first few
  of them as they are. XLA would copy what is cut from a larger array, which
  takes several times as long as attending to it.
  """

  parts: tuple[KV, ...]


class Passes(NamedTuple):
  """A layer's keys and values in earlier passes over the same tokens.

  A pass is a way to see a token; a mask says which way a query sees which.
  """

  before: tuple[KV, ...]  # each of T slots


def side_by_side(passes):
  """Return one `KV` of the slots of several."""
  return KV(
    k=jnp.concatenate([layer.k for layer in passes], -1),
    v=jnp.concatenate([layer.v for layer in passes], -2),
  )


def init(*, batch, slots, layers, kv_heads, head_dim, dtype):
  """Return an empty cache, one `KV` or on a CPU `Pieces` a layer."""
  rows = batch * kv_heads

  def some(n):
    return KV(
      k=jnp.zeros((rows, head_dim, n), dtype),
      v=jnp.zeros((rows, n, head_dim), dtype),
    )

  def layer():
    if jax.default_backend() != "cpu" or slots <= _SHORTEST:
      return some(slots)
    between = itertools.pairwise([0, *spans(slots)])
    return Pieces(tuple(some(end - at) for at, end in between))

  return tuple(layer() for _ in range(layers))


def spans(slots):
  """The first so many slots that a step may do with: 256, 512, ..., all."""
  doubled = itertools.takewhile(
    lambda n: n < slots, (_SHORTEST << i for i in itertools.count())
  )
  return [*doubled, slots]


def parts(layer):
  """The `KV` that a layer's slots are in."""
  return layer.parts if isinstance(layer, Pieces) else (layer,)


def ends(layer):
  """How many slots there are up to the end of each of a layer's parts."""
  return [*itertools.accumulate(part.v.shape[-2] for part in parts(layer))]


def joined(layer):
  """A layer as one `KV`."""
  found = parts(layer)
  return found[0] if len(found) == 1 else side_by_side(found)


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
  if isinstance(layer, Pieces):
    each = zip(layer.parts, [0, *ends(layer)[:-1]], strict=True)
    return Pieces(tuple(write(x, k, v, positions - at) for x, at in each))
  B, T, G, d = k.shape
  options = dict(mode="drop", wrap_negative_indices=False)
  if layer.k.ndim == 4:
    return _write_apart(layer, k, v, positions, options)
  rows = jnp.arange(B * G)[:, None]  # [B * G, 1]
  at = jnp.repeat(positions, G, axis=0)  # [B * G, T]

  def per_head(x, dtype):  # [B * G, T, head_dim]
    return x.astype(dtype).transpose(0, 2, 1, 3).reshape(B * G, T, d)

  return KV(
    k=layer.k.at[rows, :, at].set(per_head(k, layer.k.dtype), **options),
    v=layer.v.at[rows, at].set(per_head(v, layer.v.dtype), **options),
  )


def _write_apart(layer, k, v, positions, options):
  """Row by row and head by head, so that a mesh sees that none needs another's.

  With indices, every device would get what all the others write.
  """

  def one(layer, k, v, at):
    return KV(
      k=layer.k.at[:, at].set(k.T.astype(layer.k.dtype), **options),
      v=layer.v.at[at].set(v.astype(layer.v.dtype), **options),
    )

  heads = jax.vmap(one, (0, 1, 1, None))
  return jax.vmap(heads)(layer, k, v, positions)


def apart(layer, batch):
  """A layer as one `KV` with B = batch and G as two axes."""
  layer = joined(layer)
  if layer.k.ndim == 4:
    return layer
  return KV(*(x.reshape(batch, -1, *x.shape[1:]) for x in layer))


def prefill(model, params, tokens, length):
  """Return a cache that holds tokens 0 .. length - 2 of each row.

  They are fed some at a time. How often is data, so that a prompt's length
  compiles nothing; padding is not stored.

  Args:
    model: a `Target`; params: its parameters.
    tokens: [B, S] int32, S slots, a multiple of PREFILL.
    length: [B] int32, at most S + 1; a row of 1 or less needs nothing.
  """
  return prefill_taps(model, params, tokens, length, ())[0]


def prefill_taps(model, params, tokens, length, features):
  """Return `prefill`'s cache and the taps [B, S, F, D] of what was fed.

  Args:
    features: layers whose outputs are wanted; none: taps are None. What stands
      at tokens that were not fed is arbitrary.
  """
  B, S = tokens.shape
  steps = widths(B, S)
  end = length.max() - 1
  # the last step may reach behind the slots
  tokens = jnp.pad(tokens, [(0, 0), (0, steps[0] - PREFILL)])

  def call(width, at, cache):
    chunk = lax.dynamic_slice_in_dim(tokens, at, width, axis=1)
    positions = at + jnp.arange(width)
    real = positions < length[:, None] - 1
    return model.apply(
      params,
      chunk,
      jnp.where(real, positions, S),
      cache,
      features=features,
    )[1:]

  def feed(width, carry):
    at, cache, taps = carry
    some, cache = call(width, at, cache)
    if features:
      taps = lax.dynamic_update_slice_in_dim(taps, some, at, axis=1)
    return at + width, cache, taps

  cache, taps = model.init_cache(B, S), None
  if features:
    some = jax.eval_shape(functools.partial(call, PREFILL), jnp.int32(0), cache)
    shape = (*tokens.shape, *some[0].shape[2:])
    taps = jnp.zeros(shape, some[0].dtype)
  carry = jnp.int32(0), cache, taps
  for width in steps:
    carry = _while_more(functools.partial(feed, width), width, end, carry)
  _, cache, taps = carry
  return cache, taps[:, :S] if features else None


def _while_more(feed, width, end, carry):
  """Feed wide steps while half of one is left, narrow ones while anything is.

  What a loop has of the weights alone, as for a wide step all of them in one
  piece, XLA makes before it: where no step is taken that must not happen.
  """
  if width == PREFILL:
    return lax.while_loop(lambda carry: carry[0] < end, feed, carry)
  more = lambda carry: end - carry[0] > width // 2
  loop = lambda carry: lax.while_loop(more, feed, carry)
  return lax.cond(more(carry), loop, lambda carry: carry, carry)


def widths(batch, slots):
  """Tokens that a row is fed in a prefill step: wide ones first, then PREFILL.

  Many rows in one product take less time each, on 2 cores 256 half of what 64
  do. A wide step is taken while more than half of it is left. It is one more
  program to compile, and on a CPU one that holds the matrices a second time, so
  there is one where prompts may be four times as long.
  """
  wide = _WIDEST // batch // PREFILL * PREFILL
  return [wide, PREFILL] if PREFILL < wide <= slots // 4 else [PREFILL]


def num_slots(cache):
  """S of a cache."""
  return ends(cache[0])[-1]


def visible(positions, slots):
  """Mask [B, T, S]: slot s is seen by a query at position >= s."""
  return jnp.arange(slots) <= positions[..., None]


def num_bytes(*, batch, slots, layers, kv_heads, head_dim, dtype):
  """Bytes that `init` with the same arguments allocates."""
  per_layer = 2 * batch * slots * kv_heads * head_dim
  return layers * per_layer * jnp.dtype(dtype).itemsize
