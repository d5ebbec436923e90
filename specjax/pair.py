"""From a config and its target to a draft that fits it, or one line why not.

`opened` compares what can be compared before any weight is read; `load` reads
the draft; `join` makes it a request's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax import sharding, types
from specjax.drafters import feature, hybrid, lm, ngram, replay
from specjax.errors import UserError
from specjax.models import load as models
from specjax.models import transformer


class Opened(NamedTuple):
  """A draft whose weights have not been read yet."""

  name: str
  num_draft: int  # K
  verifier: str
  temperature: float  # below 0: the request's
  alpha: float  # of replay
  own: models.Opened | None  # a model beside the target
  layers: tuple[int, ...]  # of the target, those that the draft is made of
  ids: tuple[int, ...] | None  # what its head keeps, None: all
  config: transformer.Config | None  # of its layers, None: it has none
  top_p: float = -1.0  # as temperature
  chosen: str = ""  # in words, what a schedule made of it and why
  features: tuple[int, ...] = ()  # layers of the target that it reads
  lookup: int = 0  # tokens that repeat where it copies, 0: it never does


class Pair(NamedTuple):
  """A draft that fits a loaded target."""

  drafter: types.Drafter
  params: Callable  # (the plain run's tokens [B, N]) -> the drafter's
  opened: Opened
  model: models.Model | None = None  # a draft whose q depends on the text alone
  policy: Any = None  # an `adaptive.Policy` to draft fewer tokens by


_opened = functools.partial(models.opened, draft=True)


def opened(config, target, open_model=_opened):
  """Return the `Opened` of a config's draft, checked against its target.

  Args:
    target: a `load.Opened`.
    open_model: what makes a weight reference a draft's `load.Opened`.

  Raises:
    UserError: the reference, or that the two do not fit each other: other
      tokens, layers that the target lacks, a head wider than the vocabulary;
      or that the weights are another method's.
  """
  asked = config.draft
  own, layers, ids, architecture = None, (), None, None
  if asked.weights:
    own = open_model(asked.weights)
    same_method(asked, own)
    same_tokens(target.tokenizer, own.tokenizer)
    architecture = own.config
    ids = _exported(asked, own, target.config)
  elif asked.layers:
    layers = named_layers(asked.layers, target.config.layers)
    architecture = transformer.some_layers(target.config, layers)
  if asked.head:
    known = min(target.config.vocab_size, architecture.vocab_size)
    ids = _head(asked.head, target.tokenizer.stop_ids, known)
    architecture = dataclasses.replace(
      architecture, tied=False, head_size=len(ids)
    )
  return Opened(
    name=asked.name,
    num_draft=asked.num_tokens,
    verifier=config.verifier,
    temperature=asked.temperature,
    top_p=asked.top_p,
    alpha=asked.alpha,
    own=own,
    layers=layers,
    ids=ids,
    config=architecture,
    features=features(own),
    lookup=asked.lookup if asked.name == "feature" else 0,
  )


def features(own):
  """Layers of its target that a `load.Opened` draft reads, () for a model."""
  return own.lacks.features if own and own.lacks else ()


def method(own):
  """The draft.name that decodes with a `load.Opened`."""
  return "feature" if features(own) else "lm"


def same_method(asked, own):
  """Raise UserError unless a config's `draft` names the method of weights."""
  if asked.name == method(own):
    return
  what = "reads its target's hidden states"
  if not features(own):
    what = "is a language model, no head that reads hidden states"
  raise UserError(
    f"--config.draft.name={asked.name}: {asked.weights} {what}; type"
    f" --config.draft.name={method(own)}"
  )


def _exported(asked, own, target):
  """The ids of a draft of ours, None if all, once it fits its target."""
  if not own.lacks:
    return None
  check_shared(own, target, asked.weights)
  ids = own.lacks.ids
  if ids is not None and asked.head:
    raise UserError(
      f"--config.draft.head={asked.head}: the head of {asked.weights} was"
      f" trained for its own {len(ids):,} ids; leave draft.head away"
    )
  if ids is not None and max(ids) >= target.vocab_size:
    raise UserError(
      f"{asked.weights} drafts id {max(ids)}, the target's vocabulary has"
      f" {target.vocab_size}; choose other draft.weights"
    )
  return ids


def check_shared(own, target, where):
  """Raise UserError unless a target has what a draft takes from it.

  Of its embedding that is the shape, of its hidden states the layers.

  Args:
    own: the draft's `load.Opened`; target: the `transformer.Config`.
  """
  if own.lacks and own.lacks.embedding == "shared":
    sizes = [(x.vocab_size, x.width) for x in (own.config, target)]
    if sizes[0] != sizes[1]:
      raise UserError(
        f"{where} shares an embedding of {sizes[0][0]} ids and width"
        f" {sizes[0][1]}, the target's has {sizes[1][0]} and {sizes[1][1]}; it"
        f" was trained for {own.lacks.reference}"
      )
  if features(own) and max(features(own)) >= target.layers:
    raise UserError(
      f"{where} reads layer {max(features(own))} of its target, this one has"
      f" layers 0 to {target.layers - 1}; it was trained for"
      f" {own.lacks.reference}"
    )


