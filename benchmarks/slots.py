"""What empty slots cost a target call, and narrow steps a prompt.

call     a target call on 1 and on 2 tokens, behind 64 others in a cache of so
         many slots: attention over those in use (`cache.spans`), or over
         all of them
prompt   one of so many tokens into 1,024 slots, by steps of `cache.widths`, or
         by narrow ones alone
"""

import functools
from unittest import mock

import jax
import numpy as np
import rich.table

from benchmarks import clock
from specjax import cache as kv
from specjax import timing

STEPS = 24  # target calls in a turn
SLOTS = (256, 512, 1024, 2048)
PROMPTS = (60, 200, 760)
_SPANS = {"now": kv.spans, "before": lambda slots: [slots]}
_WIDTHS = {"now": kv.widths, "before": lambda batch, slots: [kv.PREFILL]}


def variants(model):
  """Return {(what, size, which): () -> seconds of one call or prompt}."""
  found = {}
  for which, spans in _SPANS.items():
    for width in (1, 2):
      for slots in SLOTS:
        with mock.patch.object(kv, "spans", spans):
          one = _calls(model, width, slots)
        found[f"a call on {width}", slots, which] = one
  for which, widths in _WIDTHS.items():
    with mock.patch.object(kv, "widths", widths):
      one = _prompt(model)
    for length in PROMPTS:
      found["a prompt", length, which] = functools.partial(one, length)
  return found


def _calls(model, width, slots):
  # made anew, and traced at once: nothing of another variant's
  loop = timing.target_loop.__wrapped__(model.target, 1, width, STEPS)
  cache = model.target.init_cache(1, slots)
  args = functools.partial(loop, model.params)
  run = timing.in_turn({0: args}, cache, np.int32(clock.PROMPT))[0]
  run()
  return lambda: run() / STEPS


def _prompt(model):
  slots = 1024
  prefill = jax.jit(lambda params, *fed: kv.prefill(model.target, params, *fed))
  tokens = np.zeros((1, slots), np.int32)
  of = lambda n: np.array([n + 1], np.int32)  # the last is not fed
  jax.block_until_ready(prefill(model.params, tokens, of(1)))
  return lambda n: clock.seconds(prefill, model.params, tokens, of(n))


def table(times):
  """Medians in ms, and the medians of a turn's ratios."""
  result = rich.table.Table("", "slots or tokens", "before", "now", "S")
  for what, size, which in times:
    if which == "now":
      now, before = (times[what, size, x] for x in ("now", "before"))
      result.add_row(
        what,
        f"{size:,}",
        f"{1e3 * clock.median(before):.2f} ms",
        f"{1e3 * clock.median(now):.2f} ms",
        f"{clock.median_ratio(before, now):.2f}",
      )
  return result
