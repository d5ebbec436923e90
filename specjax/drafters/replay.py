"""Draft the tokens of an earlier run, spoilt with a known probability.

An instrument, not a method: it needs the answer. A draft of known alpha that
costs nothing separates what the loop does from what a draft does.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import Drafter, Proposal


class Params(NamedTuple):
  """An earlier run of the same request, and how much of it to keep."""

  tokens: jax.Array  # [B, N] int32, its answer, -1 behind the end
  alpha: jax.Array  # [] float32 in [0, 1]


@functools.cache
def make(vocab_size):
  """Return the `Drafter` that replays an earlier answer.

  The law of the token at place t of the answer is q = alpha at the earlier
  run's token and 1 - alpha at the one with the next id. Where p is one-hot at
  the earlier token, as at T = 0, sum min(p, q) = alpha in every round; the
  output is exact whatever the tokens are. Behind their end nothing is drafted.

  Args:
    vocab_size: V of the target, at least 2.
  """

  def law(token, alpha):
    ids = jnp.arange(vocab_size)
    kept, spoilt = ids == token, ids == (token + 1) % vocab_size
    return jnp.where(kept, alpha, jnp.where(spoilt, 1 - alpha, 0))

  def propose(params, prompt_length, context, noise):
    B, N = params.tokens.shape
    K, rows = context.num_draft, jnp.arange(B)
    # the answer's next place, and those behind it
    t = (context.length - prompt_length)[:, None] + jnp.arange(K)  # [B, K]
    ended = jnp.pad(params.tokens, ((0, 0), (0, 1)), constant_values=-1)
    earlier = ended[rows[:, None], jnp.minimum(t, N)]
    real = earlier >= 0
    # float32 by name: under jax_enable_x64 a float64 would widen p (B59)
    alpha = jnp.asarray(params.alpha, jnp.float32)
    probs = jax.vmap(jax.vmap(law, (0, None)), (0, None))(earlier, alpha)
    tokens = lax.fori_loop(  # a loop, so that K does not slow the compiler
      0,
      K,
      lambda i, x: x.at[:, i].set(noise.draft(i, probs[:, i])),
      jnp.zeros((B, K), jnp.int32),
    )
    length = real.sum(1).astype(jnp.int32)
    return Proposal(tokens, probs, length), prompt_length

  return Drafter(
    features=(),
    # a copy: states are donated, and a buffer cannot be given twice
    init=lambda params, prompt, length, taps, slots: jnp.array(length),
    propose=propose,
    commit=lambda params, state, outcome: state,
  )
