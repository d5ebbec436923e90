"""The draft that is trained: where it starts, what it shares, what it says.

It starts from a model of its own, from layers of the target or from random
numbers. Its embedding is its own or the target's, which then stays as it is.
Its head may know only the ids that are frequent in what the target says: the
head is most of a small draft's cost. The map from logits to ids belongs to the
weights, and is never made a second time for them (B61).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cli, pair, types
from specjax.errors import UserError
from specjax.models import (
  describe,
  exported,
  families,
  load,
  transformer,
)


class Student(NamedTuple):
  """A draft in training.

  `params` are float32 whatever the target's dtype, and buffers of their own:
  they may be donated. `shared` are the target's arrays: never donate them.
  """

  model: types.Target  # its functions take `merged` parameters
  config: transformer.Config  # of the merged tree, matrices whole
  shared: dict  # {} or {"embed": [V, D]}
  params: dict  # what is trained, as it starts
  ids: tuple[int, ...] | None  # the token of each logit, None: all
  # layers of the target that it reads; (): a language model
  features: tuple[int, ...] = ()


class _Start(NamedTuple):
  """A draft before anything is shared or trimmed; a tied one has no head."""

  config: transformer.Config
  params: Any
  ids: tuple[int, ...] | None


def merged(shared, params):
  """Return the tree that `Student.model` takes; nothing is copied."""
  return {**params, **shared}


def as_model(student, params, teacher):
  """Return the `load.Model` of a student with some parameters."""
  tree = merged(student.shared, params)
  return load.Model(
    student.model, tree, teacher.tokenizer, student.config, student.config
  )


def check(asked):
  """Raise UserError for a config's `draft` that says no draft to train.

  What needs the target is left to `check_target`, its data to `make`.
  """
  if asked.name != "lm":
    raise UserError(f"--config.draft.name must be lm, got {asked.name!r}")
  starts = ("weights", "layers", "architecture")
  given = [key for key in starts if asked[key]]
  if len(given) != 1:
    raise UserError(
      "a draft starts from exactly one of --config.draft.weights=REF,"
      " --config.draft.layers=0,1 and draft.architecture, a dict in the config;"
      f" got {' and '.join(given) or 'none'}"
    )
  if asked.embedding not in exported.EMBEDDINGS:
    raise UserError(
      f"--config.draft.embedding must be own or shared, got {asked.embedding!r}"
    )
  if not all(type(i) is int for i in asked.layers):
    raise UserError(
      "--config.draft.layers must be layer numbers, such as 0,1,29, got"
      f" {','.join(map(str, asked.layers))}"
    )
  if asked.head < 0:
    raise UserError(f"--config.draft.head must be at least 0, got {asked.head}")


def check_target(asked, opened):
  """Raise UserError for a draft that no data would make fit its target.

  Args:
    asked: a config's `draft`; opened: the target, a `load.Opened`.
  """
  if asked.weights:
    _opened(asked.weights, opened)
  elif asked.layers:
    pair.named_layers(asked.layers, opened.config.layers)
  else:
    config = _architecture(asked, opened)
    if asked.embedding == "shared":
      _check_shape(config, opened.config)


def make(config, teacher, found=None, *, ids=None, track=lambda leaves: leaves):
  """Return the `Student` that a training config's `draft` asks for.

  Of a trimmed vocabulary, the map of the checkpoint wins, then that of the
  weights that it starts from, then the frequencies decide. Its head starts from
  the rows of the head that there was. A tied head that is not trimmed is the
  embedding: one array, trained as one or frozen as one (B24).

  Args:
    config: `seed` and `draft` of a training config; see `check`.
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
  check(asked)
  teacher = load.whole(teacher)
  if asked.weights:
    start = _from_weights(asked.weights, teacher, track)
  elif asked.layers:
    start = _from_layers(asked.layers, teacher)
  else:
    start = _fresh(asked, teacher, config.seed)
  shared = {}
  if asked.embedding == "shared":
    _check_shape(start.config, teacher.config)
    shared = {"embed": teacher.params["embed"]}
    start = start._replace(params={**start.params, **shared})
  ids = _vocabulary(asked, start, teacher, found, ids)
  start = _trimmed(start, ids)
  params = {k: x for k, x in start.params.items() if k not in shared}
  describe.to_hf(start.config)  # what cannot be exported is not trained
  return Student(
    transformer.make(start.config, jnp.float32),
    start.config,
    shared,
    jax.tree.map(_master, params),
    ids,
  )


