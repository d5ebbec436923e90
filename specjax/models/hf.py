"""Open a folder in Hugging Face layout: config.json, safetensors, tokenizer."""

import dataclasses
import pathlib
import re

import safetensors

from specjax.errors import UserError
from specjax.models import exported, families, tokenizer, weights

_SINGLE, _INDEX = exported.MODEL, "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
# Of a model that reads images too: how the names of its text model begin, here
# and in files by transformers 4.52 and newer, and what else there is.
_TEXT = {"language_model.": "", "model.language_model.": "model."}
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")


def open_folder(folder, *, draft=False):
  """Return the checked `Source` of a folder; no weights are read yet.

  Args:
    draft: it is opened beside a target, so that it may lack what that has.

  Raises:
    UserError: a file is missing, corrupt or truncated, describes a model that
      is not known, or holds other tensors than it describes; it is a draft that
      lacks something, and none is asked for.
  """
  path = folder / "config.json"
  values = exported.load_json(path)
  found = exported.read(folder, values)
  if found and not draft:
    raise UserError(exported.refusal(folder, found))
  if found:
    values = {**values, "model_type": found.family}
  config = families.from_hf(values, where=str(path))
  if found and found.ids is not None:
    size = len(found.ids)
    config = dataclasses.replace(config, tied=False, head_size=size)
  images = values.get("model_type") == families.WITH_IMAGES
  shapes, home = {}, {}  # by tensor name: its shape, its file and name there
  for path in [folder / exported.WEIGHTS] if found else _shards(folder):
    for there, shape in _shapes(path).items():
      name = _text_name(there) if images else there
      if name is not None:
        shapes[name], home[name] = shape, (path, there)

  def read(name):
    path, there = home[name]
    with _open(path) as f:
      return f.get_tensor(there)

  return weights.checked(
    weights.Source(
      where=str(folder),
      config=config,
      shapes=shapes,
      read=read,
      tokenizer=lambda: tokenizer.from_folder(folder),
      lacks=found,
    )
  )


def _text_name(name):
  """The name of a tensor in the text model alone, None: it is not of it."""
  if _IMAGES.fullmatch(name):
    return None
  for begin, own in _TEXT.items():
    if name.startswith(begin):
      return own + name.removeprefix(begin)
  return name


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
  home = exported.load_json(index).get("weight_map")
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
