"""Files that are whole or not there, folders that one process holds.

Nothing here needs JAX: the processes that only start others use it too.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from specjax.errors import UserError


def part(path):
  """A file of this process beside `path`, or beside what it links to."""
  real = Path(os.path.realpath(path))
  return real.with_name(f".{os.getpid()}.{real.name}")


def write(path, data):
  """Write bytes to a file, all of them or none; raise OSError."""
  new = part(path)
  try:
    new.write_bytes(data)
    os.replace(new, os.path.realpath(path))
  finally:
    with contextlib.suppress(OSError):
      new.unlink()


def hold(path, busy):
  """Return the open file of a lock that is held now, until it is closed.

  The kernel lets go of it when its last holder ends, whatever ends that.

  Raises:
    UserError: another process holds it; the message is `busy`.
  """
  while True:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      os.close(file)
      raise UserError(busy) from e
    except OSError:  # a file system without locks
      return file
    # whoever held it before may have removed what was opened here
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(file), os.stat(path)):
        return file
    os.close(file)
