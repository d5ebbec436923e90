"""What a call should take by the bytes and FLOPs that it needs: a model.

A dense model's call on n tokens of each of B rows takes

  t = max(2 P B n / F, (weights + B context kv) / BW) + layers * launch

P its weights, F the device's FLOP/s, BW its bytes/s, kv the bytes that a cached
token holds. (Williams et al. 2009.) Up to B n = F / BW, at 2 bytes a weight, it
is the bytes that count, so that verification is nearly free. It says what
measured costs become at another batch or context, as ratios.
"""

import math
from typing import NamedTuple

import jax

from specjax import cache
from specjax.errors import UserError
from specjax.models import transformer
from specjax.timing import Cost


class Work(NamedTuple):
  """What a call of a model has to do."""

  weights: int  # P, numbers that each token is multiplied by
  weight_bytes: int  # what a call reads of them, once
  cache_bytes: int  # of one cached token, read in each later call of its row
  layers: int


class Machine(NamedTuple):
  """What a device does, from its data sheet or measured."""

  bandwidth: float  # bytes/s
  peak: float  # FLOP/s in the weights' precision
  launch: float = 0.0  # seconds that a layer takes however little it does


class There(NamedTuple):
  """Where a prediction is wanted that was timed at another size."""

  machine: Machine  # the one that was timed
  batch: int
  context: int


def work(config, params):
  """Return the `Work` of a model with these parameters.

  Weights are all parameters but, where the head is a matrix of its own, the
  embedding, of which a token reads one row.

  Args:
    config: the `transformer.Config` of its layers.
  """
  dtype = params["embed"].dtype
  if "head" in params:
    params = {name: x for name, x in params.items() if name != "embed"}
  leaves = jax.tree.leaves(params)
  shape = transformer.cache_shape(config)
  return Work(
    sum(x.size for x in leaves),
    sum(x.size * x.dtype.itemsize for x in leaves),
    cache.num_bytes(batch=1, slots=1, dtype=dtype, **shape),
    config.layers,
  )


def seconds(work, machine, *, tokens, batch, context):
  """t of the module's equation, of `tokens` of each row.

  ValueError unless bandwidth and peak are positive.
  """
  if not (machine.bandwidth > 0 and machine.peak > 0):
    raise ValueError(f"bandwidth and peak must be positive, got {machine}")
  flops = 2 * work.weights * batch * tokens
  moved = work.weight_bytes + batch * context * work.cache_bytes
  slowest = max(flops / machine.peak, moved / machine.bandwidth)
  return slowest + work.layers * machine.launch


def extrapolate(costs, target, draft, machine, *, batch, context):
  """Return measured `timing.Costs` at another batch and context, modelled.

  A time changes by the ratio of the roofline's; what a plain step and a round
  take beside their calls and drafted tokens stays.

  Args:
    target, draft: the models' `Work`; draft None: one that does not change,
      such as a look-up.
    machine: a `Machine`.
  """
  here = dict(batch=costs.batch, context=costs.context)
  there = dict(batch=batch, context=context)

  def scaled(cost, work, n):
    ratio = seconds(work, machine, tokens=n, **there)
    ratio /= seconds(work, machine, tokens=n, **here)
    return Cost(*(x * ratio for x in cost))

  calls = {n: scaled(cost, target, n) for n, cost in costs.target.items()}
  token = scaled(costs.draft, draft, 1) if draft else costs.draft
  more = lambda cost, by: Cost(*(x + by for x in cost))
  new = costs._replace(target=calls, draft=token, modelled=True, **there)
  parts = lambda costs, k: k * costs.draft.median + costs.call(k + 1)
  return new._replace(
    plain=costs.plain and more(costs.plain, new.call(1) - costs.call(1)),
    round={
      k: more(cost, parts(new, k) - parts(costs, k))
      for k, cost in costs.round.items()
    },
  )


def there(at, machine, measured=()):
  """The `There` of two lists of texts, None if both are empty.

  Args:
    at: batch and context; machine: bytes/s and FLOP/s.
    measured: names of reports to be put beside, which are of no such size.

  Raises:
    UserError: they do not say it.
  """
  if not at and not machine:
    return None
  if any(measured):
    raise UserError(
      "--measured is of batch 1 as it was timed, --at models S for another"
      " size; leave one of them away"
    )
  if len(at) != 2 or len(machine) != 2:
    raise UserError(
      "another size takes both --at=BATCH,CONTEXT and --machine=BYTES/S,FLOP/S"
      " of this machine, such as --at=8,2048 --machine=2e10,1.8e11"
    )
  try:
    batch, context = map(int, at)
    bandwidth, peak = map(float, machine)
    right = min(batch, context) > 0
    right = right and all(0 < x < math.inf for x in (bandwidth, peak))
  except ValueError:
    right = False
  if not right:
    raise UserError(
      "--at takes two whole numbers and --machine two numbers, all above 0,"
      " such as --at=8,2048 --machine=2e10,1.8e11; got"
      f" --at={','.join(at)} --machine={','.join(machine)}"
    )
  return There(Machine(bandwidth, peak), batch, context)


def elsewhere(timed, model, pairs, there):
  """The costs at another batch and context; see `extrapolate`.

  Args:
    timed: {name: `timing.Costs`}; pairs: {name: `pair.Pair`}.
    model: the target's `load.Model`; there: a `There`.
  """
  target = work(model.loaded, model.params)
  found = {}
  for name, draft in pairs.items():
    own = None  # a look-up
    if draft.opened.config:
      own = work(draft.opened.config, draft.params(None))
    size = dict(batch=there.batch, context=there.context)
    found[name] = extrapolate(timed[name], target, own, there.machine, **size)
  return found
