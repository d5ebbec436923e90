"""Draft with a smaller language model that has a cache of its own.

The model may be any checkpoint with the target's vocabulary, or some of the
target's own layers (`models.load.part`), which share its arrays. Its head may
know fewer ids than the vocabulary has: the head, not the layers, is the cost of
a small draft.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import cache as kv
from specjax import sampling
from specjax.types import Drafter, Proposal


@functools.cache
def make(model, vocab_size, *, ids=None):
  """Return the `Drafter` of a language model.

  It drafts token i + 1 from its law behind the committed tokens and the i
  drafted ones, under the draft's own sampling values. Its cache is valid for
  length - 2 tokens or more: a wholly accepted draft ends in a token that was
  never fed. So each round begins by feeding the last two committed tokens.

  Equal arguments return the very same Drafter, hence share compiled programs.

  Args:
    model: the draft's `Target`; its parameters are the drafter's.
    vocab_size: V of the target. Ids that only one of the two models has, as
      paddings differ, have q = 0 here.
    ids: a tuple, the token of each of the draft's logits if these are not 0,
      1, 2, ...; a trimmed head.

  Raises:
    ValueError: an id that the target does not have, or one given twice: its
      mass would be lost.
  """
  if ids is not None:
    ids = _checked(ids, vocab_size)

  def draw(params, hidden, context, noise, i):
    """A token [B] and the law [B, V] that it was drawn from."""
    logits = model.unembed(params, hidden)[:, :vocab_size]
    q = jax.vmap(sampling.probabilities)(logits, context.sampling)  # [B, Vq]
    token = noise.draft(i, q)
    if ids is None:
      return token, jnp.pad(q, ((0, 0), (0, vocab_size - q.shape[1])))
    wide = jnp.zeros((len(q), vocab_size), q.dtype)
    return jnp.asarray(ids)[token], wide.at[:, ids].set(q)

  def propose(params, cache, context, noise):
    tokens, length, K = context.tokens, context.length, context.num_draft
    B, S = tokens.shape
    # A prompt of one token has no last but one: nothing is stored for it.
    pair = length[:, None] + jnp.array([-2, -1])
    at = jnp.where(pair < 0, S, pair)
    last_two = tokens[jnp.arange(B)[:, None], jnp.maximum(pair, 0)]
    hidden, cache = _feed(model, params, cache, last_two, at)
    if not K:
      return _nothing(B, vocab_size), cache
    token, q = draw(params, hidden, context, noise, 0)
    # padded, not set: XLA's CPU backend makes five copies of a scatter at K = 1
    drafted = jnp.pad(token[:, None], ((0, 0), (0, K - 1)))
    probs = jnp.pad(q[:, None], ((0, 0), (0, K - 1), (0, 0)))

    def step(i, carry):
      cache, drafted, probs = carry
      last, at = drafted[:, i - 1, None], (length - 1 + i)[:, None]
      hidden, cache = _feed(model, params, cache, last, at)
      token, q = draw(params, hidden, context, noise, i)
      return cache, drafted.at[:, i].set(token), probs.at[:, i].set(q)

    cache, drafted, probs = lax.fori_loop(1, K, step, (cache, drafted, probs))
    return Proposal(drafted, probs, jnp.full(B, K, jnp.int32)), cache

  def init(params, prompt, length, taps, slots):
    del taps, slots  # it reads none; its slots are the target's
    return kv.prefill(model, params, _known(model, prompt), length)

  return Drafter(
    features=(),
    init=init,
    propose=propose,
    commit=lambda params, cache, outcome: cache,  # lengths do it all
    context=model.context,
  )


def _known(model, tokens):
  """An id that the draft does not have is fed as its last one (B11)."""
  return jnp.minimum(tokens, model.vocab_size - 1)


def _feed(model, params, cache, tokens, positions):
  """What stands behind tokens [B, T]: hidden [B, D] and the cache."""
  tokens = _known(model, tokens)
  hidden, _, cache = model.apply(params, tokens, positions, cache)
  return hidden[:, -1], cache


def _checked(ids, vocab_size):
  """The ids as an array; a scatter would drop or overwrite what is wrong."""
  ids = np.array(ids, np.int32)
  if not ids.size or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(f"a draft's ids must be in 0..{vocab_size - 1}")
  if len(np.unique(ids)) < len(ids):
    raise ValueError("a draft's ids must differ from each other")
  return ids


def _nothing(batch, vocab_size):
  return Proposal(
    tokens=jnp.zeros((batch, 0), jnp.int32),
    # float32 by name: under jax_enable_x64 a float64 would widen p (B59)
    probs=jnp.zeros((batch, 0, vocab_size), jnp.float32),
    length=jnp.zeros(batch, jnp.int32),
  )
