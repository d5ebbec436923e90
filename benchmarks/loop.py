r"""What decoding costs, plain and speculative, as ratios measured in one run.

  python -m benchmarks.loop --config=configs/smollm2.py:random
  python -m benchmarks.loop --config=configs/smollm2.py:random --part=replay
  python -m benchmarks.loop --config=configs/smollm2.py --part=ngram \
      --kinds=rewrite,long --config.prompts.path=configs/prompts.jsonl

Batch 1, 512 slots but for `slots` and `ngram`; run it on an otherwise idle
machine. The parts: `plain` (benchmarks/plain.py), `costs` and `replay`
(speculation.py), `verify` (verifier.py), `slots` (slots.py: where few are in
use), `ngram` (lookup.py: real prompts).
"""

import sys

import rich.console
from absl import flags

from benchmarks import clock, lookup, plain, slots, speculation, verifier
from specjax import cli, memory, report, runtime, settings, terminal
from specjax.errors import UserError
from specjax.models import load

_PARTS = ("plain", "costs", "replay", "verify", "slots", "ngram")
_CONFIG = cli.define_config()
_PART = flags.DEFINE_list(
  "part", "plain,costs,replay", f"Which of {', '.join(_PARTS)}."
)
_TURNS = flags.DEFINE_integer("turns", 15, "Turns that each variant takes.")
_KINDS = flags.DEFINE_list("kinds", "", "ngram: only prompts of these kinds.")
_JSON = flags.DEFINE_string("json", None, "Write the numbers here.")


def _run(part, model, config, out):
  """Measure one part, print its table and return its numbers."""
  turns = _TURNS.value
  # a table that is piped is not squeezed into 80 columns
  width = None if sys.stdout.isatty() else 100
  show = rich.console.Console(width=width).print
  if part == "plain":
    variants = plain.variants(model, plain.STEPS)
    times = clock.measure(variants, turns, out)
    show(plain.table(times, plain.STEPS))
    return {"steps": plain.STEPS, "seconds": times}
  if part == "costs":
    times = clock.measure(speculation.cost_variants(model), turns, out)
    show(speculation.cost_table(times))
    return {"steps": speculation.STEPS, "seconds": times}
  if part == "replay":
    K = config.draft.num_tokens
    variants, accepted = speculation.replay_variants(model, K)
    times = clock.measure(variants, turns, out)
    show(speculation.replay_table(times, accepted, K))
    return {"num_draft": K, "seconds": times}
  if part == "verify":
    times = clock.measure(verifier.variants(model), turns, out)
    show(verifier.table(times))
    return {"steps": verifier.STEPS, "seconds": times}
  if part == "slots":
    times = clock.measure(slots.variants(model), turns, out)
    show(slots.table(times))
    seconds = {" ".join(map(str, key)): row for key, row in times.items()}
    return {"steps": slots.STEPS, "seconds": seconds}
  found = lookup.measure(model, _KINDS.value, config, turns, out)
  show(lookup.table(found))
  return found


def main(argv):
  del argv
  out = terminal.console()
  config = settings.checked(_CONFIG.value)
  wrong = [part for part in _PART.value if part not in _PARTS]
  if wrong or _TURNS.value < 1:
    raise UserError(
      f"--part must be out of {','.join(_PARTS)}, --turns at least 1"
    )
  if _JSON.value is not None:
    report.check_path(_JSON.value)
  dtype = runtime.setup(config.dtype)
  model = load.model(terminal.open_target(out, config), dtype=dtype)
  found = {part: _run(part, model, config, out) for part in _PART.value}
  device = runtime.device()
  print(f"{device['name']}, {device['cores']} cores, {dtype}")
  print(f"peak memory {memory.human(memory.peak() or 0)}")
  if _JSON.value is not None:
    report.save(_JSON.value, {**found, "device": device})


if __name__ == "__main__":
  cli.run(main)
