"""From plain answers of a model to what they say of a draft."""

from typing import NamedTuple

import numpy as np

from specjax import forced, pair, predict, request, settings, timing


def texts(model, draft, answers, config, *, num_draft, batch, slots, track):
  """Feed plain answers to target and draft; return their `predict.Texts`.

  Args:
    model: a `load.Model`; draft: a `pair.Pair`.
    answers: list of (prompt token ids, answer token ids) of plain decoding.
    config: what they were decoded with.
    num_draft: K, the longest draft that is asked about.
    batch, slots: of each pass.
    track: wraps the list of passes, for a progress bar.
  """
  answers = [(prompt, answer) for prompt, answer in answers if answer]
  groups = [answers[i : i + batch] for i in range(0, len(answers), batch)]
  parts = [
    _texts(model, draft, group, config, num_draft, batch, slots)
    for group in track(groups)
  ]
  most = max(part.log_p.shape[1] for part in parts)

  def pad(x):
    if x.ndim == 1:  # the lengths
      return x
    return np.pad(x, [(0, 0), (0, most - x.shape[1]), (0, 0)][: x.ndim])

  return predict.Texts(
    *(np.concatenate([pad(x) for x in xs]) for xs in zip(*parts, strict=True))
  )


def _texts(model, draft, group, config, K, batch, slots):
  """The `predict.Texts` of at most `batch` answers."""
  target, V = model.target, model.target.vocab_size
  ask = request.make(
    [prompt for prompt, _ in group],
    max_new=1,
    batch=batch,
    width=slots,
    **settings.sampling(config, V),
  )
  text = forced.Text(
    ask.prompt.copy(), ask.length, ask.length.copy(), ask.sampling
  )
  for row, (prompt, answer) in enumerate(group):
    answer = answer[: slots - len(prompt)]
    text.tokens[row, len(prompt) : len(prompt) + len(answer)] = answer
    text.length[row] += len(answer)
  plain = np.full((batch, max(len(a) for _, a in group)), -1, np.int32)
  for row, (_, answer) in enumerate(group):
    plain[row, : len(answer)] = answer
  joined = pair.join(draft, ask, plain)
  rows = len(group)
  length = (text.length - text.prompt_length)[:rows]
  if draft.model is not None:
    log_p, ((log_q, alpha),) = forced.of_model(
      target,
      model.params,
      draft.model.target,
      joined.params,
      text,
      [joined.sampling],
      ids=draft.opened.ids,
    )
    real = (
      np.arange(log_q.shape[1]) < (text.length - text.prompt_length)[:, None]
    )
    log_q = forced.windows(np.where(real, log_q, -np.inf), K)
  else:
    log_p, _ = forced.of_model(target, model.params, None, None, text, [])
    log_q = forced.of_drafter(
      joined.drafter, joined.params, text, joined.sampling, num_draft=K
    )
    first = log_q[..., 0] if K else np.full(log_p.shape, -np.inf)
    alpha = np.exp(np.minimum(first - log_p, 0))
  return predict.Texts(length, log_p[:rows], log_q[:rows], alpha[:rows])


class Forecast(NamedTuple):
  """What plain decoding and the clock say about a draft."""

  prediction: predict.Prediction
  costs: timing.Costs
  speedups: predict.Speedups | None  # None: not of one row


def of_run(model, draft, config, sizes, batches, track=lambda groups: groups):
  """Return the `Forecast` beside a run of both decoders, or None.

  The texts are the plain run's. Its step and the speculative run's round are
  the run's own times; a drafted token and bare target calls are timed here.
  None where there is nothing to predict from, or it would say nothing:
  `replay` knows the answer, coupled decoding keeps other tokens.

  Args:
    draft: a `pair.Pair`; sizes: a `play.Sizes`.
    batches: list of `answers.Batch` of both decoders.
  """
  plain = [b for b in batches if b.decoder == "autoregressive"]
  speculative = [b for b in batches if b.decoder == "speculative"]
  found = [(a.prompt_ids, a.token_ids) for b in plain for a in b.answers]
  if not speculative:
    return None
  K = draft.opened.num_draft
  if not K or not any(ids for _, ids in found):
    return None
  if draft.opened.verifier == "coupled" or draft.opened.name == "replay":
    return None
  shape = dict(batch=sizes.batch, slots=plain[-1].slots)
  some = texts(model, draft, found, config, num_draft=K, track=track, **shape)
  prediction = predict.predict(some, draft.opened.verifier)
  context = int(np.mean([len(prompt) + len(ids) / 2 for prompt, ids in found]))
  costs = _bare(model, draft, config, context, shape, K)
  costs = costs._replace(
    plain=_of_calls(plain), round={K: _of_calls(speculative)}
  )
  alone = sizes.batch == 1
  return Forecast(
    prediction, costs, predict.speedups(prediction, costs) if alone else None
  )


def _bare(model, draft, config, context, shape, K):
  """`timing.Costs` of drafted tokens and bare calls of a run's shape."""
  V = model.target.vocab_size
  steps = 8
  asked = settings.sampling(config, V)
  ask = request.make([[0]], max_new=1, batch=shape["batch"], **asked)
  own = pair.join(draft, ask, np.full((shape["batch"], 1), -1, np.int32))
  return timing.measure(
    model.target,
    model.params,
    own,
    **shape,
    context=max(min(context, shape["slots"] - steps * (K + 1)), 1),
    widths=[K],
    sampling=asked,
    whole=False,
    steps=min(steps, (shape["slots"] - 1) // (K + 1)),
    turns=3,
  )


def _of_calls(batches):
  """The mean seconds of a run's target calls, with the quarters of batches."""
  each = [b.seconds / b.steps for b in batches if b.steps]
  low, high = np.quantile(each, [0.25, 0.75])
  mean = sum(b.seconds for b in batches) / sum(b.steps for b in batches)
  return timing.Cost(mean, float(low), float(high))
