"""What a drafted token, a target call and a round cost on this device.

Each thing is a compiled loop of its own, run once to compile it; then all take
turns, so that a drift of the machine's speed falls on each. Costs are medians
over the turns, with the quarters on both sides. What was not measured can be
extrapolated by a roofline, and is then marked as modelled.
"""

import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import generate, multihost, request, types


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
  modelled: bool = False  # extrapolated by `extrapolate`, not measured

  def call(self, n):
    """Seconds of a target call on n tokens a row, between measured n linear.

    ValueError outside them.
    """
    known = sorted(self.target)
    if not known[0] <= n <= known[-1]:
      raise ValueError(f"calls on {known} tokens were measured, not on {n}")
    return float(np.interp(n, known, [self.target[m].median for m in known]))

  def overhead(self, K):
    """Seconds of a round beside K drafted tokens and a target call.

    Between measured K linear, outside them that of the nearest.
    """
    known = sorted(self.round)
    parts = [k * self.draft.median + self.call(k + 1) for k in known]
    rest = [self.round[k].median for k in known] - np.array(parts)
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


def fit(room, context, longest, steps):
  """(context, steps) nearest to those asked for that fit some room.

  Args:
    room: tokens that the slots and both contexts hold.
    longest: K of the longest round; `steps` of them follow the context.

  Raises:
    ValueError: not one does.
  """
  steps = min(steps, (room - 1) // (longest + 1))
  if steps < 1:
    raise ValueError(f"a round of K = {longest} does not fit {room} tokens")
  return max(min(context, room - steps * (longest + 1)), 1), steps


def measure(
  target,
  params,
  drafts,
  *,
  batch,
  slots,
  context,
  widths,
  sampling=None,
  whole=True,
  steps=16,
  turns=5,
  track=lambda runs: runs,
):
  """Return {name: `Costs`} of a target and its drafts, measured in turns.

  Args:
    target: a `Target`; params: its parameters.
    drafts: {name: `types.Draft`}; their own num_draft is not looked at.
    batch, slots: B rows of so many cache slots.
    context: tokens before the first timed one; they are made up.
    widths: which K to time: a call on K + 1 tokens and a round of each; and a
      call on one token.
    sampling: dict of `request.make`'s sampling values, by default greedy.
    whole: also time plain steps and whole rounds; without, they are missing.
    steps: target calls between two looks at the clock.
    track: wraps the list of all that is run, for a progress bar.

  Raises:
    ValueError: `steps` of the longest round do not fit; see `fit`.
  """
  widths = sorted(set(widths))
  longest, most = widths[-1], steps * (widths[-1] + 1)
  room = min(slots, target.context)
  if context + most > room:
    raise ValueError(f"timing needs {context + most} tokens, there are {room}")
  ask = request.make(
    [made_up(target, context)] * batch,
    max_new=most,
    seed=np.arange(batch),
    **(sampling or {}),
  )
  sizes = dict(max_new_tokens=most, slots=slots)
  run = functools.partial(decode, target, params, ask, sizes, steps)
  variants = calls(target, params, ask, slots, {0, *widths}, steps)
  # a proposal goes on behind the prompt, where padding repeats itself
  text = np.array([made_up(target, slots)] * batch, np.int32)
  for name, draft in drafts.items():
    draft = draft._replace(num_draft=longest)
    state = generate.start(target, params, ask, draft=draft, **sizes)
    state = state._replace(tokens=text)
    loop = propose_loop(draft.drafter, longest, steps)
    args = loop, draft.params, state
    variants["draft", name] = functools.partial(seconds, *args)
    for k in widths if whole else ():
      a_round = functools.partial(run, draft._replace(num_draft=k))
      variants["round", name, k] = a_round
  if whole:
    variants["plain"] = functools.partial(run, None)
  times = multihost.same(take_turns(variants, turns, track))
  cost = lambda key, each=steps: _cost([x / each for x in times[key]])
  bare = {k + 1: cost(("call", k + 1)) for k in (0, *widths)}
  return {
    name: Costs(
      plain=cost("plain") if whole else None,
      target=bare,
      draft=cost(("draft", name), steps * max(longest, 1)),
      round={k: cost(("round", name, k)) for k in widths if whole},
      batch=batch,
      context=context,
    )
    for name in drafts
  }


def calls(target, params, ask, slots, widths, steps):
  """{("call", n): () -> seconds} of bare target calls behind the prompts."""
  batch, context = ask.prompt.shape
  cache = target.init_cache(batch, slots)
  loop = lambda n: target_loop(target, batch, n, steps)
  some = {k + 1: functools.partial(loop(k + 1), params) for k in widths}
  timed = in_turn(some, cache, np.int32(context))
  return {("call", n): run for n, run in timed.items()}


def in_turn(loops, cache, *args):
  """{name: () -> seconds} of loops that hand one cache on, donated.

  A loop that may not write into the cache it is given first copies it, which
  is as slow as a step of a small target where there are many slots.
  """
  held = [cache]

  def run(loop):
    began = time.perf_counter()
    _, held[0] = jax.block_until_ready(loop(held[0], *args))
    return time.perf_counter() - began

  return {name: functools.partial(run, x) for name, x in loops.items()}


def made_up(target, context):
  """Token ids in a fixed order, none twice in V: nothing that can be copied."""
  V = target.vocab_size
  return ((np.arange(context) * (7919 if V % 7919 else 1)) % V).tolist()


def decode(target, params, ask, sizes, steps, draft):
  """Seconds of `steps` target calls behind a prompt, prefill apart."""
  state = generate.start(target, params, ask, draft=draft, **sizes)
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


def take_turns(variants, turns, track=lambda runs: runs):
  """Return {name: [seconds a turn]} of functions that return seconds."""
  times = {name: [] for name in variants}
  for name in track(list(variants) * (turns + 1)):
    times[name].append(variants[name]())
  return {name: row[1:] for name, row in times.items()}  # the first compiles


def _cost(seconds):
  if len(seconds) == 1:
    return Cost(*seconds * 3)
  low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
  return Cost(median, low, high)


@functools.cache
def target_loop(target, batch, width, steps):
  """A jitted loop of target calls with nothing around them but a maximum.

  Each call feeds `width` tokens a row, one place further on than the call
  before, as a round does that accepts nothing.

  Returns:
    (params, cache, context) -> [batch, width] tokens and the cache; the one
    that is given is donated.
  """

  @functools.partial(jax.jit, donate_argnums=1)
  def run(params, cache, context):
    def step(i, carry):
      tokens, cache = carry
      at = jnp.broadcast_to(context + i + jnp.arange(width), tokens.shape)
      hidden, _, cache = target.apply(params, tokens, at, cache)
      # an argmax would be slow on a CPU, see `sampling.probabilities`
      largest = target.unembed(params, hidden).max(-1)
      return (largest > jnp.inf).astype(jnp.int32), cache

    tokens = jnp.zeros((batch, width), jnp.int32)
    return lax.fori_loop(0, steps, step, (tokens, cache))

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
