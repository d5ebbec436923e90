"""Prompt lookup on real prompts at T = 0, plain decoding beside it.

Each prompt is decoded by both, in turns; S is the ratio of the medians' sums. A
small model that falls into a loop is easy to look up, so each answer's share of
tokens inside an 8-gram that it has more than once is told, and the share inside
one that the prompt has.
"""

import numpy as np
import rich.progress
import rich.table

from benchmarks import clock
from specjax import metrics, prompts, request, types
from specjax.drafters import ngram
from specjax.errors import UserError

_N = 8


def measure(model, kinds, config, turns, out):
  """Decode the first turn of each prompt; return {"num_draft", "prompts"}.

  Args:
    kinds: only prompts of these, all if there are none.
  """
  todo = of_kinds(config, kinds)
  K = config.draft.num_tokens
  draft = types.Draft(ngram.make(model.target.vocab_size), (), K)
  rows = []
  for prompt in rich.progress.track(
    todo, "measuring", console=out, transient=True
  ):
    ids = first_turn(model, prompt, config)
    rows.append(
      {
        "id": prompt.id,
        "kind": prompt.kind,
        **_compare(model, ids, config.max_new_tokens, draft, turns),
      }
    )
  return {"num_draft": K, "prompts": rows}


def of_kinds(config, kinds):
  """Return a config's prompts of some kinds, all if there are none.

  Raises:
    UserError: there is no such prompt.
  """
  todo = [p for p in prompts.read(config) if not kinds or p.kind in kinds]
  if not todo:
    raise UserError(f"no prompt is of a kind in --kinds={','.join(kinds)}")
  return todo


def first_turn(model, prompt, config):
  """Return the ids of a prompt's first turn, as it is decoded."""
  talk = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
  return prompts.encode(model.tokenizer, talk, as_chat=config.chat)


def _compare(model, ids, max_new, draft, turns):
  """Decode one prompt by both, `turns` times and once to compile."""
  ask = request.make([ids], max_new=max_new, stop_ids=model.tokenizer.stop_ids)
  runs = {"plain": None, "speculative": draft}
  spent, answers = {name: [] for name in runs}, {}
  for _ in range(turns + 1):
    for name, how in runs.items():
      seconds, answers[name] = clock.decode(
        model.target,
        model.params,
        ask,
        steps=max_new,
        max_new_tokens=max_new,
        draft=how,
      )
      spent[name].append(seconds)
  same, out = answers.values()
  if not (out.tokens == same.tokens).all():
    raise UserError("plain and speculative decoding gave different answers")
  answer = out.tokens[0, : out.length[0]].tolist()
  found = metrics.acceptance(out, draft.num_draft)
  return {
    "prompt_tokens": len(ids),
    "tokens": len(answer),
    "seconds": {name: row[1:] for name, row in spent.items()},
    "tokens_per_call": found.tokens_per_call,
    "alpha": found.alpha,
    "repeated": share(answer, grams(answer, twice=True)),
    "copied": share(answer, grams(ids)),
  }


def grams(ids, twice=False):
  """The 8-grams of a text, or those that it has more than once."""
  seen, again = set(), set()
  for i in range(len(ids) - _N + 1):
    gram = tuple(ids[i : i + _N])
    (again if gram in seen else seen).add(gram)
  return again if twice else seen


def share(ids, grams):
  """The share of a text's tokens that lie inside one of some 8-grams."""
  inside = np.zeros(len(ids), bool)
  for i in range(len(ids) - _N + 1):
    if tuple(ids[i : i + _N]) in grams:
      inside[i : i + _N] = True
  return float(inside.mean()) if ids else 0.0


_COLUMNS = (
  "prompt",
  "its tokens",
  "tokens",
  "plain/s",
  "S",
  "a call",
  "repeated",
  "copied",
)


def table(found):
  """A row for each prompt, for each kind and for all."""
  result = rich.table.Table(*_COLUMNS)
  rows = [row for row in found["prompts"] if row["tokens"]]
  for row in rows:
    result.add_row(row["id"], *_cells([row]))
  kinds = dict.fromkeys(row["kind"] for row in rows)
  for kind in kinds if len(kinds) > 1 else ():
    some = [row for row in rows if row["kind"] == kind]
    result.add_row(f"all of {kind}", *_cells(some), style="bold")
  result.add_row("all", *_cells(rows), style="bold")
  return result


def _cells(rows):
  """Totals over some prompts, seconds being each prompt's median."""
  seconds = {
    name: sum(clock.median(row["seconds"][name]) for row in rows)
    for name in ("plain", "speculative")
  }
  tokens = sum(row["tokens"] for row in rows)
  calls = sum(row["tokens"] / row["tokens_per_call"] for row in rows)
  mean = lambda key: sum(row[key] * row["tokens"] for row in rows) / tokens
  return (
    str(sum(row["prompt_tokens"] for row in rows)),
    str(tokens),
    f"{tokens / seconds['plain']:.1f}",
    f"{seconds['plain'] / seconds['speculative']:.2f}",
    f"{tokens / calls:.2f}",
    f"{mean('repeated'):.0%}",
    f"{mean('copied'):.0%}",
  )
