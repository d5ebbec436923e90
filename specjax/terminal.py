"""What a person sees: text on stdout, everything about it on stderr.

Where stderr is no terminal, what it gets is plain lines without bars.
"""

import contextlib
import re
import sys
import textwrap
import time

import rich.console
import rich.progress

from specjax.models import hub, load, tokenizer
from specjax.play import Show

_LOG_EVERY = 10.0  # seconds between lines where no bar can be drawn
# All but tab and newline. A terminal obeys these, and a model may emit them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console():
  """Return the console for all that is not the answer itself."""
  # An encoding that lacks a character must not end the run.
  sys.stdout.reconfigure(errors="backslashreplace")
  return rich.console.Console(
    stderr=True, highlight=False, markup=False, emoji=False
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
  """Return a function that shows a bar with an ETA over a list's items."""
  return lambda items: rich.progress.track(
    items,
    description=what,
    console=out,
    transient=True,
    disable=not out.is_terminal,
  )


def open_target(out, config):
  """Return the `load.Opened` of a config's target, fetched if need be."""
  if config.target == "random":
    return load.random(config.architecture, seed=config.seed)
  path = hub.resolve(config.target, console=out)  # draws bars of its own
  with waiting(out, "opening the model"):
    return load.opened(str(path))


def table(out, rows):
  """Print (name, text) pairs, long texts wrapped to their column."""
  sys.stdout.flush()
  left = max(len(name) for name, _ in rows) + 2
  width = sys.maxsize
  if out.is_terminal:
    out.rule(style="dim")
    width = max(out.width - left, 20)
  for name, text in rows:
    lines = textwrap.wrap(text, width)
    out.print(f"{name:{left}}", style="bold", end="")
    out.print(f"\n{'':{left}}".join(lines), soft_wrap=True)


def show(out, tok, todo, sizes):
  """Return a context that is the `Show` for a batch size."""
  total = sum(len(prompt.turns) for prompt in todo)
  if sizes.batch == 1:
    return _live(out, tok, total)
  return _batched(out, tok, total, sizes.max_new)


@contextlib.contextmanager
def _live(out, tok, total):
  """Stream one answer at a time."""
  tell = _teller(out, total)
  stream, done = None, 0

  def begin(turns):
    nonlocal stream
    stream = tokenizer.stream(tok)
    tell(turns[0], done)

  def tokens(row, ids):
    del row
    _write(stream.step(ids))

  def end():
    nonlocal stream, done
    _write(stream.flush() + _after(total))
    stream, done = None, done + 1

  try:
    yield Show(begin, tokens, end)
  except KeyboardInterrupt:
    if stream:  # in the middle of an answer's line
      _write("\n")
    raise


@contextlib.contextmanager
def _batched(out, tok, total, max_new):
  """Show a bar; print the answers of a group of prompts when all are there.

  They are printed in the prompts' order, a prompt's turns one after the other,
  so that stdout is the same for every batch size.
  """
  tell = _teller(out, total)
  bar = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.TextColumn("{task.fields[tokens]} tokens"),
    console=out,
    transient=True,
    disable=not out.is_terminal,
  )
  task = bar.add_task("decoding", total=total * max_new, tokens=0)
  todo, streams, texts, finished, num_tokens, done = [], [], [], [], 0, 0

  def begin(turns):
    nonlocal todo, streams, texts
    todo, texts = turns, [""] * len(turns)
    streams = [tokenizer.stream(tok) for _ in turns]
    bar.start()

  def tokens(row, ids):
    nonlocal num_tokens
    texts[row] += streams[row].step(ids)
    num_tokens += len(ids)
    bar.update(task, advance=len(ids), tokens=num_tokens)

  def end():
    nonlocal done
    bar.stop()
    for turn, text, stream in zip(todo, texts, streams, strict=True):
      finished.append((turn.index, turn.number, turn, text + stream.flush()))
    done += len(todo)
    bar.update(task, completed=done * max_new)
    if all(turn.number + 1 == len(turn.prompt.turns) for turn in todo):
      flush()

  def flush():
    for _, _, turn, text in sorted(finished, key=lambda x: x[:2]):
      tell(turn, done)
      _write(text + _after(total))
    finished.clear()

  try:
    yield Show(begin, tokens, end)
  except KeyboardInterrupt:
    bar.stop()
    flush()
    raise
  finally:
    bar.stop()  # or the cursor stays hidden


def _write(text):
  if sys.stdout.isatty():
    text = _visible(text)
  sys.stdout.write(text)
  sys.stdout.flush()


def _after(total):
  """What follows an answer: a blank line where others come."""
  return "\n\n" if total > 1 else "\n"


def _visible(text):
  return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _teller(out, total):
  """Return what announces a turn, the next of `total`, when `done` are.

  On a terminal it prints a heading and the question, elsewhere a line now and
  then.
  """
  began = logged = time.perf_counter()
  number = 0

  def tell(turn, done):
    nonlocal number, logged
    number += 1
    now = time.perf_counter()
    title = f"{number}/{total} {turn.prompt.id}"
    if len(turn.prompt.turns) > 1:
      title += f" turn {turn.number + 1}"
    if 0 < done < total:
      left = int((now - began) / done * (total - done))
      title += f", {left // 60}:{left % 60:02d} left"
    if out.is_terminal:
      if total > 1:
        out.rule(_visible(title), align="left", style="dim")
      text = turn.prompt.turns[turn.number]
      short = text if len(text) < 400 else f"{text[:300]} [...] {text[-80:]}"
      out.print(_visible(short), style="dim italic")
    elif now - logged > _LOG_EVERY:
      note(out, title)
      logged = now

  return tell
