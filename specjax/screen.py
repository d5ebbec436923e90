"""The answers as they come: the text on stdout once, the rest on stderr.

Where both decoders run, plain decoding shows no more than its progress; the
text is what speculation emits, drafted tokens that were accepted in green.
"""

import contextlib
import itertools
import os
import re
import sys
import time

import rich.progress
import rich.text

from specjax import settings, stops, terminal
from specjax.models import tokenizer
from specjax.play import Show

# All but tab and newline. A terminal obeys these, and a model may emit them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SAID = {
  "autoregressive": "plain decoding",
  "speculative": "speculative decoding",
}

_LEGEND = (": drafted and accepted; the rest is the target's own", "dim")


def show(out, tok, todo, sizes, config):
  """Return a context that is the `Show` for a batch size.

  Args:
    out: the console of stderr; tok: a `Tokenizer`.
    todo: list of `Prompt`; sizes: a `play.Sizes`.
    config: its decoders are played in turns; the text is the last one's.
  """
  decoders = settings.decoders(config)
  if decoders[-1] == "speculative" and out.is_terminal and _coloured():
    out.print(rich.text.Text.assemble(("green", "green"), _LEGEND))
  total = sum(len(prompt.turns) for prompt in todo)
  texts = settings.stop_texts(config)
  new_text = lambda: _Text(tok, texts)
  if sizes.batch == 1:
    return _live(out, new_text, total, decoders)
  return _batched(out, new_text, total, sizes.max_new, decoders)


@contextlib.contextmanager
def _live(out, new_text, total, decoders):
  """Stream one answer at a time."""
  tell = _teller(out, total)
  spinner = out.status("")
  text, count, done = None, 0, 0

  def begin(decoder, turns):
    nonlocal text, count
    count = 0
    if decoder == decoders[0]:
      tell(turns[0], done)
    if decoder == decoders[-1]:
      text = new_text()
    else:
      spinner.update(f"{_SAID[decoder]} ...")
      spinner.start()

  def tokens(row, ids, accepted, whole):
    nonlocal count
    del row
    count += len(ids)
    if text:
      _write(text.step(ids, accepted, whole))
    else:
      spinner.update(f"{_SAID[decoders[0]]}, {count} tokens")

  def end():
    nonlocal text, done
    spinner.stop()
    if text:
      _write([*text.flush(), (_after(total), False)])
      text, done = None, done + 1

  try:
    yield Show(begin, tokens, end)
  except KeyboardInterrupt:
    if text:  # in the middle of an answer's line
      _write([("\n", False)])
    raise
  finally:
    spinner.stop()  # or the cursor stays hidden


@contextlib.contextmanager
def _batched(out, new_text, total, max_new, decoders):
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
  task = bar.add_task("", total=total * max_new * len(decoders), tokens=0)
  todo, texts, finished, num_tokens, done, spoken = [], [], [], 0, 0, False

  def begin(decoder, turns):
    nonlocal todo, texts, spoken
    todo, spoken = turns, decoder == decoders[-1]
    texts = [new_text() for _ in turns]
    bar.update(task, description=_SAID[decoder])
    bar.start()

  def tokens(row, ids, accepted, whole):
    nonlocal num_tokens
    texts[row].step(ids, accepted, whole)
    num_tokens += len(ids)
    bar.update(task, advance=len(ids), tokens=num_tokens)

  def end():
    nonlocal done
    bar.stop()
    done += len(todo)
    bar.update(task, completed=done * max_new)
    if spoken:
      for turn, text in zip(todo, texts, strict=True):
        text.flush()
        finished.append((turn.index, turn.number, turn, text.pieces))
      if all(turn.number + 1 == len(turn.prompt.turns) for turn in todo):
        flush()

  def flush():
    for _, _, turn, pieces in sorted(finished, key=lambda x: x[:2]):
      tell(turn, done // len(decoders))
      _write([*pieces, (_after(total), False)])
    finished.clear()

  try:
    yield Show(begin, tokens, end)
  except KeyboardInterrupt:
    bar.stop()
    flush()
    raise
  finally:
    bar.stop()  # or the cursor stays hidden


class _Text:
  """An answer in pieces, each a (text, whether it was drafted).

  What may turn out to begin a stop text is held back.
  """

  def __init__(self, tok, stop_texts):
    self._stream = tokenizer.stream(tok)
    self._stop_texts = stop_texts
    self._last = self._ended = False
    self._held = []
    self._count = 0  # characters of `pieces`
    self.pieces = []

  def step(self, ids, accepted, whole=None):
    """Return the new pieces; a character is whose token completed it.

    Args:
      whole: the answer's text if it ended at a stop text, else None.
    """
    for i, self._last in zip(ids, accepted, strict=True):
      self._held.append((self._stream.step([i]), self._last))
    held = "".join(text for text, _ in self._held)
    if whole is None:
      return self._release(len(held) - stops.held_back(held, self._stop_texts))
    self._held.append((self._stream.flush(), self._last))
    new, self._ended = self._release(len(whole) - self._count), True
    return new

  def flush(self):
    """Return what is held back when no more ids come."""
    if self._ended:
      return []
    self._held.append((self._stream.flush(), self._last))
    return self._release(sum(len(text) for text, _ in self._held))

  def _release(self, count):
    """Move the first `count` held characters to the pieces, and return them."""
    new, rest = [], []
    for text, drafted in self._held:
      new.append((text[:count], drafted))
      rest.append((text[count:], drafted))
      count = max(count - len(text), 0)
    new, self._held = ([x for x in part if x[0]] for part in (new, rest))
    self._count += sum(len(text) for text, _ in new)
    self.pieces += new
    return new


def _coloured():
  """Whether stdout is to be coloured; see https://no-color.org."""
  wanted = not os.environ.get("NO_COLOR")
  return wanted and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _write(pieces):
  """Write (text, drafted) pieces; no colour outlasts a call."""
  if sys.stdout.isatty():
    pieces = [(_visible(text), drafted) for text, drafted in pieces]
  coloured = _coloured()
  for drafted, run in itertools.groupby(pieces, lambda piece: piece[1]):
    text = "".join(piece for piece, _ in run)
    green = coloured and drafted and text
    sys.stdout.write(f"\x1b[32m{text}\x1b[0m" if green else text)
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
      title += f", {terminal.time_left(began, done, total)}"
    if out.is_terminal:
      if total > 1:
        out.rule(_visible(title), align="left", style="dim")
      text = turn.prompt.turns[turn.number]
      short = text if len(text) < 400 else f"{text[:300]} [...] {text[-80:]}"
      out.print(_visible(short), style="dim italic")
    elif now - logged > terminal.LOG_EVERY:
      terminal.note(out, title)
      logged = now

  return tell
