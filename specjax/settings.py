"""Refuse a config's impossible values before anything is loaded."""

import copy
import json
import math
from pathlib import Path

from specjax import cli, request, sharding, types
from specjax.errors import UserError
from specjax.runtime import DTYPES

DECODERS = ("autoregressive", "speculative")  # in the order they are played in
_DRAFTS = ("lm", "feature", "ngram", "replay")
_SCHEDULES = ("constant", "auto", "adaptive")


def decoders(config):
  """Return the names of the decoders that a config asks for."""
  return DECODERS if config.decoder == "both" else (config.decoder,)


def checked(config):
  """Return a config with the shipped head named if it means that, checked.

  So reports say what drafted. A path that is not there is the project's.
  """
  config = _completed(config)
  check(config)
  return config


def _completed(config):
  draft = config.get("draft")  # a training config has another one
  if not draft or draft.name != "feature" or draft.weights:
    return config
  if not draft.get("shipped"):
    return config
  path = Path(draft.shipped)
  own = Path(__file__).parents[1] / path
  c = copy.deepcopy(config)
  with c.unlocked():
    c.draft.weights = str(path if path.exists() or not own.exists() else own)
  return c


def check(config):
  """Raise UserError, naming the key, for a value outside its range."""
  if "decoder" not in config:
    raise UserError(
      "--config is one of train_draft.py; decode with one such as"
      " configs/smollm2.py or configs/tiny_train.py:decode"
    )
  _one_of("decoder", config.decoder, ("both", *DECODERS))
  _one_of("dtype", config.dtype, DTYPES)
  _one_of("verifier", config.verifier, types.VERIFIERS)
  _range("batch_size", config.batch_size, 1)
  _range("max_new_tokens", config.max_new_tokens, 0)
  sharding.check(config, "batch_size")
  _range("prompts.limit", config.prompts.limit, 0)
  _range("seed", config.seed, 0, 2**32 - 1)
  _range("sampling.top_k", config.sampling.top_k, -(2**31), 2**31 - 1)
  if config.target == "random" and "architecture" not in config:
    raise UserError(
      '--config.target="random" needs a config with an architecture, such as'
      " configs/tiny.py or configs/smollm2.py:random"
    )
  _check_sampling(config.sampling)
  stop_texts(config)
  _check_draft(config.draft)
  if config.draft.name == "replay" and config.decoder != "both":
    raise UserError(
      "--config.draft.name=replay drafts the plain run's answer, so it needs"
      f" --config.decoder=both, got {config.decoder}"
    )


def _check_sampling(asked):
  values = {k: v for k, v in asked.items() if k not in ("bias", "banned")}
  try:
    request.check(**values)
  except ValueError as e:
    raise UserError(f"--config.sampling.{e}") from e
  if not all(type(i) is int for i in asked.banned):
    raise UserError(
      "--config.sampling.banned must be token ids, such as 198,216, got"
      f" {','.join(map(str, asked.banned)) or 'nothing'}"
    )
  _bias(asked.bias)


def _bias(text):
  """{token id: added logit} of JSON like {"198": -2.5}."""
  try:
    values = json.loads(text or "{}")
    return {int(i): float(x) for i, x in values.items()}
  except (ValueError, TypeError, AttributeError):
    raise UserError(
      "--config.sampling.bias must be JSON of token ids and numbers, such as"
      f""" '{{"198": -2.5}}', got {text}"""
    ) from None


def sampling(config, vocab_size):
  """Return a config's sampling as `request.make` wants it.

  Raises:
    UserError: a biased or banned id that the vocabulary lacks.
  """
  asked = dict(config.sampling)
  values, banned = _bias(asked.pop("bias")), asked.pop("banned")
  if not values and not banned:
    return asked
  try:
    bias = request.bias_of(vocab_size, values, banned)
  except ValueError as e:
    raise UserError(f"--config.sampling.bias and .banned: {e}") from e
  if len({*banned}) >= vocab_size:
    raise UserError("--config.sampling.banned leaves no token")
  return asked | {"bias": bias}


def stop_texts(config):
  """Return the texts that end an answer, a tuple.

  Raises:
    UserError: `config.stop` looks like JSON and is no list of texts.
  """
  if not config.stop.startswith("["):
    return (config.stop,) if config.stop else ()
  try:
    texts = json.loads(config.stop)
    if all(isinstance(text, str) and text for text in texts):
      return tuple(texts)
  except ValueError:
    pass
  raise UserError(
    "--config.stop must be one text or a JSON list of texts, such as"
    f""" '["\\n\\n", "User:"]', got {config.stop}"""
  )


def _check_draft(draft):
  _one_of("draft.name", draft.name, _DRAFTS)
  _one_of("draft.schedule", draft.schedule, _SCHEDULES)
  if draft.name == "replay" and draft.schedule != "constant":
    raise UserError(
      "--config.draft.name=replay drafts what it is told to: it needs"
      f" --config.draft.schedule=constant, got {draft.schedule}"
    )
  _range("draft.num_tokens", draft.num_tokens, 0)
  _range("draft.num_tokens", draft.num_tokens, 0, 1000)  # a slip of the hand
  _range("draft.head", draft.head, 0)
  if not math.isfinite(draft.temperature):
    raise UserError(
      "--config.draft.temperature must be finite, below 0 for the target's"
      f" own, got {draft.temperature}"
    )
  if not (draft.top_p < 0 or 0 < draft.top_p <= 1):  # or NaN
    raise UserError(
      "--config.draft.top_p must be in (0, 1], or below 0 for the target's own,"
      f" got {draft.top_p}"
    )
  if not 0 <= draft.alpha <= 1:
    raise UserError(f"--config.draft.alpha must be in 0..1, got {draft.alpha}")
  if not all(type(i) is int for i in draft.layers):
    raise UserError(
      "--config.draft.layers must be layer numbers, such as 0,1,29, got"
      f" {','.join(map(str, draft.layers)) or 'nothing'}"
    )
  _range("draft.lookup", draft.lookup, 0, 8)
  _check_method(draft)


def _check_method(draft):
  """Refuse what the draft's method needs and lacks, or what is another's."""
  chosen = [k for k in ("weights", "layers") if draft[k]]
  if draft.name == "lm" and len(chosen) != 1:
    raise UserError(
      "--config.draft.name=lm needs exactly one of --config.draft.weights=REF"
      " (a model of its own) and --config.draft.layers=0,1 (layers of the"
      f" target), got {' and '.join(chosen) or 'neither'}"
    )
  if draft.name == "feature" and not draft.weights:
    raise UserError(
      "--config.draft.name=feature needs --config.draft.weights=FOLDER, a head"
      " that train_draft.py exported"
    )
  given = chosen + ["head"] * (draft.head > 0)
  given += [k for k in ("temperature", "top_p") if draft[k] >= 0]
  own = {"lm": given, "feature": ["weights", "temperature", "top_p"]}
  others = [key for key in given if key not in own.get(draft.name, ())]
  if others:
    raise UserError(
      f"--config.draft.{others[0]} is for --config.draft.name=lm; the draft is"
      f" {draft.name}"
    )


def _one_of(key, value, known):
  if value not in known:
    names = ", ".join(known)
    best = cli.nearest(value, known)
    hint = f"; did you mean {best}?" if best else ""
    raise UserError(f"--config.{key} must be one of {names}: {value!r}{hint}")


def _range(key, value, least, most=None):
  if value < least or (most is not None and value > most):
    rule = f"at least {least}" if most is None else f"in {least}..{most}"
    raise UserError(f"--config.{key} must be {rule}, got {value}")
