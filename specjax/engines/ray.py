"""Tasks of a Ray cluster: one a point, wherever its resources are free.

A task whose machine is lost is run again on another one.
"""

import os

from specjax import engines
from specjax.errors import UserError

_POLL = 1.0  # seconds
_PATIENCE = 60.0  # seconds, for tasks that are cancelled to save and end
_RETRIES = 3  # when a machine is lost


def run(commands, *, address="", cpus=0, gpus=0, resources=None):
  """Run commands as tasks; see `specjax.engines`.

  Args:
    address: of the cluster, such as "auto" or "ray://head:10001"; "" for one
      that begins and ends with this call, on this machine.
    cpus, gpus: of a task; no cpus are one, or all of the largest machine if
      nothing else is asked for, so that a task has it alone.
    resources: {name: number} of others, such as {"TPU": 4}.

  Raises:
    UserError: Ray is not installed, or there is no such cluster.
  """
  os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  ray = engines.need("ray")
  where = {"address": address} if address else {"include_dashboard": False}
  try:
    ray.init(log_to_driver=False, logging_level="ERROR", **where)
  except (ConnectionError, ValueError, RuntimeError) as e:
    raise UserError(f"no Ray cluster at --address={address}: {e}") from e
  left = {}
  try:
    if not (cpus or gpus or resources):
      cpus = max(node["Resources"].get("CPU", 1) for node in ray.nodes())
    task = ray.remote(
      num_cpus=cpus or 1,
      num_gpus=gpus,
      resources=resources,
      max_retries=_RETRIES,
    )(_call)
    for index, command in enumerate(commands):
      left[task.remote(command, os.getcwd())] = index
    while left:
      for ref in ray.wait(list(left), timeout=_POLL)[0]:
        yield left.pop(ref), _told(ray, ref)
  finally:
    for ref in left:
      ray.cancel(ref)
    if left:
      ray.wait(list(left), num_returns=len(left), timeout=_PATIENCE)
    ray.shutdown()


def _call(command, folder):
  return engines.Command(command, folder)()


def _told(ray, ref):
  """What a task's command had to say, or why there was none."""
  try:
    return ray.get(ref)
  except ray.exceptions.RayError as e:
    return next(filter(None, reversed(str(e).splitlines())), type(e).__name__)
