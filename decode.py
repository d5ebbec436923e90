r"""Decode prompts, plainly and speculatively, and report what each took.

  python decode.py --config=configs/smollm2.py --config.prompt="Why is it so?"
  python decode.py --config=configs/smollm2.py --config.draft.name=lm \
      --config.draft.layers=0,1,29 --config.sampling.temperature=0.8
  python decode.py --config=configs/smollm2.py --json=out.json \
      --config.prompts.path=configs/prompts.jsonl --config.batch_size=8
  python decode.py --config=configs/smollm2.py --config.stop=". " \
      --config.sampling.repetition_penalty=1.1 --config.verifier=coupled
  echo Hello | python decode.py --config=configs/smollm2.py --config.prompt=-

Text goes to stdout, all about it to stderr. The keys: configs/common.py.
"""

import time

from absl import flags

from specjax import cli

_CONFIG = cli.define_config()
_JSON = flags.DEFINE_string("json", None, "Write the whole report here.")
_MULTIHOST = flags.DEFINE_boolean("multihost", False, "Join other processes.")


def main(argv):
  del argv
  config = _CONFIG.value
  # Imported here: --help and a mistyped key need not wait for JAX.
  from specjax import (
    play,
    prompts,
    report,
    runtime,
    screen,
    settings,
    table,
    terminal,
  )

  config = settings.checked(config)
  if _JSON.value is not None:
    report.check_path(_JSON.value)
  todo = prompts.read(config)
  dtype = runtime.setup(config.dtype, _MULTIHOST.value)
  out = terminal.console()
  began = time.perf_counter()
  opened = terminal.open_target(out, config)
  settings.sampling(config, opened.config.vocab_size)  # ids that it has
  sizes = play.sizes(opened, todo, config)
  draft = terminal.open_draft(out, config, opened, sizes)
  model, loaded = terminal.load_pair(out, config, opened, draft, sizes, dtype)
  seconds = {"load": time.perf_counter() - began}
  name = table.short_name(config.target)
  terminal.note(out, f"loaded {name} in {seconds['load']:.1f} s")
  loaded = terminal.scheduled(out, model, loaded, config, sizes, todo)
  draft = loaded and loaded.opened
  with terminal.waiting(out, "compiling"):
    seconds["compile"] = play.warm_up(model, loaded, config, sizes)
  terminal.note(out, f"compiled in {sum(seconds['compile'].values()):.1f} s")
  batches, interrupted = [], False
  try:
    with screen.show(out, model.tokenizer, todo, sizes, config) as show:
      for batch in play.play(model, loaded, todo, config, sizes, show):
        batches.append(batch)
  except KeyboardInterrupt:
    interrupted = True
  result = report.build(
    *(config, model, draft, dtype, sizes, batches, seconds, interrupted),
    terminal.predicted(out, model, loaded, config, sizes, batches),
  )
  terminal.table(out, table.rows(result))
  if _JSON.value is not None:
    report.save(_JSON.value, result)
    terminal.note(out, f"wrote {_JSON.value}")
  return 130 if interrupted else 0


if __name__ == "__main__":
  cli.run(main)
