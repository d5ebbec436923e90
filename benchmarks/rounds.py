r"""Where a round's time goes: calls, rounds of K, and rounds that draft fewer.

  python -m benchmarks.rounds --config=configs/smollm2.py
  python -m benchmarks.rounds --config=configs/smollm2.py --lengths=1,4

Batch 1, behind a text that repeats nothing. A bare call on n tokens has nothing
around it; a round of K is what a constant schedule runs; a row that may draft
up to draft.num_tokens and stops at n is an adaptive one that does not ask how
sure the draft is of the next token (a row that asks and declines pays a draft
step more). The draft is the config's. Medians of turns; run it
on an otherwise idle machine.
"""

import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import clock, foretold
from specjax import (
  adaptive,
  cli,
  forecast,
  prompts,
  request,
  runtime,
  settings,
  terminal,
  timing,
)
from specjax.models import load

_CONFIG = cli.define_config()
_LENGTHS = flags.DEFINE_list("lengths", "1,2,4,8", "K, at most the config's.")
_TURNS = flags.DEFINE_integer("turns", 9, "Turns that each variant takes.")
_CONTEXT, _SLOTS, _STEPS = 128, 512, 8


def _variants(model, draft, lengths):
  """{name: () -> seconds of a call or a round}."""
  K, target, params = draft.num_draft, model.target, model.params
  most = _STEPS * (K + 1)
  ask = request.make(
    [timing.made_up(target, _CONTEXT)], max_new=most, seed=np.arange(1)
  )
  sizes = dict(max_new_tokens=most, slots=_SLOTS)

  def run(own):
    args = target, params, ask, sizes, _STEPS, own
    return lambda: timing.decode(*args) / _STEPS

  def up_to(n):
    return draft._replace(policy=adaptive.exactly(K, n))

  calls = timing.calls(target, params, ask, _SLOTS, {0, *lengths}, _STEPS)
  per_step = lambda call: lambda: call() / _STEPS
  return (
    {"a plain step": run(None)}
    | {f"a bare call on {k[1]}": per_step(call) for k, call in calls.items()}
    | {f"a round of K = {k}": run(draft._replace(num_draft=k)) for k in lengths}
    | {f"a row that drafts {n} of {K}": run(up_to(n)) for n in (0, *lengths)}
  )


def _table(times):
  table = rich.table.Table("", "ms", "plain steps")
  step = clock.median(times["a plain step"])
  for name, seconds in times.items():
    each = clock.median(seconds)
    table.add_row(name, f"{1e3 * each:.2f}", f"{each / step:.3f}")
  return table


def main(argv):
  del argv
  config, out = settings.checked(_CONFIG.value), terminal.console()
  dtype = runtime.setup(config.dtype)
  opened = terminal.open_target(out, config)
  model = load.model(opened, dtype=dtype)
  todo = [prompts.Prompt("", "", (), ("x",), None)]
  pair, _ = foretold.drafted(out, model, opened, config, todo)
  draft = forecast.timed(pair, config, model.target.vocab_size, 1)
  lengths = sorted({int(k) for k in _LENGTHS.value})
  lengths = [k for k in lengths if k <= draft.num_draft]
  track = terminal.track(out, "timing")
  variants = _variants(model, draft, lengths)
  times = timing.take_turns(variants, _TURNS.value, track)
  rich.console.Console(width=80).print(_table(times))


if __name__ == "__main__":
  cli.run(main)
