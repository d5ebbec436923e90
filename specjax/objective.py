"""What a training step minimises: a schedule of losses, summed over positions.

From hidden states, `chunk` positions of each row at a time: there are never
logits [B, T, V] of the teacher or the student.

Sums are returned, not means. Add them up over micro-batches and devices and
divide once: a mean of means would give a short sample the weight of a long one,
and a micro-batch without a supervised token is 0 / 0 (B19, B20).
"""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import chunks, laws, losses, reach, renewal

LOSSES = {
  loss.__name__: loss
  for loss in (
    losses.forward_kl,
    losses.reverse_kl,
    losses.js,
    losses.total_variation,
    losses.negative_log_acceptance,
    losses.likelihood_hybrid,
    losses.tvd_plus_plus,
    losses.expected_length,
    renewal.expected_rounds,
  )
}


class Sums(NamedTuple):
  """Over the positions of a batch; divide by `weight` when all are added."""

  loss: jax.Array  # [] sum of weights * loss, the one that has a gradient
  weight: jax.Array  # [] sum of weights
  alpha: jax.Array  # [] sum of weights * alpha, at depth 1


class Positions(NamedTuple):
  """What the draft is worth at each position, [B, T], or [B, T, J] by depth."""

  alpha: jax.Array
  log_ratio: jax.Array  # ln q(x) / p(x) of the text's token


def phase(schedule, fraction):
  """Which entry of the schedule rules when `fraction` of the steps are done.

  (("forward_kl", 1 / 3), ("total_variation", 1.0)) is KL for the first third,
  then TV. An entry is (name of a loss, until[, options]), options a mapping of
  the loss's own keywords: ("expected_length", 1.0, {"num_draft": 4}).

  Args:
    schedule: static.
    fraction: [] in [0, 1], may be traced: a switch compiles nothing.

  Returns:
    [] int32.

  Raises:
    ValueError: an unknown loss or option, one that is missing, or ends that do
      not rise to 1.
  """
  ends = [until for _, until, _ in _entries(schedule)]
  return (fraction >= jnp.asarray(ends[:-1], float)).sum().astype(jnp.int32)