def _master(x):
  # a program's output, so that it is nobody else's memory
  return jnp.array(x, jnp.float32, copy=True)


def _opened(reference, target):
  """The `load.Opened` of a draft's weights, which fits a target."""
  file = load.opened(reference, draft=True)
  pair.same_tokens(target.tokenizer, file.tokenizer)
  pair.check_shared(file, target.config, reference)
  return file


def _from_weights(reference, teacher, track):
  file = _opened(reference, teacher)
  lent = None
  if file.lacks and file.lacks.embedding == "shared":
    lent = load.borrowed(file, teacher)
  params, config = file.read(
    dtype=jnp.float32, untie=False, block=0, track=track, lent=lent
  )
  return _Start(config, params, file.lacks and file.lacks.ids)


def _from_layers(asked, teacher):
  layers = pair.named_layers(asked, teacher.config.layers)
  part = load.part(teacher, layers=layers)
  params = dict(part.params)
  if teacher.config.tied:
    params.pop("head", None)  # a copy, see `weights.load`
  config = dataclasses.replace(teacher.config, layers=len(layers))
  return _Start(config, params, None)


def _architecture(asked, target):
  """The `Config` of new weights: the target's, but for the keys asked for."""
  base, given = describe.to_hf(target.config), dict(asked.architecture)
  for key in given:
    if key not in base and key not in ("rope_scaling", "rope_parameters"):
      best = cli.nearest(key, base)
      hint = f"; did you mean {best}?" if best else ""
      raise UserError(f"config.draft.architecture has no key {key!r}{hint}")
  if given.keys() & {"hidden_size", "num_attention_heads"}:
    base.pop("head_dim")  # it follows from them
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


def _vocabulary(asked, start, teacher, found, restored):
  """The ids that the head keeps, None: all."""
  if restored is not None:
    if start.ids not in (None, restored):
      raise UserError(
        f"{asked.weights} drafts other ids than the checkpoint; start in a new"
        " workdir, or from the weights that it was started from"
      )
    return tuple(restored)
  if start.ids is not None or not asked.head:
    return start.ids
  known = min(start.config.vocab_size, teacher.config.vocab_size)
  if found is None:
    raise ValueError("a trimmed vocabulary needs trajectories")
  return frequent(
    found,
    asked.head,
    vocab_size=known,
    stop_ids=teacher.tokenizer.stop_ids,
  )


def frequent(found, count, *, vocab_size, stop_ids):
  """Return the sorted ids of a trimmed vocabulary, a tuple of `count`.

  They are the end tokens and, of the rest, what is most frequent in the
  answers; of equally frequent ids the lower ones.

  Args:
    found: `trajectories.Trajectories`.
    vocab_size: ids that target and draft have.

  Raises:
    UserError: count is more than there are, or not even the end tokens fit; or
      there are no answers.
  """
  ends = [i for i in stop_ids if i < vocab_size]
  if not max(len(ends), 1) <= count <= vocab_size:
    raise UserError(
      f"--config.draft.head must be 0 or in {max(len(ends), 1)}..{vocab_size},"
      f" the end tokens and the vocabulary, got {count}"
    )
  t = np.arange(found.tokens.shape[1])
  answer = (t >= found.prompt_length[:, None]) & (t < found.length[:, None])
  if not answer.any():
    raise UserError(
      "no trajectory has an answer, whose ids --config.draft.head would count;"
      " take other data"
    )
  counts = np.bincount(found.tokens[answer], minlength=vocab_size)[:vocab_size]
  counts[ends] = counts.max() + 1
  order = np.argsort(-counts, kind="stable")
  return tuple(sorted(order[:count].tolist()))


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
  return _Start(config, params, ids)
