"""Copy where the text repeats itself, elsewhere ask a head.

A copy costs nothing and may be long, but most text repeats nothing; a head
always has a guess. A row that finds the end of its text earlier in it drafts
what followed there (`ngram.py`), any other row what the head drafts. (Oliaro et
al. 2025, "SuffixDecoding", arXiv:2411.04975, has such a pair.)
"""

import functools

import jax
import jax.numpy as jnp

from specjax.drafters import ngram


@functools.cache
def make(head, vocab_size, *, least):
  """Return the `Drafter` that copies where `least` tokens or more repeat.

  Which of the two drafts is settled by the committed tokens, and by what the
  rule of an adaptive length has learned from them, before anything is drawn.
  So q is the law that each token was drawn from, and the output stays exact.
  Under such a rule a row copies only what is worth its verification, and the
  head drafts where that is nothing; copies have beliefs of their own, their
  confidence is above 1, and cost nothing to draft (`adaptive.py`).

  Args:
    head: a `Drafter` that has every committed token fed to it by `commit`, as
      `feature.make`'s has: it cannot have drafted those that were copied. Its
      parameters and state are this drafter's.

  Raises:
    ValueError: as `ngram.make`'s, of least as the shortest match.
  """
  lookup = ngram.make(vocab_size, shortest=least)

  def propose(params, state, context, noise):
    if not context.num_draft:
      return head.propose(params, state, context, noise)
    copy, _ = lookup.propose((), (), context, noise)
    copies = copy.length > 0
    rest = context._replace(
      more=_of_others(context.more, ~copies),
      ask=lambda i, survival: ~copies & _asks(context, i, survival),
    )
    drafted, state = head.propose(params, state, rest, noise)

    def choose(ours, theirs):
      mine = copies.reshape(-1, *[1] * (ours.ndim - 1))
      return jnp.where(mine, ours, theirs)

    proposal = jax.tree.map(choose, copy, drafted)
    if context.more is None:
      proposal = proposal._replace(confidence=None)
    return proposal, state

  return head._replace(propose=propose)


def _asks(context, i, survival):
  return True if context.ask is None else context.ask(i, survival)


def _of_others(more, drafts):
  """`Context.more` of the head: no token in rows that do not draft [B]."""

  def decide(i, survival, confidence):
    if more is None:
      return drafts, survival
    go, survival = more(i, survival, confidence)
    return go & drafts, survival

  return decide
