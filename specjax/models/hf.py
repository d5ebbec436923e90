"""Open a folder in Hugging Face layout: config.json, safetensors, tokenizer."""

import json

import safetensors

from specjax.errors import UserError
from specjax.models import families, tokenizer
from specjax.models.weights import Source

_INDEX = "model.safetensors.index.json"


def open_folder(folder):
  """Return the `Source` of a folder; nothing of the weights is read yet.

  Raises:
    UserError: a file is missing, corrupt or truncated, or describes a model
      that is not known.
  """
  config = families.from_hf(_json(folder / "config.json"))
  where = {}  # tensor name -> file
  for path in _shards(folder):
    with _open(path) as f:
      where |= dict.fromkeys(f.keys(), path)

  def read(name):
    with _open(where[name]) as f:
      try:
        return f.get_tensor(name)
      except safetensors.SafetensorError as e:
        raise UserError(f"{where[name]}: tensor {name}: {e}") from e

  return Source(
    where=str(folder),
    config=config,
    names=frozenset(where),
    read=read,
    tokenizer=lambda: tokenizer.from_folder(folder),
  )


def _shards(folder):
  index = folder / _INDEX
  if not index.exists():
    return [folder / "model.safetensors"]
  names = _json(index).get("weight_map", {}).values()
  return [folder / name for name in sorted(set(names))]


def _open(path):
  try:
    return safetensors.safe_open(path, "np")
  except (safetensors.SafetensorError, OSError) as e:
    raise UserError(f"{path} is corrupt, truncated or missing: {e}") from e


def _json(path):
  try:
    return json.loads(path.read_text())
  except OSError as e:
    raise UserError(f"cannot read {path}: {e.strerror}") from e
  except ValueError as e:
    raise UserError(f"{path} is not valid JSON: {e}") from e
