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
  # [B, K] `_confidence` of each token before it was drawn, NaN where a row did
  # not ask
  confidence: jax.Array


def propose(context, noise, head, feed, x, carry, *, vocab_size, ids=None):
  """Draw context.num_draft >= 1 tokens, each from its law behind those before.

  Args:
    context, noise: of `Drafter.propose`.
    head: x -> logits [B, Vq].
    feed: (i, tokens [B], carry) -> (x, carry): feeds the drafted token i - 1
      and gives what the head makes token i of, i from 1.
    x: an array, what it makes token 0 of.
    carry: what feed changes, such as a cache.
    vocab_size: V; a draft's logits beyond it are never drafted.
    ids: an array [Vq], the token of each logit; None: 0, 1, 2, ...

  Returns:
    `Proposal` and the carry; the last drafted token was not fed.
  """
  B, K = len(context.tokens), context.num_draft

  def draw(logits, i):
    """A token [B] and the law [B, V] that it was drawn from."""
    q = jax.vmap(sampling.probabilities)(logits, context.sampling)
    token = noise.draft(i, q)
    if ids is None:
      return token, jnp.pad(q, ((0, 0), (0, vocab_size - q.shape[1])))
    wide = jnp.zeros((B, vocab_size), q.dtype)
    return jnp.asarray(ids)[token], wide.at[:, ids].set(q)

  def one(i, x, plan):
    """Token i, if rows go on to it, its law, and the plan."""
    logits = head(x)[:, :vocab_size]
    plan = _go_on(context, i, plan, logits)
    if context.more is None:
      return *draw(logits, i), plan
    token, q = _where_any(plan.alive, draw, logits, i)
    # there is no token K, and no use in what is said of the last one
    return token, q, _ask(context, jnp.minimum(i + 1, K - 1), plan)

  token, q, plan = _first(context, one, x, _ask(context, 0, _begin(B, K)))
  # padded, not set: XLA's CPU backend makes five copies of a scatter at K = 1
  drafted = jnp.pad(token[:, None], ((0, 0), (0, K - 1)))
  probs = jnp.pad(q[:, None], ((0, 0), (0, K - 1), (0, 0)))

  def step(state):
    i, carry, drafted, probs, plan = state
    x, carry = feed(i, drafted[:, i - 1], carry)
    token, q, plan = one(i, x, plan)
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
  unknown = jnp.full((batch, num_draft), jnp.nan, jnp.float32)
  return _Plan(one > 0, length, one, unknown)


def _first(context, one, x, plan):
  """one(0, x, plan), or what it would be if no row asks."""
  if context.ask is None:
    return one(0, x, plan)

  def once(i, found):
    # or XLA would compute it in front of the loop, asked or not
    return one(0, lax.optimization_barrier((x, i))[0], found[-1])

  shapes = jax.eval_shape(one, 0, x, plan)
  token, q = (jnp.zeros(a.shape, a.dtype) for a in shapes[:2])
  trips = plan.alive.any().astype(jnp.int32)
  return lax.fori_loop(0, trips, once, (token, q, plan))


def _where_any(rows, function, *args):
  """function(*args), or zeros where there are no such rows."""
  shapes = jax.eval_shape(function, *args)
  zeros = lambda *_: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
  return lax.cond(rows.any(), function, zeros, *args)


def _ask(context, i, plan):
  """The plan without the rows that need not know how sure token i would be."""
  if context.ask is None:
    return plan
  return plan._replace(alive=plan.alive & context.ask(i, plan.survival))


def _go_on(context, i, plan, logits):
  """The plan once each row has decided about its token i, from its logits."""
  if context.more is None:
    return plan._replace(length=plan.length + 1)
  confidence = _confidence(logits)
  go, survival = context.more(i, plan.survival, confidence)
  known = jnp.where(plan.alive, confidence, jnp.nan)
  alive = plan.alive & go
  return _Plan(
    alive,
    plan.length + alive,
    survival,
    plan.confidence.at[:, i].set(known),
  )


def _confidence(logits):
  """The largest probability [B] of logits [B, Vq] as they are.

  Of the law that is drawn from it would be 1 wherever that is greedy.
  """
  logits = logits.astype(jnp.float32)
  found = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))
  return jnp.nan_to_num(found)  # NaN is for a row that did not ask


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
