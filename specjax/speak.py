"""Answers sampled in batches, for training: many prompts, little waste."""

import functools
from collections import Counter, deque
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import cache, generate, request, trajectories, types
from specjax.drafters import lm

_CHUNK_STEPS = 8  # target calls between two chances for Ctrl-C
_SLOT_STEP = 2 * cache.PREFILL  # few programs, and few slots that none needs


class Plan(NamedTuple):
  """How answers are sampled. Every field decides what they say."""

  max_new: int = 128  # tokens of an answer
  max_prompt: int = 256  # a longer prompt is dropped
  # (temperature, weight): each answer has one of them, in these proportions
  temperatures: tuple = ((0.0, 0.3), (0.7, 0.3), (1.0, 0.4))
  samples: int = 1  # answers a prompt; sample j is drawn with seed + j
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  batch: int = 64  # rows that are decoded at once


class Ask(NamedTuple):
  """A prompt as the model is to see it."""

  ids: tuple[int, ...]
  seed: int | None  # None: the plan's


class Row(NamedTuple):
  """One answer to be sampled."""

  number: int  # its place in the result
  ids: tuple[int, ...]
  seed: int
  temperature: float


def check(plan):
  """Raise ValueError, naming the field, for a value outside its range."""
  for field in ("max_new", "max_prompt", "samples", "batch"):
    value = getattr(plan, field)
    if value < 1:
      raise ValueError(f"{field} must be at least 1, got {value}")
  if not 0 <= plan.seed < 2**32:
    raise ValueError(f"seed must be in 0..2^32 - 1, got {plan.seed}")
  request.check(top_p=plan.top_p, min_p=plan.min_p)
  try:
    values = np.array(plan.temperatures, float).reshape(-1, 2)
    right = len(values) and (np.isfinite(values) & (values >= 0)).all()
  except (TypeError, ValueError):
    right = False
  if not right or not (values[:, 1] > 0).all():
    raise ValueError(
      "temperatures must be pairs of a temperature >= 0 and a weight > 0, got"
      f" {plan.temperatures}"
    )


def mix(plan, count):
  """Return the temperatures [count, samples] of some prompts' answers.

  Each has its share of the answers to within one a sample, and the answers of
  one prompt are spread over them. A pure function of plan and count.
  """
  values, weights = np.array(plan.temperatures, float).reshape(-1, 2).T
  order = np.random.default_rng([plan.seed, 0]).permutation(count)
  u = (order[:, None] + 0.5) / count + np.arange(plan.samples) / plan.samples
  shares = np.cumsum(weights) / weights.sum()
  at = np.searchsorted(shares[:-1], u % 1, side="right")
  return values[at]


def rows(asks, plan):
  """Return the `Row`s of some `Ask`s: samples of the first, the second, ..."""
  temperatures = mix(plan, len(asks))
  return [
    row
    for i, ask in enumerate(asks)
    for row in samples(i, ask, plan, temperatures[i])
  ]


def samples(number, ask, plan, temperatures):
  """Return the `Row`s of one `Ask`, the number-th, at each temperature."""
  seed = plan.seed if ask.seed is None else ask.seed
  return [
    Row(number * plan.samples + j, ask.ids, (seed + j) % 2**32, float(t))
    for j, t in enumerate(temperatures)
  ]


def groups(rows, batch, seed):
  """Return the rows in batches of like prompt length, in random order.

  A batch's prefill takes as long as its longest prompt. The order is random
  so that the first batches are as good a sample of the data as all are.
  """
  by_length = sorted(rows, key=lambda row: len(row.ids))
  found = [by_length[i : i + batch] for i in range(0, len(rows), batch)]
  order = np.random.default_rng([seed, 1]).permutation(len(found))
  return [found[i] for i in order]


def answers(target, params, rows, plan, *, stop_ids, batch):
  """Return the arrays of a shard: the rows, decoded `batch` at a time.

  Returns:
    {"number", "prompt_length", "length", "count", "finish": [R] int32,
    "tokens": [R, W] int32, "temperature": [R] float32}; count is of tokens
    sampled, finish indexes types.FINISH_REASONS.
  """
  found, counts, finish = [], [], []
  for i in range(0, len(rows), batch):
    now = rows[i : i + batch]
    out = _decode(target, params, now, plan, stop_ids, batch)
    for row, tokens, count in zip(now, out.tokens, out.length, strict=False):
      found.append((row.ids, tokens[:count].tolist(), row.temperature))
    counts += out.length[: len(now)].tolist()
    finish += out.finish_reason[: len(now)].tolist()
  numbers = [row.number for row in rows]
  int32 = dict(number=numbers, count=counts, finish=finish)
  return trajectories.make(found)._asdict() | {
    key: np.array(x, np.int32) for key, x in int32.items()
  }


