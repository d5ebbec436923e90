"""How much memory a run will take, told before it is taken."""

import sys
from pathlib import Path

import jax
import psutil

from specjax import cache
from specjax.errors import UserError
from specjax.models import transformer


def estimate(config, *, dtype, batch, slots, queries=1, untie=False):
  """Return bytes by purpose: the weights, the cache and the probabilities.

  Args:
    config: a `transformer.Config`.
    dtype: of weights and cache.
    queries: positions a step makes logits for: 1, or K + 1 when verifying.
    untie: a tied head is copied.
  """
  size = jax.numpy.dtype(dtype).itemsize
  weights = size * transformer.num_parameters(config)
  if untie and config.tied:
    weights += size * config.vocab_size * config.width
  return {
    "weights": weights,
    "cache": cache.num_bytes(
      batch=batch, slots=slots, dtype=dtype, **transformer.cache_shape(config)
    ),
    # logits, their law and its truncation, float32 [batch, queries, V] each
    "probabilities": 3 * 4 * batch * queries * config.vocab_size,
  }


def available():
  """Bytes that the default device can still hold, None if it does not say."""
  device = jax.local_devices()[0]
  if device.platform != "cpu":
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
      return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  return min(psutil.virtual_memory().available, _container_limit())


def peak():
  """The most bytes held so far: the device's, or the process's on a CPU."""
  device = jax.local_devices()[0]
  if device.platform != "cpu":
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
  import resource  # not on Windows

  # kibibytes on Linux, bytes on macOS
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check(parts):
  """Return a line that tells the estimate.

  Raises:
    UserError: it is more than there is.
  """
  total, free = sum(parts.values()), available()
  line = " + ".join(f"{human(n)} {name}" for name, n in parts.items())
  if free is None:
    return f"memory: {line}"
  if total > free:
    raise UserError(
      f"out of memory: {line} = {human(total)}, but {human(free)} is free;"
      " lower --config.batch_size or --config.max_new_tokens, or choose a"
      " smaller target"
    )
  return f"memory: {line} of {human(free)} free"


def human(num_bytes):
  """'1.2 GB', three digits at most where a unit is large enough for that."""
  units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
  unit, size = next((u for u in units if num_bytes >= u[1]), units[-1])
  value = num_bytes / size
  return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


def _container_limit():
  """What a cgroup leaves this process, which `psutil` does not see."""
  folder = Path("/sys/fs/cgroup")
  try:
    most = int((folder / "memory.max").read_text())
    used = int((folder / "memory.current").read_text())
    stat = dict(map(str.split, (folder / "memory.stat").open()))
    # files that were read and would make room at once
    return most - used + int(stat["inactive_file"])
  except (OSError, ValueError, KeyError):  # no cgroup, or "max"
    return float("inf")
