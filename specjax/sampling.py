"""From logits to the law that is sampled, and one draw from it.

Functions act on one row at one position; the decode loop vmaps them. What is
not asked for costs nothing even inside that vmap: each threshold is found by a
`while_loop` that makes no trip unless some row needs it, where a `lax.cond`
would become a select and always run. Nothing sorts the vocabulary.
"""

import jax.numpy as jnp
from jax import lax

_BLOCK = 256  # width of the inner level of `draw`


def probabilities(logits, params, history=None):
  """Return the law of the next token under temperature and truncation.

  In this order, as transformers and vLLM do: softmax(logits / temperature);
  the top_k most likely tokens; the smallest set of them with at least top_p
  of their mass; of those the ones with p >= min_p * max p; renormalise.
  Each rule keeps a set {p >= threshold}, so tokens tied with the last one
  kept are kept too, and the most likely token always is.

  temperature = 0 is the limit: one-hot at the first of the largest logits.
  (Nucleus: Holtzman et al. 2020; min-p: Nguyen et al. 2024.)

  Args:
    logits: [V], of any float dtype; float64 is kept, others become float32.
    params: `Sampling` of one row.
    history: must be None; penalties will read it.

  Returns:
    [V] probabilities. All NaN if a logit is NaN or +inf, so that a broken
    model is seen and never sampled.
  """
  assert history is None, "penalties are not written yet"
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))  # [V]
  (V,) = logits.shape
  largest = logits.max()
  greedy = params.temperature <= 0

  # A plain argmax costs XLA's CPU backend ten times what these two passes do.
  ids = lax.iota(jnp.int32, V)
  best = jnp.where(logits == largest, ids, V).min()
  one_hot = (ids == best).astype(logits.dtype)

  temperature = jnp.where(greedy, 1, params.temperature).astype(logits.dtype)
  p = jnp.exp((logits - largest) / temperature)
  p = p / p.sum()
  kept = jnp.where(p >= _threshold(p, params), p, 0)
  truncated = _is_truncated(V, params)
  p = jnp.where(truncated, kept / kept.sum(), p)
  return jnp.where(
    jnp.isfinite(largest), jnp.where(greedy, one_hot, p), jnp.nan
  )


def draw(p, u):
  """Draw from p with one uniform: a two-level inverse CDF.

  The token is the first i with sum(p[: i + 1]) > u * sum(p), found among the
  sums of blocks first and then inside one block, which costs two passes over
  V instead of a cumulative sum. A token with p = 0 is never drawn, whatever
  the rounding of the sums.

  Args:
    p: [V] non-negative weights, not all zero; they need not sum to 1.
    u: [] uniform on [0, 1).

  Returns:
    [] int32 token.
  """
  (V,) = p.shape
  blocks = jnp.pad(p, (0, -V % _BLOCK)).reshape(-1, _BLOCK)
  mass = blocks.sum(1)
  block, below = _first_above(mass, u.astype(p.dtype) * mass.sum())
  inner, _ = _first_above(blocks[block], u.astype(p.dtype) * mass.sum() - below)
  return block * _BLOCK + inner


def _first_above(mass, goal):
  """First i of positive mass with cumsum(mass)[i] > goal, and the sum before.

  Rounding may leave no such i; it is then the last one of positive mass.
  """
  (n,) = mass.shape
  ids = lax.iota(jnp.int32, n)
  total = jnp.cumsum(mass)
  first = jnp.where((mass > 0) & (total > goal), ids, n).min()
  last = jnp.where(mass > 0, ids, 0).max()
  i = jnp.minimum(first, last)
  return i, total[i] - mass[i]


def _is_truncated(V, params):
  by_k = (params.top_k > 0) & (params.top_k < V)
  return by_k | (params.top_p < 1) | (params.min_p > 0)


def _threshold(p, params):
  """The one threshold that top-k, top-p and min-p amount to: keep p >= it."""
  (V,) = p.shape
  greedy = params.temperature <= 0  # needs no threshold, so pays for none
  by_k = ~greedy & (params.top_k > 0) & (params.top_k < V)
  k_least = _largest_feasible(p, by_k, lambda t: (p >= t).sum() >= params.top_k)
  mass = jnp.where(by_k, jnp.where(p >= k_least, p, 0).sum(), 1)
  goal = params.top_p.astype(p.dtype) * mass
  p_least = _largest_feasible(
    p,
    ~greedy & (params.top_p < 1),
    lambda t: jnp.where(p >= jnp.maximum(t, k_least), p, 0).sum() >= goal,
  )
  return jnp.maximum(
    jnp.maximum(k_least, p_least), params.min_p.astype(p.dtype) * p.max()
  )


def _largest_feasible(p, wanted, feasible):
  """The largest t <= max p with feasible(t), by bisection on the bits of t.

  Non-negative floats are ordered as their bit patterns are, so at most 31
  halvings (63 in float64) find t exactly. Infeasible everywhere, or not
  `wanted`: 0, which keeps every token.
  """
  bits = jnp.int32 if p.dtype == jnp.float32 else jnp.int64

  def as_float(b):
    return lax.bitcast_convert_type(b, p.dtype)

  def halve(bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    ok = feasible(as_float(middle))
    return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

  high = lax.bitcast_convert_type(p.max(), bits) + 1
  low, _ = lax.while_loop(
    lambda bounds: bounds[0] + 1 < bounds[1],
    halve,
    (jnp.zeros((), bits), jnp.where(wanted, high, 1)),
  )
  return as_float(low)
