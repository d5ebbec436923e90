"""The law of `generate.round`, its noise enumerated, is the target's.

Every draft, every side of every acceptance threshold and every next token of a
round is a row of one batch; the rounds that follow go on from the states that
the shipped code returned, stale cache slots included.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from verify_test import TOLERANCE, tables

from specjax import generate, loop, request, types


def bigram_drafter(V):
  """q(. | last token) from a table; it has no state."""

  def propose(q, state, context, noise):
    rows = jnp.arange(len(context.tokens))
    last = context.tokens[rows, context.length - 1]
    tokens, probs = [], []
    for i in range(context.num_draft):
      probs.append(q[last])
      last = noise.draft(i, probs[-1])
      tokens.append(last)
    stack = lambda x, shape: (
      jnp.stack(x, 1) if x else jnp.zeros((len(rows), 0, *shape), jnp.int32)
    )
    K = jnp.full(len(rows), context.num_draft)
    return types.Proposal(stack(tokens, ()), stack(probs, (V,)), K), state

  return types.Drafter(
    features=(),
    init=lambda *args: (),
    propose=propose,
    commit=lambda params, state, outcome: state,
  )


def _outcomes(V, K):
  """Arrays drafts [n, K], sides [n, K] and next tokens [n]: all of them."""
  rows = itertools.product(
    itertools.product(range(V), repeat=K),
    itertools.product((0, 1), repeat=K),
    range(V),
  )
  drafts, sides, following = zip(*rows, strict=True)
  shape = (len(drafts), K)
  return (
    np.array(drafts, np.int32).reshape(shape),
    np.array(sides).reshape(shape),
    np.array(following, np.int32),
  )


def joint_law(p, q, K, T, dtype):
  """{text of T tokens: probability} over successive rounds, from token 0.

  p [V, V, V] is the law after (before, last), and `before` is read from the
  cache: a stale slot that is seen, or a wrong position, changes the law.
  """
  V = len(p)
  target, drafter = toy.trigram(V), bigram_drafter(V)
  with np.errstate(divide="ignore"):
    table = jnp.asarray(np.log(p), dtype)
  q_table = jnp.asarray(q, dtype)
  drafts, sides, following = _outcomes(V, K)
  B = len(drafts)

  @jax.jit
  def run(state, u):
    seen = []

    def choose(n, probs):
      seen.append(probs)
      return jnp.asarray(following)

    noise = types.Noise(
      draft=lambda i, probs: jnp.asarray(drafts[:, i]), accept=u, next=choose
    )
    state = generate.round(
      target, drafter, table, q_table, state, noise, num_draft=K
    )
    return state, seen[0]

  ask = request.make([[0]], max_new=T + K, temperature=1.0)
  start = loop.start(target, table, ask, max_new_tokens=T + K)
  frontier, done = {(): (1.0, start._replace(draft=()))}, {}
  while frontier:
    text, (weight, state) = frontier.popitem()
    before = np.tile((0, 0, *text)[-2:], (B, 1))
    seen = np.concatenate([before, drafts], 1)  # [B, K + 2]
    pd = p[seen[:, :K], seen[:, 1 : K + 1], drafts]
    qd = q[seen[:, 1 : K + 1], drafts]
    a = np.where(qd > 0, np.minimum(1, pd / np.where(qd > 0, qd, 1)), 0)
    u = np.where(sides, (a + 1) / 2, a / 2)
    w = (qd * np.where(sides, 1 - a, a)).prod(1)
    many = _rows(state, np.zeros(B, int))
    new, probs = jax.device_get(run(many, u.astype(dtype)))
    w = w * np.asarray(probs, np.float64)[range(B), following]
    for row in np.flatnonzero(w):
      full = tuple(new.tokens[row, 1 : new.length[row]].tolist())
      if len(full) >= T:
        done[full[:T]] = done.get(full[:T], 0) + weight * w[row]
        continue
      one = _rows(new, np.array([row]))
      old = frontier.get(full, (0.0, None))[0]
      frontier[full] = (old + weight * w[row], one)
  return done


def _rows(state, rows):
  """The state of some rows; what belongs to the whole batch stays."""
  shared = dict(steps=state.steps, stop_ids=state.stop_ids)
  per_row = state._replace(steps=(), stop_ids=())
  return jax.tree.map(lambda x: x[rows], per_row)._replace(**shared)


def target_law(p, T):
  law = {}
  for text in itertools.product(range(len(p)), repeat=T):
    seen = (0, 0, *text)  # the token before the first counts as 0
    law[text] = np.prod([p[seen[t : t + 3]] for t in range(T)])
  return law


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("V, K", [(3, 0), (3, 1), (3, 2), (4, 2), (3, 3)])
def test_joint_law(V, K, dtype):
  """Of K + 2 tokens through successive rounds, in float64 and float32."""
  with jax.enable_x64(True):
    p = np.stack([tables(V, seed)[0] for seed in range(V)])
    q = tables(V, 1)[1]
    got = joint_law(p, q, K, K + 2, dtype)
  want = target_law(p, K + 2)
  error = max(abs(got.get(text, 0) - x) for text, x in want.items())
  assert error <= TOLERANCE[dtype]
  np.testing.assert_allclose(sum(got.values()), 1, atol=1e-6)
