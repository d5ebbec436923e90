"""Plain decoding: what a step costs beside what the memory allows.

read     one jitted sum over a float32 array as large as the weights that a
         step reads: what the memory's bandwidth allows
largest  a bare loop of target calls that takes the largest of the logits
T = 0, T = 1, top_p = 0.9 at T = 1: `generate.advance`
"""

import jax
import jax.numpy as jnp
import rich.table

from benchmarks import clock
from specjax import request

STEPS = 24  # target calls in a turn
_SAMPLING = {
  "T = 0": dict(temperature=0.0),
  "T = 1": dict(temperature=1.0),
  "top_p = 0.9": dict(temperature=1.0, top_p=0.9),
}


def variants(model, steps):
  """Return {name: () -> seconds}, each starting from the same prompt."""
  target, params = model.target, model.params
  prompt = clock.prompt()
  size = sum(x.size for x in jax.tree.leaves(params))
  if "head" in params:
    size -= params["embed"].size  # one row of it is read
  weights = jnp.ones((size,), jnp.float32)
  total = jax.jit(jnp.sum)

  def decode(options):
    ask = request.make([prompt], max_new=steps, **options)
    sizes = dict(max_new_tokens=steps, slots=clock.SLOTS)
    return clock.decode(target, params, ask, steps=steps, **sizes)[0]

  # as many reads as steps, so that both are averages over the same time
  read = lambda: sum(clock.seconds(total, weights) for _ in range(steps))
  return {
    "read": read,
    "largest": clock.bare_calls(model, 1, steps),
    **{
      name: lambda options=options: decode(options)
      for name, options in _SAMPLING.items()
    },
  }


def table(times, steps):
  """Medians; ratios are medians of a turn's pairs, and best against best."""
  result = rich.table.Table(
    "", "ms a call", "best", "of the read", "best of best", "over largest"
  )
  paired = lambda a, b: clock.median_ratio(times[a], times[b])
  for name, row in times.items():
    result.add_row(
      name,
      f"{clock.median(row) / steps * 1e3:.2f}",
      f"{min(row) / steps * 1e3:.2f}",
      f"{paired('read', name):.2f}",
      f"{min(times['read']) / min(row):.2f}",
      f"{(paired(name, 'largest') - 1) * 100:+.1f} %",
    )
  return result
