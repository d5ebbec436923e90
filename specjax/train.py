"""Train a draft, and never lose a run.

A run is its config and its folder. What decides how it goes on is in its newest
checkpoint or is a function of (config, step), so that a run that was stopped,
in the middle of a step too, ends with the same parameters, bit for bit on a
CPU. To go on is to type the same command.

  1. the folder's newest whole checkpoint, if its config is this one
  2. else the draft that the config begins with
"""

import contextlib
import functools
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax import (
  checkpoint,
  costs,
  evaluate,
  export,
  feed,
  objective,
  recipe,
  runtime,
  shards,
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

SAVES, BEST, DRAFT = "checkpoints", "best", "draft"


class Job(NamedTuple):
  """What a run is made of, beside its state."""

  config: Any
  folder: Path
  out: Any  # a rich console
  teacher: load.Model  # matrices whole
  student: student.Student  # its params are only shapes
  costs: timing.Costs
  programs: step.Steps
  saves: Any  # of `checkpoint.opened`, as is
  best: Any


def run(config, workdir):
  """Train the draft of a config, or go on with it, and save what came of it.

  Ctrl-C and SIGTERM end the run behind the micro-batch that it is at, saved; a
  second one ends it at once.

  Returns:
    The exit code: 0 when all steps are done, else 128 + the signal's number.

  Raises:
    UserError: an impossible config, bad data, a folder of another run, a
      damaged checkpoint, a full disk, a loss that is not finite.
  """
  recipe.check(config)
  folder, out = Path(workdir), terminal.console()
  _check_folder(folder, config)
  dtype = runtime.setup(config.dtype)
  bar = terminal.track(out, "reading weights")
  opened = terminal.open_target(out, config)
  teacher = load.whole(load.model(opened, dtype=dtype, track=bar))
  with shards.shown(out, "sampling answers") as watch:
    found = feed.collect(config, teacher, watch)
    fed = feed.split(config, found, watch.note)
  with contextlib.ExitStack() as open_files:
    enter = open_files.enter_context
    trainlog.begin(folder, recipe.plain(config))
    saves = enter(checkpoint.opened(folder / SAVES, config.checkpoint.keep))
    best = enter(checkpoint.opened(folder / BEST, 1))
    number = checkpoint.latest(saves)
    meta = {} if number is None else checkpoint.meta(saves, number)
    draft = student.make(config, teacher, fed.train, ids=meta.get("ids"))
    optimiser = step.optimiser(config.optimiser, config.steps)
    job = Job(
      config,
      folder,
      out,
      teacher,
      draft._replace(params=jax.eval_shape(lambda: draft.params)),
      _costs(config, folder, draft, teacher, out),
      _programs(config, teacher, draft, optimiser, dtype),
      saves,
      best,
    )
    if number is None:
      state = step.start(draft.params, optimiser)
      _save(job, state, 0)
      checkpoint.wait(saves)
    else:
      like = jax.eval_shape(lambda: step.start(draft.params, optimiser))
      state = checkpoint.restore(saves, number, like)
    del draft
    at = int(state.step), int(state.micro)
    trainlog.describe(folder, at[0])
    if at[0] or at[1]:
      terminal.note(out, f"going on from step {at[0]} of {config.steps}")
    log = enter(trainlog.opened(folder, at[0]))
    with _asked_to_stop() as asked:
      at = _train(job, fed, state, at, log, asked)
      checkpoint.wait(saves)
    trainlog.picture(log, config.loss, config.steps)
    if asked:
      name, again = signal.Signals(asked[0]).name, shlex.join(sys.orig_argv)
      terminal.note(out, f"{name}: saved at step {at}; to go on, type: {again}")
      return 128 + asked[0]
    _finish(job, fed, log)
  return 0


def _check_folder(folder, config):
  """Raise UserError unless a run of this config is there, or none."""
  before = trainlog.config_of(folder)
  if before is None:
    return
  saved = checkpoint.numbers(folder / SAVES)
  if not saved and trainlog.read(folder):
    raise UserError(
      f"{folder} has metrics of a run but none of its checkpoints: put them back"
      f" into {folder / SAVES}, or name a new --workdir"
    )
  changed = recipe.differing(before, recipe.plain(config))
  if saved and changed:
    raise UserError(
      f"--workdir={folder} holds a run of another config ({'; '.join(changed)});"
      " name a new --workdir, or set these back to go on"
    )


def _programs(config, teacher, draft, optimiser, dtype):
  """The `step.Steps` of a run."""
  own, most = config.optimiser, config.steps
  warmup = round(own.warmup * most)
  return step.make(
    teacher.target,
    step.lm(draft.model),
    student.merged,
    optimiser,
    step.learning_rate(own.learning_rate, warmup, most),
    schedule=config.loss,
    steps=most,
    log_every=config.log_every,
    dtype=dtype,
    sampling=recipe.sampling(config),
    draft_temperature=recipe.draft_temperature(config),
    ids=draft.ids,
    chunk=config.chunk,
  )


def _costs(config, folder, draft, teacher, out):
  """The `timing.Costs` of a run: given, or measured once and kept with it."""
  K = config.draft.num_tokens
  if config.costs.verify:
    return costs.given(config.costs, K)
  path = folder / "costs.json"
  if path.exists():
    return costs.from_json(json.loads(path.read_text()))
  found = costs.measured(
    draft,
    draft.params,
    teacher,
    num_draft=K,
    context=config.length // 2,
    sampling=dict(config.sampling),
    track=terminal.track(out, "timing a round"),
  )
  trainlog.write(path, json.dumps(costs.to_json(found)))
  return found


@contextlib.contextmanager
def _asked_to_stop():
  """Give a list, which gets the number of the first SIGINT or SIGTERM.

  The second one is a KeyboardInterrupt.
  """
  asked = []

  def heard(number, frame):
    if asked:
      raise KeyboardInterrupt
    asked.append(number)

  kinds = signal.SIGINT, signal.SIGTERM
  before = {kind: signal.signal(kind, heard) for kind in kinds}
  try:
    yield asked
  finally:
    for kind, handler in before.items():
      signal.signal(kind, handler)


def _train(job, fed, state, at, log, asked):
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
  with trainlog.shown(job.out, config.steps) as show:
    if due(config.evaluation.every) and not _judged(log, now):
      trainlog.append(log, _judge(job, fed, state, now, _row(now)))
    while now < config.steps and not stop:
      batch = feed.batch(config, fed, now * config.accumulate + micro)
      args = state, batch, job.teacher.params, job.student.shared
      state, micro = _first(job.out, job.programs.accumulate, *args), micro + 1
      if micro == config.accumulate:
        state, report = job.programs.update(state)
        now, micro = now + 1, 0
        pending.append((now, report))
      stop = bool(asked)
      judge = due(config.evaluation.every)
      save = due(config.checkpoint.every) or stop
      # the newest report stays on the device while the next step begins
      new = _read(job, pending, 0 if judge or save else 1, clock)
      if judge:
        mine = new.pop() if new and new[-1]["step"] == now else _row(now)
        new.append(_judge(job, fed, state, now, mine))
      for row in new:
        trainlog.append(log, row)
        clock = time.perf_counter()
      if new:
        show(now, summary.line(log.rows))
      if save:
        _save(job, state, now * config.accumulate + micro)
      if micro == 0:
        fed = _refreshed(job, fed, state, now)
  return now


def _first(out, program, *args):
  """Call a program; tell that it is compiled if that is what takes time."""
  if program._cache_size():
    return program(*args)
  began = time.perf_counter()
  with terminal.waiting(out, "compiling the training step"):
    result = jax.block_until_ready(program(*args))
  spent = time.perf_counter() - began
  terminal.note(out, f"compiled the training step in {spent:.1f} s")
  return result


def _refreshed(job, fed, state, now):
  """Rows with the draft's own answers, if a refresh is due or none are there."""
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
  new = []
  while len(pending) > lag:
    now, report = pending.pop(0)
    told = jax.device_get(report)
    if told.failed >= 0:
      raise UserError(_failure(job, told))
    if now % job.config.log_every == 0 or now == job.config.steps:
      spent = time.perf_counter() - clock
      new.append(
        _row(now)
        | {
          "loss": float(told.loss),
          "alpha": float(told.alpha),
          "gradient_norm": float(told.norm),
          "learning_rate": float(told.rate),
          "tokens_per_second": float(told.tokens) / spent,
        }
      )
  return new


def _row(now):
  return {"step": now, "time": time.time()}


def _failure(job, told):
  number, each = checkpoint.latest(job.saves), job.config.accumulate
  return (
    f"step {told.failed + 1} came out wrong: its loss is {told.now:g}, its"
    f" gradient's norm {told.norm:g}; the checkpoint of step {number // each} is"
    " whole: lower --config.optimiser.learning_rate in another --workdir"
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
    checkpoint.save(best, now, state.params, told)
    # before a checkpoint of this step is: a run that goes on from that one
    # does not come here again
    checkpoint.wait(best)
  return row | evaluate.scalars(found)


def _save(job, state, number):
  """Begin a checkpoint; its number counts micro-batches."""
  ids = job.student.ids
  told = {"ids": None if ids is None else list(ids)}
  checkpoint.save(job.saves, number, state, told)


def _finish(job, fed, log):
  """Export the best parameters and print what came of the run."""
  config, number = job.config, checkpoint.latest(job.best)
  told = checkpoint.meta(job.best, number)
  params = checkpoint.restore(job.best, number, job.student.params)
  export.save(
    job.folder / DRAFT,
    job.student,
    params,
    teacher=job.teacher,
    reference=config.target,
    card={
      "step": told["step"],
      "steps": config.steps,
      "config": recipe.plain(config),
      "held out": told["scalars"],
      "versions": runtime.versions(),
    },
  )
  rows = summary.rows(
    config, job.folder, log.rows, told["step"], fed, job.costs
  )
  terminal.table(job.out, rows)
