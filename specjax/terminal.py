"""What a person sees: text on stdout, everything about it on stderr.

Where stderr is no terminal, what it gets is plain lines without bars.
"""

import contextlib
import functools
import sys
import textwrap
import time

import rich.console
import rich.progress

from specjax import (
  forecast,
  memory,
  multihost,
  pair,
  schedule,
  settings,
  sharding,
)
from specjax.answers import Show
from specjax.models import hub, load

LOG_EVERY = 10.0  # seconds between lines where no bar can be drawn


def console():
  """Return the console for all that is not the answer itself."""
  # An encoding that lacks a character must not end the run.
  sys.stdout.reconfigure(errors="backslashreplace")
  return rich.console.Console(
    stderr=True,
    highlight=False,
    markup=False,
    emoji=False,
    quiet=not multihost.first(),
  )


def note(out, line):
  """Print a line about the run, uncut however narrow the terminal is."""
  sys.stdout.flush()
  out.print(line, style="dim", soft_wrap=True)


@contextlib.contextmanager
def waiting(out, what):
  """Show a spinner, on a terminal, while something takes its time."""
  with out.status(f"{what} ..."):
    yield


def track(out, what):
  """Return a function that shows over a list's items how many are left.

  A bar with an ETA; where none can be drawn, a line now and then.
  """
  if not out.is_terminal:
    return functools.partial(_lines, out, what)
  return lambda items: rich.progress.track(
    items, description=what, console=out, transient=True
  )


def _lines(out, what, items):
  items, began = list(items), time.perf_counter()
  logged = began
  for i, item in enumerate(items):
    now = time.perf_counter()
    if now - logged > LOG_EVERY:
      left = time_left(began, i, len(items))
      note(out, f"{what}: {i} of {len(items)}, {left}")
      logged = now
    yield item


def time_left(began, done, total):
  """'1:05 left', if what is left goes on as what is done since `began`."""
  left = int((time.perf_counter() - began) / done * (total - done))
  return f"{left // 60}:{left % 60:02d} left"


@contextlib.contextmanager
def decoding(out, todo, sizes):
  """Give a `Show` that shows how far plain decoding is, and no text.

  Args:
    todo: list of `Prompt`; sizes: a `play.Sizes`.
  """
  answers = sum(len(prompt.turns) for prompt in todo)
  bar = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    console=out,
    transient=True,
    disable=not out.is_terminal,
  )
  task = bar.add_task("plain decoding", total=answers * sizes.max_new)
  began = logged = time.perf_counter()
  done = asked = 0

  def begin(decoder, turns):
    nonlocal asked
    asked = len(turns)

  def tokens(row, ids, accepted, text):
    bar.advance(task, len(ids))

  def end():
    nonlocal done, logged
    done, now = done + asked, time.perf_counter()
    bar.update(task, completed=done * sizes.max_new)
    if not out.is_terminal and (now - logged > LOG_EVERY or done == answers):
      left = time_left(began, done, answers)
      note(out, f"{done} of {answers} answers decoded, {left}")
      logged = now

  with bar:
    yield Show(begin, tokens, end)


def open_target(out, config):
  """Return the `load.Opened` of a config's target, fetched if need be."""
  if config.target == "random":
    return load.random(config.architecture, seed=config.seed)
  return open_model(out, config.target)


def open_model(out, reference, *, draft=False):
  """Return the `load.Opened` of a weight reference, fetched if need be."""
  path = hub.resolve(reference, console=out)  # draws bars of its own
  with waiting(out, "opening the model"):
    return load.opened(str(path), draft=draft)


def open_draft(out, config, target, sizes):
  """Return the `pair.Opened` of a config, None if it only decodes plainly.

  Args:
    target: a `load.Opened`; sizes: the `play.Sizes` of the run.
  """
  if "speculative" not in settings.decoders(config):
    return None
  get = functools.partial(open_model, out, draft=True)
  draft = pair.opened(config, target, get)
  pair.check_context(draft, sizes.tokens)
  return draft


def load_pair(out, config, target, draft, sizes, dtype):
  """Read the weights of both, once it is told that memory holds them.

  Args:
    config: whose mesh they are laid over; target: a `load.Opened`.
    draft: a `pair.Opened`, or None, whose pair is None.

  Returns:
    The target's `load.Model` and the `pair.Pair`.
  """
  mesh = sharding.make(config)
  shape = dict(dtype=dtype, batch=sizes.batch, slots=sizes.slots)
  estimate = memory.estimate(
    target.config, draft=draft, untie=load.untie_here(), **shape
  )
  note(out, memory.check(memory.on(mesh, estimate)))
  told_mesh(out, mesh, target.config)
  bar = track(out, "reading weights")
  model = load.model(target, dtype=dtype, track=bar, mesh=mesh)
  if draft is None:
    return model, None
  if draft.own:
    told_mesh(out, mesh, draft.own.config, "the draft's ")
  bar = track(out, "reading the draft's weights")
  return model, pair.load(draft, model, dtype=dtype, track=bar)


def told_mesh(out, mesh, config, whose=""):
  """Say what of a model a mesh does not divide."""
  if mesh is not None and (line := sharding.undivided(mesh, config, whose)):
    note(out, line)


def scheduled(out, model, draft, config, sizes, todo):
  """Return the `pair.Pair` that a run's schedule makes of one, and tell.

  Args:
    model: a `load.Model`; draft: a `pair.Pair`, or None, which stays.
    sizes: a `play.Sizes`; todo: list of `Prompt`.
  """
  if draft is None or config.draft.schedule == "constant":
    return draft
  with waiting(out, "calibrating the draft's length"):
    draft = schedule.decide(model, draft, config, sizes, todo)
  note(out, draft.opened.chosen)
  return draft


def predicted(out, model, draft, config, sizes, batches):
  """Return the `forecast.Forecast` of a run, None if there is none to make.

  Args:
    model: a `load.Model`; draft: a `pair.Pair` or None.
    sizes: a `play.Sizes`; batches: list of `answers.Batch`.
  """
  cut = not batches or batches[-1].interrupted
  if not config.predict or draft is None or cut:
    return None
  try:
    with waiting(out, "predicting from the plain answers"):
      return forecast.of_run(model, draft, config, sizes, batches)
  except KeyboardInterrupt:  # the answers are there: their report comes
    return None


def table(out, rows):
  """Print (name, text) pairs, long texts wrapped to their column."""
  sys.stdout.flush()
  left = max(len(name) for name, _ in rows) + 2
  width = sys.maxsize
  if out.is_terminal:
    out.rule(style="dim")
    width = max(out.width - left, 20)
  blocks = out.is_terminal and out.encoding.startswith("utf")
  for name, text in rows:
    lines = textwrap.wrap(text if blocks else text.replace("█", "#"), width)
    out.print(f"{name:{left}}", style="bold", end="")
    out.print(f"\n{'':{left}}".join(lines), soft_wrap=True)
