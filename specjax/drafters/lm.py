"""Draft with a smaller language model that has a cache of its own.

The model may be any checkpoint with the target's vocabulary, or some of the
target's own layers (`models.load.part`), which share its arrays. Its head may
know fewer ids than the vocabulary has: the head, not the layers, is the cost of
a small draft.
"""

import functools

import jax.numpy as jnp

from specjax import cache as kv
from specjax.drafters import chain
from specjax.types import Drafter


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
    ValueError: an id that the target does not have, or one given twice.
  """
  if ids is not None:
    ids = chain.checked(ids, vocab_size)

  def propose(params, cache, context, noise):
    tokens, length = context.tokens, context.length
    B, S = tokens.shape
    # A prompt of one token has no last but one: nothing is stored for it.
    pair = length[:, None] + jnp.array([-2, -1])
    at = jnp.where(pair < 0, S, pair)
    last_two = tokens[jnp.arange(B)[:, None], jnp.maximum(pair, 0)]
    hidden, cache = _feed(model, params, cache, last_two, at)
    if not context.num_draft:
      return chain.nothing(B, vocab_size), cache

    def feed(i, token, cache):
      at = (length - 1 + i)[:, None]
      return _feed(model, params, cache, token[:, None], at)

    head = functools.partial(model.unembed, params)
    options = dict(vocab_size=vocab_size, ids=ids)
    return chain.propose(context, noise, head, feed, hidden, cache, **options)

  def init(params, prompt, length, taps, slots):
    del taps, slots  # it reads none; its slots are the target's
    return kv.prefill(model, params, known(model, prompt), length)

  return Drafter(
    features=(),
    init=init,
    propose=propose,
    commit=lambda params, cache, outcome: cache,  # lengths do it all
    context=model.context,
  )


def known(model, tokens):
  """What is fed for tokens: its last id for one that it does not have (B11).

  Args:
    model: anything with a vocab_size.
  """
  return jnp.minimum(tokens, model.vocab_size - 1)


def _feed(model, params, cache, tokens, positions):
  """What stands behind tokens [B, T]: hidden [B, D] and the cache."""
  tokens = known(model, tokens)
  hidden, _, cache = model.apply(params, tokens, positions, cache)
  return hidden[:, -1], cache