def request_of(target, rows, plan, stop_ids, batch):
  """Return the `Request` of some rows, and the sizes to decode it with."""
  ask = request.make(
    [row.ids for row in rows],
    max_new=plan.max_new,
    seed=[row.seed for row in rows],
    temperature=[row.temperature for row in rows],
    top_k=plan.top_k,
    top_p=plan.top_p,
    min_p=plan.min_p,
    stop_ids=stop_ids,
    batch=batch,
  )
  most = min(ask.prompt.shape[1] + plan.max_new, target.context)
  slots = -(-most // _SLOT_STEP) * _SLOT_STEP
  return ask, dict(max_new_tokens=plan.max_new, slots=slots)


def _decode(target, params, rows, plan, stop_ids, batch):
  """The `Output` of one batch; it ends when its last row does."""
  ask, sizes = request_of(target, rows, plan, stop_ids, batch)
  parts = generate.stream(
    target, params, ask, chunk_steps=_CHUNK_STEPS, **sizes
  )
  return deque(parts, maxlen=1).pop()


def from_draft(
  draft, params, asks, plan, *, vocab_size, stop_ids, refresh, count, ids=None
):
  """Return answers of the draft alone: the prefixes that it leads itself to.

  Training on these, with the target's laws as the teacher, is on-policy
  distillation (Agarwal et al. 2024; Zhou et al. 2024). Text from the pair has
  the target's law whatever the draft is, so it would be `from_target` again.
  A pure function of its arguments: a resumed run samples the same again.

  Args:
    draft: the draft's `Target`; params: its parameters as they are now.
    asks: list of `Ask`; see `data.encode`.
    plan: a `Plan`; its `samples` is not used.
    vocab_size: V of the target; stop_ids: the target's.
    refresh: how often there have been such answers: 0, 1, 2, ... Each has
      other prompts, see `trajectories.indices`, and other noise.
    count: prompts to answer.
    ids: a tuple, the token of each of the draft's logits; see `lm.make`.

  Raises:
    ValueError: count is more than there are prompts.
  """
  check(plan)
  chosen = trajectories.indices(plan.seed, refresh, len(asks), count)
  first = plan.seed + refresh * count  # no seed serves twice
  plan = plan._replace(samples=1, seed=(plan.seed + refresh) % 2**32)
  asks = [Ask(asks[i].ids, (first + n) % 2**32) for n, i in enumerate(chosen)]
  batch = min(plan.batch, count)
  target = _widened(draft, vocab_size, ids)
  options = dict(stop_ids=stop_ids, batch=batch)
  return join(
    [
      answers(target, params, group, plan, **options)
      for group in groups(rows(asks, plan), batch, plan.seed)
    ]
  )


@functools.cache  # a `Target` is static in jitted programs
def _widened(draft, vocab_size, ids):
  """A draft as a `Target` that speaks in the target's vocabulary."""

  def apply(params, tokens, positions, cache, *, features=()):
    known = lm.known(draft, tokens)
    return draft.apply(params, known, positions, cache, features=features)

  def unembed(params, hidden):
    logits = draft.unembed(params, hidden)
    at = np.arange(logits.shape[-1]) if ids is None else np.array(ids)
    nothing = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return nothing.at[..., at].set(logits, mode="drop")

  if ids is None and draft.vocab_size == vocab_size:
    return draft
  return draft._replace(apply=apply, unembed=unembed, vocab_size=vocab_size)


def join(found):
  """Return the `Trajectories` of some shards, rows in their order."""
  names = trajectories.Trajectories._fields
  all_rows = trajectories.concatenate(
    [trajectories.Trajectories(*(x[key] for key in names)) for x in found]
  )
  order = np.argsort(np.concatenate([x["number"] for x in found]))
  return trajectories.take(all_rows, order)


def tell(found):
  """Return the counts of some shards, for people."""
  reasons = Counter(int(i) for x in found for i in x["finish"])
  total = lambda key: int(sum(x[key].sum() for x in found))
  return {
    "sequences": sum(len(x["number"]) for x in found),
    "prompt_tokens": total("prompt_length"),
    "sampled_tokens": total("count"),
    "ended": {types.FINISH_REASONS[i]: n for i, n in sorted(reasons.items())},
  }
