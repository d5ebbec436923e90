r"""Attention of many queries: all rows at once, and some rows at a time.

  python -m benchmarks.attention --shapes=64x64x288,64x64x128,8x320x320

Shapes are rows x queries x slots, with SmolLM2-135M's heads (9, of 3 keys, 64
wide). Milliseconds of a layer's attention, the median of turns; see
specjax/models/attention.py. Run it on an idle machine.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import clock
from specjax import cache as kv
from specjax import cli, runtime, terminal
from specjax.errors import UserError
from specjax.models import attention

_SHAPES = flags.DEFINE_list("shapes", "64x64x288,8x320x320", "RxTxS of each.")
_TURNS = flags.DEFINE_integer("turns", 10, "Times that each is measured.")
_HEADS, _KEYS, _WIDTH = 9, 3, 64
_VARIANTS = {
  "once": attention.attend,
  "turns": functools.partial(attention.in_turns, attention.attend),
}


def _case(text):
  """q, a layer's cache and the mask of RxTxS, rows at places of their own."""
  try:
    rows, queries, slots = map(int, text.split("x"))
  except ValueError as e:
    raise UserError(f"--shapes={text}: expected such as 64x64x288") from e
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  layer = kv.KV(
    draw(rows * _KEYS, _WIDTH, slots), draw(rows * _KEYS, slots, _WIDTH)
  )
  at = rng.integers(0, slots - queries + 1, rows)[:, None] + np.arange(queries)
  mask = kv.visible(jnp.asarray(at), slots)
  return draw(rows, queries, _HEADS, _WIDTH), layer, mask


def main(argv):
  del argv
  runtime.setup("float32")
  out = terminal.console()
  table = rich.table.Table("rows x queries x slots", "at once", "in turns", "S")
  for shape in _SHAPES.value:
    case = _case(shape)
    variants = {
      name: functools.partial(clock.seconds, jax.jit(attend), *case)
      for name, attend in _VARIANTS.items()
    }
    spent = clock.measure(variants, _TURNS.value, out)
    once, turns = (1e3 * clock.median(spent[name]) for name in variants)
    table.add_row(
      shape,
      f"{once:.1f} ms",
      f"{turns:.1f} ms",
      f"{clock.median_ratio(spent['once'], spent['turns']):.2f}",
    )
  rich.console.Console().print(table)


if __name__ == "__main__":
  cli.run(main)
