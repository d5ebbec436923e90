r"""Check, on your own pair and machine, that speculation changes nothing.

  python -m specjax.selfcheck --config=configs/tiny.py
  python -m specjax.selfcheck --config=configs/smollm2.py --samples=8192
  python -m specjax.selfcheck --config=configs/smollm2.py \
      --config.draft.name=lm --config.draft.layers=0,1,29 --json=check.json

It decodes with the config's target, draft, verifier, sampling values and dtype:

  law      Many answers of three tokens to the first prompt, plainly and
           speculatively, must be samples of one law. At the config's
           temperature, or at 1 if that is 0. Samples of one law differ too, by
           chance: the p-value says how often this much, and a tiny one is a
           fault. What a round does behind its third token it does not see.
  greedy   At temperature 0 the answers must be the same tokens: first turns of
           up to 8 prompts, up to 64 tokens each.
  coupled  So must they be at the law's temperature with --config.verifier=
           coupled, where both decoders share their noise.

Where tokens differ, the target is asked again, one token at a time and as
speculation does, several at once. Numbers that are added in another order are
rounded otherwise: if that explains it, it is a tie-flip, else a fault. Exit
code 1 for a fault, 0 for none.
"""

import contextlib
import functools
import time

from absl import flags

from specjax import cli
from specjax.errors import UserError

_PROMPTS = 8  # most prompts that are compared token by token, first turns
_TOKENS = 64  # most tokens of each
_TEXT = 3  # T, tokens of a text whose law is tested
_LEAST_SAMPLES = 100


def main(argv):
  del argv
  config, samples, path = (
    flags.FLAGS[name].value for name in ("config", "samples", "json")
  )
  _refuse(config, samples)
  # Imported here: --help and a mistyped key need not wait for JAX.
  from specjax import report, settings, terminal

  config = settings.checked(config)
  if path is not None:
    report.check_path(path)
  out = terminal.console()
  return check(out, _load(out, config), samples, path)


def check(out, case, samples, path=None):
  """Check a case, print and save what is found; return the exit code.

  Args:
    out: a console.
    case: an `agreement.Case`.
    samples: texts each way.
    path: of the JSON file, None for none.
  """
  from specjax import findings, report, terminal

  result = _measure(out, case, samples)
  terminal.table(out, findings.rows(result))
  if path is not None:
    report.save(path, result)
    terminal.note(out, f"wrote {path}")
  return 1 if result["faults"] else 0


def _refuse(config, samples):
  """Raise UserError where there is nothing to check."""
  if config.decoder == "autoregressive":
    raise UserError(
      "--config.decoder=autoregressive has no draft to check; leave it out"
    )
  if not config.max_new_tokens:
    raise UserError("--config.max_new_tokens=0 leaves no token to check")
  if samples < _LEAST_SAMPLES:
    raise UserError(
      f"--samples must be at least {_LEAST_SAMPLES}, got {samples}"
    )


def _load(out, config):
  """Return the `agreement.Case` of a config, its weights read."""
  from specjax import (
    agreement,
    generate,
    play,
    prompts,
    runtime,
    settings,
    terminal,
    twosample,
  )

  todo = [p._replace(turns=p.turns[:1]) for p in prompts.read(config)]
  todo = todo[:_PROMPTS]
  dtype = runtime.setup(config.dtype)
  opened = terminal.open_target(out, config)
  settings.sampling(config, opened.config.vocab_size)  # ids that it has
  sizes = play.sizes(opened, todo, config)  # refuses what is too long
  asked = [_asked(p, opened.tokenizer, config) for p in todo]
  context, width = opened.config.context, max(len(x.ids) for x in asked)
  if len(asked[0].ids) >= context:
    raise UserError(f"the prompt {asked[0].id!r} leaves no room for an answer")
  max_new = min(sizes.max_new, _TOKENS)
  slots = generate.num_slots(context, width, max_new)
  sizes = sizes._replace(
    # the law's texts: a cache a side, and the one that is written to
    batch=max(sizes.batch, 3 * twosample.ROWS),
    slots=slots,
    tokens=min(width + max_new, context),
  )
  draft = terminal.open_draft(out, config, opened, sizes)
  model, pair = terminal.load_pair(out, config, opened, draft, sizes, dtype)
  return agreement.Case(
    model=model,
    pair=pair,
    config=config,
    asked=tuple(asked),
    max_new=max_new,
    slots=slots,
    dtype=dtype,
  )


def _asked(prompt, tokenizer, config):
  """The `agreement.Asked` of a prompt's first turn."""
  from specjax import agreement, prompts

  talk = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
  return agreement.Asked(
    id=prompt.id,
    ids=tuple(prompts.encode(tokenizer, talk, as_chat=config.chat)),
    seed=config.seed if prompt.seed is None else prompt.seed,
  )


def _measure(out, case, samples):
  """Return everything that was found, as --json has it."""
  import numpy as np

  from specjax import agreement, runtime, twosample

  config, began = case.config, time.perf_counter()
  temperature = config.sampling.temperature or 1.0
  # coupled has tests of its own
  own = "block" if config.verifier == "coupled" else config.verifier
  bars = lambda what: functools.partial(_progress, out, what)
  found = {
    "law": twosample.law(
      *(case, samples, own),
      temperature=temperature,
      length=_TEXT,
      track=bars(f"{samples} texts each way"),
    )
  }
  for name, verifier, t in (
    ("greedy", own, 0.0),
    ("coupled", "coupled", temperature),
  ):
    found[name] = agreement.equality(
      case, verifier, temperature=t, track=bars(f"{name} answers")
    )
  return {
    "schema": 1,
    "faults": [name for name, part in found.items() if part["fault"]],
    **found,
    "K": case.pair.opened.num_draft,
    "dtype": str(np.dtype(case.dtype)),
    "seconds": time.perf_counter() - began,
    "device": runtime.device(),
    "versions": runtime.versions(),
    "config": config.to_dict(),
  }


def _progress(out, what, items):
  """Yield the items under a bar; where there is no terminal, tell quarters."""
  from specjax import terminal

  items, began, told = list(items), time.perf_counter(), 0
  terminal.note(out, f"{what} ...")
  with contextlib.closing(terminal.track(out, what)(items)) as bar:
    for done, item in enumerate(bar):
      if not out.is_terminal and 4 * done // len(items) > told:
        told = 4 * done // len(items)
        left = (time.perf_counter() - began) * (len(items) / done - 1)
        terminal.note(out, f"{done} of {len(items)}, {left:.0f} s left")
      yield item


if __name__ == "__main__":
  # defined here alone, so that this file can be imported beside other scripts
  cli.define_config()
  flags.DEFINE_integer("samples", 2048, "Texts drawn each way.")
  flags.DEFINE_string("json", None, "Write everything that was found here.")
  cli.run(main)
