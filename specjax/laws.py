"""The laws that meet when a draft is trained: the target's p, the draft's q."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.sampling import probabilities
from specjax.types import Sampling

PLAIN = Sampling(np.float32(1), np.int32(0), np.float32(1), np.float32(0))


class Normaliser(NamedTuple):
  """What a law that is not truncated needs besides some tokens' logits."""

  top: jax.Array  # [...] int32, the first of the largest logits
  log_sum: jax.Array  # [...] ln sum exp(logits / T) over V, T = 1 if it is 0


def laws(
  teacher,
  student,
  *,
  sampling=PLAIN,
  draft_temperature=None,
  ids=None,
  known=None,
):
  """The laws that meet in deployment: p and log q on the draft's vocabulary.

  p is not renormalised there: outside q = 0, so that sum min(p, q) is the
  acceptance probability whatever was trimmed. Without ids the draft's logits
  are tokens 0, 1, ...; those beyond V can never be drafted and are cut.

  log q = log softmax(student / draft_temperature), before any truncation of the
  draft's, which has no derivative. Gradients hold a factor 1 / temperature; no
  T^2 (Hinton et al. 2015) makes up for it.

  Args:
    teacher: [..., V] logits; constants.
    student: [..., Vq] logits.
    sampling: `Sampling` whose fields broadcast to the positions [...].
    draft_temperature: [...] too. None: the target's; 1 where it is 0 (greedy).
    ids: a tuple or NumPy array, the token of each of the draft's logits.
    known: a `Normaliser` [...]: the teacher's logits are then those of `ids`
      alone, and nothing is truncated.

  Returns:
    p [..., Vq] and log q [..., Vq]; p is NaN where the teacher is broken.

  Raises:
    ValueError: ids that are no trimmed vocabulary; a bias or penalties.
  """
  if any(x is not None for x in sampling[4:]):
    raise ValueError("a draft is trained without bias, penalties or minimum")
  V = teacher.shape[-1] if known is None else np.inf
  student = student[..., :V] if ids is None else student
  ids = checked(ids, V, student.shape[-1])
  teacher = lax.stop_gradient(teacher)
  if known is None:
    law = lambda logits, *fields: probabilities(logits, Sampling(*fields))
    law = jnp.vectorize(law, signature="(v),(),(),(),()->(v)")
    p = law(teacher, *sampling[:4])
    first = (ids == np.arange(len(ids))).all()
    p = p[..., : len(ids)] if first else p[..., ids]
  else:
    p = _of_some(teacher, sampling.temperature, ids, known)
  T = sampling.temperature if draft_temperature is None else draft_temperature
  z = student.astype(jnp.promote_types(student.dtype, jnp.float32))
  T = jnp.where(jnp.asarray(T) > 0, T, 1)[..., None].astype(z.dtype)
  return p, jax.nn.log_softmax(z / T)


def _of_some(logits, temperature, ids, known):
  """p [..., Vq] of a law that is not truncated, from its logits of ids."""
  z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  T = jnp.asarray(temperature, z.dtype)[..., None]
  log_sum = known.log_sum[..., None].astype(z.dtype)
  p = jnp.exp(z / jnp.where(T > 0, T, 1) - log_sum)
  p = jnp.where(T > 0, p, known.top[..., None] == ids)
  return jnp.where(jnp.isfinite(log_sum), p, jnp.nan)


def checked(ids, V, Vq):
  """ids as an array [Vq]; a gather would clamp what is wrong."""
  ids = np.arange(Vq) if ids is None else np.asarray(ids)
  if ids.shape != (Vq,) or ids.min() < 0 or ids.max() >= V:
    raise ValueError(f"ids must be {Vq} tokens, one a logit, in 0..{V - 1}")
  if len(np.unique(ids)) < Vq:
    raise ValueError("ids must differ from each other")
  return ids
