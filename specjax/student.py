"""The draft that is trained: where it starts, what it shares, what it says.

A language model starts from a model of its own, from layers of the target or
from random numbers. Its embedding is its own or the target's, which then stays
as it is. A head that reads the target's features starts from an earlier one or
from one or two of the target's layers, beside the target's embedding.

Its head may know only the ids that are frequent in what the target says: the
head is most of a small draft's cost; see `vocabulary`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import asked as asks
from specjax import (
  cli,
  multihost,
  pair,
  sharding,
  step,
  types,
  vocabulary,
)
from specjax.drafters import feature
from specjax.errors import UserError
from specjax.models import (
  describe,
  families,
  load,
  transformer,
)


class Student(NamedTuple):
  """A draft in training.

  `params` are float32 whatever the target's dtype, and buffers of their own:
  they may be donated. `shared` are the target's arrays: never donate them.
  """

  model: types.Target | None  # it takes `merged`; None: it is none by itself
  config: transformer.Config  # of the merged tree's layers, matrices whole
  shared: dict  # {} or {"embed": [V, D]}
  params: dict  # what is trained, as it starts
  ids: tuple[int, ...] | None  # the token of each logit, None: all
  # layers of the target that it reads; (): a language model
  features: tuple[int, ...] = ()
  # `overlap.read` of the weights that it begins with, None: none, or unknown
  prompts: Any = None


class _Start(NamedTuple):
  """A draft before anything is shared or trimmed; a tied one has no head."""

  config: transformer.Config
  params: Any
  ids: tuple[int, ...] | None
  features: tuple[int, ...] = ()
  prompts: Any = None


def merged(shared, params):
  """Return a draft's whole tree; nothing is copied."""
  return {**params, **shared}


def as_model(student, params, teacher):
  """Return the `load.Model` of a language model with some parameters."""
  tree = merged(student.shared, params)
  return load.Model(
    student.model, tree, teacher.tokenizer, student.config, student.config
  )


def check_target(asked, opened):
  """Raise UserError for a draft that no data would make fit its target.

  Args:
    asked: a config's `draft`; opened: the target, a `load.Opened`.
  """
  depth = opened.config.layers
  pair.named_layers(asked.layers, depth)
  features = _features(asked.features, depth)
  if asked.head and not asked.weights:
    stop_ids = opened.tokenizer.stop_ids
    vocabulary.check(asked.head, opened.config.vocab_size, stop_ids)
  if asked.weights:
    _opened(asked, opened, features)
  elif asked.architecture:
    config = _architecture(asked, opened)
    if asked.embedding == "shared":
      _check_shape(config, opened.config)


def _features(asked, depth):
  """Numbers from 0 of the target's layers that a draft reads."""
  found = pair.named_layers(asked, depth, "features")
  if len(set(found)) < len(found):
    text = ",".join(map(str, asked))
    raise UserError(f"--config.draft.features={text} names a layer twice")
  return found


def make(config, teacher, found=None, *, ids=None, track=lambda leaves: leaves):
  """Return the `Student` that a training config's `draft` asks for.

  Of a trimmed vocabulary, the map of the checkpoint wins, then that of the
  weights that it starts from, then the frequencies decide. Its head starts from
  the rows of the head that there was. A tied head that is not trimmed is the
  embedding: one array, trained as one or frozen as one (B24).

  Args:
    config: `seed` and `draft` of a training config; see `asked.check`.
    teacher: the target, a `load.Model`; `load.whole` where it is in blocks, or
      what is shared is a copy.
    found: the `trajectories.Trajectories` to train on, whose answers decide
      what is frequent.
    ids: the map of a checkpoint that is to be restored.
    track: wraps the list of what is read, for a progress bar.

  Raises:
    UserError: a draft that cannot be, or does not fit its target.
  """
  asked = config.draft
  asks.check(asked)
  teacher = load.whole(teacher)
  if asked.weights:
    start = _from_weights(asked, teacher, track)
  elif asked.architecture:
    start = _fresh(asked, teacher, config.seed)
  else:
    start = _from_layers(asked, teacher, found)
  shared = {}
  if asked.embedding == "shared":
    _check_shape(start.config, teacher.config)
    shared = {"embed": teacher.params["embed"]}
    start = start._replace(params={**start.params, **shared})
  ids = vocabulary.kept(asked, start, teacher, found, ids)
  start = _trimmed(start, ids)
  params = {k: x for k, x in start.params.items() if k not in shared}
  describe.to_hf(start.config)  # what cannot be exported is not trained
  model = transformer.make(start.config, jnp.float32)
  model = sharding.target(model, teacher.mesh)
  return Student(
    None if start.features else model,
    start.config,
    shared,
    jax.tree.map(_master, params),
    ids,
    start.features,
    start.prompts,
  )


def _master(x):
  # a program's output, so that it is nobody else's memory
  return jnp.array(x, jnp.float32, copy=True)


