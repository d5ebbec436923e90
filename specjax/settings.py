"""Refuse a config's impossible values before anything is loaded."""

from specjax import request
from specjax.errors import UserError
from specjax.runtime import DTYPES

_DECODERS = ("autoregressive",)


def check(config):
  """Raise UserError, naming the key, for a value outside its range."""
  _one_of(config, "decoder", _DECODERS)
  _one_of(config, "dtype", DTYPES)
  _range("batch_size", config.batch_size, 1)
  _range("max_new_tokens", config.max_new_tokens, 0)
  _range("prompts.limit", config.prompts.limit, 0)
  _range("seed", config.seed, 0, 2**32 - 1)
  _range("sampling.top_k", config.sampling.top_k, -(2**31), 2**31 - 1)
  if config.target == "random" and "architecture" not in config:
    raise UserError(
      '--config.target="random" needs a config with an architecture, such as'
      " configs/tiny.py or configs/smollm2.py:random"
    )
  try:
    request.check(**config.sampling)
  except ValueError as e:
    raise UserError(f"--config.sampling.{e}") from e


def _one_of(config, key, known):
  if config[key] not in known:
    names = ", ".join(known)
    raise UserError(f"--config.{key} must be one of {names}: {config[key]!r}")


def _range(key, value, least, most=None):
  if value < least or (most is not None and value > most):
    rule = f"at least {least}" if most is None else f"in {least}..{most}"
    raise UserError(f"--config.{key} must be {rule}, got {value}")
