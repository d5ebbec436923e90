"""Which ids a trimmed head keeps.

The map from logits to ids belongs to the weights: it is never made a second
time for them (B61).
"""

import numpy as np

from specjax.errors import UserError


def kept(asked, start, teacher, found, restored):
  """Return the ids of a draft's head, None: all.

  Args:
    asked: a config's `draft`; start: .config and .ids of what it starts from.
    teacher: the target, a `load.Model`.
    found: `trajectories.Trajectories`, or None.
    restored: the map of a checkpoint, or None.

  Raises:
    UserError: the weights and the checkpoint draft other ids; see `frequent`.
  """
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


def check(count, vocab_size, stop_ids):
  """Return the end tokens; raise UserError unless a head has room for them."""
  ends = [i for i in stop_ids if i < vocab_size]
  if not max(len(ends), 1) <= count <= vocab_size:
    raise UserError(
      f"--config.draft.head must be 0 or in {max(len(ends), 1)}..{vocab_size},"
      f" the end tokens and the vocabulary, got {count}"
    )
  return ends


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
  ends = check(count, vocab_size, stop_ids)
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
