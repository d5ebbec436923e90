"""Timing for the benchmarks: variants take turns, ratios are of a turn's pairs.

A drift of the machine's speed then falls on all of them. Everything runs at
batch 1 in SLOTS cache slots.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from jax import lax

from specjax import generate

SLOTS, PROMPT = 512, 64

median = statistics.median


def seconds(run):
  """Of one call, until its result is there."""
  began = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - began


def decode(target, params, request, *, steps, draft=None, **sizes):
  """Time `steps` target calls of a request, its prefill apart.

  Returns:
    Seconds, and the `Output` so far.
  """
  state = generate.start(target, params, request, draft=draft, **sizes)
  state = jax.block_until_ready(state)
  began = time.perf_counter()
  state = generate.advance(target, params, state, steps=steps, draft=draft)
  jax.block_until_ready(state.steps)
  spent = time.perf_counter() - began
  return spent, generate.output(state, sizes["max_new_tokens"])


def measure(variants, turns, out):
  """Return {name: [seconds a turn]}, the variants taking turns."""
  times = {name: [] for name in variants}
  for _ in rich.progress.track(
    range(turns + 1), "measuring", console=out, transient=True
  ):
    for name, run in variants.items():
      times[name].append(run())
  return {name: row[1:] for name, row in times.items()}  # the first compiles


def median_ratio(a, b):
  """The median of a turn's ratios."""
  return median(x / y for x, y in zip(a, b, strict=True))


def prompt(seed=0):
  """PROMPT token ids that every vocabulary has."""
  return np.random.default_rng(seed).integers(0, 256, PROMPT).tolist()


@functools.cache
def target_loop(target, width, steps):
  """A jitted loop of target calls with nothing around them but an argmax.

  Each call feeds `width` tokens, one place further on than the call before, as
  a round does that accepts nothing.

  Returns:
    (params, cache) -> [1, width] tokens.
  """

  @jax.jit
  def run(params, cache):
    def step(i, carry):
      tokens, cache = carry
      at = (PROMPT + i + jnp.arange(width))[None]
      hidden, _, cache = target.apply(params, tokens, at, cache)
      return jnp.argmax(target.unembed(params, hidden), -1), cache

    tokens = jnp.zeros((1, width), jnp.int32)
    return lax.fori_loop(0, steps, step, (tokens, cache))[0]

  return run
