"""Attention: rotary positions, what each layer sees, and scores on a CPU."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import cache as kv

# All scores at once are tens of megabytes that are written, read and given back
# in every layer. Those of a few rows stay in the processor's cache.
_MANY = 1 << 24  # bytes of scores from which on rows take turns
_TURN = 1 << 22  # bytes of scores of a turn, or one row's


class View(NamedTuple):
  """What a layer is told about the tokens of a step."""

  angles: tuple  # cos and sin, of `rotary`
  mask: jax.Array  # [B, T, S], True where a query sees a key
  span: jax.Array | None = None  # which of `cache.spans` all of them see in


def views(config, positions, mask, places, caches=None):
  """Return the `View` of each layer.

  A layer with a window of n sees n tokens, the query's own the last of them.
  Its cache is as long as others': a draft that is rolled back has overwritten
  nothing that the next round sees (B58).

  Args:
    config: a `transformer.Config`; positions: [B, T] of queries.
    mask: [B, T, S] of a layer that sees all.
    places: positions of keys, of a shape that broadcasts to [B, T, S].
    caches: the layers', if they have any.
  """
  span = _span(positions, caches)
  every = View(rotary(positions, config.inv_freq), mask, span)
  if not config.windows:
    return [every] * config.layers
  at = positions
  if span is not None:  # padding too sees something of it: no NaN
    at = jnp.where(positions < kv.num_slots(caches), positions, 0)
  ago, found = at[:, :, None] - places, {0: every}
  angles = every.angles
  if config.local_inv_freq:
    angles = rotary(positions, config.local_inv_freq)
  for n in {*config.windows} - {0}:
    found[n] = View(angles, mask & (ago < n), span)
  return [found[n] for n in config.windows]


def rotary(positions, inv_freq):
  """cos and sin [B, T, 1, head_dim / 2] of position * frequency.

  Made once a step: in every layer they would cost more than the attention.
  """
  angle = positions[..., None, None] * jnp.asarray(inv_freq, jnp.float32)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x, cos, sin):
  """Rotate the pairs (x_i, x_{i + head_dim / 2}) of x [B, T, heads, head_dim].

  Su et al. 2021, eq. 34, in the half-split layout of Hugging Face weights.
  """
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def attend(q, layer, mask, *, scalar=None, cap=None):
  """softmax(q k^T / sqrt(scalar)) v, in float32, over visible slots.

  Args:
    q: [B, T, H, head_dim]; layer: a `cache.KV` or `cache.Pieces`, H a multiple
      of its G.
    mask: [B, T, S], True where a query sees a slot.
    scalar: None is head_dim.
    cap: of the scores, see `capped`.

  Returns:
    [B, T, H, head_dim]
  """
  B, T, H, d = q.shape
  parts = kv.parts(layer)
  lead = parts[0].k.shape[:-2]  # (B * G,) or (B, G)
  G = math.prod(lead) // B
  # the queries that share a key head are one matrix
  q = q.reshape(B, T, G, H // G, d).transpose(0, 2, 1, 3, 4)
  q = q.reshape(*lead, -1, d)

  def scored(part, seen):
    s = jnp.einsum(
      "...nd,...ds->...ns", q, part.k, preferred_element_type=jnp.float32
    )
    s = s.reshape(B, G, T, H // G, -1) * (scalar or d) ** -0.5
    return jnp.where(seen[:, None, :, None], capped(s, cap), -jnp.inf)

  def weighted(part, w):
    w = w.reshape(*lead, -1, w.shape[-1]).astype(part.v.dtype)
    return jnp.einsum(
      "...ns,...sd->...nd", w, part.v, preferred_element_type=jnp.float32
    )

  seen = jnp.split(mask, kv.ends(layer)[:-1], -1)
  scores = [scored(*each) for each in zip(parts, seen, strict=True)]
  add = functools.partial(functools.reduce, jnp.add)
  largest = [s.max(-1, keepdims=True) for s in scores]
  largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, largest))
  weights = [jnp.exp(s - largest) for s in scores]
  out = add([weighted(*each) for each in zip(parts, weights, strict=True)])
  total = add([w.sum(-1, keepdims=True) for w in weights])
  out = out.reshape(B, G, T, H // G, d) / total
  out = out.transpose(0, 2, 1, 3, 4).reshape(B, T, H, d)
  return out.astype(parts[0].v.dtype)


def capped(x, cap):
  """cap * tanh(x / cap), within (-cap, cap); x itself where there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def _span(positions, caches):
  """The index of the shortest of `cache.spans` in which all queries see.

  None where the cache is in one piece, and all is seen. A choice pays on a CPU,
  where a cache that is mostly empty would take a tenth of a step; elsewhere it
  costs more. (A program that a CPU lowers for another platform has it.) Caches
  of a mesh, whose rows are on several devices that would have to agree, are in
  one piece.
  """
  if not caches or not isinstance(caches[0], kv.Pieces):
    return None
  *ends, slots = kv.ends(caches[0])
  # a query at S or behind is padding
  last = jnp.where(positions < slots, positions, -1).max()
  return (last >= jnp.array(ends, jnp.int32)).sum()


def within(attend, q, layer, view):
  """`attend` over the view's span alone: behind it no query sees anything.

  Args:
    attend: see `in_turns`; layer: a `cache.KV`, or `cache.Pieces` with a span.
  """
  if view.span is None:
    return attend(q, layer, view.mask)

  def first(n, end):  # parts, which hold so many slots
    return lambda q, layer, mask: attend(
      q, kv.Pieces(layer.parts[:n]), mask[..., :end]
    )

  branches = [first(n, end) for n, end in enumerate(kv.ends(layer), 1)]
  return jax.lax.switch(view.span, branches, q, layer, view.mask)


def in_turns(attend, q, layer, mask):
  """`attend(q, layer, mask)`, some rows at a time where scores are many.

  Rows do not see one another, so it is the same function; its gradient makes
  the scores of a turn again. Other backends hold no scores in memory.

  Args:
    attend: see `attend`, with q [B, T, H, head_dim], a layer
      of [B * G, ...] and mask [B, T, S].
  """
  B, T, H, _ = q.shape
  row = T * H * mask.shape[-1] * 4  # bytes
  n = _rows(B, row)
  # on a mesh, whose caches are [B, G, ...], rows are on several devices already
  few = B * row < _MANY or n == B or kv.parts(layer)[0].k.ndim == 4
  if few or jax.default_backend() != "cpu":
    return attend(q, layer, mask)
  turns = lambda x: x.reshape(B // n, -1, *x.shape[1:])
  one = jax.checkpoint(lambda some: attend(*some))
  found = jax.lax.map(one, jax.tree.map(turns, (q, layer, mask)))
  return found.reshape(q.shape)


def _rows(B, row):
  """The most rows of a turn that divide B."""
  fit = max(min(_TURN // row, B), 1)
  return max(n for n in range(1, fit + 1) if B % n == 0)
