r"""Which objective trains the better draft: toy pairs whose optimum is known.

  python -m benchmarks.objectives --json=objectives.json

Every objective trains the same drafts of `benchmarks/toys.py` from the same
starts on the same texts for the same number of steps, at each of RATES; its
column is at the one rate that is best for it in the mean over seeds. "tokens a
call" is exact, of endless texts, K = 6, token verification; "block" is that of
block verification on long texts. The last lines say what holds.

Seven minutes on one core; `--toy=rank --seeds=1 --steps=400` is a quick look.
"""

import sys

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags

from benchmarks import toys
from specjax import cli, report, terminal

RATES = (0.03, 0.1, 0.3, 1.0)
_KINDS = ["rank", "classes"]
_TOYS = flags.DEFINE_multi_enum("toy", _KINDS, _KINDS, "Which pair.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Targets, each with its own start.")
_STEPS = flags.DEFINE_integer("steps", 2000, "Of training.")
_JSON = flags.DEFINE_string("json", None, "Write the numbers here.")


def compare(kind, made, steps, track):
  """Return {name: numbers} of every objective and of the optimum, by seed."""
  keys = jax.random.split(jax.random.key(0), len(made))
  found = {}
  for name in track(list(toys.SCHEDULES)):
    args = toys.SCHEDULES[name], steps, made, keys, RATES, toys.SURE
    Q = toys.train(kind, *args)
    best = toys.best_rate(made, Q)
    found[name] = toys.numbers(made, Q[:, best]) | {"rate": RATES[best]}
  return found | {"optimum": toys.numbers(made, toys.best(kind, made, steps))}


def table(found):
  """A row for each objective."""
  result = rich.table.Table(
    "objective", "rate", "alpha", "tokens a call, by seed", "mean", "block"
  )
  for name, row in found.items():
    mean = lambda key, row=row: f"{np.mean(row[key]):.3f}"
    seeds = " ".join(f"{x:.2f}" for x in row["tokens"])
    rate = str(row.get("rate", ""))
    result.add_row(
      name, rate, mean("alpha"), seeds, mean("tokens"), mean("block")
    )
  return result


def main(argv):
  del argv
  if _JSON.value is not None:
    report.check_path(_JSON.value, "json")
  out, result = terminal.console(), {}
  made = [toys.make(seed) for seed in range(_SEEDS.value)]
  show = rich.console.Console(width=None if sys.stdout.isatty() else 100).print
  for kind in _TOYS.value:
    track = terminal.track(out, f"training {kind}")
    result[kind] = compare(kind, made, _STEPS.value, track)
    show(f"{kind}, {_SEEDS.value} seeds, {_STEPS.value} steps")
    show(table(result[kind]))
    for line in toys.verdicts(result[kind]):
      show(line)
  if _JSON.value is not None:
    report.save(_JSON.value, {"steps": _STEPS.value, "toys": result})


if __name__ == "__main__":
  cli.run(main)
