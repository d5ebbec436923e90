"""Draft token by token: what every drafter with a law of its own has in common.

A method says what q is behind the committed tokens, and how feeding one more
drafted token gives the next q; drawing, the draft's own vocabulary and rows
that stop early are here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import sampling
from specjax.types import Proposal


class _Plan(NamedTuple):
  """How far each row drafts."""

  alive: jax.Array  # [B] bool, it has not stopped
  length: jax.Array  # [B] int32, tokens so far
  survival: jax.Array  # [B] what is believed of them all
  confidence: jax.Array  # [B, K] `_confidence` of each, before it was drawn


def propose(context, noise, logits, feed, carry, *, vocab_size, ids=None):
  """Draw context.num_draft >= 1 tokens, each from its law behind those before.

  Args:
    context, noise: of `Drafter.propose`.
    logits: [B, Vq] behind the committed tokens.
    feed: (i, tokens [B], carry) -> (logits [B, Vq], carry): feeds the drafted
      token i - 1 and gives the logits of token i, i from 1.
    carry: what feed changes, such as a cache.
    vocab_size: V; a draft's logits beyond it are never drafted.
    ids: an array [Vq], the token of each logit; None: 0, 1, 2, ...

  Returns:
    `Proposal` and the carry; the last drafted token was not fed.
  """
  B, K = len(context.tokens), context.num_draft

  def law(logits):
    laws = jax.vmap(sampling.probabilities)
    return laws(logits[:, :vocab_size], context.sampling)

  def draw(q, i):
    """A token [B] and the law [B, V] that it was drawn from."""
    token = noise.draft(i, q)
    if ids is None:
      return token, jnp.pad(q, ((0, 0), (0, vocab_size - q.shape[1])))
    wide = jnp.zeros((B, vocab_size), q.dtype)
    return jnp.asarray(ids)[token], wide.at[:, ids].set(q)

  plan = _go_on(context, 0, _begin(B, K), logits[:, :vocab_size])
  token, q = draw(law(logits), 0)
  # padded, not set: XLA's CPU backend makes five copies of a scatter at K = 1
  drafted = jnp.pad(token[:, None], ((0, 0), (0, K - 1)))
  probs = jnp.pad(q[:, None], ((0, 0), (0, K - 1), (0, 0)))

  def step(state):
    i, carry, drafted, probs, plan = state
    logits, carry = feed(i, drafted[:, i - 1], carry)
    plan = _go_on(context, i, plan, logits[:, :vocab_size])
    token, q = draw(law(logits), i)
    drafted = drafted.at[:, i].set(token)
    return i + 1, carry, drafted, probs.at[:, i].set(q), plan

  _, carry, drafted, probs, plan = lax.while_loop(
    lambda state: (state[0] < K) & state[-1].alive.any(),
    step,
    (jnp.int32(1), carry, drafted, probs, plan),
  )
  confidence = None if context.more is None else plan.confidence
  return Proposal(drafted, probs, plan.length, confidence), carry


def _begin(batch, num_draft):
  one = jnp.ones(batch, jnp.float32)
  length = jnp.zeros(batch, jnp.int32)
  return _Plan(one > 0, length, one, jnp.zeros((batch, num_draft)))


def _go_on(context, i, plan, logits):
  """The plan once each row has decided about its token i, from its logits."""
  if context.more is None:
    return plan._replace(length=plan.length + 1)
  confidence = _confidence(logits)
  go, survival = context.more(i, plan.survival, confidence)
  alive = plan.alive & go
  return _Plan(
    alive,
    plan.length + alive,
    survival,
    plan.confidence.at[:, i].set(confidence),
  )


def _confidence(logits):
  """The largest probability [B] of logits [B, Vq] as they are.

  Of the law that is drawn from it would be 1 wherever that is greedy.
  """
  logits = logits.astype(jnp.float32)
  return jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))


def nothing(batch, vocab_size):
  """Return the `Proposal` of K = 0."""
  return Proposal(
    tokens=jnp.zeros((batch, 0), jnp.int32),
    # float32 by name: under jax_enable_x64 a float64 would widen p (B59)
    probs=jnp.zeros((batch, 0, vocab_size), jnp.float32),
    length=jnp.zeros(batch, jnp.int32),
  )


def checked(ids, vocab_size):
  """The ids as an array; a scatter would drop or overwrite what is wrong.

  Raises:
    ValueError: an id that the target does not have, or one given twice: its
      mass would be lost.
  """
  ids = np.array(ids, np.int32)
  if not ids.size or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(f"a draft's ids must be in 0..{vocab_size - 1}")
  if len(np.unique(ids)) < len(ids):
    raise ValueError("a draft's ids must differ from each other")
  return ids