def _entries(schedule):
  """[(name, until, options)], checked."""
  entries = [(*e, {})[:3] for e in schedule]
  for name, _, options in entries:
    if name not in LOSSES:
      raise ValueError(f"no loss {name!r}; there are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    known = inspect.signature(getattr(loss, "equation", loss)).parameters
    known = {k: v for k, v in known.items() if v.kind is v.KEYWORD_ONLY}
    for key in options:
      if key not in known:
        raise ValueError(f"{name} has no option {key!r}, but {[*known]}")
    for key, parameter in known.items():
      if key not in options and parameter.default is parameter.empty:
        raise ValueError(f"{name} needs the option {key!r}")
  ends = [0.0, *(until for _, until, _ in entries)]
  if ends[-1] != 1 or any(b <= a for a, b in zip(ends, ends[1:], strict=False)):
    raise ValueError(f"a schedule's ends must rise to 1, got {ends[1:]}")
  return entries


def total(
  schedule,
  fraction,
  teacher,
  student,
  weights,
  labels=None,
  *,
  depth_weights=(1.0,),
  **how,
):
  """The `Sums` of the loss that rules now; no other one is computed.

  A draft whose law depends on where its round began has hidden states at each
  depth of a round. A loss of positions is then the mean over depths of its
  values there, by `depth_weights`; where no round can have come so deep it is
  0, as outside the answer. A loss along rows judges the token that is drafted
  j-th from a start by depth j, and weighs depths by itself. alpha is depth 1's.

  Args:
    schedule, fraction: of `phase`.
    teacher: [B, T, D] hidden states, constants.
    student: [B, T, Dq], or [B, T, J, Dq] by depth.
    weights: [B, T], of the label of each position; where they are 0 hidden
      states may hold NaN.
    labels: [B, T] the token behind each position; losses along rows need it.
    depth_weights: [J] >= 0, in any unit.
    **how: keywords of `positions`.

  Raises:
    ValueError: see `phase`; no labels where they are needed; other depths.
  """
  branches = []
  for name, _, options in _entries(schedule):
    equation = getattr(LOSSES[name], "equation", None)
    loss = functools.partial(equation or LOSSES[name], **options)
    args = loss, teacher, student, weights
    if equation:
      branches.append(
        functools.partial(_by_positions, *args, depth_weights, **how)
      )
    elif labels is None:
      raise ValueError(f"{name} needs the labels")
    else:
      branches.append(functools.partial(_by_starts, *args, labels, **how))
  # not under vmap: there every branch would be computed
  return lax.switch(phase(schedule, fraction), branches)


def _by_starts(loss, teacher, student, weights, labels, **how):
  """`Sums` of a loss that looks along the row."""
  at = positions(teacher, student, weights, labels, **how)
  loss = loss(at.log_ratio, at.alpha, weights)
  alpha = reach.at_depth(lax.stop_gradient(at.alpha), 0, weights)
  alpha = losses.weighted(alpha, weights)
  return Sums(loss.sum(), weights.astype(loss.dtype).sum(), alpha.sum())


def positions(
  teacher,
  student,
  weights,
  labels,
  *,
  teacher_unembed,
  student_unembed,
  chunk=32,
  ids=None,
  known=None,
  **deployment,
):
  """alpha and ln rho of every position; both have a gradient.

  Args:
    teacher, student, weights, labels: see `total`. What is returned where
      weights are 0 is arbitrary, and finite.
    teacher_unembed, student_unembed: hidden states -> logits. A head that is
      cast to bfloat16 inside gets its gradient summed in float32.
    chunk: how many positions of each row are unembedded at a time.
    temperature: [B] that each row's text was sampled at: 0 is greedy; where it
      is NaN (given text), and if None, the sampling's.
    known: the `laws.Normaliser` [B, T] of positions where teacher_unembed makes
      logits of ids alone.
    ids: and the other keywords: of `laws.laws`.

  Returns:
    `Positions`.
  """
  how = _deployment(**deployment)

  def values(teacher, student, labels):
    labels, known = jax.tree.map(lambda x: x[..., None], labels)
    p, log_q = laws.laws(
      teacher[..., None, :], student, ids=ids, known=known, **how
    )
    alpha = losses.acceptance.equation(p, log_q)
    return Positions(alpha, losses.log_ratio(p, log_q, labels, ids=ids))

  heads = teacher_unembed, student_unembed
  args = teacher, by_depth(student), weights, (labels, known)
  found = chunks.chunked(values, heads, *args, chunk=chunk)
  if student.ndim == 4:
    return found
  return jax.tree.map(lambda x: x[..., 0], found)


def by_depth(student):
  """Hidden states [B, T, J, Dq]; those of a draft without depths as one."""
  return student if student.ndim == 4 else student[:, :, None]


def _deployment(*, sampling=laws.PLAIN, temperature=None, **rest):
  """Keywords of `laws.laws` for [B, T, J] laws."""
  if temperature is not None:
    own = jnp.where(jnp.isnan(temperature), sampling.temperature, temperature)
    sampling = sampling._replace(temperature=own[:, None, None])
  return {"sampling": sampling, **rest}


def _by_positions(
  equation,
  teacher,
  student,
  weights,
  depth_weights,
  *,
  teacher_unembed,
  student_unembed,
  chunk=32,
  ids=None,
  known=None,
  **deployment,
):
  """`Sums` of an equation; the teacher's laws are made once for all depths."""
  how = _deployment(**deployment)
  student, share = by_depth(student), jnp.asarray(depth_weights, float)
  if share.shape != student.shape[2:3]:
    raise ValueError(
      f"{student.shape[2]} depths need as many depth_weights, got {share.shape}"
    )
  each = reach.reached(weights, len(share)) * (share / share.sum())
  xs = lax.stop_gradient(teacher), student, (weights, each, known)
  xs = jax.tree.map(lambda x: chunks.split(x, chunk), xs)
  teacher_head, fixed = jax.closure_convert(teacher_unembed, xs[0][0])
  student_head, heads = jax.closure_convert(student_unembed, xs[1][0])
  fixed = fixed, how  # traced temperatures too: a custom_vjp closes over none

  def sums(heads, student, fixed, teacher, weights):
    (fixed, how), (weights, each, known) = fixed, weights
    teacher = teacher_head(chunks.there(teacher, weights), *fixed)
    p, log_q = laws.laws(
      teacher[..., None, :],
      student_head(chunks.there(student, weights), *heads),
      ids=ids,
      known=jax.tree.map(lambda x: x[..., None], known),
      **how,
    )
    loss = losses.weighted(equation(p, log_q), each)
    alpha = losses.acceptance.equation(p[..., 0, :], log_q[..., 0, :])
    alpha = losses.weighted(alpha, weights)
    return loss.sum(), (weights.astype(loss.dtype).sum(), alpha.sum())

  return Sums(*chunks.summed(sums, heads, xs[1], fixed, xs[0], xs[2]))
