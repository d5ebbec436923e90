"""Timing for the benchmarks: variants take turns, ratios are of a turn's pairs.

A drift of the machine's speed then falls on all of them. Everything runs at
batch 1 in SLOTS cache slots.
"""

import functools
import statistics
import time

import jax
import numpy as np

from specjax import generate, terminal, timing

SLOTS, PROMPT = 512, 64

median, seconds = statistics.median, timing.seconds


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
  return timing.take_turns(variants, turns, terminal.track(out, "measuring"))


def median_ratio(a, b):
  """The median of a turn's ratios."""
  return median(x / y for x, y in zip(a, b, strict=True))


def prompt(seed=0):
  """PROMPT token ids that every vocabulary has."""
  return np.random.default_rng(seed).integers(0, 256, PROMPT).tolist()


def bare_calls(model, width, steps):
  """() -> seconds of `timing.target_loop` behind PROMPT tokens."""
  loop = timing.target_loop(model.target, 1, width, steps)
  loops = {0: functools.partial(loop, model.params)}
  cache = model.target.init_cache(1, SLOTS)
  return timing.in_turn(loops, cache, np.int32(PROMPT))[0]
