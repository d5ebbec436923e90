"""From plain answers of a model to what they say of a draft."""

from typing import NamedTuple

import numpy as np

from specjax import forced, pair, predict, request, settings, timing


def texts(
  model,
  draft,
  answers,
  config,
  *,
  num_draft,
  batch,
  slots,
  variants=({},),
  track,
):
  """Feed plain answers to target and draft, once for all variants.

  Args:
    model: a `load.Model`; draft: a `pair.Pair`.
    answers: list of (prompt token ids, answer token ids) of plain decoding.
    config: what they were decoded with.
    num_draft: K, the longest draft that is asked about.
    batch, slots: of each pass.
    variants: what to change of the draft's own `Sampling`, a dict of numbers
      each, such as {"temperature": 0.7}. A look-up does not heed them.
    track: wraps the list of passes, for a progress bar.

  Returns:
    The `predict.Texts` of each variant.
  """
  answers = [(prompt, answer) for prompt, answer in answers if answer]
  groups = [answers[i : i + batch] for i in range(0, len(answers), batch)]
  parts = [
    _texts(model, draft, group, config, num_draft, batch, slots, variants)
    for group in track(groups)
  ]
  most = max(part[0].log_p.shape[1] for part in parts)

  def pad(x):
    if x.ndim == 1:  # the lengths
      return x
    return np.pad(x, [(0, 0), (0, most - x.shape[1]), (0, 0)][: x.ndim])

  return [
    predict.Texts(
      *(np.concatenate([pad(x) for x in xs]) for xs in zip(*own, strict=True))
    )
    for own in zip(*parts, strict=True)
  ]


def _texts(model, draft, group, config, K, batch, slots, variants):
  """`texts` of at most `batch` answers."""
  V, rows = model.target.vocab_size, len(group)
  ask = request.make(
    [prompt for prompt, _ in group],
    max_new=1,
    batch=batch,
    width=slots,
    **settings.sampling(config, V),
  )
  text, plain = _joined(ask, group, slots)
  own = pair.join(draft, ask, plain)
  length = text.length - text.prompt_length
  fed = (model.target, model.params)
  if draft.model is None:  # q of a token may depend on where its round starts
    log_p, _ = forced.of_model(*fed, None, None, text, [])
    asks = [_changed(own.sampling, variant) for variant in variants]
    found = [
      (log_q, _alpha(log_p, log_q))
      for log_q in _at_every_place(*fed, draft, own, text, asks, K)
    ]
  else:
    log_p, drafts = forced.of_model(
      *fed,
      draft.model.target,
      own.params,
      text,
      [_changed(own.sampling, variant) for variant in variants],
      ids=draft.opened.ids,
    )
    real = np.arange(log_p.shape[1]) < length[:, None]
    found = [
      (forced.windows(np.where(real, log_q, -np.inf), K), alpha)
      for log_q, alpha in drafts
    ]
  return [
    predict.Texts(length[:rows], log_p[:rows], log_q[:rows], alpha[:rows])
    for log_q, alpha in found
  ]


def _at_every_place(target, params, draft, own, text, asks, K):
  """log q [B, N, K] of each of a drafter's samplings."""
  ids, index = draft.opened.ids, None
  if ids is not None:
    index = np.zeros(target.vocab_size, np.int32)
    index[list(ids)] = np.arange(len(ids))
  taps = forced.features(target, params, text, own.drafter.features)
  options = dict(num_draft=K, own=index, taps=taps)
  return [
    forced.of_drafter(own.drafter, own.params, text, ask, **options)
    for ask in asks
  ]


def _alpha(log_p, log_q):
  """min(1, q / p) [B, N] of tokens drawn from p: its mean is alpha."""
  if not log_q.shape[-1]:
    return np.zeros_like(log_p)
  return np.exp(np.minimum(log_q[..., 0] - log_p, 0))


