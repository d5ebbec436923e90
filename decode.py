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
  if _JSON.value:
    report.check_path(_JSON.value)
  todo = prompts.read(config)
  out = terminal.console()
  began = time.perf_counter()
  dtype = runtime.setup(config.dtype)
  with terminal.waiting(out, "opening the model"):
    if config.target == "random":
      opened = load.random(config.architecture, seed=config.seed)
    else:
      opened = load.opened(config.target, console=out)
  slots = play.slots(
    opened,
    todo,
    as_chat=config.chat,
    max_new_tokens=config.max_new_tokens,
  )
  estimate = memory.estimate(
    opened.config,
    dtype=dtype,
    batch=config.batch_size,
    slots=slots,
    untie=load.untie_here(),
  )
  out.print(f"[dim]{memory.check(estimate)}[/dim]")
  track = terminal.track(out, "reading weights")
  model = load.model(opened, dtype=dtype, track=track)
  seconds = {"load": time.perf_counter() - began}
  with terminal.waiting(out, "compiling"):
    seconds["compile"] = play.warm_up(
      model, batch_size=config.batch_size, slots=slots
    )
  batches, interrupted = [], False
  try:
    for batch in play.play(
      model,
      todo,
      sampling=config.sampling.to_dict(),
      batch_size=config.batch_size,
      slots=slots,
      max_new_tokens=config.max_new_tokens,
      as_chat=config.chat,
      seed=config.seed,
      show=terminal.show(out, model.tokenizer, todo, config),
    ):
      batches.append(batch)
  except KeyboardInterrupt:
    interrupted = True
  result = report.build(
    config,
    model=model,
    dtype=dtype,
    slots=slots,
    batches=batches,
    seconds=seconds,
    interrupted=interrupted,
  )
  out.print(report.table(result))
  if _JSON.value:
    report.save(_JSON.value, result)
    out.print(f"[dim]wrote {_JSON.value}[/dim]")
  return 130 if interrupted else 0


if __name__ == "__main__":
  cli.run(main)
