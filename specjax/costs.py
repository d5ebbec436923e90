"""What a round costs when checkpoints are compared: given, or timed here.

Both are `timing.Costs` of one row, so that a predicted S is
E[N] / (v_k + k c + o_k) in units of a plain step. A run takes its costs once,
at the start: with costs that drift its checkpoints could not be compared.
"""

import functools
import math

import jax
import jax.numpy as jnp

from specjax import sharding, timing, types
from specjax import student as students
from specjax.drafters import feature, lm
from specjax.errors import UserError
from specjax.models import load, transformer, weights


def given(asked, num_draft):
  """Return the `timing.Costs` that a config gives.

  Args:
    asked: .draft, c of a drafted token; .verify, pairs (n, a target call on n
      tokens) from n = 1 on, straight lines between; .overhead, o of a round;
      all in units of a plain step.
    num_draft: K, the longest draft that will be asked about.

  Raises:
    UserError: a value out of its range, a curve that does not reach from 1 to
      K + 1 tokens.
  """
  for key in ("draft", "overhead"):
    value = getattr(asked, key)
    if not 0 <= value < math.inf:
      raise UserError(
        f"--config.costs.{key} must be a number >= 0, in units of a target"
        f" step, got {value}"
      )
  try:
    curve = [(int(n), float(v)) for n, v in asked.verify]
    right = all(int(n) == n for n, _ in asked.verify)
  except (TypeError, ValueError):
    curve, right = [], False
  widths = [n for n, _ in curve]
  right = right and all(0 < v < math.inf for _, v in curve)
  if not right or widths[:1] != [1] or widths != sorted(set(widths)):
    raise UserError(
      "--config.costs.verify must be pairs (tokens, cost of a target call on"
      " them), tokens rising from 1 and costs above 0, such as"
      f" ((1, 1.0), (5, 1.35)), got {asked.verify}"
    )
  if widths[-1] <= num_draft:
    raise UserError(
      f"--config.costs.verify ends at {widths[-1]} tokens; a round of"
      f" {num_draft} drafted ones verifies {num_draft + 1}: add"
      f" ({num_draft + 1}, cost)"
    )
  same = lambda x: timing.Cost(x, x, x)
  costs = timing.Costs(
    plain=same(1.0),
    target={n: same(v) for n, v in curve},
    draft=same(float(asked.draft)),
    round={},
    batch=1,
    context=0,
    modelled=True,
  )
  whole = lambda k: costs.call(k + 1) + k * asked.draft + asked.overhead
  return costs._replace(round={k: same(whole(k)) for k in (1, num_draft)})


def measured(
  student,
  params,
  teacher,
  *,
  num_draft,
  slots,
  context,
  sampling,
  turns=5,
  track=lambda runs: runs,
):
  """Return the `timing.Costs` of a draft beside its target, on this device.

  As decoding would have both: one row, the teacher's dtype, matrices as they
  are stored for few rows. A round is timed at 1, 2, 4, ... and K drafted
  tokens; between these costs are straight lines.

  Args:
    student: a `Student`; params: what is trained of it.
    teacher: a `load.Model`.
    num_draft: K >= 1.
    slots: of the cache: tokens of a prompt and its answer.
    context: tokens before the first timed one.
    sampling: dict of `request.make`'s sampling values.
    track: wraps the list of all that is run, for a progress bar.

  Raises:
    UserError: slots or contexts do not hold a round.
  """
  dtype = teacher.params["embed"].dtype
  lay = functools.partial(_stored, dtype=dtype, mesh=teacher.mesh)
  config, stored = lay(teacher.loaded, teacher.params)
  target = sharding.target(transformer.make(config, dtype), teacher.mesh)
  merged = students.merged(student.shared, params)
  config, own = lay(student.config, merged)
  vocab_size = target.vocab_size
  if student.features:
    config = feature.Config(config, student.features)
    drafter = feature.make(config, vocab_size, ids=student.ids)
    drafter = sharding.drafter(drafter, teacher.mesh)
  else:
    model = sharding.target(transformer.make(config, dtype), teacher.mesh)
    drafter = lm.make(model, vocab_size, ids=student.ids)
  room = min(slots, target.context, drafter.context)
  try:
    context, steps = timing.fit(room, context, num_draft, 8)
  except ValueError as e:
    raise UserError(
      f"the costs cannot be timed: {e}; ask for shorter drafts"
    ) from e
  draft = types.Draft(drafter, own, num_draft)
  widths = {2**i for i in range(num_draft.bit_length())} | {num_draft}
  return timing.measure(
    target,
    stored,
    {"": draft},
    batch=1,
    slots=slots,
    context=context,
    widths=widths,
    sampling=sampling,
    steps=steps,
    turns=turns,
    track=track,
  )[""]


def _stored(config, params, dtype, mesh):
  """(config, params) as `load.model` has them for decoding here."""
  untie = load.untie_here()
  block = 0 if mesh is not None else load.block_here()
  if untie and config.tied:
    params = {**params, "head": params["embed"].T}
  if config.block != block:
    params = weights.in_blocks(params, block)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  config = weights.as_loaded(config, untie, block)
  if mesh is not None:
    params = sharding.params(mesh, config, params)
  return config, params
