"""Logits of some positions at a time: never [B, T, V] of them all."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def chunked(values, heads, teacher, student, weights, labels, *, chunk):
  """What `values` makes of the logits, `chunk` positions of each row at a time.

  Logits are made again in the backward pass.

  Args:
    values: (teacher's logits [B, chunk, V], student's [B, chunk, ..., Vq],
      labels) -> a tree of [B, chunk, ...].
    heads: the two unembeds, hidden states -> logits.
    teacher: [B, T, D], constants; student: [B, T, ..., Dq].
    weights: [B, T]; where they are 0 hidden states count as 0.
    labels: a tree of [B, T, ...].
    chunk: how many positions of each row are unembedded at a time.

  Returns:
    The tree of [B, T, ...].
  """

  @jax.checkpoint
  def at(xs):
    *states, weights, labels = xs
    of = lambda head, x: head(there(x, weights))
    return values(*map(of, heads, states), labels)

  xs = lax.stop_gradient(teacher), student, weights, labels
  chunks = jax.tree.map(functools.partial(split, chunk=chunk), xs)
  join = functools.partial(_join, T=weights.shape[1])
  return jax.tree.map(join, lax.map(at, chunks))


def summed(sums, heads, student, fixed, teacher, weights):
  """(loss, weight, alpha) of all chunks; loss has a gradient by the first two.

  A sum's gradient is known up to a factor as soon as the sum is: each chunk's
  is taken while its logits are there, which saves making them again.

  Args:
    sums: (heads, student, fixed, teacher, weights) -> (loss, (weight, alpha))
      of one chunk.
    heads, fixed: alike for all chunks; the others: of `split`, [n, ...].
  """

  @jax.custom_vjp
  def value(heads, student, fixed, teacher, weights):
    each = lambda xs: sums(heads, xs[0], fixed, *xs[1:])
    loss, (weight, alpha) = lax.map(each, (student, teacher, weights))
    return loss.sum(), weight.sum(), alpha.sum()

  def forward(heads, student, fixed, teacher, weights):
    gradient = jax.value_and_grad(sums, argnums=(0, 1), has_aux=True)

    def step(d_heads, xs):
      (loss, aux), (d, d_student) = gradient(heads, xs[0], fixed, *xs[1:])
      d_heads = [a + b.astype(a.dtype) for a, b in zip(d_heads, d, strict=True)]
      return d_heads, (loss, *aux, d_student)

    wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    d_heads, (*values, d_student) = lax.scan(
      step, [wide(x) for x in heads], (student, teacher, weights)
    )
    kept = [d.astype(x.dtype) for d, x in zip(d_heads, heads, strict=True)]
    return tuple(x.sum() for x in values), (kept, d_student)

  def backward(gradients, cotangents):
    scale = lambda g: (cotangents[0] * g).astype(g.dtype)
    d_heads, d_student = jax.tree.map(scale, gradients)
    return d_heads, d_student, None, None, None

  value.defvjp(forward, backward)
  return value(heads, student, fixed, teacher, weights)


def there(hidden, weights):
  """Hidden states [B, chunk, ...] with 0 for those of weight 0 [B, chunk].

  Masking the loss is not enough: the gradient of a head's weights is a product
  with the states, and 0 * NaN is NaN.
  """
  axes = [1] * (hidden.ndim - weights.ndim)
  return jnp.where((weights > 0).reshape(*weights.shape, *axes), hidden, 0)


def split(x, chunk):
  """[B, T, ...] as [n, B, chunk, ...], padded with 0."""
  B, T, *rest = x.shape
  x = jnp.pad(x, [(0, 0), (0, -T % chunk), *[(0, 0)] * len(rest)])
  return jnp.moveaxis(x.reshape(B, -1, chunk, *rest), 1, 0)


def _join(x, T):
  """[n, B, chunk, ...] as [B, T, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(len(x), -1, *x.shape[3:])[:, :T]


def answers(mask, most, x):
  """Return x [B, most, ...] from each row's first supervised position on.

  Heads are most of a step, and what is not supervised needs none. A row's
  supervised positions are one piece. Behind its last position are zeros, whose
  weight is 0 too.

  Args:
    mask: [B, T], what is supervised; most: None: x as it is.
  """
  if most is None or most >= mask.shape[1]:
    return x
  rows = jnp.arange(len(mask))[:, None]
  at = mask.argmax(1)[:, None] + jnp.arange(most)
  return x.at[rows, at].get(mode="fill", fill_value=0)
