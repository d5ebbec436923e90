"""How many tokens to draft: as long as the next one is worth its cost.

With lambda the tokens that decoding makes in the time of a plain step, drafting
one more token pays by itself if

  P(it and all before it are accepted | what is known before it is drawn)
    > lambda * (v_{i+1} - v_i),

v_i the cost of a target call on i + 1 tokens, in plain steps (renewal reward,
the threshold policy of Huang et al. 2024, "SpecDec++"). To know how sure the
draft is of a token takes a draft step, c plain ones, which is spent by then. So
a row asks only if what the answer is worth is expected to be more:

  E[max(0, left side - right side)] > lambda * c,

over how sure the draft has been. (c is the mean of a draft step; what the first
one of a round takes is less for a feature head, whose layers have run by then,
and an `lm` feeds its last two tokens whether it asks or not.) Each row learns
all of it from its own past rounds: how sure its draft is, the mean of sum
min(p, q) where it was about as sure, and lambda. The first two fade, so that a
row that has stopped asking goes back to what it began with and asks again.

Nothing here looks at the token that it decides about, so that every verifier
stays exact. The tokens of a row depend on its own past alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BINS = 8  # of a draft's confidence, and as many of a copy's
_PRIOR = 4.0  # tests that a bin begins with
_SEEN = 0.5  # answers that it begins with
_FADE = 63 / 64  # of what was learned, a round
# What they found, a + b confidence, of a model's tokens and of copies: about
# what a small head and copies are worth (LOG.md, 2026-11-30)
_GREEDY = (0.1, 0.5), (0.35, 0.6)
_SAMPLED = (0.23, 0.3), (0.2, 0.5)  # at T = 1


class Policy(NamedTuple):
  """What a round costs, in plain steps; data, so that none compiles anew."""

  draft: jax.Array  # [] float32, c: a draft step
  verify: jax.Array  # [K + 1] float32, v_k: a target call on k + 1 tokens
  overhead: jax.Array  # [] float32, the rest of a round


class Learned(NamedTuple):
  """What a row's past rounds have taught, fields [B, ...]."""

  belief: jax.Array  # [B, 2 BINS] float32, of sum min(p, q), to begin with
  seen: jax.Array  # [B, BINS] float32, a model's answers
  tested: jax.Array  # [B, 2 BINS] float32
  overlap: jax.Array  # [B, 2 BINS] float32, of sum min(p, q) over them
  tokens: jax.Array  # [B] float32 emitted
  cost: jax.Array  # [B] float32, plain steps


class Adaptive(NamedTuple):
  """What a state carries."""

  policy: Policy
  learned: Learned


def exactly(num_draft, n):
  """Return the `Policy` by which rows draft n of num_draft tokens, if they can.

  None costs anything up to n, the next one more than all, so that they do not
  even ask.
  """
  verify = jnp.where(jnp.arange(num_draft + 1) <= n, 0.0, 1e9)
  return Policy(jnp.float32(0), verify, jnp.float32(1))


def begin(temperature):
  """Return the `Learned` of rows that have seen nothing yet.

  A draft that is not sure is seldom right at T = 0, where there is one right
  token; at T = 1 it shares some of its law with the target's whatever it is.

  Args:
    temperature: [B] of the draft's law; between 0 and 1 the beliefs are, too.
  """
  middle = (np.arange(BINS, dtype=np.float32) + 0.5) / BINS
  line = lambda of: np.concatenate([a + b * middle for a, b in of])
  warm = np.clip(temperature, 0, 1)[:, None]
  belief = (1 - warm) * line(_GREEDY) + warm * line(_SAMPLED)
  nothing = np.zeros_like(belief, np.float32)
  one = np.ones(len(belief), np.float32)
  return Learned(
    belief.astype(np.float32), nothing[:, :BINS], nothing, nothing, one, one
  )


def _is_copy(confidence):
  return confidence > 1


def _bin(confidence):
  copy = _is_copy(confidence)
  within = ((confidence - copy) * BINS).astype(jnp.int32)
  return jnp.clip(within, 0, BINS - 1) + copy * BINS


