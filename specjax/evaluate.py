"""What a draft in training is worth: held-out texts under both models.

Each batch of held-out rows is one pass of teacher and student without a cache,
heads in chunks of positions; a draft whose q depends on where its round began
is unrolled to every depth of a round. p and q are those of decoding, truncation
and T = 0 included, at the temperature that the row was sampled at; from log p
and log q of its tokens comes what `predict` says of speculation, which needs
none.

Temperatures are told apart, since E[N] is right only for text x ~ p at that
very temperature; "mix" is all rows at once, total tokens / total rounds. Given
text, of temperature NaN, is judged at the deployment's; it is not x ~ p, so its
numbers only rank drafts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import (
  chunks,
  forced,
  losses,
  multihost,
  objective,
  predict,
  reach,
  step,
  trajectories,
)
from specjax import sampling as laws
from specjax import student as students

RULES = ("token", "block")


class Worth(NamedTuple):
  """Of some texts of a total of n tokens; K is the longest draft asked about.

  A_{s,j} is `predict.survival` of a round that starts behind s tokens of a
  text. Depths 1..K go by starts with so many tokens behind them.
  """

  texts: int
  tokens: int  # n, of answers
  alpha: float  # mean over tokens of sum min(p, q), as a round's first
  agreement: float  # share of tokens where argmax p = argmax q
  forward_kl: float  # mean over tokens of `losses.forward_kl`: q untruncated
  # [K] alpha of the j-th token of a draft whose first j - 1 were accepted: mean
  # over starts of alpha_{s+j}, weighted by A_{s,j-1} of token verification
  alpha_by_depth: np.ndarray
  # {rule: Prediction}: .tokens is E[N] for k = 0..K, n / expected rounds (the
  # renewal form), with a bootstrap interval over texts; .survival [K + 1] is
  # A_j, the mean of A_{s,j} over starts
  predictions: dict
  speedups: dict  # {rule: predict.Speedups}: S for k = 0..K, the best k


class Evaluation(NamedTuple):
  """Of one draft."""

  mix: Worth  # all rows
  by_temperature: dict  # {temperature, or None of given text: Worth}


def evaluate(
  student,
  params,
  teacher,
  held_out,
  *,
  sampling,
  batch,
  length,
  num_draft,
  costs,
  draft_temperature=None,
  chunk=32,
  track=lambda batches: batches,
):
  """Return the `Evaluation` of a draft.

  Args:
    student: a `Student`; params: what is trained of it, as it is now.
    teacher: a `load.Model`, its matrices whole.
    held_out: `Trajectories`; a row without an answer token among the first
      `length` positions is left out.
    sampling: the deployment's `Sampling` of scalars. Its temperature is that
      of given text; other rows have their own.
    batch: rows of a pass; length: positions of each.
    num_draft: K, the longest draft that is asked about.
    costs: `timing.Costs` of one row, see `costs.py`.
    draft_temperature: of the draft's draws; None: the row's.
    chunk: positions of each row that are unembedded at a time.
    track: wraps the list of batches, for a progress bar.

  Raises:
    UserError: no row has an answer there.
  """
  held_out = trajectories.fit(held_out, length, lambda line: None)
  merged = students.merged(student.shared, params)
  rows = np.arange(len(held_out.length))
  parts = []
  for start in track(range(0, len(rows), batch)):
    some = trajectories.batch(
      held_out, np.resize(rows[start : start + batch], batch), length
    )
    at, own = _samplings(sampling, some.temperature, draft_temperature)
    found = _pass(
      teacher.target,
      step.forward(student, num_draft),
      teacher.params,
      merged,
      some,
      at,
      own,
      ids=student.ids,
      chunk=chunk,
    )
    found = multihost.fetch(found)
    parts += [
      jax.tree.map(lambda x, r=r: x[r][some.mask[r]], found)  # noqa: B023
      for r in range(len(rows[start : start + batch]))
    ]
  kinds = {
    None if np.isnan(t) else round(float(t), 6): t
    for t in np.unique(held_out.temperature)
  }
  of = lambda some: _worth(some, num_draft, costs)
  same = lambda t: np.isclose(held_out.temperature, t, equal_nan=True)
  return Evaluation(
    mix=of(parts),
    by_temperature={
      name: of([parts[i] for i in np.flatnonzero(same(t))])
      for name, t in kinds.items()
    },
  )


class _Tokens(NamedTuple):
  """Of each position, [B, T]; of a row's answer tokens, [n]."""

  log_p: jax.Array  # of the next token
  log_q: jax.Array  # [..., J] at each depth of a round; J = 1: alike at all
  alpha: jax.Array  # [..., J]
  agree: jax.Array  # bool, at depth 1
  kl: jax.Array  # at depth 1


def _samplings(sampling, temperature, draft_temperature):
  """The target's and the draft's `Sampling`, fields [B]."""
  given = np.isnan(temperature)
  own = np.where(given, sampling.temperature, temperature).astype(np.float32)
  wide = lambda key: np.broadcast_to(getattr(sampling, key), own.shape)
  truncation = {key: wide(key) for key in ("top_k", "top_p", "min_p")}
  target = sampling._replace(temperature=own, **truncation)
  if draft_temperature is None:
    return target, target
  own = np.full_like(own, draft_temperature)
  return target, target._replace(temperature=own)


