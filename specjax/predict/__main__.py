r"""Predict the speed-up of several drafts without speculating once.

  python -m specjax.predict --config=configs/smollm2.py \
      --drafts=ngram,0+29,0+1+28+29 --lengths=1,2,4,8 \
      --config.prompts.path=configs/prompts.jsonl --config.prompts.limit=8 \
      --json=prediction.json --png=prediction.png
  python -m specjax.predict --config=configs/smollm2.py --drafts=0+29 \
      --config.sampling.temperature=1 --temperatures=0.5,0.7,1 --top_ps=0.9,1

The prompts are decoded plainly; each draft is fed the answers once; a drafted
token, target calls and whole rounds are timed at batch 1. From these come the
tokens a target call and the speed-up S of each draft, K and verifier, with a
95 % interval over the prompts: the costs are taken as they are. Beside them is
what the formula for independent tokens, E[N] / (1 + K / C), makes of the mean
alpha, and how far that is off.

--at=8,2048 --machine=2e10,1.8e11 foretells S at batch 8 and 2,048 tokens of
context: the timed parts are scaled by a roofline of this machine's bytes/s and
FLOP/s, and marked as modelled.

A draft is `ngram`, layers of the target joined by `+`, or a weight reference;
a feature head's may end in `+ngram`: it copies first, where text repeats.
--config.batch_size is of the plain decoding alone. The table goes to stdout.
"""

import time

from absl import flags

from specjax import cli

_CONFIG = cli.define_config()
_DRAFTS = flags.DEFINE_list("drafts", "ngram", "Drafts to compare.")
_LENGTHS = flags.DEFINE_list("lengths", "1,2,4,8", "K: drafted tokens a round.")
_TEMPERATURES = flags.DEFINE_list(
  "temperatures", "", "Of the drafts' own draws; -1: the config's."
)
_TOP_PS = flags.DEFINE_list("top_ps", "", "Truncations of those draws.")
_TURNS = flags.DEFINE_integer("turns", 5, "Times that each cost is measured.")
_AT = flags.DEFINE_list("at", "", "BATCH,CONTEXT to model S for.")
_MACHINE = flags.DEFINE_list("machine", "", "Its BYTES/S,FLOP/S, for --at.")
_MEASURED = flags.DEFINE_list("measured", "", "decode.py's reports, beside.")
_JSON = flags.DEFINE_string("json", None, "Write the whole prediction here.")
_PNG = flags.DEFINE_string("png", None, "Draw it here.")


def _flags():
  """What was asked for besides the config."""
  some = (_DRAFTS, _LENGTHS, _TEMPERATURES, _TOP_PS, _TURNS, _MEASURED)
  some += (_AT, _MACHINE)
  return {flag.name: flag.value for flag in some}


def main(argv):
  del argv
  config = _CONFIG.value
  # Imported here: --help and a mistyped key need not wait for JAX.
  from specjax import (
    compare,
    plots,
    prompts,
    ranking,
    report,
    roofline,
    runtime,
    settings,
    terminal,
  )

  config = settings.checked(config)
  asked = compare.asked(
    config,
    _DRAFTS.value,
    _LENGTHS.value,
    _TEMPERATURES.value,
    _TOP_PS.value,
    _TURNS.value,
  )
  there = roofline.there(_AT.value, _MACHINE.value, _MEASURED.value)
  asked = asked._replace(there=there)
  points = ranking.measured(_MEASURED.value, config, list(asked.configs))
  for flag in (_JSON, _PNG):
    if flag.value is not None:
      report.check_path(flag.value, flag.name)
  todo = prompts.read(config)
  out = terminal.console()
  began = time.perf_counter()
  dtype = runtime.setup(config.dtype)
  found = compare.run(out, config, asked, todo, dtype)
  result = ranking.build(found, asked, points, _flags())
  terminal.note(out, f"predicted in {time.perf_counter() - began:.0f} s")
  ranking.show(result["prediction"])
  if _JSON.value is not None:
    report.save(_JSON.value, result)
    terminal.note(out, f"wrote {_JSON.value}")
  if _PNG.value is not None:
    report.write(_PNG.value, plots.prediction(result["prediction"]))
    terminal.note(out, f"wrote {_PNG.value}")


if __name__ == "__main__":
  cli.run(main)
