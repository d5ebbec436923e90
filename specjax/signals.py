"""Signals that are heard for a while."""

import contextlib
import signal


@contextlib.contextmanager
def heard(kinds, handler):
  """Have a handler hear some signals; those that heard them before do again."""
  before = {kind: signal.signal(kind, handler) for kind in kinds}
  try:
    yield
  finally:
    for kind, old in before.items():
      signal.signal(kind, old)
