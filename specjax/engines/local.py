"""Processes on this machine: one at a time, or one a device."""

import collections
import os
import time

from specjax import engines

_POLL = 0.05  # seconds


def run(commands, *, devices=()):
  """Run commands here; see `specjax.engines`.

  Args:
    devices: ids of accelerators, of which each runs one command at a time and
      is all that this command sees; () for one command at a time, which sees
      all there is.
  """
  todo = collections.deque(enumerate(commands))
  free, running = list(devices or (None,)), {}  # {process: (index, device)}
  try:
    while todo or running:
      while todo and free:
        index, command = todo.popleft()
        device = free.pop(0)
        process = engines.start(command, env=os.environ | _only(device))
        running[process] = index, device
        yield index, None
      for process in [p for p in running if p.poll() is not None]:
        index, device = running.pop(process)
        free.append(device)
        yield index, engines.ended(process)
      time.sleep(_POLL)
  finally:
    engines.stop([*running])


def _only(device):
  """The environment in which JAX sees one GPU or one TPU chip."""
  if device is None:
    return {}
  return {
    "CUDA_VISIBLE_DEVICES": device,
    "TPU_VISIBLE_DEVICES": device,
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
  }
