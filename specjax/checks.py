"""Refuse, in words, what the compiled programs would clamp or choke on."""

import numpy as np

from specjax import types
from specjax.cache import PREFILL


def lengths(target, prompt, length, max_new, max_new_tokens, slots):
  """Shapes, and that prompt and answer fit the slots and the context."""
  if not prompt.shape[:1] == length.shape == max_new.shape:
    raise ValueError(
      f"prompt {prompt.shape}, length {length.shape} and max_new"
      f" {max_new.shape} differ in their number of rows"
    )
  if slots % PREFILL:
    raise ValueError(f"slots must be a multiple of {PREFILL}, got {slots}")
  if (length < 1).any():
    raise ValueError(f"row {int(length.argmin())} has an empty prompt")
  if (length > prompt.shape[1]).any():
    raise ValueError(
      f"length {length.max()} is more than the prompt's width {prompt.shape}"
    )
  if (length > target.context).any():
    raise ValueError(
      f"row {int(length.argmax())} has {length.max()} tokens; the model's"
      f" context holds {target.context}"
    )
  needed = np.minimum(length + max_new, target.context).max()
  if slots < needed:
    raise ValueError(f"{needed} tokens do not fit in {slots} slots")
  if (max_new < 0).any() or (max_new > max_new_tokens).any():
    raise ValueError(
      f"max_new must be in 0..{max_new_tokens}, got {max_new.tolist()}"
    )


def ids(target, prompt, length, stop_ids):
  """JAX clamps an index that is out of range; say so instead."""
  real = np.arange(prompt.shape[1]) < length[:, None]
  wrong = real & ((prompt < 0) | (prompt >= target.vocab_size))
  if wrong.any():
    raise ValueError(
      f"token id {prompt[wrong][0]} is outside the target's vocabulary of"
      f" {target.vocab_size}"
    )
  if np.shape(stop_ids) != (types.STOP_IDS,):
    raise ValueError(
      f"stop_ids must have shape [{types.STOP_IDS}], got {np.shape(stop_ids)}"
    )


def draft(target, asked, length, max_new):
  """That a `types.Draft` can be decoded with, for such a request."""
  if asked.verifier not in types.VERIFIERS:
    known = ", ".join(types.VERIFIERS)
    raise ValueError(f"verifier must be one of {known}: {asked.verifier!r}")
  K = asked.num_draft
  if not isinstance(K, int | np.integer) or K < 0:
    raise ValueError(f"num_draft must be a whole number of 0 or more, got {K}")
  shapes = {np.shape(x) for x in (asked.sampling or ())[:4]}
  if shapes - {length.shape}:
    raise ValueError(
      f"the draft's sampling values must have shape {length.shape}, got"
      f" {sorted(shapes)}"
    )
  most = asked.drafter.context
  needed = np.minimum(length + max_new, target.context).max()
  if most is not None and most < needed:
    raise ValueError(
      f"the draft's context holds {most} tokens; this request needs {needed}"
    )
