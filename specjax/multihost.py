"""Several processes that run one program, each on devices of its own.

Every process runs the same script with the same arguments and sees the same
files; the first alone writes and prints. What they decide by, a clock or a
signal, is one process's for all, since a process that takes another turn leaves
the others waiting for it. In one process all of this is nothing.
"""

import os
import pickle
import sys

import jax
import numpy as np

from specjax.errors import UserError

ADDRESS, COUNT, NUMBER = (
  "JAX_COORDINATOR_ADDRESS",
  "JAX_NUM_PROCESSES",
  "JAX_PROCESS_ID",
)


def join():
  """Join the other processes, before anything else is asked of JAX.

  Slurm, Open MPI, Kubernetes and TPUs say who they are. Elsewhere each process
  has COUNT, its own NUMBER from 0 on, and process 0's ADDRESS, as host:port, in
  its environment. Processes but the first are silent from here on.

  Raises:
    UserError: nobody says it, or the others do not come.
  """
  given = [os.environ.get(name) for name in (ADDRESS, COUNT, NUMBER)]
  hint = f"set {ADDRESS}=HOST:PORT, {COUNT} and {NUMBER} in each process"
  if any(given) and not all(given):
    raise UserError(f"--multihost has some of three settings: {hint}")
  try:
    if all(given):
      jax.distributed.initialize(given[0], int(given[1]), int(given[2]))
    else:
      jax.distributed.initialize()
  except (RuntimeError, ValueError) as e:
    raise UserError(f"--multihost: {' '.join(str(e).split())}; {hint}") from e
  if not first():
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def several():
  """Whether there are other processes."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def first():
  """Whether this process writes and prints."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def fetch(tree):
  """Arrays of a tree as numpy's, from whichever process holds them."""
  if not several():
    return jax.device_get(tree)
  from jax.experimental import multihost_utils

  def one(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return jax.device_get(x)

  return jax.tree.map(one, tree)


def same(value):
  """The first process's value in each of them; all have to ask."""
  if not several():
    return value
  from jax.experimental import multihost_utils

  data = np.frombuffer(pickle.dumps(value), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
  sent = np.zeros(size, np.uint8)
  if first():
    sent[:] = data
  return pickle.loads(multihost_utils.broadcast_one_to_all(sent).tobytes())


def most(number):
  """The largest of all processes' numbers; all have to ask."""
  if not several():
    return number
  from jax.experimental import multihost_utils

  return int(multihost_utils.process_allgather(np.int32(number)).max())


def meet(where):
  """Wait until every process is here."""
  if several():
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(where)
