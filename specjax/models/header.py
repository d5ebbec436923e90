"""Reading a file's description of a model, key by key, each value checked."""

import reprlib
from collections.abc import Mapping
from typing import NamedTuple

from specjax.errors import UserError

# Larger than in any model: what exceeds it is a broken header.
_MOST = 2**24


class Header(NamedTuple):
  """A description's keys and values, and what to call it in messages."""

  where: str
  values: Mapping

  def has(self, key):
    """Whether there is a value: null is none."""
    return self.values.get(key) is not None

  def whole(self, key, default=None, most=_MOST):
    fits = lambda x: type(x) is int and 0 < x <= most
    return self._checked(key, default, fits, f"a whole number in 1..{most}")

  def number(self, key, default=None):
    fits = lambda x: type(x) in (int, float) and 0 < x < 1e30  # so no NaN
    return self._checked(key, default, fits, "a positive number")

  def flag(self, key, default=False):
    fits = lambda x: type(x) is bool
    return self._checked(key, default, fits, "true or false")

  def group(self, key):
    values = self._checked(key, {}, is_group, "a group of keys")
    return Header(f"{self.where}: {key}", values)

  def each(self, key, length):
    """A list of so many values, one a layer."""
    fits = lambda x: isinstance(x, (list, tuple)) and len(x) == length
    return self._checked(key, None, fits, f"a list of {length}, one a layer")

  def _checked(self, key, default, fits, kind):
    """The value of a key; absent or null is the default, None for no default.

    Raises:
      UserError: there is none, or it does not fit.
    """
    value = self.values.get(key)
    if value is None:
      value = default
    if value is None:
      raise UserError(f"{self.where} has no {key!r}")
    if not fits(value):
      found = reprlib.repr(value)
      raise UserError(f"{self.where}: {key!r} must be {kind}, found {found}")
    return value


def is_group(value):
  """Whether it has keys."""
  return hasattr(value, "items")  # a ConfigDict is no Mapping


def require(header, what, found, known):
  """Raise UserError, by name, for what is none of the known."""
  # a value of any type: lists have no hash
  if found not in tuple(known):
    raise UserError(
      f"{header.where}: {what} {reprlib.repr(found)} is not supported;"
      f" known: {', '.join(map(str, known)) or 'none'}"
    )