def _joined(ask, group, slots):
  """The `forced.Text` of prompts and answers, and the answers alone."""
  text = forced.Text(
    ask.prompt.copy(), ask.length, ask.length.copy(), ask.sampling
  )
  plain = np.full(
    (len(ask.length), max(len(answer) for _, answer in group)), -1, np.int32
  )
  for row, (prompt, answer) in enumerate(group):
    answer = answer[: slots - len(prompt)]
    text.tokens[row, len(prompt) : len(prompt) + len(answer)] = answer
    text.length[row] += len(answer)
    plain[row, : len(answer)] = answer
  return text, plain


def _changed(sampling, variant):
  """A `Sampling` with some fields the same number in every row."""
  fields = {
    name: np.full_like(getattr(sampling, name), value)
    for name, value in variant.items()
  }
  return sampling._replace(**fields)


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
  `replay` knows the answer, coupled decoding keeps other tokens, a round is
  longer than the cache.

  Args:
    draft: a `pair.Pair`; sizes: a `play.Sizes`.
    batches: list of `answers.Batch` of both decoders.
  """
  plain = [b for b in batches if b.decoder == "autoregressive"]
  speculative = [b for b in batches if b.decoder == "speculative"]
  each = [texts_of(b) for b in plain]
  found = [row for rows in each for row in rows]
  if not speculative or not any(ids for _, ids in found):
    return None
  K = draft.opened.num_draft
  if not K or room(model, draft, plain[-1].slots) < K + 2:
    return None
  if draft.opened.verifier == "coupled" or draft.opened.name == "replay":
    return None
  if draft.policy is not None:  # its lengths are decided on the way
    return None
  shape = dict(batch=sizes.batch, slots=plain[-1].slots)
  (some,) = texts(
    model, draft, found, config, num_draft=K, track=track, **shape
  )
  prediction = predict.predict(some, draft.opened.verifier)
  context = mean_context(each)
  costs = timed_costs(model, draft, config, context, shape, K, whole=False)
  costs = costs._replace(
    plain=_of_calls(plain), round={K: _of_calls(speculative)}
  )
  alone = sizes.batch == 1
  return Forecast(
    prediction, costs, predict.speedups(prediction, costs) if alone else None
  )


def room(model, draft, slots):
  """Tokens that the slots and both contexts hold."""
  return min(slots, model.target.context, draft.drafter.context or slots)


def mean_context(batches):
  """The mean number of tokens before a call that answers were made with.

  Of the longest row of each batch: on a CPU all rows attend to what it has.

  Args:
    batches: lists of (prompt ids, ids), of rows that were decoded at once.
  """
  middle = lambda prompt, ids: len(prompt) + len(ids) / 2
  return int(np.mean([max(middle(*row) for row in rows) for rows in batches]))


def texts_of(batch):
  """(prompt ids, ids) of each answer of an `answers.Batch`."""
  return [(a.prompt_ids, a.token_ids) for a in batch.answers]


def timed(draft, config, vocab_size, batch):
  """The `types.Draft` of a pair for a request that is made up."""
  asked = settings.sampling(config, vocab_size)
  ask = request.make([[0]] * batch, max_new=1, **asked)
  return pair.join(draft, ask, np.full((batch, 1), -1, np.int32))


def timed_costs(model, draft, config, context, shape, K, *, whole):
  """`timing.Costs` of drafted tokens and bare calls of a run's shape.

  Args:
    whole: also of plain steps and rounds.
  """
  V = model.target.vocab_size
  space = room(model, draft, shape["slots"])
  context, steps = timing.fit(space, context, K, 8)
  return timing.measure(
    model.target,
    model.params,
    {"": timed(draft, config, V, shape["batch"])},
    **shape,
    context=context,
    widths=[K],
    sampling=settings.sampling(config, V),
    whole=whole,
    steps=steps,
    turns=3,
  )[""]


def _of_calls(batches):
  """The mean seconds of a run's target calls, with the quarters of batches."""
  each = [b.seconds / b.steps for b in batches if b.steps]
  low, high = np.quantile(each, [0.25, 0.75])
  mean = sum(b.seconds for b in batches) / sum(b.steps for b in batches)
  return timing.Cost(mean, float(low), float(high))
