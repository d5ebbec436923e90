r"""Which draft and which length pay, by kind of prompt? Adaptive lengths too.

  python -m benchmarks.schedules --config=configs/smollm2.py --lengths=1,2,4,8 \
      --config.prompts.path=configs/prompts.jsonl --kinds=rewrite,chat
  python -m benchmarks.schedules --config=configs/smollm2.py --limit=4 \
      --drafts=ngram,0+29 --config.prompts.path=question.jsonl \
      --temperatures=0,1

A draft's tokens are worth drafting where it agrees with its target. So the
prompts should be of easy and of hard kinds. First turns, batch 1; plain
decoding, each draft at each K and with adaptive lengths up to the largest (or
--most) take turns; the tokens a second are over all answers of a kind.
"Repeated" is the share of plain answers inside an 8-gram that the answer has
more than once. Run it on an otherwise idle machine.
"""

import copy

import rich.console
import rich.table
from absl import flags

from benchmarks import clock, foretold, lookup
from specjax import (
  cli,
  compare,
  pair,
  report,
  request,
  runtime,
  schedule,
  settings,
  terminal,
  title,
)
from specjax.models import load

_CONFIG = cli.define_config()
_DRAFTS = flags.DEFINE_list("drafts", "", "As specjax.predict's; the config's.")
_TEMPERATURES = flags.DEFINE_list("temperatures", "", "Else the config's.")
_LENGTHS = flags.DEFINE_list("lengths", "1,2,4,8", "Constant K to compare.")
_MOST = flags.DEFINE_integer("most", 0, "Of adaptive ones, else the largest.")
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


def _configs(config):
  """{(draft, temperature): the config that decodes so}."""
  of = lambda T: foretold.asked(config, T)
  many = _TEMPERATURES.value or [config.sampling.temperature]
  if not _DRAFTS.value:
    return {(config.draft.name, float(T)): of(float(T)) for T in many}
  wanted = lambda T: compare.asked(of(T), _DRAFTS.value, _LENGTHS.value)
  return {
    (name, float(T)): c
    for T in many
    for name, c in wanted(float(T)).configs.items()
  }


def _variants(model, config, opened, todo, out):
  """{schedule: `pair.Pair`} of a draft, and the `play.Sizes`."""
  lengths = [int(K) for K in _LENGTHS.value]
  config = copy.deepcopy(config)
  with config.unlocked():
    config.draft.num_tokens = max(*lengths, _MOST.value)
    config.draft.schedule = "adaptive"
  found, sizes = foretold.drafted(out, model, opened, config, todo)
  constant = lambda K: found._replace(opened=found.opened._replace(num_draft=K))
  chosen = schedule.decide(model, found, config, sizes, todo)
  terminal.note(out, chosen.opened.chosen)
  return {f"K = {K}": constant(K) for K in lengths} | {
    "adaptive": chosen
  }, sizes


def _measure(model, config, variants, sizes, todo, out):
  """A dict a prompt and variant; variants: with None for plain decoding."""
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
      row = {"id": prompt.id, "kind": prompt.kind, "variant": name}
      row |= {"tokens": int(output.length.sum())}
      row |= {"calls": int(output.stats.steps), "repeated": _repeated(output)}
      rows.append(row | {"seconds": clock.median(spent[name][-_TURNS.value :])})
  return rows


def _repeated(output):
  ids = output.tokens[0, : output.length[0]].tolist()
  return lookup.share(ids, lookup.grams(ids, twice=True))


def _table(title, rows):
  """Tokens a call and speed-up over plain decoding, by kind and variant."""
  variants = [*dict.fromkeys(row["variant"] for row in rows)]
  result = rich.table.Table(
    *("prompts", "tokens", "repeated"),
    *(x for name in variants[1:] for x in (f"{name}: a call", "S")),
    title=title,
  )
  for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
    some = [row for row in rows if kind in (row["kind"], "all")]
    own = {v: [r for r in some if r["variant"] == v] for v in variants}
    total = {
      v: {key: sum(r[key] for r in x) for key in ("tokens", "calls", "seconds")}
      for v, x in own.items()
    }
    rate = {v: x["tokens"] / x["seconds"] for v, x in total.items()}
    again = sum(r["repeated"] * r["tokens"] for r in own["plain"])
    cells = [str(total["plain"]["tokens"])]
    cells.append(f"{again / total['plain']['tokens']:.0%}")
    for v in variants[1:]:
      cells.append(f"{total[v]['tokens'] / total[v]['calls']:.2f}")
      cells.append(f"{rate[v] / rate['plain']:.3f}")
    result.add_row(kind, *cells)
  return result


def main(argv):
  del argv
  config, out = settings.checked(_CONFIG.value), terminal.console()
  dtype, todo = runtime.setup(config.dtype), _todo(config)
  opened = terminal.open_target(out, config)
  model = load.model(opened, dtype=dtype)
  found = []
  for (name, T), c in _configs(config).items():
    settings.check(c)
    variants, sizes = _variants(model, c, opened, todo, out)
    variants = {"plain": None, **variants}
    rows = _measure(model, c, variants, sizes, todo, out)
    head = f"{title.label({'draft': name, 'sampling': {}})}, T = {T:g}"
    rich.console.Console(width=120).print(_table(head, rows))
    found += [{"draft": name, "temperature": T, **row} for row in rows]
  if _JSON.value:
    report.save(_JSON.value, {"rows": found, "device": runtime.device()})


if __name__ == "__main__":
  cli.run(main)
