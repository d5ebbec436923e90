"""Slow and obvious NumPy versions of what the library computes."""

import numpy as np


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """Sort, cut, renormalise, in float64; ties with the last kept are kept."""
  logits = np.asarray(logits, np.float64)
  if temperature == 0:
    return np.eye(len(logits))[int(np.argmax(logits))]
  z = (logits - logits.max()) / temperature
  p = np.exp(z) / np.exp(z).sum()
  if 0 < top_k < len(p):
    p = np.where(p >= np.sort(p)[-top_k], p, 0)
    p = p / p.sum()
  if top_p < 1:
    ordered = np.sort(p)[::-1]
    needed = int(np.searchsorted(np.cumsum(ordered), top_p)) + 1
    p = np.where(p >= ordered[min(needed, len(p)) - 1], p, 0)
    p = p / p.sum()
  p = np.where(p >= min_p * p.max(), p, 0)
  return p / p.sum()
