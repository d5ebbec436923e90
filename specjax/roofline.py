"""What a call should take by the bytes and FLOPs that it needs: a model.

A dense model's call on n tokens of each of B rows takes

  t = max(2 P B n / F, (weights + B context kv) / BW) + layers * launch

P its weights, F the device's FLOP/s, BW its bytes/s, kv the bytes that a cached
token holds. (Williams et al. 2009.) Up to B n = F / BW, at 2 bytes a weight, it
is the bytes that count, so that verification is nearly free. It says what
measured costs become at another batch or context, as ratios.
"""

from typing import NamedTuple

import jax

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


def work(target, params, layers):
  """Return the `Work` of a `Target` with these parameters.

  Weights are all parameters but, where the head is a matrix of its own, the
  embedding, of which a token reads one row.
  """
  if isinstance(params, dict) and "head" in params:
    params = {name: x for name, x in params.items() if name != "embed"}
  leaves, slots = jax.tree.leaves(params), 64
  cache = jax.tree.leaves(jax.eval_shape(lambda: target.init_cache(1, slots)))
  num_bytes = lambda arrays: sum(x.size * x.dtype.itemsize for x in arrays)
  return Work(
    sum(x.size for x in leaves),
    num_bytes(leaves),
    num_bytes(cache) // slots,
    layers,
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
