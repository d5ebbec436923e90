"""How much memory a run will take, told before it is taken."""

import sys
from pathlib import Path

import jax
import psutil

from specjax import cache, sharding
from specjax.errors import UserError
from specjax.models import transformer, weights


def estimate(config, *, dtype, batch, slots, untie=False, draft=None):
  """Return bytes by purpose: weights, caches and probabilities.

  Args:
    config: a `transformer.Config`.
    dtype: of weights and cache.
    untie: a tied head is copied.
    draft: a `pair.Opened` to speculate with, None for plain decoding.
  """
  shape = dict(batch=batch, slots=slots, dtype=dtype)
  cached = lambda c: cache.num_bytes(**shape, **transformer.cache_shape(c))
  K = draft.num_draft if draft else 0
  parts = {"weights": _weights(config, dtype, untie)}
  if draft and draft.own:
    size = _weights(draft.own.config, dtype, untie, draft.features)
    if draft.own.lacks and draft.own.lacks.embedding == "shared":
      size -= _lent(draft.own.config, dtype, untie)
    parts["draft weights"] = size
  elif draft and draft.ids:  # the rest is the target's
    size = jax.numpy.dtype(dtype).itemsize
    parts["draft head"] = size * len(draft.ids) * config.width
  parts["cache"] = cached(config)
  if draft and draft.config:
    parts["draft cache"] = cached(draft.config)
  if draft and draft.features:  # of the prompts, while they are fed
    size = jax.numpy.dtype(dtype).itemsize * len(draft.features)
    parts["features"] = size * batch * slots * config.width
  # float32 [batch, V] each: logits, their law and its truncation of the K + 1
  # positions that a step scores, and q of the K drafted ones
  rows = 3 * (K + 1) + K
  return parts | {"probabilities": 4 * batch * rows * config.vocab_size}


def _weights(config, dtype, untie, features=()):
  size = jax.numpy.dtype(dtype).itemsize
  copied = config.vocab_size * config.width if untie and config.tied else 0
  return size * (weights.num_parameters(config, features) + copied)


def _lent(draft, dtype, untie):
  """Bytes of a draft's tree that are the target's arrays; see `load.model`."""
  embedding = jax.numpy.dtype(dtype).itemsize * draft.vocab_size * draft.width
  return embedding * (2 if untie and draft.tied else 1)


def on(mesh, parts):
  """The parts of an `estimate` as one device of a mesh holds them.

  On a CPU all devices share one memory, so it is what all of them hold. What
  the mesh does not divide is taken for divided: the rest is rounding.
  """
  data, model = sharding.sizes(mesh)
  by_axis = {"weights": model, "draft weights": model, "draft head": model}
  by_axis |= {"cache": data * model, "draft cache": data * model}
  devices = data * model if jax.default_backend() == "cpu" else 1
  return {k: n * devices // by_axis.get(k, data) for k, n in parts.items()}


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
      " lower --config.batch_size, --config.max_new_tokens or"
      " --config.draft.num_tokens, or choose smaller weights"
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
