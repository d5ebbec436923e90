"""A tiny language model whose every conditional is a row of a table.

Unlike a bigram it cannot do without its cache: the law after (a, b) is
softmax(table[a, b]) and a is read back from the slot before b's, so a wrong
write, mask or length shows in the tokens.
"""

import jax.numpy as jnp
import numpy as np

from specjax.types import Target


def trigram(vocab_size, *, context=4096):
  """Return the `Target`; its parameters are a table [V, V, V] of logits.

  The token before the first one counts as 0.
  """

  def apply(table, tokens, positions, cache, *, features=()):
    assert not features
    B, T = tokens.shape
    rows = jnp.arange(B)[:, None]
    if cache is None:
      cache, keep = jnp.full((B, T), -1), None
    else:
      keep = True
    cache = cache.at[rows, positions].set(
      tokens, mode="drop", wrap_negative_indices=False
    )
    before = cache[rows, jnp.maximum(positions - 1, 0)]
    before = jnp.where(positions > 0, before, 0)
    hidden = table[before, tokens]  # [B, T, V]
    taps = jnp.zeros((B, T, 0, vocab_size), hidden.dtype)
    return hidden, taps, cache if keep else None

  def unembed(table, hidden):
    del table
    return hidden

  def init_cache(batch, slots):
    return jnp.full((batch, slots), -1, jnp.int32)

  return Target(apply, unembed, init_cache, vocab_size, context)


def table(vocab_size, *, seed=0, scale=2.0):
  """A random [V, V, V] table of logits."""
  rng = np.random.default_rng(seed)
  shape = (vocab_size,) * 3
  return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)
