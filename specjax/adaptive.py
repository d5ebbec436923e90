"""How many tokens to draft: as long as the next one is worth its cost.

With lambda the tokens that decoding makes in the time of a plain step, drafting
one more token pays exactly if

  P(it and all before it are accepted | what is known before it is drawn)
    > lambda * (c + v_{i+1} - v_i),

c the cost of a draft step and v_i that of a target call on i + 1 tokens, in
plain steps (renewal reward, the threshold policy of Huang et al. 2024,
"SpecDec++"). Both sides are learned by each row from its own past rounds: the
mean of sum min(p, q) where the draft was about as sure of itself, and lambda.

Nothing here looks at the token that it decides about, so that every verifier
stays exact. The tokens of a row depend on its own past alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BINS = 8  # of a draft's confidence, and as many of a copy's
_PRIOR = 4.0  # tests that a bin begins with
# What they found, a + b confidence, of a model's tokens and of copies: about
# what small heads and copies are worth at T = 0 and T = 1 (LOG.md, 2026-11-30)
_BELIEFS = (0.1, 0.5), (0.15, 0.75)


class Policy(NamedTuple):
  """What a round costs, in plain steps; data, so that none compiles anew."""

  draft: jax.Array  # [] float32, c: a drafted token
  verify: jax.Array  # [K + 1] float32, v_k: a target call on k + 1 tokens
  overhead: jax.Array  # [] float32, the rest of a round


class Learned(NamedTuple):
  """What a row's past rounds have taught, fields [B, ...]."""

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

  None costs anything up to n, the next one more than all.
  """
  verify = jnp.where(jnp.arange(num_draft + 1) <= n, 0.0, 1e9)
  return Policy(jnp.float32(0), verify, jnp.float32(1))


def begin(batch):
  """Return the `Learned` of rows that have seen nothing yet."""
  middle = (jnp.arange(BINS) + 0.5) / BINS
  belief = jnp.concatenate([a + b * middle for a, b in _BELIEFS])
  tested = jnp.full((batch, 2 * BINS), _PRIOR, jnp.float32)
  one = jnp.ones(batch, jnp.float32)
  return Learned(tested, tested * belief, one, one)


def _is_copy(confidence):
  return confidence > 1


def _bin(confidence):
  copy = _is_copy(confidence)
  within = ((confidence - copy) * BINS).astype(jnp.int32)
  return jnp.clip(within, 0, BINS - 1) + copy * BINS


def decide(policy, learned, i, survival, confidence):
  """Return whether rows draft their token i [B], and its survival [B].

  Args:
    i: [] from 0.
    survival: [B] that of the tokens before it, 1 for the first.
    confidence: [B] how sure the draft is of its token i before it is drawn, of
      `types.Proposal`; what that is worth is learned.
  """
  at = _bin(confidence)[:, None]
  take = lambda x: jnp.take_along_axis(x, at, 1)[:, 0]
  survival = survival * take(learned.overlap) / take(learned.tested)
  rate = learned.tokens / learned.cost
  draft = jnp.where(_is_copy(confidence), 0, policy.draft)
  more = draft + policy.verify[i + 1] - policy.verify[i]
  return survival > rate * more, survival


def learn(policy, learned, confidence, overlap, drafted, emitted):
  """Return what a round adds.

  Args:
    confidence: [B, K] of each drafted token.
    overlap: [B, K] sum min(p, q) where it was tested, else NaN.
    drafted: [B] tokens; the target is called on one more, as far as the row is
      concerned: what its neighbours need is none of its business.
    emitted: [B] tokens; a row with none has ended, and learns nothing.
  """
  real = ~jnp.isnan(overlap) & (emitted > 0)[:, None]
  one_hot = jax.nn.one_hot(_bin(confidence), 2 * BINS) * real[..., None]
  found = jnp.where(real, overlap, 0)
  asked = jnp.where(_is_copy(confidence).any(1), 0, drafted)  # of a model
  spent = policy.draft * asked + policy.verify[drafted] + policy.overhead
  return Learned(
    learned.tested + one_hot.sum(1),
    learned.overlap + (one_hot * found[..., None]).sum(1),
    learned.tokens + emitted,
    learned.cost + jnp.where(emitted > 0, spent, 0),
  )


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