def _opened(asked, target, features):
  """The `load.Opened` of a draft's weights, which fits a target."""
  reference = asked.weights
  file = load.opened(reference, draft=True)
  pair.same_method(asked, file)
  its = pair.features(file)
  if features and its != features:
    raise UserError(
      f"{reference} reads the target's layers {','.join(map(str, its))}; leave"
      " --config.draft.features away"
    )
  pair.same_tokens(target.tokenizer, file.tokenizer)
  pair.check_shared(file, target.config, reference)
  return file


def _from_weights(asked, teacher, track):
  features = _features(asked.features, teacher.config.layers)
  file = _opened(asked, teacher, features)
  lent, lacks = None, file.lacks
  if lacks and lacks.embedding == "shared":
    lent = load.borrowed(file, teacher)
  params, config = file.read(
    dtype=jnp.float32, untie=False, block=0, track=track, lent=lent
  )
  if not lacks:
    return _Start(config, params, None, prompts=file.prompts)
  return _Start(config, params, lacks.ids, lacks.features, file.prompts)


def _from_layers(asked, teacher, found):
  """Layers of the target; of a feature head, which may name none, the last."""
  depth = teacher.config.layers
  layers = pair.named_layers(asked.layers or (-1,), depth)
  part = load.part(teacher, layers=layers)
  params = dict(part.params)
  if teacher.config.tied:
    params.pop("head", None)  # a copy, see `weights.load`
  config = transformer.some_layers(teacher.config, layers)
  features = _features(asked.features, depth)
  if features:
    architecture = feature.Config(config, features)
    params |= feature.begin(architecture, size(teacher, found, features[-1]))
  return _Start(config, params, None, features)


def size(teacher, found, layer):
  """Return the RMS of a target's layer's outputs, the median over some tokens.

  Not the mean: those of a text's first token are many times as large.

  Args:
    teacher: a `load.Model`; found: `Trajectories` to take tokens from, None:
      the first ids are a text.
  """
  tokens, length = np.arange(_SOME)[None] % teacher.config.vocab_size, [_SOME]
  if found is not None:
    tokens, length = found.tokens[:8, :_SOME], found.length[:8]
  read = jax.jit(step.read, static_argnums=(0, 3))
  _, taps = read(teacher.target, teacher.params, tokens, (layer,))
  taps = np.asarray(multihost.fetch(taps)[:, :, 0], np.float32)
  sizes = np.sqrt(np.square(taps).mean(-1))
  real = np.arange(tokens.shape[1]) < np.asarray(length)[:, None]
  return float(np.median(sizes[real]))


_SOME = 64  # tokens of a text
_FROM_HEADS = {"head_dim", "query_pre_attn_scalar"}


def _architecture(asked, target):
  """The `Config` of new weights: the target's, but for the keys asked for."""
  base, given = describe.to_hf(target.config), dict(asked.architecture)
  for key in given:
    if key not in base and key not in ("rope_scaling", "rope_parameters"):
      best = cli.nearest(key, base)
      hint = f"; did you mean {best}?" if best else ""
      raise UserError(f"config.draft.architecture has no key {key!r}{hint}")
  if given.keys() & {"hidden_size", "num_attention_heads"}:
    base |= dict.fromkeys(base.keys() & _FROM_HEADS)  # it follows from them
  if "num_hidden_layers" in given:
    base |= dict.fromkeys(base.keys() & {"layer_types"})
  config = families.from_hf(base | given, "config.draft.architecture")
  if config.vocab_size < target.tokenizer.vocab_size:
    raise UserError(
      f"config.draft.architecture: vocab_size={config.vocab_size} has no room"
      f" for the target's {target.tokenizer.vocab_size} ids"
    )
  return config


def _fresh(asked, teacher, seed):
  """Random numbers; beside a shared embedding, the target's head."""
  config = _architecture(asked, teacher)
  params = transformer.init(config, jax.random.key(seed))
  heads = not config.tied and not teacher.config.tied
  if asked.embedding == "shared" and heads:
    _check_shape(config, teacher.config)
    params["head"] = teacher.params["head"]
  return _Start(config, params, None)


def _check_shape(config, target):
  sizes = [(c.vocab_size, c.width) for c in (config, target)]
  if sizes[0] != sizes[1]:
    raise UserError(
      "--config.draft.embedding=shared needs the target's vocabulary and width,"
      f" {sizes[1][0]} and {sizes[1][1]}; the draft's are {sizes[0][0]} and"
      f" {sizes[0][1]}: choose --config.draft.embedding=own"
    )


def _trimmed(start, ids):
  """The `_Start` whose head has a row for each of the ids."""
  if ids is None or start.ids is not None:
    return start
  at, params = np.array(ids), dict(start.params)
  if start.config.tied:
    params["head"] = params["embed"][at].T
  else:
    params["head"] = params["head"][:, at]
  config = dataclasses.replace(start.config, tied=False, head_size=len(ids))
  return start._replace(config=config, params=params, ids=ids)
