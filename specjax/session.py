"""The loop of a training run: steps, what is read of them, what is saved.

What happens at a step happens in one order: the log's row, with its evaluation,
then the best draft, then the checkpoint. So whatever is in a checkpoint's past
is on disk, and a run that goes on from it repeats all that is not.
"""

import contextlib
import functools
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax import (
  checkpoint,
  evaluate,
  feed,
  multihost,
  recipe,
  signals,
  speak,
  step,
  student,
  summary,
  terminal,
  timing,
  trainlog,
)
from specjax.errors import UserError
from specjax.models import load


class Job(NamedTuple):
  """What a run is made of, beside its state."""

  config: Any
  folder: Path
  out: Any  # a rich console
  teacher: load.Model  # matrices whole
  taught: load.Model  # the same, or with the draft's tokens alone in its head
  student: student.Student  # its params are only shapes
  digest: str  # of `feed.digest`
  costs: timing.Costs
  programs: step.Steps
  saves: Any  # of `checkpoint.opened`, as is
  best: Any


def train(job, fed, state, at, log, asked):
  """Take the steps that are left, until all are done or one asks to stop.

  Args:
    at: (step, micro) of the state, so that the device need not be asked.

  Returns:
    The step that was reached; it is saved.
  """
  config, now, micro = job.config, *at
  pending, clock, stop = [], time.perf_counter(), False
  due = lambda every: micro == 0 and (now % every == 0 or now == config.steps)
  fed = _refreshed(job, fed, state, now)
  accumulate = functools.partial(_compiled, job.out, job.programs.accumulate)
  with trainlog.shown(job.out, config.steps) as show:
    if due(config.evaluation.every) and not _judged(log, now):
      trainlog.append(log, _judge(job, fed, state, now, _row(now)))
    while now < config.steps and not stop:
      batch = feed.batch(config, fed, now * config.accumulate + micro)
      args = state, batch, job.taught.params, job.student.shared
      state, micro = accumulate(*args), micro + 1
      if accumulate is not job.programs.accumulate:
        accumulate, clock = job.programs.accumulate, time.perf_counter()
      if micro == config.accumulate:
        state, report = job.programs.update(state)
        now, micro = now + 1, 0
        pending.append((now, report))
      stop = _asked(asked)
      judge = due(config.evaluation.every)
      saving = due(config.checkpoint.every) or stop
      # the newest report stays on the device while the next step begins
      new = _read(job, pending, 0 if judge or saving else 1, clock)
      if judge:
        mine = new.pop() if new and new[-1]["step"] == now else _row(now)
        new.append(_judge(job, fed, state, now, mine))
      for row in new:
        trainlog.append(log, row)
        clock = time.perf_counter()
      if new:
        show(now, summary.line(log.rows))
      if saving:
        save(job, state, now * config.accumulate + micro)
      if micro == 0:
        fed = _refreshed(job, fed, state, now)
  return now


def _asked(asked):
  """Whether any process was asked to stop; the others hear of it here."""
  number = multihost.most(asked[0] if asked else 0)
  if number and not asked:
    asked.append(number)
  return bool(asked)


def _compiled(out, program, *args):
  """Call a program for the first time; tell how long it takes to compile."""
  began = time.perf_counter()
  with terminal.waiting(out, "compiling the training step"):
    result = jax.block_until_ready(program(*args))
  spent = time.perf_counter() - began
  terminal.note(out, f"compiled the training step in {spent:.1f} s")
  return result


def _refreshed(job, fed, state, now):
  """The `Feed` with the draft's own answers, if these are due or not there."""
  config = job.config
  fresh = now % config.data.refresh_every == 0
  if now == config.steps or (fed.drafted is not None and not fresh):
    return fed

  def make(asks, plan, refresh, count):
    with terminal.waiting(job.out, "the draft answers"):
      return speak.from_draft(
        job.student.model,
        student.merged(job.student.shared, state.params),
        asks,
        plan,
        vocab_size=job.teacher.target.vocab_size,
        stop_ids=job.teacher.tokenizer.stop_ids,
        refresh=refresh,
        count=count,
        ids=job.student.ids,
      )

  return feed.refresh(config, fed, now, job.folder, make)


def _read(job, pending, lag, clock):
  """Take all reports but the newest `lag`; return the rows they make.

  Raises:
    UserError: a loss or gradient was not finite.
  """
  new, tokens = [], 0
  while len(pending) > lag:
    now, report = pending.pop(0)
    told = multihost.fetch(report)
    if told.failed >= 0:
      raise UserError(_failure(job, told))
    if now % job.config.log_every == 0 or now == job.config.steps:
      tokens += float(told.tokens)
      numbers = dict(
        loss=float(told.loss),
        alpha=float(told.alpha),
        tokens=int(told.tokens),
        gradient_norm=float(told.norm),
        learning_rate=float(told.rate),
      )
      new.append(_row(now) | numbers)
  rate = tokens / (time.perf_counter() - clock)
  return [row | {"tokens_per_second": rate} for row in new]


def _row(now):
  return {"step": now, "time": time.time()}


def _failure(job, told):
  number, each = checkpoint.latest(job.saves), job.config.accumulate
  return (
    f"step {told.failed + 1} came out wrong: its loss is {told.now:g}, its"
    f" gradient's norm {told.norm:g}; the checkpoint of step {number // each}"
    " is whole: lower --config.optimiser.learning_rate in another --workdir"
  )


def _judged(log, now):
  """Whether the log has an evaluation of this very step."""
  return any(row["step"] == now and summary.KEY in row for row in log.rows)


def _judge(job, fed, state, now, row):
  """Evaluate; keep the parameters if they are the best; return the row."""
  config, best = job.config, job.best
  with terminal.waiting(job.out, "evaluating"):
    found = evaluate.evaluate(
      job.student,
      state.params,
      job.teacher,
      fed.held_out,
      sampling=recipe.sampling(config),
      batch=config.evaluation.batch,
      length=config.length,
      num_draft=config.draft.num_tokens,
      costs=job.costs,
      draft_temperature=recipe.draft_temperature(config),
      chunk=config.chunk,
    )
  score, number = evaluate.score(found), checkpoint.latest(best)
  if number is None or score > checkpoint.meta(best, number)["score"]:
    told = {"step": now, "score": score, "scalars": evaluate.scalars(found)}
    checkpoint.save(best, now, state.params, told | identity(job))
    # before a checkpoint of this step is: a run that goes on from that one
    # does not come here again
    checkpoint.wait(best)
  return row | evaluate.scalars(found)


def identity(job):
  """What tells this run's best draft from another run's."""
  return {"data": job.digest, "config": recipe.digest(job.config)}


def save(job, state, number):
  """Begin a checkpoint; its number counts micro-batches."""
  ids = job.student.ids
  told = {"ids": None if ids is None else list(ids), "data": job.digest}
  checkpoint.save(job.saves, number, state, told)


@contextlib.contextmanager
def asked_to_stop():
  """Give a list, which gets the number of the first SIGINT or SIGTERM.

  The second one is a KeyboardInterrupt.
  """
  asked = []

  def heard(number, frame):
    if asked:
      raise KeyboardInterrupt
    asked.append(number)

  with signals.heard((signal.SIGINT, signal.SIGTERM), heard):
    yield asked
