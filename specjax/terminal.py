"""What a person sees: text on stdout, everything about it on stderr."""

import contextlib
import time

import rich.console
import rich.progress
import rich.rule

from specjax.models import tokenizer
from specjax.play import Show

_LOG_EVERY = 10.0  # seconds between lines where no bar can be drawn


def console():
  """The console for all that is not the answer itself."""
  return rich.console.Console(stderr=True, highlight=False)


@contextlib.contextmanager
def waiting(out, what):
  """Show that something of unknown length goes on; on a terminal, a spinner."""
  began = time.perf_counter()
  with out.status(f"{what} ..."):
    yield
  out.print(f"[dim]{what}: {time.perf_counter() - began:.1f} s[/dim]")


def track(out, what):
  """Return a function that shows a bar with an ETA over a list's items."""
  return lambda items: rich.progress.track(
    items, description=what, console=out, transient=True
  )


def show(out, tok, todo, config):
  """Return the `Show` that suits a config: `live`, or `batched`."""
  num_answers = sum(len(prompt.turns) for prompt in todo)
  if config.batch_size == 1:
    return live(out, tok, num_answers=num_answers)
  return batched(
    out, tok, num_answers=num_answers, max_new_tokens=config.max_new_tokens
  )


def live(out, tok, *, num_answers):
  """Return a `Show` that streams one answer at a time to stdout."""
  began, done = time.perf_counter(), 0
  stream = None

  def begin(todo):
    nonlocal stream
    stream = tokenizer.stream(tok)
    ((prompt, turn),) = todo
    _heading(out, prompt, turn, done, num_answers, began)

  def tokens(row, ids):
    del row
    print(stream.step(ids), end="", flush=True)

  def end():
    nonlocal done
    done += 1
    print(stream.flush(), flush=True)
    if num_answers > 1:
      print(flush=True)

  return Show(begin, tokens, end)


def batched(out, tok, *, num_answers, max_new_tokens):
  """Return a `Show` with a bar; a batch's answers are printed at its end.

  Rows are printed in the prompts' order, so stdout is the same for every
  batch size.
  """
  began, logged, done = time.perf_counter(), 0.0, 0
  todo, streams, counts, bar = [], [], [], None

  def begin(now):
    nonlocal todo, streams, counts, bar
    todo = now
    streams = [([], tokenizer.stream(tok)) for _ in todo]
    counts = [0] * len(todo)
    bar = rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.TextColumn("{task.fields[tokens]} tokens"),
      console=out,
      transient=True,
    )
    bar.add_task(
      "decoding",
      total=num_answers * max_new_tokens,
      completed=done * max_new_tokens,
      tokens=0,
    )
    bar.start()

  def tokens(row, ids):
    pieces, stream = streams[row]
    pieces.append(stream.step(ids))
    counts[row] += len(ids)
    total = sum(counts)
    bar.update(0, completed=done * max_new_tokens + total, tokens=total)

  def end():
    nonlocal done, logged
    bar.stop()
    for (prompt, turn), (pieces, stream) in zip(todo, streams, strict=True):
      if out.is_terminal:
        _heading(out, prompt, turn, done, num_answers, began)
      print("".join(pieces) + stream.flush(), end="\n\n", flush=True)
      done += 1
    now = time.perf_counter()
    if not out.is_terminal and now - logged > _LOG_EVERY:
      out.print(
        f"{done}/{num_answers} answers{_left(began, done, num_answers)}"
      )
      logged = now

  return Show(begin, tokens, end)


def _heading(out, prompt, turn, done, num_answers, began):
  """Say which prompt is answered, and on a terminal what it asks."""
  if num_answers > 1:
    title = f"{done + 1}/{num_answers} {prompt.id}"
    if len(prompt.turns) > 1:
      title += f" turn {turn + 1}"
    title += _left(began, done, num_answers)
    out.print(rich.rule.Rule(title, align="left", style="dim"))
  text = prompt.turns[turn]
  short = text if len(text) < 400 else f"{text[:300]} [...] {text[-80:]}"
  out.print(short, style="dim italic", markup=False)


def _left(began, done, total):
  if not done or done == total:
    return ""
  seconds = (time.perf_counter() - began) / done * (total - done)
  return f", {int(seconds // 60)}:{int(seconds % 60):02d} left"
