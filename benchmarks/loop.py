r"""What plain decoding costs, as ratios measured in one run.

  python -m benchmarks.loop --config=configs/smollm2.py:random

Batch 1, 512 slots, a context of at most 256 tokens. The variants take turns,
so that a drift of the machine's speed falls on all of them, and ratios are
medians over the turns; run it on an otherwise idle machine.

  read    one jitted sum over a float32 array as large as the weights that a
          step reads: what the memory's bandwidth allows
  argmax  a bare loop of target calls that takes jnp.argmax of the logits
  T = 0, T = 1, top_p = 0.9 at T = 1: `generate.advance`
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
import rich.table
from absl import flags
from jax import lax

from specjax import (
  cli,
  generate,
  memory,
  report,
  request,
  runtime,
  settings,
  terminal,
)
from specjax.errors import UserError
from specjax.models import load

_CONFIG = cli.define_config()
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Turns that each variant takes.")
_STEPS = flags.DEFINE_integer("steps", 24, "Target calls in a turn.")
_JSON = flags.DEFINE_string("json", None, "Write the numbers here.")

_SLOTS, _PROMPT = 512, 64
_SAMPLING = {
  "T = 0": dict(temperature=0.0),
  "T = 1": dict(temperature=1.0),
  "top_p = 0.9": dict(temperature=1.0, top_p=0.9),
}


def _seconds(run):
  began = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - began


def _argmax_only(target, steps):
  """A loop of target calls with nothing around them but an argmax."""

  @jax.jit
  def run(params, cache, token):
    def step(i, carry):
      token, cache = carry
      at = jnp.full((1, 1), _PROMPT + i)
      hidden, _, cache = target.apply(params, token[:, None], at, cache)
      return jnp.argmax(target.unembed(params, hidden[:, 0]), -1), cache

    return lax.fori_loop(0, steps, step, (token, cache))[0]

  return run


def _variants(model, steps):
  """Return {name: () -> seconds}, each starting from the same prompt."""
  target, params = model.target, model.params
  prompt = np.random.default_rng(0).integers(0, 256, _PROMPT).tolist()
  size = sum(x.size for x in jax.tree.leaves(params))
  if "head" in params:
    size -= params["embed"].size  # one row of it is read
  weights = jnp.ones((size,), jnp.float32)
  total = jax.jit(jnp.sum)
  bare = _argmax_only(target, steps)
  cache = target.init_cache(1, _SLOTS)
  first = jnp.zeros((1,), jnp.int32)

  def decode(options):
    ask = request.make([prompt], max_new=steps, **options)
    state = jax.block_until_ready(
      generate.start(target, params, ask, max_new_tokens=steps, slots=_SLOTS)
    )
    return _seconds(
      lambda: generate.advance(target, params, state, steps=steps)
    )

  # as many reads as steps, so that both are averages over the same time
  read = lambda: sum(_seconds(lambda: total(weights)) for _ in range(steps))
  return {
    "read": read,
    "argmax": lambda: _seconds(lambda: bare(params, cache, first)),
    **{
      name: lambda options=options: decode(options)
      for name, options in _SAMPLING.items()
    },
  }


def _measure(variants, rounds, out):
  """Return {name: [seconds a turn]}, the variants taking turns."""
  times = {name: [] for name in variants}
  for _ in rich.progress.track(
    range(rounds + 1), "measuring", console=out, transient=True
  ):
    for name, run in variants.items():
      times[name].append(run())
  return {name: row[1:] for name, row in times.items()}  # the first compiles


def _table(times, steps):
  """Medians; ratios are medians of a turn's pairs, and best against best."""
  table = rich.table.Table(
    "", "ms a call", "best", "of the read", "best of best", "over argmax"
  )
  paired = lambda a, b: statistics.median(
    x / y for x, y in zip(times[a], times[b], strict=True)
  )
  for name, row in times.items():
    table.add_row(
      name,
      f"{statistics.median(row) / steps * 1e3:.2f}",
      f"{min(row) / steps * 1e3:.2f}",
      f"{paired('read', name):.2f}",
      f"{min(times['read']) / min(row):.2f}",
      f"{(paired(name, 'argmax') - 1) * 100:+.1f} %",
    )
  return table


def main(argv):
  del argv
  out = terminal.console()
  config = _CONFIG.value
  settings.check(config)
  if _ROUNDS.value < 1 or not 0 < _STEPS.value <= _SLOTS - _PROMPT:
    raise UserError(
      f"--rounds must be at least 1, --steps in 1..{_SLOTS - _PROMPT}"
    )
  if _JSON.value is not None:
    report.check_path(_JSON.value)
  dtype = runtime.setup(config.dtype)
  model = load.model(terminal.open_target(out, config), dtype=dtype)
  steps = _STEPS.value
  times = _measure(_variants(model, steps), _ROUNDS.value, out)
  rich.print(_table(times, steps))
  device = runtime.device()
  print(
    f"{device['name']}, {device['cores']} cores, {dtype}, {_ROUNDS.value} turns"
  )
  print(f"peak memory {memory.human(memory.peak() or 0)}")
  if _JSON.value is not None:
    found = {"steps": steps, "seconds": times, "device": device}
    report.save(_JSON.value, found)


if __name__ == "__main__":
  cli.run(main)
