"""Matrices as they are stored: whole, or in blocks of columns.

And what is made with some that lie side by side in one, over several devices.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax


def shape(inner, outer, block):
  """How a matrix is stored: [in, out], or [out / block, in, block].

  With a block it is so wherever the block divides `out`.
  """
  if not block or outer % block:
    return (inner, outer)
  return (outer // block, inner, block)


def in_blocks(matrix, block):
  """A matrix [in, out] as `shape` has it."""
  stored = shape(*matrix.shape, block)
  if len(stored) == 2:
    return matrix
  blocks, inner, _ = stored
  return matrix.reshape(inner, blocks, block).transpose(1, 0, 2)


def whole(matrix):
  """[in, out] of a matrix that is stored either way."""
  if matrix.ndim == 2:
    return matrix
  return matrix.transpose(1, 0, 2).reshape(matrix.shape[1], -1)


def product(x, matrix, dtype=None):
  """x [..., in] @ matrix -> [..., out], the matrix stored either way.

  XLA's CPU backend multiplies 2 or more rows by first packing the matrix into
  another array, which takes as long as reading it from memory. A block's packed
  copy stays in the processor's cache. Many rows are bound by arithmetic, which
  the whole matrix serves better.
  """
  rows = x.reshape(-1, x.shape[-1])
  if matrix.ndim == 2 or len(rows) > _FEW:
    return jnp.matmul(x, whole(matrix), preferred_element_type=dtype)
  blocks, inner, columns = matrix.shape
  n = _parts(blocks, inner)
  rows = rows.reshape(-1, n, inner // n).transpose(1, 0, 2)
  each = jnp.broadcast_to(rows, (blocks, *rows.shape))
  parts = matrix.reshape(blocks, n, inner // n, columns)
  found = dtype or jnp.result_type(x, matrix)
  wide = jnp.promote_types(found, jnp.float32)  # until parts are added
  y = jnp.matmul(each, parts, preferred_element_type=wide).sum(1)
  y = y.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)
  return y.astype(found)


def _parts(blocks, inner):
  """In how many parts a block is multiplied, one behind the other.

  Two cores share an odd number of large blocks evenly only if each is two.
  """
  return 2 if blocks % 2 and inner % 2 == 0 and inner >= _LARGE else 1


_FEW = 64  # rows up to which blocks are no slower
_LARGE = 1024  # rows of a block that are worth sharing


def widths(config):
  """Widths of what a layer has side by side, by the matrix's name.

  Args:
    config: a `transformer.Config`.
  """
  kv = config.kv_heads * config.head_dim
  return {
    "qkv": (config.heads * config.head_dim, kv, kv),
    "gate_up": (config.hidden, config.hidden),
  }


def shards(config):
  """Shards of such a matrix, by its name: 1 where they do not divide it."""
  n = {"qkv": config.kv_heads, "gate_up": config.hidden}
  return {k: 1 if x % config.shards else config.shards for k, x in n.items()}


def order(widths, shards):
  """Columns of matrices side by side, so that each shard has some of every one.

  Args:
    widths: of the matrices, each divided by the number of shards.
  """
  starts = np.cumsum([0, *widths[:-1]])
  parts = zip(widths, starts, strict=True)
  each = [np.arange(n).reshape(shards, -1) + at for n, at in parts]
  return np.concatenate(each, 1).ravel()


def cut(x, start, stop, shards, axis=-1):
  """x[..., start:stop] of an axis in the `order` of so many shards.

  Both ends are between two of the matrices. Nothing leaves its shard.
  """
  axis %= x.ndim
  if shards == 1:
    return lax.slice_in_dim(x, start, stop, axis=axis)
  before, behind = x.shape[:axis], x.shape[axis + 1 :]
  x = x.reshape(*before, shards, -1, *behind)
  at = start // shards, stop // shards
  x = lax.slice_in_dim(x, *at, axis=axis + 1)
  return x.reshape(*before, -1, *behind)
