"""Draft with a smaller language model that has a cache of its own.

The model may be any checkpoint with the target's vocabulary, or some of the
target's own layers (`models.load.part`), which share its arrays. Its head may
know fewer ids than the vocabulary has: the head, not the layers, is the cost of
a small draft.
"""

import functools
from typing import NamedTuple

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

  def law(params, hidden, context):
    """q [B, Vq] of the token behind, in the draft's own vocabulary."""
    logits = model.unembed(params, hidden)[:, :vocab_size]
    return jax.vmap(sampling.probabilities)(logits, context.sampling)

  def draw(q, noise, i):
    """A token [B] and the law [B, V] that it was drawn from."""
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
    q = law(params, hidden, context)
    plan = _go_on(context, 0, _Plan.begin(B, K), q)
    token, q = draw(q, noise, 0)
    # padded, not set: XLA's CPU backend makes five copies of a scatter at K = 1
    drafted = jnp.pad(token[:, None], ((0, 0), (0, K - 1)))
    probs = jnp.pad(q[:, None], ((0, 0), (0, K - 1), (0, 0)))

    def step(carry):
      i, cache, drafted, probs, plan = carry
      last, at = drafted[:, i - 1, None], (length - 1 + i)[:, None]
      hidden, cache = _feed(model, params, cache, last, at)
      q = law(params, hidden, context)
      plan = _go_on(context, i, plan, q)
      token, q = draw(q, noise, i)
      drafted = drafted.at[:, i].set(token)
      return i + 1, cache, drafted, probs.at[:, i].set(q), plan

    _, cache, drafted, probs, plan = lax.while_loop(
      lambda carry: (carry[0] < K) & carry[-1].alive.any(),
      step,
      (jnp.int32(1), cache, drafted, probs, plan),
    )
    confidence = None if context.more is None else plan.confidence
    return Proposal(drafted, probs, plan.length, confidence), cache

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


class _Plan(NamedTuple):
  """How far each row drafts."""

  alive: jax.Array  # [B] bool, it has not stopped
  length: jax.Array  # [B] int32, tokens so far
  survival: jax.Array  # [B] what is believed of them all
  confidence: jax.Array  # [B, K] the largest q of each, before it was drawn

  @classmethod
  def begin(cls, batch, num_draft):
    one = jnp.ones(batch, jnp.float32)
    length = jnp.zeros(batch, jnp.int32)
    return cls(one > 0, length, one, jnp.zeros((batch, num_draft)))


def _go_on(context, i, plan, q):
  """The plan once each row has decided about its token i, whose law is q."""
  if context.more is None:
    return plan._replace(length=plan.length + 1)
  confidence = q.max(-1).astype(jnp.float32)
  go, survival = context.more(i, plan.survival, confidence)
  alive = plan.alive & go
  return _Plan(
    alive,
    plan.length + alive,
    survival,
    plan.confidence.at[:, i].set(confidence),
  )


def known(model, tokens):
  """What is fed for tokens: its last id for one that it does not have (B11)."""
  return jnp.minimum(tokens, model.vocab_size - 1)


def _feed(model, params, cache, tokens, positions):
  """What stands behind tokens [B, T]: hidden [B, D] and the cache."""
  tokens = known(model, tokens)
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
