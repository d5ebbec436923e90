"""JAX as every script wants it, and what there is to say about the machine."""

import platform
from importlib import metadata

import jax
import jax.numpy as jnp

from specjax import __version__
from specjax.models import hub

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "gguf")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def setup(dtype):
  """Set JAX up and return the dtype of weights and cache.

  "auto" is float32 on a CPU, where narrower weights are slower, and bfloat16
  elsewhere. float32 also asks for full-precision products, which GPUs and
  TPUs otherwise round to fewer bits. Compiled programs are kept in the user's
  cache folder and found again by the next process. Seeds promise the same
  tokens within one version, so the way keys are partitioned is pinned.
  """
  if dtype == "auto":
    on_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
  if dtype == "float32":
    jax.config.update("jax_default_matmul_precision", "highest")
  jax.config.update("jax_threefry_partitionable", True)
  folder = str(hub.cache_folder() / "compiled")
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  return jnp.dtype(dtype)


def device():
  """Return what the numbers of a report were measured on."""
  first = jax.local_devices()[0]
  return {
    "platform": first.platform,
    "kind": first.device_kind,
    "count": jax.device_count(),
    "machine": platform.machine(),
    "system": platform.system(),
  }


def versions():
  """Return the versions that decide a result."""
  return {
    "specjax": __version__,
    "python": platform.python_version(),
    **{name: metadata.version(name) for name in _PACKAGES},
  }
