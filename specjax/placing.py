"""Training on a mesh: what is trained is cut over all devices, batches by row.

Parameters, the optimiser's moments and the gradient's sum lie in equal parts on
every device, over "model" as `sharding.spec` has it and over "data" too (ZeRO:
Rajbhandari et al. 2020, arXiv:1910.02054). A micro-batch gathers the parameters
over "data", and its gradient goes back in parts. The programs are those of
`step.py`; only where their arrays lie is said here.
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import sharding


def _where(mesh, config, keys, x, over_data=True):
  """The sharding of an array by its path, of a state or of a draft's tree.

  The optimiser's arrays are named as the parameters that they belong to.
  """
  path = tuple(key.key for key in keys if hasattr(key, "key"))
  how = dict(over_data=over_data)
  spec = sharding.spec(mesh, config, path, x.shape, **how) if path else P()
  return NamedSharding(mesh, spec)


def shapes(mesh, config, tree):
  """Return a tree of shapes that say where what is trained is to lie.

  Args:
    config: the draft's `transformer.Config`.
    tree: of `jax.ShapeDtypeStruct`s: parameters, or a `step.State`.
  """
  return jax.tree_util.tree_map_with_path(
    lambda keys, x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=_where(mesh, config, keys, x)
    ),
    tree,
  )


def put(tree, like):
  """Return arrays where shapes say that they lie."""
  return jax.tree.map(
    lambda x, shape: sharding.put_one(x, shape.sharding), tree, like
  )


def _held(mesh, config, tree, **how):
  constrain = jax.lax.with_sharding_constraint
  return jax.tree_util.tree_map_with_path(
    lambda keys, x: constrain(x, _where(mesh, config, keys, x, **how)), tree
  )


def joined(join, mesh, config):
  """Return `step.make`'s join, whose parameters are whole over "data"."""

  def whole(shared, params):
    return join(shared, _held(mesh, config, params, over_data=False))

  return whole


def steps(programs, mesh, config):
  """Return `step.Steps` whose state stays where it is and whose batch is cut.

  Args:
    programs: of `step.make`; config: the draft's `transformer.Config`.
  """
  hold = functools.partial(_held, mesh, config)

  @functools.partial(jax.jit, donate_argnums=0)
  def add(state, batch, teacher_params, shared):
    return hold(programs.accumulate(state, batch, teacher_params, shared))

  @functools.partial(jax.jit, donate_argnums=0)
  def update(state):
    state, report = programs.update(state)
    return hold(state), report

  def accumulate(state, batch, teacher_params, shared):
    return add(state, rows(mesh, batch), teacher_params, shared)

  return programs._replace(accumulate=accumulate, update=update)


def rows(mesh, batch):
  """Arrays [B, ...] of the host, B over "data".

  Every process makes the same batch, which is a function of the step, and hands
  its devices the rows that are theirs.
  """
  over = NamedSharding(mesh, P(sharding.DATA))
  return jax.tree.map(lambda x: sharding.put_one(np.asarray(x), over), batch)
