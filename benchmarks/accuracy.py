r"""Is what is foretold what comes? First the prediction, then the speculation.

  python -m benchmarks.accuracy --config=configs/smollm2.py \
      --config.prompts.path=question.jsonl --drafts=ngram,0+29 \
      --config.max_new_tokens=128 --config.batch_size=8 --out=accuracy

Writes OUT/prediction.json before anything speculates, with its sha256 in
OUT/accuracy.json beside what was measured, and OUT/accuracy.png. Prompts are
spread over the file, first turns only. Run it on an otherwise idle machine:
S is a matter of time; tokens a call are not.
"""

import hashlib
import pathlib
import sys

import rich.console
from absl import flags

from benchmarks import foretold
from specjax import cli, prompts, report, runtime, settings, terminal
from specjax.errors import UserError

_CONFIG = cli.define_config()
_DRAFTS = flags.DEFINE_list("drafts", "ngram", "Drafts, as specjax.predict's.")
_LENGTHS = flags.DEFINE_list("lengths", "1,2,4,8", "K of tokens a call.")
_ALONE = flags.DEFINE_list("lengths_alone", "2,4,8", "K of S at batch 1.")
_TEMPERATURES = flags.DEFINE_list("temperatures", "0,1", "Of the target.")
_PROMPTS = flags.DEFINE_integer("prompts", 24, "How many.")
_PROMPTS_ALONE = flags.DEFINE_integer("prompts_alone", 8, "Of S at batch 1.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Answers a prompt at T > 0.")
_TURNS = flags.DEFINE_integer("turns", 5, "Times that each cost is measured.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results.", required=True)


def _asked():
  """The flags as numbers."""
  try:
    return {
      "drafts": _DRAFTS.value,
      "lengths": [int(x) for x in _LENGTHS.value],
      "lengths_alone": [int(x) for x in _ALONE.value],
      "temperatures": [float(x) for x in _TEMPERATURES.value],
      "prompts": _PROMPTS.value,
      "prompts_alone": _PROMPTS_ALONE.value,
      "samples": _SAMPLES.value,
      "turns": _TURNS.value,
    }
  except ValueError as e:
    raise UserError(f"--lengths and --temperatures are numbers: {e}") from e


def main(argv):
  del argv
  config, out = settings.checked(_CONFIG.value), terminal.console()
  asked = _asked()
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  todo = foretold.prompts(prompts.read(config), asked["prompts"])
  dtype = runtime.setup(config.dtype)
  predicted = foretold.foretell(out, config, asked, todo, dtype)
  path = folder / "prediction.json"
  report.save(path, {"flags": asked, "prediction": predicted})
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  terminal.note(out, f"wrote {path}, sha256 {digest}; now speculating")
  measured = foretold.measure(out, config, asked, todo, dtype)
  rows = foretold.compared(predicted, measured)
  width = None if sys.stdout.isatty() else 130
  rich.console.Console(width=width).print(foretold.table(rows))
  device = runtime.device()
  found = {"prediction_sha256": digest, "flags": asked, "rows": rows}
  report.save(folder / "accuracy.json", found | {"device": device})
  report.write(folder / "accuracy.png", foretold.picture(rows))
  terminal.note(out, f"wrote {folder}/accuracy.json and .png")


if __name__ == "__main__":
  cli.run(main)