def same_tokens(target, draft):
  """Raise UserError unless every id is the same token in both tokenizers.

  How many logits the models have may differ: vocabularies are padded.
  """
  hint = "a draft needs the target's tokenizer; choose other draft.weights"
  sizes = target.vocab_size, draft.vocab_size
  if sizes[0] != sizes[1]:
    raise UserError(
      f"the target's tokenizer has {sizes[0]} ids, the draft's {sizes[1]};"
      f" {hint}"
    )
  ours, theirs = _by_id(target), _by_id(draft)
  if ours == theirs:
    return
  i = next(i for i in range(sizes[0]) if ours.get(i) != theirs.get(i))
  names = [repr(x[i]) if i in x else "no token" for x in (ours, theirs)]
  raise UserError(
    f"id {i} is {names[0]} in the target's tokenizer, {names[1]} in the"
    f" draft's; {hint}"
  )


def _by_id(tok):
  vocab = tok.backend.get_vocab(with_added_tokens=True)
  return {i: token for token, i in vocab.items()}


def named_layers(asked, depth, key="layers"):
  """Layer numbers from 0; negative ones count from the end. key: of draft."""
  if not all(-depth <= i < depth for i in asked):
    text = ",".join(map(str, asked))
    raise UserError(
      f"--config.draft.{key}={text}: the target has layers 0 to {depth - 1}"
    )
  return tuple(i % depth for i in asked)


def _head(head, stop_ids, known):
  if head > known:
    raise UserError(
      f"--config.draft.head must be in 0..{known}, the vocabulary, got {head}"
    )
  return tuple(sorted({*range(head), *(i for i in stop_ids if i < known)}))


def check_context(draft, needed):
  """Raise UserError unless the draft's context holds `needed` tokens.

  Args:
    draft: an `Opened`, or None for plain decoding.
    needed: prompt, answers and all.
  """
  if draft and draft.config and draft.config.context < needed:
    raise UserError(
      f"the draft's context holds {draft.config.context} tokens, a prompt and"
      f" its answers may need {needed}; lower --config.max_new_tokens or choose"
      " other --config.draft.weights"
    )


def load(draft, target, *, dtype, track=lambda paths: paths):
  """Return the `Pair` of an `Opened`; read its weights if it has its own.

  They are laid over the mesh that the target lies on.

  Args:
    draft: an `Opened`; target: the `load.Model`.
    dtype, track: as in `load.model`.
  """
  vocab_size, mesh = target.target.vocab_size, target.mesh
  if draft.name == "ngram":
    return Pair(ngram.make(vocab_size), lambda plain: (), draft)
  if draft.name == "replay":
    alpha = np.float32(draft.alpha)
    params = lambda plain: replay.Params(plain, alpha)
    return Pair(replay.make(vocab_size), params, draft)
  if draft.name == "feature":
    options = dict(dtype=dtype, track=track, target=target, mesh=mesh)
    params, layers = models.read(draft.own, **options)
    architecture = feature.Config(layers, draft.features)
    drafter = feature.make(architecture, vocab_size, ids=draft.ids)
    drafter = sharding.drafter(drafter, mesh)
    if draft.lookup:
      drafter = hybrid.make(drafter, vocab_size, least=draft.lookup)
    return Pair(drafter, lambda plain: params, draft)
  model = target
  if draft.own:
    options = dict(dtype=dtype, track=track, target=target, mesh=mesh)
    model = models.model(draft.own, **options)
  # an exported head is trimmed already
  ids = draft.ids if model.config.head_size is None else None
  if draft.layers or ids:
    layers = draft.layers or range(model.config.layers)
    model = models.part(model, layers=layers, ids=ids)
  drafter = lm.make(model.target, vocab_size, ids=draft.ids)
  return Pair(drafter, lambda plain: model.params, draft, model)


def join(pair, request, plain):
  """Return the `types.Draft` of a request.

  Its sampling is always said, so that the draft's own values are data.

  Args:
    plain: [B, N] int32, what plain decoding made of it, -1 behind the end.
  """
  ours = request.sampling
  for key in ("temperature", "top_p"):
    value = getattr(pair.opened, key)
    if value >= 0:
      own = np.full_like(getattr(ours, key), value)
      ours = ours._replace(**{key: own})
  return types.Draft(
    drafter=pair.drafter,
    params=pair.params(plain),
    num_draft=pair.opened.num_draft,
    verifier=pair.opened.verifier,
    sampling=ours,
    policy=pair.policy,
  )
