"""Draft by looking up the end of the text in the text: no model at all.

Good where an answer repeats its prompt or itself: rewriting, summarising,
answering from a document, code. (Prompt lookup decoding: Saxena 2023.)
"""

import functools

import jax
import jax.numpy as jnp

from specjax.types import Drafter, Proposal


@functools.cache
def make(vocab_size, *, longest=8, shortest=1):
  """Return the `Drafter` that copies what followed the same words before.

  Of all earlier places in prompt and answer whose last tokens agree with the
  last tokens of the row, the one that agrees on the most of them is chosen, up
  to `longest`, and the latest of those; what stands behind it is the draft. A
  copy that reaches the end of the text goes on as the period it then has. Where
  not even `shortest` tokens agree, nothing is drafted.

  q is one-hot: the draft is a function of the text, so that a token is
  accepted with probability p of it and its residual is p without it (B05).
  It has no parameters and no state: pass ().

  Raises:
    ValueError: not 1 <= shortest <= longest.
  """
  if not 1 <= shortest <= longest:
    raise ValueError(
      f"needs 1 <= shortest <= longest, got shortest {shortest} and longest"
      f" {longest}"
    )

  def lookup(tokens, length, num_draft):
    """Of one row [S]: the draft [K] and how many of it are real."""
    s = jnp.arange(len(tokens))
    agreed, alike = jnp.zeros_like(s), s < length - 1
    for j in range(longest):
      mine = tokens[jnp.maximum(length - 1 - j, 0)]
      alike &= (jnp.roll(tokens, j) == mine) & (s >= j)
      agreed += alike
    best = jnp.argmax(agreed * len(tokens) + s)  # the latest of the longest
    period = jnp.maximum(length - 1 - best, 1)
    found = agreed[best] >= shortest
    at = best + 1 + jnp.arange(num_draft) % period
    # where nothing is found, the last token: padding may be anything
    draft = tokens[jnp.minimum(at, length - 1)]
    length = jnp.where(found, num_draft, 0).astype(jnp.int32)
    return draft, length, agreed[best] / longest

  def propose(params, state, context, noise):
    del params, noise
    draft, length, confidence = jax.vmap(lookup, (0, 0, None))(
      context.tokens, context.length, context.num_draft
    )
    confidence = 1 + confidence  # a copy's
    if context.more is not None:
      length = jnp.minimum(length, _worth(context, confidence))
    # float32 by name: under jax_enable_x64 a float64 would widen p (B59)
    probs = jax.nn.one_hot(draft, vocab_size, dtype=jnp.float32)
    confidence = jnp.broadcast_to(confidence[:, None], draft.shape)
    return Proposal(draft, probs, length, confidence), state

  return Drafter(
    features=(),
    init=lambda params, prompt, length, taps, slots: (),
    propose=propose,
    commit=lambda params, state, outcome: state,
  )


def _worth(context, confidence):
  """How many tokens of a copy are worth drafting [B]."""
  survival = jnp.ones_like(confidence)
  alive, length = survival > 0, jnp.zeros(len(confidence), jnp.int32)
  for i in range(context.num_draft):
    go, survival = context.more(i, survival, confidence)
    alive &= go
    length += alive
  return length