@functools.partial(
  jax.jit, static_argnums=(0, 1), static_argnames=("ids", "chunk")
)
def _pass(target, forward, params, own_params, batch, at, own, *, ids, chunk):
  """`_Tokens` of a batch."""
  teacher, taps = step.read(target, params, batch.tokens, forward.features)
  student = forward.hidden(own_params, batch, teacher, taps)
  law = jax.vmap(jax.vmap(laws.probabilities, (0, None)))

  def values(logits, own_logits, labels):
    p = law(logits, at)
    own_logits = own_logits[..., : target.vocab_size]
    at_ids = jnp.arange(own_logits.shape[-1]) if ids is None else jnp.array(ids)
    judge = lambda z: forced.judged(p, z, labels, own, at_ids)
    log_q, alpha = jax.vmap(judge, 2, 2)(own_logits)
    first = own_logits[:, :, 0]
    T = jnp.where(own.temperature > 0, own.temperature, 1)[:, None, None]
    z = jax.nn.log_softmax(first.astype(jnp.float32) / T)
    return _Tokens(
      log_p=jnp.log(jnp.take_along_axis(p, labels[..., None], -1)[..., 0]),
      log_q=log_q,
      alpha=alpha,
      agree=_first_best(logits) == at_ids[_first_best(first)],
      kl=losses.forward_kl.equation(p[..., at_ids], z),
    )

  heads = (
    functools.partial(target.unembed, params),
    functools.partial(forward.unembed, own_params),
  )
  rows = teacher, objective.by_depth(student), batch.mask, batch.labels
  return chunks.chunked(values, heads, *rows, chunk=chunk)


def _first_best(logits):
  """argmax; XLA's CPU backend is slow at that one."""
  ids = jnp.arange(logits.shape[-1])
  best = logits == logits.max(-1, keepdims=True)
  return jnp.where(best, ids, len(ids) - 1).min(-1)


def _worth(parts, K, costs):
  """`Worth` of a list of texts' `_Tokens`."""
  texts, alpha = _texts(parts, K)
  joined = _Tokens(*map(np.concatenate, zip(*parts, strict=True)))
  predictions = {rule: predict.predict(texts, rule) for rule in RULES}
  return Worth(
    texts=len(parts),
    tokens=len(joined.alpha),
    alpha=float(joined.alpha[:, 0].mean()),
    agreement=float(joined.agree.mean()),
    forward_kl=float(joined.kl.mean()),
    alpha_by_depth=_by_depth(texts, alpha),
    predictions=predictions,
    speedups={
      rule: predict.speedups(found, costs)
      for rule, found in predictions.items()
    },
  )


def _texts(parts, K):
  """`predict.Texts` of a list of `_Tokens`, and alpha [P, N, K] like log_q."""
  length = np.array([len(x.alpha) for x in parts])

  def pad(found, value):
    wide = [(0, 0)] * (found[0].ndim - 1)
    each = [
      np.pad(x, [(0, length.max() - len(x)), *wide], constant_values=value)
      for x in found
    ]
    return np.stack(each).astype(np.float64)

  log_p = pad([x.log_p for x in parts], 0)
  # a token that this pass's rounding truncates, or of given text: p is unknown
  log_p = np.where(np.isneginf(log_p), 0, log_p)
  log_q = pad([reach.by_start(x.log_q, K, -np.inf) for x in parts], -np.inf)
  alpha = pad([reach.by_start(x.alpha, K, 0) for x in parts], 0)
  return predict.Texts(length, log_p, log_q, alpha[..., 0]), alpha


def _by_depth(texts, alpha):
  """`Worth.alpha_by_depth` [K]; alpha: [P, N, K] by [start, depth]."""
  (_, N, K), found = alpha.shape, []
  A = predict.survival(texts.log_p, texts.log_q, "token")
  for j in range(K):
    there = np.arange(N) + j < texts.length[:, None]  # [P, N] starts
    weight = np.where(there, A[..., j], 0)
    total = weight.sum()
    found.append((weight * alpha[..., j]).sum() / total if total else 0)
  return np.array(found)


def score(evaluation):
  """The largest S of block verification at k = 1..K, over the mix.

  What checkpoints are compared by. Below 1 plain decoding is faster, which is
  no draft's merit.
  """
  return float(evaluation.mix.speedups["block"].mean[1:].max())


def scalars(evaluation):
  """Return {name: float} for a log: "mix/S", "T=0.7/alpha", ..."""
  found = {}
  named = {None: "given"}
  for temperature, worth in evaluation.by_temperature.items():
    name = named.get(temperature, f"T={temperature}")
    found |= {f"{name}/{k}": x for k, x in _scalars(worth).items()}
  return found | {f"mix/{k}": x for k, x in _scalars(evaluation.mix).items()}


def _scalars(worth):
  """{name: float}; E[N] is at K, S at the best of k = 1..K."""
  found = {
    key: getattr(worth, key) for key in ("alpha", "agreement", "forward_kl")
  }
  for j, alpha in enumerate(worth.alpha_by_depth, 1):
    found[f"alpha_{j}"] = float(alpha)
  for rule in RULES:
    prediction, S = worth.predictions[rule], worth.speedups[rule]
    tokens = prediction.tokens
    for j, A in enumerate(prediction.survival[1:], 1):
      found[f"A_{j}_{rule}"] = float(A)
    found[f"E_N_{rule}"] = float(tokens.mean[-1])
    found[f"E_N_{rule}_low"] = float(tokens.low[-1])
    found[f"E_N_{rule}_high"] = float(tokens.high[-1])
    found[f"S_{rule}"] = float(S.mean[1:].max())
    found[f"k_{rule}"] = S.best
  return found
