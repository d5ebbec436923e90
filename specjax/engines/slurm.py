"""Jobs of a Slurm cluster, through submitit: one array, one job a point.

A job that is preempted or out of time saves, and is put into the queue again.
"""

import os
import time

from specjax import engines
from specjax.errors import UserError

_POLL = 1.0  # seconds; submitit asks Slurm less often than that
_PATIENCE = 60  # polls, for jobs that are cancelled to save and end


def run(
  commands,
  *,
  folder,
  cluster="slurm",
  partition="",
  minutes=60,
  cpus=0,
  gpus=0,
  at_once=0,
):
  """Run commands as jobs; see `specjax.engines`.

  Args:
    folder: of submitit's logs, which the jobs can read and write.
    cluster: "slurm", or "local" for processes of this machine, all at once.
    partition, minutes, cpus, gpus, at_once: of a job, at most so many of which
      run at a time; "" or 0 for what the cluster does unasked.

  Raises:
    UserError: submitit is not installed, or there is no Slurm here.
  """
  submitit = engines.need("submitit")
  try:
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
  except RuntimeError as e:
    raise UserError(
      f"there is no Slurm here ({e}); type this on a login node of the cluster"
    ) from e
  asked = {
    "cpus_per_task": cpus,
    "gpus_per_node": gpus,
    "slurm_partition": partition,
    "slurm_array_parallelism": at_once,
  }
  asked = {name: value for name, value in asked.items() if value}
  executor.update_parameters(name="specjax", timeout_min=minutes, **asked)
  with executor.batch():
    jobs = [executor.submit(engines.Command(c, os.getcwd())) for c in commands]
  left = dict(enumerate(jobs))
  try:
    while left:
      for index in [i for i, job in left.items() if job.done()]:
        yield index, _told(left.pop(index))
      time.sleep(_POLL)
  finally:
    _cancel(left.values())


def _told(job):
  """What a job's command had to say, or why there was none."""
  try:
    return job.result()
  except Exception as e:  # of whatever kind: the job is over
    return next(filter(None, reversed(str(e).splitlines())), type(e).__name__)


def _cancel(jobs):
  for job in jobs:
    job.cancel()
  for _ in range(_PATIENCE):
    if all(job.done() for job in jobs):
      break
    time.sleep(_POLL)
