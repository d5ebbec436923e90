r"""Does stopping early pay? Adaptive lengths against each constant K.

  python -m benchmarks.schedules --config=configs/smollm2.py --lengths=1,2,4,8 \
      --config.prompts.path=configs/prompts.jsonl --kinds=rewrite,chat

A draft's tokens are worth drafting where it agrees with its target. So the
prompts should be of easy and of hard kinds, and `config.draft` one draft for
all of them. First turns, batch 1; plain decoding, each K and adaptive lengths
up to the largest take turns; the tokens a second are over all answers of a
kind. Run it on an otherwise idle machine.
"""

import rich.console
import rich.table
from absl import flags

from benchmarks import clock, lookup
from specjax import (
  cli,
  pair,
  play,
  report,
  request,
  runtime,
  schedule,
  settings,
  terminal,
)
from specjax.models import load

_CONFIG = cli.define_config()
_LENGTHS = flags.DEFINE_list("lengths", "1,2,4,8", "Constant K to compare.")
_KINDS = flags.DEFINE_list("kinds", "", "Only prompts of these kinds.")
_LIMIT = flags.DEFINE_integer("limit", 0, "Prompts of a kind, 0 for all.")
_TURNS = flags.DEFINE_integer("turns", 3, "Times that a prompt is decoded.")
_JSON = flags.DEFINE_string("json", None, "Write the numbers here.")


def _todo(config):
  """First turns of the kinds that were asked for, so many of each."""
  found = [
    p._replace(turns=p.turns[:1]) for p in lookup.of_kinds(config, _KINDS.value)
  ]
  kinds = _KINDS.value or dict.fromkeys(p.kind for p in found)
  of = lambda kind: [p for p in found if p.kind == kind]
  return [p for kind in kinds for p in of(kind)[: _LIMIT.value or None]]


def _variants(model, config, opened, todo, lengths, out):
  """{name: `pair.Pair`, None for plain decoding}, and the `play.Sizes`."""
  sizes = play.sizes(opened, todo, config)
  found = terminal.open_draft(out, config, opened, sizes)
  found = pair.load(found, model, dtype=model.params["embed"].dtype)
  constant = lambda K: found._replace(opened=found.opened._replace(num_draft=K))
  variants = {"plain": None} | {f"K = {K}": constant(K) for K in lengths}
  with config.unlocked():
    config.draft.schedule = "adaptive"
  chosen = schedule.decide(model, constant(max(lengths)), config, sizes, todo)
  terminal.note(out, chosen.opened.chosen)
  return variants | {"adaptive": chosen}, sizes


def _measure(model, config, variants, sizes, todo, out):
  """[{"kind", "variant", "tokens", "calls", "seconds"}], one a prompt each."""
  rows, V = [], model.target.vocab_size
  for number, prompt in terminal.track(out, "measuring")(list(enumerate(todo))):
    ask = request.make(
      [lookup.first_turn(model, prompt, config)],
      max_new=config.max_new_tokens,
      seed=config.seed + number,
      stop_ids=model.tokenizer.stop_ids,
      **settings.sampling(config, V),
    )
    spent, outputs, plain = {name: [] for name in variants}, {}, None
    for _ in range(_TURNS.value + (number == 0)):  # once more to compile
      for name, own in variants.items():
        seconds, outputs[name] = clock.decode(
          *(model.target, model.params, ask),
          steps=config.max_new_tokens,
          max_new_tokens=sizes.max_new,
          slots=sizes.slots,
          draft=own and pair.join(own, ask, plain),
        )
        plain = outputs["plain"].tokens
        spent[name].append(seconds)
    for name, output in outputs.items():
      row = {"kind": prompt.kind, "variant": name}
      row |= {"tokens": int(output.length.sum())}
      row |= {"calls": int(output.stats.steps)}
      rows.append(row | {"seconds": clock.median(spent[name][-_TURNS.value :])})
  return rows


def _table(rows):
  """Tokens a call and speed-up over plain decoding, by kind and variant."""
  kinds = [*dict.fromkeys(row["kind"] for row in rows), "all"]
  result = rich.table.Table(
    "", *(x for kind in kinds for x in (f"{kind}: a call", "S"))
  )
  for name in dict.fromkeys(row["variant"] for row in rows):
    cells = []
    for kind in kinds:
      some = [r for r in rows if kind in (r["kind"], "all")]
      of = lambda name, key: sum(r[key] for r in some if r["variant"] == name)  # noqa: B023
      rate = lambda name: of(name, "tokens") / of(name, "seconds")  # noqa: B023
      cells.append(f"{of(name, 'tokens') / of(name, 'calls'):.2f}")
      cells.append(f"{rate(name) / rate('plain'):.3f}")
    result.add_row(name, *cells)
  return result


def main(argv):
  del argv
  config, out = _CONFIG.value, terminal.console()
  settings.check(config)
  lengths = [int(K) for K in _LENGTHS.value]
  dtype, todo = runtime.setup(config.dtype), _todo(config)
  opened = terminal.open_target(out, config)
  model = load.model(opened, dtype=dtype)
  variants, sizes = _variants(model, config, opened, todo, lengths, out)
  rows = _measure(model, config, variants, sizes, todo, out)
  rich.console.Console(width=120).print(_table(rows))
  if _JSON.value:
    report.save(_JSON.value, {"rows": rows, "device": runtime.device()})


if __name__ == "__main__":
  cli.run(main)
