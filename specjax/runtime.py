"""JAX as every script wants it, and what there is to say about the machine."""

import logging
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax import __version__, multihost
from specjax.errors import UserError
from specjax.models import hub

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "gguf")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def setup(dtype, join=False):
  """Set JAX up and return the dtype of weights and cache.

  "auto" is float32 on a CPU, where narrower weights are slower, and bfloat16
  elsewhere. float32 also asks for full-precision products, which GPUs and
  TPUs otherwise round to fewer bits. Compiled programs are kept in the user's
  cache folder and found again by the next process. Seeds promise the same
  tokens within one version, so the way keys are partitioned is pinned.

  Args:
    dtype: of DTYPES; join: other processes first, see `multihost.join`.

  Raises:
    UserError: JAX cannot start on what JAX_PLATFORMS names.
  """
  # JAX's warnings are for those who write programs, not for those who run one.
  warnings.filterwarnings("ignore", module="jax")
  logging.getLogger("jax").setLevel(logging.ERROR)
  if join:
    multihost.join()
  try:
    on_cpu = jax.default_backend() == "cpu"
  except (RuntimeError, AssertionError) as e:  # a missing plugin asserts
    asked = os.environ.get("JAX_PLATFORMS", "")
    reason = str(e) or "there is no such device"
    raise UserError(
      f"JAX cannot start with JAX_PLATFORMS={asked!r}: {reason}"
    ) from e
  if dtype == "auto":
    dtype = "float32" if on_cpu else "bfloat16"
  if dtype == "float32":
    jax.config.update("jax_default_matmul_precision", "highest")
  jax.config.update("jax_threefry_partitionable", True)
  _keep_compiled(hub.cache_folder() / "compiled")
  return jnp.dtype(dtype)


def _keep_compiled(folder):
  """Point JAX's compilation cache to a folder; warn if it is of no use."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as e:
    print(
      f"compiled programs are not kept ({folder}: {e.strerror}); set"
      " SPECJAX_CACHE to a folder that can be written",
      file=sys.stderr,
    )
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def device():
  """Return what the numbers of a report were measured on."""
  first = jax.local_devices()[0]
  return {
    "platform": first.platform,
    "kind": first.device_kind,
    "name": _cpu_name() if first.platform == "cpu" else first.device_kind,
    "count": jax.device_count(),
    "processes": jax.process_count(),
    "cores": _cores(),
    "machine": platform.machine(),
    "system": platform.system(),
  }


def told(device, mesh):
  """A `device` in words; mesh: how many devices each axis has."""
  cores = f", {device['cores']} cores" if device["platform"] == "cpu" else ""
  used, count = "x".join(map(str, mesh)), device["count"]
  more = f", mesh {used} of {count} devices" if count > 1 else ""
  return f"{device['name']}{cores}{more}"


def _cpu_name():
  """What the maker calls it, where the system tells; else its architecture."""
  try:
    if platform.system() == "Darwin":
      ask = ["sysctl", "-n", "machdep.cpu.brand_string"]
      return subprocess.check_output(ask, text=True).strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except (OSError, subprocess.SubprocessError):
    return platform.processor() or platform.machine()
  names = [x.partition(":")[2] for x in lines if x.startswith("model name")]
  return " ".join(names[0].split()) if names else platform.machine()


def _cores():
  """The cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):  # Linux: what a container was given
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def versions():
  """Return the versions that decide a result."""
  return {
    "specjax": __version__,
    "python": platform.python_version(),
    **{name: metadata.version(name) for name in _PACKAGES},
  }


def commit():
  """Of the checkout that runs, "+" if it is changed; None outside of one."""
  git = ["git", "-C", str(Path(__file__).parent)]
  try:
    ask = lambda *what: subprocess.run(
      [*git, *what], capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()
    changed = "+" if ask("status", "--porcelain", "-uno") else ""
    return ask("rev-parse", "--short", "HEAD") + changed
  except (OSError, subprocess.SubprocessError):
    return None
