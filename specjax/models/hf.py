"""Open a folder in Hugging Face layout: config.json, safetensors, tokenizer."""

import json
import pathlib
import reprlib

import safetensors

from specjax.errors import UserError
from specjax.models import families, tokenizer, weights

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def open_folder(folder):
  """Return the checked `Source` of a folder; no weights are read yet.

  Raises:
    UserError: a file is missing, corrupt or truncated, describes a model that
      is not known, or holds other tensors than it describes.
  """
  path = folder / "config.json"
  config = families.from_hf(_json(path), where=str(path))
  shapes, home = {}, {}  # by tensor name: its shape, its file
  for path in _shards(folder):
    new = _shapes(path)
    shapes |= new
    home |= dict.fromkeys(new, path)

  def read(name):
    with _open(home[name]) as f:
      return f.get_tensor(name)

  return weights.checked(
    weights.Source(
      where=str(folder),
      config=config,
      shapes=shapes,
      read=read,
      tokenizer=lambda: tokenizer.from_folder(folder),
    )
  )


def _shards(folder):
  """Return the weight files; a single one wins, as in transformers."""
  single, index = folder / _SINGLE, folder / _INDEX
  if single.exists():
    return [single]
  if not index.exists():
    raise UserError(
      f"{folder} has no {_SINGLE}; transformers writes it from older weights:"
      " AutoModelForCausalLM.from_pretrained(d).save_pretrained(d)"
    )
  home = _json(index).get("weight_map")
  names = list(home.values()) if isinstance(home, dict) else [None]
  for name in names:
    if not isinstance(name, str) or pathlib.PurePath(name).name != name:
      raise UserError(f"{index}: its weight_map does not name files beside it")
  return [folder / name for name in sorted(set(names))]


def _shapes(path):
  """Return {tensor: shape} of a file, whose types must be known ones."""
  shapes = {}
  with _open(path) as f:
    names = f.keys()
    for name in names:
      part = f.get_slice(name)
      shapes[name] = tuple(part.get_shape())
      if part.get_dtype() not in _DTYPES:
        raise UserError(
          f"{path}: {name!r} is stored as {part.get_dtype()};"
          f" {', '.join(_DTYPES)} can be read"
        )
  return shapes


def _open(path):
  try:
    return safetensors.safe_open(path, "np")
  except (safetensors.SafetensorError, OSError) as e:
    raise UserError(f"{path} is corrupt, truncated or missing: {e}") from e


def _json(path):
  """Return the object that a JSON file holds."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except OSError as e:
    raise UserError(f"cannot read {path}: {e.strerror}") from e
  except (ValueError, RecursionError) as e:
    raise UserError(f"{path} is not valid JSON: {e}") from e
  if not isinstance(value, dict):
    raise UserError(f"{path} must hold an object, found {reprlib.repr(value)}")
  return value
