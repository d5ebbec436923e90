"""The systems that benchmarks/peers.py compares: names, and their processes.

A foreign system is benchmarks/peer_worker.py in a process of its own, spoken to
by JSON lines; one waits while another computes.
"""

import json
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple

from specjax import cli
from specjax.errors import UserError

WORKER = pathlib.Path(__file__).with_name("peer_worker.py")
PIP = {  # the module that is not there -> what to type
  "torch": "pip install torch transformers",
  "transformers": "pip install torch transformers",
  "llama_cpp": "pip install llama-cpp-python",
}
_HOW = {  # library -> what may follow it, what takes a number behind it
  "transformers": (("", "static", "compile"), ("assistant", "lookup")),
  "llama.cpp": (("", "F16", "Q8_0"), ("lookup",)),
  "ours": (("plain", "auto", "adaptive", "config"), ("ngram", "draft")),
}
DEFAULT = (
  "transformers",
  "transformers:static",
  "transformers:compile",
  "transformers:assistant",
  "transformers:assistant4",
  "transformers:lookup2",
  "transformers:lookup10",
  "llama.cpp",
  "llama.cpp:F16",
  "llama.cpp:Q8_0",
  "llama.cpp:lookup2",
  "llama.cpp:lookup10",
  "ours:plain",
  "ours:ngram4",
  "ours:draft4",
  "ours:auto",
  "ours:config",
)
_ADAPTIVE = ("auto", "adaptive")


class System(NamedTuple):
  """A row of the table."""

  name: str
  library: str  # of _HOW
  how: str
  k: int  # tokens that are drafted at once, 0: its default

  @property
  def speculates(self):
    return bool(self.k) or self.how in ("assistant", "config", *_ADAPTIVE)

  @property
  def drafts(self):
    """Whether it needs --draft."""
    return self.how in ("assistant", "draft", *_ADAPTIVE)

  def precision(self, dtype):
    """Of its weights; dtype: what the others have."""
    return self.how if self.how in ("F16", "Q8_0") else dtype


class Worker(NamedTuple):
  """A process that has one system loaded."""

  process: subprocess.Popen
  log: object  # the file that its stderr goes to


def parse(name):
  """Return the `System` of a name such as "llama.cpp:lookup2"."""
  library, _, rest = name.partition(":")
  if library in _HOW:
    alone, numbered = _HOW[library]
    how, digits = re.fullmatch(r"(.*?)(\d*)", rest).groups()
    if rest in alone:
      return System(name, library, rest, 0)
    if how in numbered and (digits or how == "assistant"):
      return System(name, library, how, int(digits or 0))
  best = cli.nearest(name, DEFAULT)
  hint = f"; did you mean {best}?" if best else ""
  forms = [
    ":".join(filter(None, (x, how)))
    for x, (alone, numbered) in _HOW.items()
    for how in (*alone, *(f"{n}K" for n in numbered))
  ]
  raise UserError(f"--systems: {name!r} is none of {', '.join(forms)}{hint}")


def start(python, worker=WORKER):
  """Start a `Worker` by an interpreter.

  Raises:
    UserError: there is no such interpreter.
  """
  log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, `stop`
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
  try:
    process = subprocess.Popen([python, str(worker)], text=True, **pipes)
  except OSError as e:
    raise UserError(
      f"--bench_python={python}: {e.strerror}; give an interpreter that has"
      " torch, transformers and llama-cpp-python"
    ) from e
  return Worker(process, log)


def ask(worker, do, **what):
  """Send a line, return the answer.

  Raises:
    UserError: the process is gone.
  """
  try:
    print(json.dumps({"do": do, **what}), file=worker.process.stdin, flush=True)
    line = worker.process.stdout.readline()
  except BrokenPipeError:
    line = ""
  if line:
    return json.loads(line)
  code = worker.process.wait()
  worker.log.seek(0)
  said = [x for x in worker.log.read().splitlines() if x.strip()]
  last = f"; it last said: {said[-1].strip()[:300]}" if said else ""
  raise UserError(f"a benchmarked system's process ended with {code}{last}")


def stop(worker):
  """End a process that was started here."""
  worker.process.stdin.close()
  try:
    worker.process.wait(10)
  except subprocess.TimeoutExpired:
    worker.process.kill()
    worker.process.wait()
  worker.process.stdout.close()
  worker.log.close()


def reason(found):
  """Why a system is not measured, of an answer; "" if nothing is wrong."""
  if name := found.get("missing"):
    return f"not installed: {PIP.get(name, f'pip install {name}')}"
  return found.get("error", "")
