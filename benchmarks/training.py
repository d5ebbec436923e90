r"""How fast a step of training is, as a share of the matrix products' rate.

  python -m benchmarks.training --config=configs/tiny_train.py

Utilisation = (2 P + 6 Q) tokens/s / (FLOP/s of a large square product at the
run's precision), P and Q the numbers of target and draft that multiply, heads
included. Texts are made up, every position is supervised; a micro-batch and its
step are timed, then the same with the target's hidden states at hand, then with
the columns alone that a trimmed head has, as with --config.data.keep_hidden.
Run it on an idle machine.
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from specjax import (
  cli,
  laws,
  memory,
  runtime,
  step,
  student,
  terminal,
  timing,
  train,
)
from specjax import trajectories as texts
from specjax.models import load, transformer

_CONFIG = cli.define_config()
_TURNS = flags.DEFINE_integer("turns", 10, "Turns of steps and products.")
_SIDE = 4096  # of the square matrices


def _multiplied(config):
  """Numbers that multiply something: an untied embedding is looked up."""
  looked_up = 0 if config.tied else config.vocab_size * config.width
  return transformer.num_parameters(config) - looked_up


def _trained(config, draft):
  """Q: what a token multiplies in the draft, at every depth of a head's."""
  own, D = _multiplied(draft.config), draft.config.width
  depths = len(config.draft.depth_weights) or 1
  if not draft.features:
    return own
  return depths * (own + 2 * D * D) + len(draft.features) * D * D


def _batch(config, vocab_size):
  """A `Batch` of random tokens, and the trajectories that it was cut from."""
  rng = np.random.default_rng(config.seed)
  tokens = rng.integers(0, vocab_size, (config.batch_size, config.length + 1))
  found = texts.make([(row[:1], row[1:], np.nan) for row in tokens.tolist()])
  return texts.batch(found, np.arange(len(tokens)), config.length), found


def _step(programs, draft, optimiser, batch, teacher):
  """() -> seconds of a micro-batch and a step."""
  fresh = jax.tree.map(jnp.copy, draft.params)  # a step donates them
  state = step.start(fresh, optimiser)

  def both():
    nonlocal state
    args = state, batch, teacher.params, draft.shared
    state, _ = programs.update(programs.accumulate(*args))
    return state

  return lambda: timing.seconds(both)


def _variants(config, teacher, draft, dtype, batch):
  """{name: () -> seconds} of steps, and of a product to compare with."""
  optimiser = step.optimiser(config.optimiser, config.steps)

  def run(teacher, batch):
    programs = train.programs(config, teacher, draft, optimiser, dtype)
    return _step(programs, draft, optimiser, batch, teacher)

  shape = *batch.tokens.shape, 1 + len(draft.features), teacher.config.width
  kept = batch._replace(states=np.ones(shape, np.float16))
  square, product = jnp.ones((_SIDE, _SIDE), dtype), jax.jit(jnp.matmul)
  found = {
    "step": run(teacher, batch),
    "kept": run(teacher, kept),
    "product": lambda: timing.seconds(product, square, square),
  }
  if draft.ids:
    zero = np.zeros(batch.tokens.shape, np.int32)
    known = laws.Normaliser(zero, zero.astype(np.float32))
    every = range(teacher.config.layers)
    some = load.part(teacher, layers=every, ids=draft.ids)
    found["trimmed"] = run(some, kept._replace(normaliser=known))
  return found


def main(argv):
  del argv
  config, out = _CONFIG.value, terminal.console()
  dtype = runtime.setup(config.dtype)
  model = load.model(terminal.open_target(out, config), dtype=dtype)
  teacher = load.whole(model)
  batch, found = _batch(config, teacher.config.vocab_size)
  draft = student.make(config, teacher, found)
  variants = _variants(config, teacher, draft, dtype, batch)
  track = terminal.track(out, "timing")
  times = timing.take_turns(variants, _TURNS.value, track)
  spent = {name: statistics.median(each) for name, each in times.items()}
  P, Q = _multiplied(teacher.config), _trained(config, draft)
  many = config.batch_size * config.length
  flops = (2 * P + 6 * Q) * many / spent["step"]
  peak = 2 * _SIDE**3 / spent["product"]
  print(f"target {P / 1e6:.1f} M, draft {Q / 1e6:.2f} M that multiply")
  rate, without = many / spent["step"], many / spent["kept"]
  print(f"{rate:,.0f} tokens/s, {without:,.0f} with hidden states kept")
  if draft.ids:
    some = many / spent["trimmed"]
    print(f"{some:,.0f} with the {len(draft.ids):,} columns of its head alone")
  print(f"{flops / 1e9:,.1f} of {peak / 1e9:,.1f} GFLOP/s: {flops / peak:.2f}")
  print(f"peak memory {memory.human(memory.peak() or 0)}")
  print(f"{runtime.device()['name']}, {dtype}, {config.batch_size} rows")


if __name__ == "__main__":
  cli.run(main)
