"""The joint law of rounds with any drafter, by summing every outcome."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import toy

from specjax import generate, loop, request, rounds, types


def joint_law(
  p,
  drafter,
  params,
  prompt,
  *,
  K,
  T,
  choices,
  policy=None,
  verifier="token",
  copies=None,
):
  """{text of T tokens: probability} behind a prompt, over successive rounds.

  Every draft, every side of every acceptance threshold and every next token
  of a shipped round is a row of one batch; what follows goes on from the
  states that it returned.

  Args:
    p: [V, V, V] float64, the target's law after (before, last).
    drafter, params: the draft; what has a row for each row has one here.
    choices: size of the draft's own vocabulary, 1 if it draws nothing.
    policy: an `adaptive.Policy`, None to draft K tokens in every round.
    verifier: "token" or "block".
    copies: context -> [B], rows that propose something else than was drawn.
  """
  target = toy.trigram(len(p))
  with np.errstate(divide="ignore"):
    table = jnp.asarray(np.log(p))
  every = _outcomes(choices, K, len(p))
  sent, B = _Sent({}, {}), len(every.draws)
  copies = copies or (lambda context: jnp.zeros(B, bool))
  args = target, table, p, drafter, params, every, sent, verifier, copies
  run = _program(*args)

  ask = request.make([prompt], max_new=T + K, temperature=1.0)
  draft = types.Draft(drafter, params, K, policy=policy)
  start = loop.start(target, table, ask, max_new_tokens=T + K, draft=draft)
  frontier, done = {(): (1.0, start)}, {}
  while frontier:
    text, (weight, state) = frontier.popitem()
    sent.drawn.clear()
    new, w, q, copied = jax.device_get(run(_rows(state, np.zeros(B, int))))
    jax.effects_barrier()
    w = w * sent.following.pop(0)[np.arange(B), every.following]
    assert choices == 1 or policy or copied.all() or len(sent.drawn) == K
    for i, law in sent.drawn.items():  # B05: drawn from what the proposal says
      chance = np.asarray(law)[np.arange(B), every.draws[:, i]]
      np.testing.assert_allclose(chance[~copied], q[~copied, i], atol=1e-6)
    for row in np.flatnonzero(w):
      full = tuple(new.tokens[row, len(prompt) : new.length[row]].tolist())
      if len(full) >= T:
        done[full[:T]] = done.get(full[:T], 0) + weight * w[row]
        continue
      old, _ = frontier.get(full, (0.0, None))
      frontier[full] = old + weight * w[row], _rows(new, np.array([row]))
  return done


class _Sent(NamedTuple):
  """What a running round sends: out of a loop nothing can be returned."""

  drawn: dict  # {place: [B, Vq] the law that the draft's draw was given}
  following: dict  # {0: [B, V] that of the token behind what was accepted}


class Outcomes(NamedTuple):
  """All that may happen in a round."""

  draws: np.ndarray  # [B, K] in the draft's own vocabulary
  sides: np.ndarray  # [B, K] 1 where u falls above the threshold
  following: np.ndarray  # [B]


def _outcomes(choices, K, V):
  rows = itertools.product(
    itertools.product(range(choices), repeat=K),
    itertools.product((0, 1), repeat=K),
    range(V),
  )
  draws, sides, following = zip(*rows, strict=True)
  array = lambda x: np.array(x, np.int32).reshape(len(draws), -1)
  return Outcomes(array(draws), array(sides), array(following)[:, 0])


def _program(target, table, p, drafter, params, every, sent, verifier, copies):
  """state -> (state, weight [B], q [B, K], copied [B]), one round older.

  q is of the drafts, of which some are not what was drawn.

  The weight lacks that of the following token, whose law is `sent`.
  """
  B, K = every.draws.shape

  def draw(i, q):
    jax.debug.callback(lambda i, q: sent.drawn.update({int(i): q}), i, q)
    return jnp.asarray(every.draws)[:, i]

  def choose(n, probs):
    del n
    # as it is: a callback's thread knows no float64
    keep = lambda bits: sent.following.update(
      {0: np.asarray(bits).view(probs.dtype).reshape(probs.shape)}
    )
    jax.debug.callback(keep, jax.lax.bitcast_convert_type(probs, jnp.uint32))
    return jnp.asarray(every.following)

  def thresholds(state, noise):
    """u [B, K] on the wanted side of what it meets, weight [B], q [B, K]."""
    context = types.Context(
      state.tokens, state.length, state.sampling, K, *rounds.rule(state)
    )
    proposal, _ = drafter.propose(params, state.draft, context, noise)
    x, probs, length, _ = proposal
    rows, i = jnp.arange(B)[:, None], jnp.arange(K)
    seen = state.tokens[rows, state.length[:, None] - jnp.array([2, 1])]
    seen = jnp.concatenate([seen, x], 1)
    laws = jnp.asarray(p)[seen[:, :K], seen[:, 1 : K + 1]]  # [B, K, V]
    px, qx = laws[rows, i, x], probs[rows, i, x]
    a = jnp.where(qx > 0, jnp.minimum(1, px / qx), 0)
    if verifier == "block":
      a = _block(laws, probs, jnp.where(qx > 0, px / qx, 0), length)
    weight = jnp.where(every.sides, 1 - a, a) * qx
    # of what is not real one draw and one side stand for all
    once = (every.draws == 0) & (every.sides == 0)
    weight = jnp.where(i < length[:, None], weight, once).prod(1)
    copied = copies(context)  # any draws give it: the first stand for all
    weight *= ~copied | (every.draws == 0).all(1)
    return jnp.where(every.sides, (a + 1) / 2, a / 2), weight, (qx, copied)

  @jax.jit
  def run(state):
    noise = types.Noise(draft=draw, accept=jnp.zeros((B, K)), next=choose)
    u, weight, drafts = thresholds(state, noise)
    noise = noise._replace(accept=u)
    new = generate.round(
      target,
      drafter,
      table,
      params,
      state,
      noise,
      num_draft=K,
      verifier=verifier,
    )
    return new, weight, *drafts

  return run


def _block(p, q, ratio, length):
  """h_1 .. h_K [B, K] of block verification; see `verify.block`."""
  K = ratio.shape[1]
  pi, found = jnp.ones(len(ratio)), []
  for i in range(1, K + 1):
    pi = jnp.minimum(1, pi * ratio[:, i - 1])
    h = pi
    if i < K:
      S = jnp.maximum(pi[:, None] * p[:, i] - q[:, i], 0).sum(1)
      below = S + 1 - pi
      h = jnp.where(below > 0, S / jnp.where(below > 0, below, 1), 1)
      h = jnp.where(i < length, h, pi)  # the draft ends here
    found.append(jnp.where(h > 1 - 1e-9, 1, h))  # 1 but for rounding
  return jnp.stack(found, 1)


def target_law(p, prompt, T):
  """The same of plain decoding."""
  law = {}
  for text in itertools.product(range(len(p)), repeat=T):
    seen = (*prompt[-2:], *text)
    law[text] = np.prod([p[seen[t : t + 3]] for t in range(T)])
  return law


def error(got, want):
  assert set(got) <= set(want)
  return max(abs(got.get(text, 0) - x) for text, x in want.items())


def laws(V, seed=0):
  """Random [V, V, V], some entries 0."""
  rng = np.random.default_rng(seed)
  p = rng.dirichlet(np.full(V, 0.7), (V, V))
  p[rng.random(p.shape) < 0.15] = 0
  p[p.sum(-1) == 0, 0] = 1
  return p / p.sum(-1, keepdims=True)


def _rows(state, rows):
  """The state of some rows; what belongs to the whole batch stays."""
  shared = dict(steps=state.steps, stop_ids=state.stop_ids)
  own = state.adaptive
  per_row = state._replace(steps=(), stop_ids=(), adaptive=own and own.learned)
  some = jax.tree.map(lambda x: x[rows], per_row)._replace(**shared)
  return some._replace(adaptive=own and own._replace(learned=some.adaptive))