def _worth(learned):
  """What is believed of sum min(p, q), [B, 2 BINS]."""
  return (_PRIOR * learned.belief + learned.overlap) / (_PRIOR + learned.tested)


def _rate(learned):
  """lambda [B]."""
  return learned.tokens / learned.cost


def _price(policy, learned, i):
  """What verifying token i must bring, in tokens [B]."""
  return _rate(learned) * (policy.verify[i + 1] - policy.verify[i])


def ask(policy, learned, i, survival):
  """Return whether rows need to know how sure their draft is of token i [B].

  Args:
    i, survival: as of `decide`.
  """
  worth = survival[:, None] * _worth(learned)[:, :BINS]
  gain = jnp.maximum(worth - _price(policy, learned, i)[:, None], 0)
  often = _SEEN + learned.seen
  gain = (often * gain).sum(1) / often.sum(1)
  return gain > _rate(learned) * policy.draft


def decide(policy, learned, i, survival, confidence):
  """Return whether rows draft their token i [B], and its survival [B].

  Args:
    i: [] from 0.
    survival: [B] that of the tokens before it, 1 for the first.
    confidence: [B] how sure the draft is of its token i before it is drawn, of
      `types.Proposal`; what that is worth is learned.
  """
  at = _bin(confidence)[:, None]
  survival = survival * jnp.take_along_axis(_worth(learned), at, 1)[:, 0]
  return survival > _price(policy, learned, i), survival


def learn(policy, learned, confidence, overlap, drafted, emitted):
  """Return what a round adds.

  Args:
    confidence: [B, K] of each token, NaN where the row did not ask.
    overlap: [B, K] sum min(p, q) where it was tested, else NaN.
    drafted: [B] tokens; the target is called on one more, as far as the row is
      concerned: what its neighbours need is none of its business.
    emitted: [B] tokens; a row with none has ended, and learns nothing.
  """
  runs = emitted > 0
  # float32 by name: under jax_enable_x64 the default is another (B59)
  at = jax.nn.one_hot(_bin(confidence), 2 * BINS, dtype=jnp.float32)
  tested = at * (~jnp.isnan(overlap))[..., None]
  asked = ~jnp.isnan(confidence) & ~_is_copy(confidence)
  found = jnp.where(jnp.isnan(overlap), 0, overlap).astype(jnp.float32)
  spent = policy.draft * asked.sum(1) + policy.verify[drafted] + policy.overhead
  new = Learned(
    belief=learned.belief,
    seen=_FADE * learned.seen + (at * asked[..., None]).sum(1)[:, :BINS],
    tested=_FADE * learned.tested + tested.sum(1),
    overlap=_FADE * learned.overlap + (tested * found[..., None]).sum(1),
    tokens=learned.tokens + emitted,
    cost=learned.cost + spent,
  )
  keep = lambda x, old: jnp.where(runs.reshape(-1, *[1] * (x.ndim - 1)), x, old)
  return jax.tree.map(keep, new, learned)


def widths(num_draft):
  """The compiled widths of a target call: 1, 2, 3, 5, 9, ... K + 1 tokens."""
  found = {1, num_draft + 1}
  k = 1
  while k <= num_draft:
    found.add(k + 1)
    k *= 2
  return tuple(sorted(found))


def by_width(need, num_draft, body, carry):
  """Return body(width, first, carry) of the smallest of `widths` for `need`.

  The carry as it is if nothing is needed. Each width is a loop of no trip or
  one: a `lax.switch` would copy the caches in it.

  Args:
    body: it takes the first n columns of an x [B, N, ...] by first(x, n).
      What it made of x itself, XLA would compute in front of every loop, also
      of those that are not entered.
  """
  narrower = 0
  for width in widths(num_draft):
    once = (need > narrower) & (need <= width)

    def step(i, carry, width=width):
      def first(x, n):
        return lax.optimization_barrier((x, i))[0][:, :n]

      return body(width, first, carry)

    carry = lax.fori_loop(0, once.astype(jnp.int32), step, carry)
    narrower = width
  return carry
