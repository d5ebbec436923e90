"""From logits to the law that is sampled, and one draw from it.

Functions act on one row at one position; the decode loop vmaps them. What is
not asked for costs nothing even inside that vmap: each threshold is found by a
`while_loop` that makes no trip unless some row needs it, where a `lax.cond`
would become a select and always run. Nothing sorts the vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import History

_BLOCK = 256  # tokens in a block of `draw`


def probabilities(logits, params, history=None):
  """Return the law of the next token under temperature and truncation.

  The logits are first changed (`_penalised`): bias added; the stop ids banned
  before the minimum; tokens of prompt or answer divided by `repetition` if
  positive, else multiplied (Keskar et al. 2019); then presence * [generated]
  and frequency * (times generated) subtracted.

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
    history: `History` at this position; needed by penalties and a minimum.

  Returns:
    [V] probabilities. All NaN if a logit is NaN or +inf or none is above -inf,
    so that a broken model is seen and never sampled.
  """
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))  # [V]
  logits = _penalised(logits, params, history)
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
  truncated = is_truncated(V, params)
  p = jnp.where(truncated, kept / kept.sum(), p)
  return jnp.where(
    jnp.isfinite(largest), jnp.where(greedy, one_hot, p), jnp.nan
  )


def _penalised(logits, params, history):
  """The logits [V] after bias, minimum and penalties."""
  if params.bias is not None:
    logits = logits + params.bias
  if params.minimum is not None:
    ids = params.minimum.stop_ids  # padded with -1, which is no token
    ids = jnp.where(history.generated < params.minimum.tokens, ids, -1)
    logits = logits.at[ids].set(
      -jnp.inf, mode="drop", wrap_negative_indices=False
    )
  if params.penalties is not None:
    repetition, presence, frequency = params.penalties
    there = history.counts > 0
    divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(there | history.in_prompt, divided, logits)
    logits = logits - presence * there - frequency * history.counts
  return logits


def needs_history(params):
  """Whether `probabilities` looks at a history."""
  return params.penalties is not None or params.minimum is not None


def begin(tokens, length, vocab_size):
  """The `History` of a prompt: the first `length` of tokens [S]."""
  real = jnp.arange(len(tokens)) < length
  ids = jnp.where(real, tokens, vocab_size)
  in_prompt = jnp.zeros(vocab_size, bool).at[ids].set(True, mode="drop")
  return History(in_prompt, jnp.zeros(vocab_size, jnp.int32), jnp.int32(0))


def extend(history, tokens):
  """Return the histories behind each prefix of tokens [K]: fields [K + 1].

  A drafted token counts for the positions behind it, as if it were accepted:
  these are the histories that plain decoding would have there.
  """
  (K,) = tokens.shape
  (V,) = history.counts.shape
  more = (tokens[:, None] == jnp.arange(V)).astype(jnp.int32)  # [K, V]
  more = jnp.concatenate([jnp.zeros((1, V), jnp.int32), jnp.cumsum(more, 0)])
  return History(
    in_prompt=jnp.broadcast_to(history.in_prompt, (K + 1, V)),
    counts=history.counts + more,
    generated=history.generated + jnp.arange(K + 1),
  )


def draw(p, key):
  """Draw a token from p by two small Gumbel-max draws: a block, then in it.

  The law is exactly p: argmax_b(log mass_b + g_b) is a block with probability
  mass_b, and the same rule inside it a token with p_i / mass_b (Gumbel 1954;
  Maddison et al. 2014). A token with p = 0 is never drawn.

  A step costs one pass over V and some hundred random numbers, not V of them.
  An inverse CDF would be as cheap, but rounding moves each of its V borders:
  logits that differ in the last bits, as those of two batch sizes do, gave
  another token in 1 of 800 draws. Here it is about 3 TV of the two laws.

  Args:
    p: [V] non-negative weights, not all zero; they need not sum to 1.
    key: consumed.

  Returns:
    [] int32 token.
  """
  (V,) = p.shape
  blocks = jnp.pad(p, (0, -V % _BLOCK)).reshape(-1, _BLOCK)
  outer, inner = jax.random.split(key)
  block = _gumbel_max(blocks.sum(1), outer)
  return block * _BLOCK + _gumbel_max(blocks[block], inner)


def _gumbel_max(weights, key):
  """argmax(log weights + Gumbel noise); "high" resolves events below 1e-7."""
  # float32 by name: under jax_enable_x64 the default draws other bits
  noise = jax.random.gumbel(key, weights.shape, jnp.float32, mode="high")
  return jnp.argmax(jnp.log(weights) + noise).astype(jnp.int32)


def is_truncated(V, params):
  """Whether top-k, top-p or min-p may take tokens away."""
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
