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
  """
  embedded = model.vocab_size

  def law(params, hidden, context):
    """q over the draft's own vocabulary [B, Vq]."""
    logits = model.unembed(params, hidden)[:, :vocab_size]
    return jax.vmap(sampling.probabilities)(logits, context.sampling)

  def in_full(q):
    """The same law over the target's vocabulary [B, V]."""
    if ids is not None:
      wide = jnp.zeros((len(q), vocab_size), q.dtype)
      return wide.at[:, np.array(ids)].set(q)
    return jnp.pad(q, ((0, 0), (0, vocab_size - q.shape[1])))

  def feed(params, cache, tokens, positions):
    # an id that the draft does not have is fed as its last one
    known = jnp.minimum(tokens, embedded - 1)
    hidden, _, cache = model.apply(params, known, positions, cache)
    return hidden[:, -1], cache  # [B, D]

  def draw(params, hidden, context, noise, i):
    q = law(params, hidden, context)
    token = noise.draft(i, q)
    return token if ids is None else jnp.array(ids)[token], in_full(q)

  def propose(params, cache, context, noise):
    tokens, length, K = context.tokens, context.length, context.num_draft
    B, S = tokens.shape
    # A prompt of one token has no last but one: nothing is stored for it.
    pair = length[:, None] + jnp.array([-2, -1])
    at = jnp.where(pair < 0, S, pair)
    hidden, cache = feed(
      params, cache, tokens[jnp.arange(B)[:, None], jnp.maximum(pair, 0)], at
    )
    if not K:
      return _nothing(B, vocab_size), cache
    token, q = draw(params, hidden, context, noise, 0)
    drafted = jnp.zeros((B, K), jnp.int32).at[:, 0].set(token)
    probs = jnp.zeros((B, K, vocab_size), q.dtype).at[:, 0].set(q)

    def step(i, carry):
      cache, drafted, probs = carry
      hidden, cache = feed(
        params, cache, drafted[:, i - 1, None], (length - 1 + i)[:, None]
      )
      token, q = draw(params, hidden, context, noise, i)
      return cache, drafted.at[:, i].set(token), probs.at[:, i].set(q)

    cache, drafted, probs = lax.fori_loop(1, K, step, (cache, drafted, probs))
    return Proposal(drafted, probs, jnp.full(B, K, jnp.int32)), cache

  def init(params, prompt, length, taps, slots):
    del taps, slots  # it reads none; its slots are the target's
    known = jnp.minimum(prompt, embedded - 1)
    return kv.prefill(model, params, known, length)

  return Drafter(
    features=(),
    init=init,
    propose=propose,
    commit=lambda params, cache, outcome: cache,  # lengths do it all
    context=model.context,
  )


def _nothing(batch, vocab_size):
  return Proposal(
    tokens=jnp.zeros((batch, 0), jnp.int32),
    probs=jnp.zeros((batch, 0, vocab_size)),
    length=jnp.zeros(batch, jnp.int32),
  )
