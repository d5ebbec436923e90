"""What runs the points of a sweep: one small adapter an engine.

An engine is a function run(commands, ...) -> iterator of (index, told): told is
None when a command begins, where that can be known, and the last line that it
had to say when it ended. Closing the iterator stops what still runs, and waits
for it. What became of a point says its folder, not its engine.
"""

import importlib
import signal
import subprocess
import time

from specjax.errors import UserError

_POLL = 0.1  # seconds


def start(command, **more):
  """Start a command whose stderr is to be read; return the process."""
  return subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    errors="replace",
    process_group=0,  # a terminal's Ctrl-C is not for it
    **more,
  )


def ended(process):
  """Return the last line that a process had to say, when it has ended."""
  said = [x for x in process.communicate()[1].splitlines() if x.strip()]
  code = process.returncode
  return said[-1] if said else f"ended with code {code}"


def stop(processes):
  """Ask processes to save and end, and wait; once more for an impatient user.

  The second time a training run ends at once.
  """
  while processes:
    for process in processes:
      process.terminate()
    try:
      for process in processes:
        process.wait()
      return
    except KeyboardInterrupt:
      continue


class Command:
  """Runs a command to its end, on whatever machine it was sent to."""

  def __init__(self, command, folder):
    self.command, self.folder, self.process = command, folder, None

  def __call__(self):
    """Return the last line that the command had to say."""
    self.process = start(self.command, cwd=self.folder)
    try:
      while self.process.poll() is None:
        time.sleep(_POLL)  # Ray's cancelling interrupts no longer wait
      return ended(self.process)
    except BaseException:  # cancelled
      self.save()
      raise

  def save(self):
    """Stop the command, which saves; nothing hurries it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop([self.process] if self.process else [])

  def checkpoint(self):
    """What submitit calls before a job is preempted: save, and run again."""
    self.save()
    again = Command(self.command, self.folder)
    return need("submitit").helpers.DelayedSubmission(again)


def need(package):
  """Return a package that not everybody has installed.

  Raises:
    UserError: it is not there.
  """
  try:
    return importlib.import_module(package)
  except ImportError as e:
    raise UserError(
      f"this launcher needs {package}: type `pip install {package}` ({e})"
    ) from e
