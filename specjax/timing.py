"""What a draft step, a target call and a round cost on this device.

Each thing is a compiled loop of its own, run once to compile it; then all take
turns, so that a drift of the machine's speed falls on each. Costs are medians
over the turns, with the quarters on both sides.
"""

import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import generate, request, types


class Cost(NamedTuple):
  """Seconds, over the turns."""

  median: float
  low: float  # first quartile
  high: float  # third


class Costs(NamedTuple):
  """Of B rows at one context length."""

  plain: Cost | None  # a step of plain decoding, sampling and all
  target: dict[int, Cost]  # {n: a bare call on n tokens a row}
  draft: Cost  # a drafted token
  round: dict[int, Cost]  # {K: a whole round}
  batch: int
  context: int  # tokens in the cache when the clock starts

  def call(self, n):
    """Seconds of a target call on n tokens a row, between measured n linear."""
    known = sorted(self.target)
    return float(np.interp(n, known, [self.target[i].median for i in known]))

  def overhead(self, K):
    """Seconds of a round beside K drafted tokens and a target call."""
    known = sorted(self.round)
    rest = [
      self.round[k].median - k * self.draft.median - self.call(k + 1)
      for k in known
    ]
    return float(np.interp(K, known, rest))

  @property
  def cost_ratio(self):
    """C: draft steps in the time of a target call on one token."""
    return self.call(1) / self.draft.median if self.draft.median else np.inf


def units(costs, K):
  """(c, v [K + 1], o [K + 1]) of `theory.speedup_from_costs`.

  In units of a plain step: a drafted token, a target call on 1..K + 1 tokens,
  what else a round takes.
  """
  step = costs.plain.median
  v = np.array([costs.call(k + 1) for k in range(K + 1)]) / step
  o = np.array([costs.overhead(k) for k in range(K + 1)]) / step
  return costs.draft.median / step, v, o


def measure(
  target,
  params,
  draft,
  *,
  batch,
  slots,
  context,
  widths,
  sampling=None,
  whole=True,
  steps=16,
  turns=5,
  track=lambda turns: turns,
):
  """Return the `Costs` of a pair.

  Args:
    target: a `Target`; params: its parameters.
    draft: a `types.Draft`, whose K is the longest round that is timed.
    batch, slots: B rows of so many cache slots.
    context: tokens before the first timed one; they are made up.
    widths: which K to time, a call on K + 1 tokens and a round of each.
    sampling: dict of `request.make`'s sampling values, by default greedy.
    whole: also time plain steps and whole rounds; without, they are missing.
    steps: target calls between two looks at the clock.
    track: wraps the turns, for a progress bar.

  Raises:
    ValueError: `steps` rounds of the longest draft do not fit the slots.
  """
  widths = sorted({0, *widths})
  need = context + steps * (widths[-1] + 1)
  if need > slots:
    raise ValueError(f"timing needs {need} slots, there are {slots}")
  ask = request.make(
    [_made_up(target, context)] * batch,
    max_new=slots - context,
    seed=np.arange(batch),
    **(sampling or {}),
  )
  size = dict(max_new_tokens=slots - context, slots=slots)
  run = functools.partial(_decode, target, params, ask, size, steps)
  cache, start = target.init_cache(batch, slots), np.int32(context)
  call = lambda n: functools.partial(
    seconds, target_loop(target, batch, n, steps), params, cache, start
  )
  a_round = lambda k: functools.partial(run, draft._replace(num_draft=k))
  longest = draft._replace(num_draft=widths[-1])
  state = generate.start(target, params, ask, draft=longest, **size)
  proposals = propose_loop(draft.drafter, widths[-1], steps)
  times = take_turns(
    {
      "draft": functools.partial(seconds, proposals, draft.params, state),
      **{("call", k + 1): call(k + 1) for k in widths},
      **({"plain": functools.partial(run, None)} if whole else {}),
      **({("round", k): a_round(k) for k in widths} if whole else {}),
    },
    turns,
    track,
  )
  cost = lambda name, each: _cost([x / each for x in times[name]])
  return Costs(
    plain=cost("plain", steps) if whole else None,
    target={k + 1: cost(("call", k + 1), steps) for k in widths},
    draft=cost("draft", steps * max(widths[-1], 1)),
    round={k: cost(("round", k), steps) for k in widths if whole},
    batch=batch,
    context=context,
  )


def _made_up(target, context):
  """Token ids, in a fixed order without repeats nearby."""
  return ((np.arange(context) * 7919) % min(target.vocab_size, 251)).tolist()


def _decode(target, params, ask, size, steps, draft):
  """Seconds of `steps` target calls behind a prompt, prefill apart."""
  state = generate.start(target, params, ask, draft=draft, **size)
  state = jax.block_until_ready(state)
  began = time.perf_counter()
  state = generate.advance(target, params, state, steps=steps, draft=draft)
  jax.block_until_ready(state.steps)
  return time.perf_counter() - began


def seconds(run, *arguments):
  """Of one call, until its result is there."""
  began = time.perf_counter()
  jax.block_until_ready(run(*arguments))
  return time.perf_counter() - began


def take_turns(variants, turns, track=lambda turns: turns):
  """Return {name: [seconds a turn]} of functions that return seconds."""
  times = {name: [] for name in variants}
  for _ in track(range(turns + 1)):
    for name, run in variants.items():
      times[name].append(run())
  return {name: row[1:] for name, row in times.items()}  # the first compiles


def _cost(seconds):
  if len(seconds) == 1:
    return Cost(*seconds * 3)
  low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
  return Cost(median, low, high)


@functools.cache
def target_loop(target, batch, width, steps):
  """A jitted loop of target calls with nothing around them but an argmax.

  Each call feeds `width` tokens a row, one place further on than the call
  before, as a round does that accepts nothing.

  Returns:
    (params, cache, context) -> [batch, width] tokens.
  """

  @jax.jit
  def run(params, cache, context):
    def step(i, carry):
      tokens, cache = carry
      at = jnp.broadcast_to(context + i + jnp.arange(width), tokens.shape)
      hidden, _, cache = target.apply(params, tokens, at, cache)
      return jnp.argmax(target.unembed(params, hidden), -1), cache

    tokens = jnp.zeros((batch, width), jnp.int32)
    return lax.fori_loop(0, steps, step, (tokens, cache))[0]

  return run


@functools.cache
def propose_loop(drafter, num_draft, steps):
  """A jitted loop of proposals of num_draft tokens, each for another place.

  Returns:
    (draft_params, loop.State) -> (Proposal, the drafter's state).
  """

  @jax.jit
  def run(params, state):
    def step(i, carry):
      noise = generate.keyed_noise(state._replace(steps=i), num_draft, "token")
      context = types.Context(
        state.tokens, state.length + i, state.draft_sampling, num_draft
      )
      return drafter.propose(params, carry[1], context, noise)

    first = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(lambda: step(0, (None, state.draft))[0]),
    )
    return lax.fori_loop(0, steps, step, (first, state.draft))

  return run
