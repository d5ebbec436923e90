"""Which rows a step of training sees: target's answers, and the draft's own.

All of it is a function of the config, of the number of the micro-batch and, for
the draft's own answers, of its parameters at the last refresh. Those answers
are kept in the run's folder, since a run that is resumed no longer has these
parameters.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from specjax import (
  data,
  hidden,
  prompts,
  recipe,
  shards,
  speak,
  trajectories,
)
from specjax.errors import UserError
from specjax.models import hub, load
from specjax.sampling import is_truncated

CACHE = "trajectories"  # in the user's cache folder
DRAFTED = "drafted"  # in a run's: what the draft answered
PART = 2048  # prompts with a cache of their own: more prompts keep it


class Feed(NamedTuple):
  """What a run learns from; `drafted` changes at a refresh."""

  train: trajectories.Trajectories
  held_out: trajectories.Trajectories
  drafted: trajectories.Trajectories | None
  states: hidden.Hidden | None = None  # of `train`, if they are kept


def collect(config, model, watch):
  """Return the trajectories of a config, sampled or found on disk.

  Args:
    model: the target's `load.Model`; watch: a `shards.Watch`.

  Raises:
    UserError: no prompts, no texts, or nothing to learn in them.
  """
  asked, plan = config.data, recipe.plan(config)
  root = _cache(asked)
  if asked.source == "given":
    return data.given(
      model.tokenizer,
      asked.path,
      as_chat=asked.chat,
      most=config.length + 1,
      prompts_alone=asked.learn_prompts,
      limit=asked.limit,
    )
  if asked.source == "self":
    sizes = dict(max_user=asked.max_user, root=root, watch=watch)
    return data.self_started(model, asked.count, plan, **sizes)
  todo = prompts.from_file(asked.path, asked.limit)
  found = []
  for at in range(0, len(todo), PART):
    some = todo[at : at + PART]
    if len(todo) > PART:
      watch.note(f"prompts {at + 1:,} to {at + len(some):,} of {len(todo):,}")
    found.append(
      data.from_target(
        model, some, plan, as_chat=asked.chat, root=root, watch=watch
      )
    )
  return trajectories.concatenate(found)


def _cache(asked):
  return Path(asked.cache) if asked.cache else hub.cache_folder() / CACHE


def with_states(config, feed, model, draft, watch):
  """Return the `Feed` with the target's hidden states, if they are to be kept.

  And with what a trimmed head lacks of the target's laws, if that is a number.

  Args:
    model: the target's `load.Model`, its matrices whole.
    draft: a `student.Student`; watch: a `shards.Watch`.

  Raises:
    UserError: see `hidden.collect`.
  """
  if not config.data.keep_hidden:
    return feed
  own = recipe.sampling(config)
  whole = draft.ids is None or is_truncated(model.target.vocab_size, own)
  states = hidden.collect(
    _cache(config.data),
    model,
    feed.train,
    features=draft.features,
    length=config.length,
    batch=config.batch_size,
    watch=watch,
    temperature=None if whole else config.sampling.temperature,
  )
  return feed._replace(states=states)


def taught(feed, model, ids):
  """Return the target's `load.Model` as the steps are to have it.

  Where the rest of its laws is kept its head makes the draft's logits alone.
  """
  if feed.states is None or feed.states.normalisers is None:
    return model
  return load.part(model, layers=range(model.config.layers), ids=ids)


def answer(config, feed):
  """The most positions that a row of a batch supervises."""
  if config.data.learn_prompts:
    return config.length
  most = int(trajectories.mask(feed.train).sum(1).max())
  if recipe.drafted(config.data, config.batch_size):
    most = max(most, config.data.max_new)
  return min(most, config.length)


def split(config, found, note):
  """Return the `Feed` of some trajectories, nothing drafted yet.

  Raises:
    UserError: no row has anything to learn within the config's length, one
      side would be empty, or the training set is smaller than a batch.
  """
  found = trajectories.fit(found, config.length, note)
  train, held = trajectories.split(found, config.data.held_out, config.seed)
  many, needed = len(train.length), config.batch_size
  if many < needed:
    raise UserError(
      f"{many} sequences are left to train on, a batch needs {needed}: lower"
      " --config.batch_size, or take more prompts or --config.data.samples"
    )
  most = config.evaluation.rows
  order = np.random.default_rng([config.seed, 2]).permutation(len(held.length))
  return Feed(train, trajectories.take(held, np.sort(order[:most])), None)


def digest(feed):
  """Return a hash of what is trained on and of what is held out."""
  found = hashlib.sha256()
  for x in (*feed.train, *feed.held_out):
    found.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
  return found.hexdigest()


def batch(config, feed, number):
  """Return the `Batch` of the number-th micro-batch of the run."""
  own = recipe.drafted(config.data, config.batch_size)
  rows = config.batch_size - own
  at = trajectories.indices(config.seed, number, len(feed.train.length), rows)
  how = dict(length=config.length, prompts=config.data.learn_prompts)
  found = trajectories.batch(feed.train, at, **how)
  if feed.states:
    states, normaliser = hidden.take(feed.states, at, config.length)
    return found._replace(states=states, normaliser=normaliser)
  if not own:
    return found
  size = len(feed.drafted.length)
  # another walk than the one above: its seed is no 32-bit number
  at = trajectories.indices(config.seed + 2**32, number, size, own)
  more = trajectories.batch(feed.drafted, at, **how)
  return jax.tree.map(lambda *x: np.concatenate(x), found, more)


def refresh(config, feed, step, folder, make):
  """Return the `Feed` with the draft's answers that rule at a step.

  Args:
    folder: of the run.
    make: (asks, plan, refresh, count) -> `Trajectories` of the draft as it is;
      called only where the step begins a refresh and nothing is kept of it.

  Raises:
    UserError: what was drafted before is missing or damaged.
  """
  own = recipe.drafted(config.data, config.batch_size)
  if not own:
    return feed
  every = config.data.refresh_every
  number = step // every
  kept = Path(folder) / DRAFTED
  settings = {"source": "draft", "refresh": number}
  if step % every:
    where = kept / shards.name(settings)
    try:
      return feed._replace(drafted=speak.join(shards.load(where)))
    except UserError as e:
      raise UserError(
        f"{e}: the draft wrote it at step {number * every}, and is another one"
        " now; put it back or use another --workdir"
      ) from e
  asks = list(dict.fromkeys(_asks(feed.train)))
  count = min(every * config.accumulate * own, len(asks))
  if count < own:
    raise UserError(
      f"{len(asks)} prompts cannot fill the {own} sequences of a batch that the"
      " draft answers; lower --config.data.from_draft or take more prompts"
    )
  plan = recipe.plan(config)
  shard = lambda _: _shard(make(asks, plan, number, count))
  found = shards.collect(kept, settings, 1, shard, tell=lambda _: {})
  return feed._replace(drafted=speak.join(found))


def _shard(found):
  number = np.arange(len(found.length), dtype=np.int32)
  count = found.length - found.prompt_length
  return {**found._asdict(), "number": number, "count": count}


def _asks(found):
  for tokens, length in zip(found.tokens, found.prompt_length, strict=True):
    yield data.Ask(tuple(tokens[:length].tolist()), None)
