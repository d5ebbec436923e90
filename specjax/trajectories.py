"""Sequences to learn from, and how a trainer walks through them.

All of it is plain numpy and pure: which rows a step sees, which of them are
held out and which positions count are functions of the arguments alone, so a
run that is resumed sees what an uninterrupted one would have seen.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UserError


class Trajectories(NamedTuple):
  """Prompts, each with its answer.

  Where they end is told by lengths, never by ids: a token that pads, or the
  end token, may stand anywhere.
  """

  tokens: np.ndarray  # [M, T] int32, prompt then answer, padded with 0
  prompt_length: np.ndarray  # [M] int32, >= 1: what nothing comes before
  length: np.ndarray  # [M] int32, prompt and answer
  temperature: np.ndarray  # [M] float32 it was sampled at, NaN: given text


class Batch(NamedTuple):
  """Rows of one static width: position t is to predict labels[:, t]."""

  tokens: np.ndarray  # [B, T] int32
  labels: np.ndarray  # [B, T] int32, the token behind each, 0 where none is
  mask: np.ndarray  # [B, T] bool, whether the label is to be predicted
  length: np.ndarray  # [B] int32, real tokens among the T
  temperature: np.ndarray  # [B] float32
  # [B, T, 1 + F, D] float16 of `hidden.take`; None: the target is asked
  states: np.ndarray | None = None
  # `laws.Normaliser` [B, T] of these; None: all of the target's logits are made
  normaliser: Any = None


class Stats(NamedTuple):
  """What a set of trajectories amounts to."""

  sequences: int
  tokens: int
  supervised: int  # tokens that some position is to predict
  share: float  # of them among the tokens
  prompt_length: float  # mean, tokens
  answer_length: float  # mean, tokens
  temperatures: dict  # {temperature, or None of given text: sequences}


def make(rows):
  """Return the `Trajectories` of (prompt ids, answer ids, temperature) rows.

  The prompt must not be empty: without a token before it, a first token
  cannot be predicted.
  """
  length = np.array([len(p) + len(a) for p, a, _ in rows], np.int32)
  prompt_length = np.array([len(p) for p, _, _ in rows], np.int32)
  if not (prompt_length > 0).all():
    raise ValueError(f"row {int(prompt_length.argmin())} has an empty prompt")
  tokens = np.zeros((len(rows), length.max(initial=1)), np.int32)
  for row, (prompt, answer, _) in zip(tokens, rows, strict=True):
    row[: len(prompt) + len(answer)] = [*prompt, *answer]
  temperature = np.array([t for _, _, t in rows], np.float32)
  return Trajectories(tokens, prompt_length, length, temperature)


def concatenate(parts):
  """Return all rows of some `Trajectories`, in their order."""
  width = max(part.tokens.shape[1] for part in parts)
  wide = [
    part._replace(tokens=_cut(part.tokens, 0, width, len(part.tokens)))
    for part in parts
  ]
  return Trajectories(*map(np.concatenate, zip(*wide, strict=True)))


def take(trajectories, rows):
  """Return some rows: indices, or a mask [M]."""
  return Trajectories(*(x[rows] for x in trajectories))


def mask(trajectories, prompts=False):
  """Return [M, T] bool: whether position t predicts a token of the answer.

  With `prompts`, of the whole sequence: a prompt's tokens are not the target's
  own, but what it would say behind each of them can be learned all the same.

  Position t predicts token t + 1, so the answer's first token is the last
  prompt position's to predict, and its last token, an end token or not, that
  of the position before it.
  """
  t = np.arange(trajectories.tokens.shape[1])
  first = 0 if prompts else trajectories.prompt_length[:, None] - 1
  return (t >= first) & (t + 1 < trajectories.length[:, None])


def stats(trajectories):
  """Return the `Stats`."""
  M, total = len(trajectories.length), int(trajectories.length.sum())
  supervised = int(mask(trajectories).sum())
  values, counts = np.unique(trajectories.temperature, return_counts=True)
  of = lambda n, m: float(n / m) if m else 0.0
  return Stats(
    sequences=M,
    tokens=total,
    supervised=supervised,
    share=of(supervised, total),
    prompt_length=of(trajectories.prompt_length.sum(), M),
    answer_length=of(supervised, M),
    temperatures={
      None if np.isnan(t) else round(float(t), 6): int(n)
      for t, n in zip(values, counts, strict=True)
    },
  )


def describe(found):
  """Return a `Stats` as (name, text) pairs for `terminal.table`."""
  name = lambda t: "given text" if t is None else f"T={t:g}"
  kinds = [f"{name(t)} {n:,}" for t, n in found.temperatures.items()]
  return [
    ("sequences", f"{found.sequences:,}: {', '.join(kinds)}"),
    (
      "tokens",
      f"{found.tokens:,}, of them {found.supervised:,} ({found.share:.0%})"
      " to learn from",
    ),
    (
      "mean length",
      f"prompt {found.prompt_length:.0f}, answer {found.answer_length:.0f}",
    ),
  ]


def fit(trajectories, length, note):
  """Return the rows that have something to learn among `length` positions.

  Args:
    length: T of the batches to come; what is behind it is cut.
    note: called with a line that tells how many rows were dropped, if any.

  Raises:
    UserError: there is none, for whatever reason.
  """
  M = len(trajectories.length)
  has_answer = mask(trajectories).any(1)
  kept = has_answer & (trajectories.prompt_length <= length)
  empty, cut = M - has_answer.sum(), (has_answer & ~kept).sum()
  lost = (
    f"{empty + cut:,} of {M:,} sequences have nothing to learn from: {empty:,}"
    f" have no answer, {cut:,} have a prompt of more than {length} tokens"
  )
  if not kept.any():
    raise UserError(f"{lost}; give longer sequences or other data")
  if not kept.all():
    note(lost)
  return take(trajectories, kept)


def batch(trajectories, rows, length, prompts=False):
  """Return the `Batch` of some rows, cut to `length` = T positions.

  The label of the last position is the token behind the cut, where there is
  one. `prompts`: of `mask`.
  """
  found = take(trajectories, rows)
  wide = lambda x, start: _cut(x, start, start + length, len(rows))
  t = np.arange(length)
  labels = wide(found.tokens, 1)
  labels = np.where(t + 1 < found.length[:, None], labels, 0)
  return Batch(
    tokens=wide(found.tokens, 0),
    labels=labels,
    mask=wide(mask(found, prompts), 0),
    length=np.minimum(found.length, length),
    temperature=found.temperature,
  )


def _cut(x, start, stop, rows):
  """x[:, start:stop], with zeros where x ends before."""
  out = np.zeros((rows, stop - start), x.dtype)
  part = x[:, start:stop]
  out[:, : part.shape[1]] = part
  return out


def indices(seed, step, size, batch):
  """Return the [batch] rows of a step, a pure function of the arguments.

  The steps walk through one permutation of the rows after another, a new one
  each epoch; a batch that meets the end of one goes on in the next. So every
  row is seen once an epoch and none is left out.

  Args:
    seed, step: whole numbers >= 0.
    size: rows that there are.

  Raises:
    ValueError: the batch is larger than the set.
  """
  if batch > size:
    raise ValueError(
      f"a batch of {batch} needs as many sequences, there are {size}"
    )
  at = step * batch + np.arange(batch)  # of the endless walk
  found = np.empty(batch, np.int64)
  for epoch in np.unique(at // size):
    order = np.random.default_rng([seed, epoch]).permutation(size)
    now = at // size == epoch
    found[now] = order[at[now] % size]
  return found


def split(trajectories, held_out, seed):
  """Return (training, held-out) trajectories.

  A prompt is on one side with all its answers. Which one is decided by the
  prompt and the seed alone, so that more data moves no prompt from one side to
  the other. A sequence without a prompt goes by its whole text.

  Args:
    held_out: the share that is held out, between 0 and 1: exact for many
      prompts, roughly so for few.

  Raises:
    UserError: one side would be empty.
  """
  if not 0 < held_out < 1:
    raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
  out = np.array(
    [_place(*row, seed) < held_out for row in _texts(trajectories)]
  )
  if out.all() or not out.any():
    side = "the training set" if out.any() else "the held-out set"
    raise UserError(
      f"{side} would be empty: {len(out)} sequences at a held-out share of"
      f" {held_out:g}; take more prompts or another share"
    )
  return take(trajectories, ~out), take(trajectories, out)


def _texts(trajectories):
  for tokens, prompt, length in zip(*trajectories[:3], strict=True):
    yield tokens, prompt if prompt > 1 else length


def _place(tokens, count, seed):
  """A number in [0, 1) that the first `count` tokens and the seed decide."""
  text = np.asarray(tokens[:count], "<i4").tobytes()
  key = int(seed).to_bytes(8, "little")
  digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
  return int.from_bytes(digest, "little") / 2**64
