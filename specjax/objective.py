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

from specjax import losses, renewal

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
  alpha: jax.Array  # [] sum of weights * alpha


class Positions(NamedTuple):
  """What the draft is worth at each position."""

  alpha: jax.Array  # [B, T]
  log_ratio: jax.Array  # [B, T], ln q(x) / p(x) of the text's token


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


def total(schedule, fraction, teacher, student, weights, labels=None, **how):
  """The `Sums` of the loss that rules now; no other one is computed.

  Args:
    schedule, fraction: of `phase`.
    teacher, student: [B, T, D], [B, T, Dq] hidden states; the first constants.
    weights: [B, T], of the label of each position; where they are 0 hidden
      states may hold NaN.
    labels: [B, T] the token behind each position; losses along rows need it.
    **how: keywords of `positions`.

  Raises:
    ValueError: see `phase`; no labels where they are needed.
  """
  branches = []
  for name, _, options in _entries(schedule):
    equation = getattr(LOSSES[name], "equation", None)
    loss = functools.partial(equation or LOSSES[name], **options)
    args = loss, teacher, student, weights
    if equation:
      branches.append(functools.partial(_by_positions, *args, **how))
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
  alpha = losses.weighted(lax.stop_gradient(at.alpha), weights)
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
  **deployment,
):
  """alpha and ln rho of every position; both have a gradient.

  Logits are made again in the backward pass.

  Args:
    teacher, student, weights, labels: see `total`. What is returned where
      weights are 0 is arbitrary, and finite.
    teacher_unembed, student_unembed: hidden states -> logits. A head that is
      cast to bfloat16 inside gets its gradient summed in float32.
    chunk: how many positions of each row are unembedded at a time.
    temperature: [B] that each row's text was sampled at: 0 is greedy; where it
      is NaN (given text), and if None, the sampling's.
    ids: and the other keywords: of `losses.laws`.

  Returns:
    `Positions`.
  """
  how = _deployment(**deployment)

  def values(teacher, student, labels):
    p, log_q = losses.laws(teacher, student, ids=ids, **how)
    alpha = losses.acceptance.equation(p, log_q)
    return Positions(alpha, losses.log_ratio(p, log_q, labels, ids=ids))

  heads = teacher_unembed, student_unembed
  args = teacher, student, weights, labels
  return chunked(values, heads, *args, chunk=chunk)


def chunked(values, heads, teacher, student, weights, labels, *, chunk):
  """What `values` makes of the logits, `chunk` positions of each row at a time.

  Args:
    values: (teacher's logits [B, chunk, V], student's [B, chunk, Vq], labels
      [B, chunk]) -> a tree of [B, chunk].
    heads: the two unembeds; and the other arguments: see `positions`.

  Returns:
    The tree of [B, T].
  """

  @jax.checkpoint
  def at(xs):
    *states, weights, labels = xs
    of = lambda head, x: head(_there(x, weights))
    return values(*map(of, heads, states), labels)

  xs = lax.stop_gradient(teacher), student, weights, labels
  chunks = jax.tree.map(functools.partial(_split, chunk=chunk), xs)
  join = functools.partial(_join, T=weights.shape[1])
  return jax.tree.map(join, lax.map(at, chunks))


def _deployment(*, sampling=losses.PLAIN, temperature=None, **rest):
  """Keywords of `losses.laws` for [B, T] positions."""
  if temperature is not None:
    own = jnp.where(jnp.isnan(temperature), sampling.temperature, temperature)
    sampling = sampling._replace(temperature=own[:, None])
  return {"sampling": sampling, **rest}


def _by_positions(
  equation,
  teacher,
  student,
  weights,
  *,
  teacher_unembed,
  student_unembed,
  chunk=32,
  ids=None,
  **deployment,
):
  """`Sums` of an equation.

  A sum's gradient is known up to a factor as soon as the sum is: each chunk's
  is taken while its logits are there, which saves making them again.
  """
  how = _deployment(**deployment)
  xs = lax.stop_gradient(teacher), student, weights
  xs = tuple(_split(x, chunk) for x in xs)
  teacher_head, fixed = jax.closure_convert(teacher_unembed, xs[0][0])
  student_head, heads = jax.closure_convert(student_unembed, xs[1][0])
  fixed = fixed, how  # traced temperatures too: a custom_vjp closes over none

  def sums(heads, student, fixed, teacher, weights):
    fixed, how = fixed
    p, log_q = losses.laws(
      teacher_head(_there(teacher, weights), *fixed),
      student_head(_there(student, weights), *heads),
      ids=ids,
      **how,
    )
    loss = losses.weighted(equation(p, log_q), weights)
    alpha = losses.weighted(losses.acceptance.equation(p, log_q), weights)
    return loss.sum(), (weights.astype(loss.dtype).sum(), alpha.sum())

  return Sums(*_summed(sums, heads, xs[1], fixed, xs[0], xs[2]))


def _summed(sums, heads, student, fixed, teacher, weights):
  """(loss, weight, alpha) of all chunks; loss has a gradient by the first two.

  sums(heads, student, fixed, teacher, weights) -> (loss, (weight, alpha)) of
  one chunk; the arguments are [n, ...] but for heads and fixed.
  """

  @jax.custom_vjp
  def value(heads, student, fixed, teacher, weights):
    each = lambda xs: sums(heads, xs[0], fixed, *xs[1:])
    loss, (weight, alpha) = lax.map(each, (student, teacher, weights))
    return loss.sum(), weight.sum(), alpha.sum()

  def forward(heads, student, fixed, teacher, weights):
    gradient = jax.value_and_grad(sums, argnums=(0, 1), has_aux=True)

    def step(d_heads, xs):
      (loss, aux), (d, d_student) = gradient(heads, xs[0], fixed, *xs[1:])
      d_heads = [a + b.astype(a.dtype) for a, b in zip(d_heads, d, strict=True)]
      return d_heads, (loss, *aux, d_student)

    wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    d_heads, (*values, d_student) = lax.scan(
      step, [wide(x) for x in heads], (student, teacher, weights)
    )
    kept = [d.astype(x.dtype) for d, x in zip(d_heads, heads, strict=True)]
    return tuple(x.sum() for x in values), (kept, d_student)

  def backward(gradients, cotangents):
    scale = lambda g: (cotangents[0] * g).astype(g.dtype)
    d_heads, d_student = jax.tree.map(scale, gradients)
    return d_heads, d_student, None, None, None

  value.defvjp(forward, backward)
  return value(heads, student, fixed, teacher, weights)


def _there(hidden, weights):
  """Hidden states with 0 for those of weight 0.

  Masking the loss is not enough: the gradient of a head's weights is a product
  with the states, and 0 * NaN is NaN.
  """
  return jnp.where((weights > 0)[..., None], hidden, 0)


def _split(x, chunk):
  """[B, T, ...] as [n, B, chunk, ...], padded with 0."""
  B, T, *rest = x.shape
  x = jnp.pad(x, [(0, 0), (0, -T % chunk), *[(0, 0)] * len(rest)])
  return jnp.moveaxis(x.reshape(B, -1, chunk, *rest), 1, 0)


def _join(x, T):
  """[n, B, chunk] as [B, T]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(len(x), -1)[:, :T]
