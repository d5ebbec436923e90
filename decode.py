r"""Decode prompts with a language model and report what it took.

  python decode.py --config=configs/smollm2.py --config.prompt="Why is it so?"
  python decode.py --config=configs/smollm2.py --config.sampling.temperature=0.8
  python decode.py --config=configs/smollm2.py --json=out.json \
      --config.prompts.path=configs/prompts.jsonl --config.batch_size=8
  echo "Once upon a time" | python decode.py --config=configs/smollm2.py \
      --config.prompt=- --config.chat=False

The text goes to stdout, everything about it to stderr.
"""

import time

from absl import flags

from specjax import cli

_CONFIG = cli.define_config()
_JSON = flags.DEFINE_string("json", None, "Write the whole report here.")


def main(argv):
  del argv
  config = _CONFIG.value
  # Imported here: --help and a mistyped key need not wait for JAX.
  from specjax import memory, play, prompts, report, runtime, settings, terminal
  from specjax.models import load

  settings.check(config)
  if _JSON.value is not None:
    report.check_path(_JSON.value)
  todo = prompts.read(config)
  out = terminal.console()
  dtype = runtime.setup(config.dtype)
  began = time.perf_counter()
  opened = terminal.open_target(out, config)
  sizes = play.sizes(opened, todo, config)
  estimate = memory.estimate(
    opened.config,
    dtype=dtype,
    batch=sizes.batch,
    slots=sizes.slots,
    untie=load.untie_here(),
  )
  terminal.note(out, memory.check(estimate))
  track = terminal.track(out, "reading weights")
  model = load.model(opened, dtype=dtype, track=track)
  seconds = {"load": time.perf_counter() - began}
  name = report.short_name(config.target)
  terminal.note(out, f"loaded {name} in {seconds['load']:.1f} s")
  with terminal.waiting(out, "compiling"):
    seconds["compile"] = play.warm_up(model, sizes)
  terminal.note(out, f"compiled in {seconds['compile']:.1f} s")
  batches, interrupted = [], False
  try:
    with terminal.show(out, model.tokenizer, todo, sizes) as show:
      for batch in play.play(model, todo, config, sizes, show):
        batches.append(batch)
  except KeyboardInterrupt:
    interrupted = True
  result = report.build(
    config, model, dtype, sizes, batches, seconds, interrupted
  )
  terminal.table(out, report.rows(result))
  if _JSON.value is not None:
    report.save(_JSON.value, result)
    terminal.note(out, f"wrote {_JSON.value}")
  return 130 if interrupted else 0


if __name__ == "__main__":
  cli.run(main)
