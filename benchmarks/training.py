r"""How fast a step of training is, as a share of the matrix products' rate.

  python -m benchmarks.training --config=configs/tiny_train.py

Utilisation = (2 P + 6 Q) tokens/s / (FLOP/s of a large square product at the
run's precision), P and Q the numbers of target and draft that multiply, heads
included. Texts are made up, every position is supervised; a micro-batch and its
step are timed. Run it on an idle machine.
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from specjax import cli, memory, runtime, step, student, terminal, timing, train
from specjax import trajectories as texts
from specjax.models import load, transformer

_CONFIG = cli.define_config()
_TURNS = flags.DEFINE_integer("turns", 10, "Turns of steps and products.")
_SIDE = 4096  # of the square matrices


def _multiplied(config):
  """Numbers that multiply something: an untied embedding is looked up."""
  looked_up = 0 if config.tied else config.vocab_size * config.width
  return transformer.num_parameters(config) - looked_up


def _batch(config, vocab_size):
  """A `Batch` of random tokens, and the trajectories that it was cut from."""
  rng = np.random.default_rng(config.seed)
  tokens = rng.integers(0, vocab_size, (config.batch_size, config.length + 1))
  found = texts.make([(row[:1], row[1:], np.nan) for row in tokens.tolist()])
  return texts.batch(found, np.arange(len(tokens)), config.length), found


def _step(programs, state, *args):
  """() -> seconds of a micro-batch and a step."""
  kept = [state]

  def both():
    kept[0], _ = programs.update(programs.accumulate(kept[0], *args))
    return kept[0]

  return lambda: timing.seconds(both)


def main(argv):
  del argv
  config, out = _CONFIG.value, terminal.console()
  dtype = runtime.setup(config.dtype)
  model = load.model(terminal.open_target(out, config), dtype=dtype)
  teacher = load.whole(model)
  batch, found = _batch(config, teacher.config.vocab_size)
  draft = student.make(config, teacher, found)
  optimiser = step.optimiser(config.optimiser, config.steps)
  programs = train.programs(config, teacher, draft, optimiser, dtype)
  state = step.start(draft.params, optimiser)
  square, product = jnp.ones((_SIDE, _SIDE), dtype), jax.jit(jnp.matmul)
  variants = {
    "step": _step(programs, state, batch, teacher.params, draft.shared),
    "product": lambda: timing.seconds(product, square, square),
  }
  track = terminal.track(out, "timing")
  times = timing.take_turns(variants, _TURNS.value, track)
  spent = {name: statistics.median(each) for name, each in times.items()}
  P, Q = _multiplied(teacher.config), _multiplied(draft.config)
  rate = config.batch_size * config.length / spent["step"]
  flops, peak = (2 * P + 6 * Q) * rate, 2 * _SIDE**3 / spent["product"]
  print(f"target {P / 1e6:.1f} M, draft {Q / 1e6:.2f} M that multiply")
  print(f"{rate:,.0f} tokens/s, peak {memory.human(memory.peak() or 0)}")
  print(f"{flops / 1e9:,.1f} of {peak / 1e9:,.1f} GFLOP/s: {flops / peak:.2f}")
  print(f"{runtime.device()['name']}, {dtype}, {config.batch_size} rows")


if __name__ == "__main__":
  cli.run(main)
