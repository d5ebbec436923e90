"""How many tokens to draft, decided before a run: from a short calibration.

`constant` drafts K = num_tokens in every round. `auto` decodes the first
prompts plainly, feeds the answers to the draft, times the parts of a round and
keeps the k <= K of the largest predicted speed-up. `adaptive` times the parts
and lets each row stop where its next token would not pay (`adaptive.py`).
"""

import copy

import numpy as np

from specjax import adaptive, forecast, play, predict, settings, timing

PROMPTS, TOKENS = 4, 32  # of the calibration, at most


def decide(model, draft, config, sizes, todo):
  """Return the `pair.Pair` as it is to be used, which says why in `opened`.

  Args:
    model: a `load.Model`; draft: a `pair.Pair`.
    sizes: a `play.Sizes`; todo: list of `Prompt`.
  """
  K = draft.opened.num_draft
  room = forecast.room(model, draft, sizes.slots)
  if config.draft.schedule == "constant" or not K or room < K + 2:
    return draft
  costs = _costs(model, draft, config, sizes)
  if config.draft.schedule == "adaptive":
    c, v, o = timing.units(costs, K)
    v[0] = min(v[0], 1)  # a plain step is such a call and more
    policy = adaptive.Policy(c, v, max(float(np.mean(o)), 0.0))
    said = (
      f"adaptive, up to {K} tokens; in plain steps a drafted token takes"
      f" {c:.3f}, a target call {v[0]:.2f} on 1 token and {v[K]:.2f} on {K + 1}"
    )
    opened = draft.opened._replace(chosen=said)
    return draft._replace(policy=policy, opened=opened)
  answers = _answers(model, config, sizes, todo)
  if not any(ids for _, ids in answers):
    said = f"auto: the first prompts have no answer; K stays {K}"
    return draft._replace(opened=draft.opened._replace(chosen=said))
  (texts,) = forecast.texts(
    model,
    draft,
    answers,
    config,
    num_draft=K,
    batch=sizes.batch,
    slots=sizes.slots,
    track=lambda groups: groups,
  )
  # coupled decoding keeps about as much as block verification
  own = draft.opened.verifier
  rule = own if own in predict.RULES else "block"
  S = predict.speedups(predict.predict(texts, rule), costs)
  opened = draft.opened._replace(
    num_draft=S.best, chosen=_said(S, K, len(answers))
  )
  return draft._replace(opened=opened)


def _said(S, K, answers):
  """What was chosen and why."""
  of = f"of 1 to {K}, from {answers} answers of up to {TOKENS} tokens"
  if not S.best:
    most = 1 + int(np.argmax(S.mean[1:]))
    return (
      f"auto: K = 0, nothing is drafted; the best {of} is {most} with a"
      f" predicted {S.mean[most]:.2f} x"
    )
  return (
    f"auto: K = {S.best}, predicted {S.mean[S.best]:.2f} x"
    f" ({S.low[S.best]:.2f} to {S.high[S.best]:.2f}), the best {of};"
    f" {K} would have {S.mean[K]:.2f} x"
  )


def _costs(model, draft, config, sizes):
  """`timing.Costs` of a run's shape, of some K up to its own."""
  K, V = draft.opened.num_draft, model.target.vocab_size
  room = forecast.room(model, draft, sizes.slots)
  context, steps = timing.fit(room, sizes.slots // 2, K, 8)
  return timing.measure(
    model.target,
    model.params,
    {"": forecast.timed(draft, config, V, sizes.batch)},
    batch=sizes.batch,
    slots=sizes.slots,
    context=context,
    widths=[width - 1 for width in adaptive.widths(K) if width > 1],
    sampling=settings.sampling(config, V),
    steps=steps,
    turns=5,
  )[""]


def _answers(model, config, sizes, todo):
  """(prompt ids, answer ids) of plain decoding of the first prompts."""
  plain = copy.deepcopy(config)
  with plain.unlocked():
    plain.decoder = "autoregressive"
  some = [p._replace(turns=p.turns[:1]) for p in todo[:PROMPTS]]
  few = sizes._replace(max_new=min(sizes.max_new, TOKENS))
  quiet = play.Show(lambda *a: None, lambda *a: None, lambda: None)
  batches = play.play(model, None, some, plain, few, quiet)
  return [(a.prompt_ids, a.token_ids) for b in batches for a in b.answers]
