"""A training config: what it asks for, refused before anything is loaded."""

import hashlib
import json
from pathlib import Path

import numpy as np

from specjax import asked, cli, costs, export, objective, sharding, speak
from specjax.errors import UserError
from specjax.runtime import DTYPES
from specjax.types import Sampling

_SOURCES = ("prompts", "self", "given")
_FREE = (
  "log_every",
  "checkpoint.every",
  "checkpoint.keep",
  "data.about",
  "data.cache",
  "decode_with",
  "export_dtype",
  "mesh",
)


def check(config):
  """Raise UserError, naming the key, for a value outside its range."""
  lacking = [key for key in ("data", "loss", "optimiser") if key not in config]
  if lacking:
    raise UserError(
      f"this config is none for training: it has no {lacking[0]!r}; take"
      " configs/tiny_train.py, or one that begins as configs/training.py"
    )
  _check_data(config.data, config.batch_size)
  _one_of("dtype", config.dtype, DTYPES)
  _one_of("export_dtype", config.export_dtype, export.DTYPES)
  asked.check(config.draft)
  for key in (
    *("steps", "batch_size", "accumulate", "length", "chunk", "log_every"),
    *("evaluation.every", "evaluation.rows", "evaluation.batch"),
    *("checkpoint.every", "checkpoint.keep", "draft.num_tokens"),
  ):
    _range(config, key, 1)
  _range(config, "seed", 0, 2**32 - 1)
  sharding.check(config, "batch_size", "evaluation.batch", "data.batch")
  _range(config, "optimiser.warmup", 0, 0.99)
  for key in ("beta1", "beta2"):
    _range(config, f"optimiser.{key}", 0, 0.999999)
  for key in ("learning_rate", "weight_decay"):
    _range(config, f"optimiser.{key}", 0, 1e6)
  _range(config, "optimiser.clip", 1e-30, 1e30)
  _range(config, "draft.temperature", -1e6, 1e6)
  for key in ("temperature", "top_p", "min_p"):
    _range(config, f"sampling.{key}", 0, 1e6 if key == "temperature" else 1)
  if config.target == "random" and "architecture" not in config:
    raise UserError(
      '--config.target="random" needs a config with an architecture, such as'
      " configs/tiny_train.py"
    )
  try:
    objective.phase(config.loss, 0.0)
  except (ValueError, TypeError) as e:
    raise UserError(f"--config.loss: {e}") from e
  if config.draft.name == "feature":
    _check_feature(config)
  if config.costs.verify:
    costs.given(config.costs, config.draft.num_tokens)


def _check_feature(config):
  if config.data.from_draft:
    raise UserError(
      "a feature head answers nothing without its target; type"
      f" --config.data.from_draft=0, got {config.data.from_draft:g}"
    )
  depths = len(config.draft.depth_weights)
  for name, *_, options in [e for e in config.loss if len(e) == 3]:
    if options.get("num_draft", 0) > depths:
      raise UserError(
        f"--config.loss: {name} of num_draft={options['num_draft']} needs as"
        f" many --config.draft.depth_weights, there are {depths}"
      )


def _check_data(data, batch_size):
  _one_of("data.source", data.source, _SOURCES)
  if data.source != "self" and not data.path:
    what = "prompts" if data.source == "prompts" else "texts"
    raise UserError(f"no data: type --config.data.path=FILE.jsonl of {what}")
  if data.path not in ("", "-") and not Path(data.path).is_file():
    raise UserError(f"--config.data.path={data.path}: there is no such file")
  for key in ("limit", "count", "max_user"):
    _least(f"data.{key}", data[key], 0 if key == "limit" else 1)
  if not 0 < data.held_out < 1:
    raise UserError(
      "--config.data.held_out must be between 0 and 1, got"
      f" {data.held_out:g}: what is held out tells which draft is the best"
    )
  if not 0 <= data.from_draft < 1:
    raise UserError(
      f"--config.data.from_draft must be in [0, 1), got {data.from_draft:g}"
    )
  _least("data.refresh_every", data.refresh_every, 1)
  if data.from_draft and data.keep_hidden:
    raise UserError(
      "--config.data.keep_hidden=True keeps what the target makes of its own"
      " answers; with --config.data.from_draft it has to read the draft's at"
      " every step: choose one of them"
    )
  if data.from_draft and not 0 < drafted(data, batch_size) < batch_size:
    raise UserError(
      f"--config.data.from_draft={data.from_draft:g} of a batch of"
      f" {batch_size} is {drafted(data, batch_size)} sequences; it must leave"
      " at least one of either kind"
    )
  try:
    speak.check(_plan(data))
  except ValueError as e:
    raise UserError(f"--config.data.{e}") from e


def drafted(data, batch_size):
  """How many sequences of a batch the draft itself has answered."""
  return round(data.from_draft * batch_size)


def plan(config):
  """Return the `speak.Plan` of the target's answers."""
  s = config.sampling
  return _plan(config.data)._replace(
    top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=config.seed
  )


def _plan(data):
  return speak.Plan(
    max_new=data.max_new,
    max_prompt=data.max_prompt,
    temperatures=tuple(map(tuple, data.temperatures)),
    samples=data.samples,
    batch=data.batch,
  )


def sampling(config):
  """Return the deployment's `Sampling`, scalars."""
  s = config.sampling
  return Sampling(
    np.float32(s.temperature),
    np.int32(s.top_k),
    np.float32(s.top_p),
    np.float32(s.min_p),
  )


def draft_temperature(config):
  """Of the draft's draws; None: the target's."""
  T = config.draft.temperature
  return None if T < 0 else T


def plain(config):
  """Return a config's keys and values as JSON would give them back."""
  return json.loads(json.dumps(cli.flatten(config), default=str))


def digest(config):
  """Return a hash of all that decides a run's result, see `differing`."""
  found = {k: x for k, x in plain(config).items() if k not in _FREE}
  return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def differing(old, new):
  """Return the lines 'key: old, now new' of what a run cannot go on with.

  Everything decides the result but what is only logged, kept or found on disk.
  `steps` too: the learning rate and the loss depend on the share that is done.

  Args:
    old, new: of `plain`.
  """
  keys = sorted({*old, *new} - {*_FREE})
  said = lambda config, key: config.get(key, "not set")
  return [
    f"{key}: {said(old, key)!r}, now {said(new, key)!r}"
    for key in keys
    if said(old, key) != said(new, key)
  ]


def _one_of(key, value, known):
  if value not in known:
    best = cli.nearest(value, known)
    hint = f"; did you mean {best}?" if best else ""
    raise UserError(
      f"--config.{key} must be one of {', '.join(known)}: {value!r}{hint}"
    )


def _range(config, key, least, most=None):
  value = cli.flatten(config)[key]
  if most is None:
    _least(key, value, least)
  elif not least <= value <= most:  # or NaN
    raise UserError(f"--config.{key} must be in {least}..{most}, got {value}")


def _least(key, value, least):
  if value < least:
    raise UserError(f"--config.{key} must be at least {least}, got {value}")
