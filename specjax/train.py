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

import jax
import numpy as np

from specjax import (
  checkpoint,
  costs,
  export,
  feed,
  generate,
  multihost,
  overlap,
  placing,
  recipe,
  record,
  runtime,
  session,
  sharding,
  shards,
  step,
  student,
  summary,
  terminal,
  timing,
  trainlog,
  trajectories,
  workdir,
)
from specjax.errors import UserError
from specjax.models import load

SAVES, BEST, DRAFT = workdir.SAVES, workdir.BEST, workdir.DRAFT


def run(config, folder):
  """Train the draft of a config, or go on with it, and save what came of it.

  Ctrl-C and SIGTERM end the run behind the micro-batch that it is at, saved; a
  second one ends it at once.

  Returns:
    The exit code: 0 when all steps are done, else 128 + the signal's number.

  Raises:
    UserError: an impossible config, bad data, a folder of another run or one
      that another process works in, a damaged checkpoint, a full disk, a loss
      that is not finite.
  """
  recipe.check(config)
  with workdir.locked(folder):
    return _run(config, Path(folder))


def _run(config, folder):
  began = time.perf_counter()
  workdir.check(folder, config)
  out = terminal.console()
  dtype = runtime.setup(config.dtype)
  mesh = sharding.make(config)
  teacher, fed = _given(config, out, dtype, mesh)
  digest = feed.digest(fed)
  with contextlib.ExitStack() as open_files:
    enter = open_files.enter_context
    workdir.begin(folder, config)
    saves = enter(checkpoint.opened(folder / SAVES, config.checkpoint.keep))
    best = enter(checkpoint.opened(folder / BEST, 1))
    ids = _ids(saves, digest)
    bar = terminal.track(out, "reading the draft's weights")
    draft = student.make(config, teacher, fed.train, ids=ids, track=bar)
    with shards.shown(out, "reading the texts") as watch:
      fed = feed.with_states(config, fed, teacher, draft, watch)
    taught = feed.taught(fed, teacher, draft.ids)
    optimiser = step.optimiser(config.optimiser, config.steps)
    job = session.Job(
      config,
      folder,
      out,
      teacher,
      taught,
      draft._replace(params=_shapes(mesh, draft, lambda x: x)),
      digest,
      _costs(config, folder, draft, teacher, out),
      programs(
        config, taught, draft, optimiser, dtype, feed.answer(config, fed)
      ),
      saves,
      best,
    )
    state = _state(job, draft, optimiser, mesh)
    del draft  # its parameters are the state's now
    at = int(state.step), int(state.micro)
    start = trainlog.start(at[0], dtype, config.mesh)
    trainlog.describe(folder, start)
    if at[0] or at[1]:
      terminal.note(out, f"going on from step {at[0]} of {config.steps}")
    log = enter(trainlog.opened(folder, at[0]))
    workdir.check_best(best, log.rows, session.identity(job))
    with session.asked_to_stop() as asked:
      at = session.train(job, fed, state, at, log, asked)
      checkpoint.wait(saves)
    trainlog.picture(log, config.loss, config.steps)
    told = job, log.rows, start, at, began
    if asked:
      record.save(*told, interrupted=True)
      name, again = signal.Signals(asked[0]).name, shlex.join(sys.orig_argv)
      terminal.note(out, f"{name}: saved at step {at}; to go on, type: {again}")
      return 128 + asked[0]
    _finish(job, fed, log)
    record.save(*told)
  return 0


def _given(config, out, dtype, mesh):
  """What a run begins with: the target, a `load.Model`, and its `feed.Feed`."""
  bar = terminal.track(out, "reading weights")
  opened = terminal.open_target(out, config)
  _check_target(config, opened)
  terminal.told_mesh(out, mesh, opened.config)
  model = load.model(opened, dtype=dtype, track=bar, mesh=mesh)
  teacher = load.whole(model)
  with shards.shown(out, "sampling answers") as watch:
    found = feed.collect(config, teacher, watch)
    return teacher, feed.split(config, found, watch.note)


def _check_target(config, opened):
  """Raise UserError for what can be told before hours of sampling."""
  context = opened.config.context
  if config.length > context:
    raise UserError(
      f"--config.length={config.length} is more than the target's context;"
      f" type --config.length={context} or less"
    )
  student.check_target(config.draft, opened)


def _shapes(mesh, draft, of):
  """Shapes of what a function makes of a draft's parameters, and where."""
  found = jax.eval_shape(of, draft.params)
  return found if mesh is None else placing.shapes(mesh, draft.config, found)


def _state(job, draft, optimiser, mesh):
  """The newest checkpoint's `step.State`, else the first, which is saved."""
  start = functools.partial(step.start, optimiser=optimiser)
  number, like = checkpoint.latest(job.saves), _shapes(mesh, draft, start)
  if number is not None:
    return checkpoint.restore(job.saves, number, like)
  state = start(draft.params)
  if mesh is not None:
    state = placing.put(state, like)
  session.save(job, state, 0)
  checkpoint.wait(job.saves)
  return state


def _ids(saves, digest):
  """The vocabulary map of the newest checkpoint, None: none, or no checkpoint.

  Raises:
    UserError: its data is not what there is now (B18).
  """
  number = checkpoint.latest(saves)
  if number is None:
    return None
  kept = checkpoint.meta(saves, number)
  if kept["data"] != digest:
    raise UserError(
      f"the data is not what the run in {saves.directory.parent} began with:"
      " a file of prompts or texts, or the target, has changed; name a new"
      " --workdir, or put it back"
    )
  return kept["ids"] and tuple(kept["ids"])


def programs(config, teacher, draft, optimiser, dtype, answer=None):
  """Return the `step.Steps` of a run.

  Args:
    teacher: of `feed.taught`; draft: a `Student`.
    optimiser: of `step.optimiser`; dtype: what the draft computes in.
    answer: of `feed.answer`.
  """
  own, most = config.optimiser, config.steps
  warmup = round(own.warmup * most)
  # an lm is the same at every depth, and says so by having one
  weights = tuple(config.draft.depth_weights) or (1.0,)
  mesh, join = teacher.mesh, student.merged
  if mesh is not None:
    join = placing.joined(join, mesh, draft.config)
  made = step.make(
    teacher.target,
    step.forward(draft, len(weights)),
    join,
    optimiser,
    step.learning_rate(own.learning_rate, warmup, most),
    schedule=config.loss,
    steps=most,
    log_every=config.log_every,
    dtype=dtype,
    answer=answer,
    depth_weights=weights,
    sampling=recipe.sampling(config),
    draft_temperature=recipe.draft_temperature(config),
    ids=draft.ids,
    chunk=config.chunk,
  )
  return made if mesh is None else placing.steps(made, mesh, draft.config)


def _costs(config, folder, draft, teacher, out):
  """The `timing.Costs` of a run: given, or measured once and kept with it."""
  K = config.draft.num_tokens
  if config.costs.verify:
    return costs.given(config.costs, K)
  path = folder / workdir.COSTS
  if multihost.same(path.exists()):
    return _costs_of(json.loads(path.read_text()))
  found = costs.measured(
    draft,
    draft.params,
    teacher,
    num_draft=K,
    slots=generate.num_slots(teacher.config.context, config.length, K),
    context=config.length // 2,
    sampling=dict(config.sampling),
    track=terminal.track(out, "timing a round"),
  )
  trainlog.write(path, json.dumps(found._asdict()) + "\n")
  return found


def _costs_of(kept):
  """The `timing.Costs` of its JSON."""
  one = lambda x: timing.Cost(*x)
  curve = lambda found: {int(n): one(x) for n, x in found.items()}
  return timing.Costs(
    plain=one(kept["plain"]),
    target=curve(kept["target"]),
    draft=one(kept["draft"]),
    round=curve(kept["round"]),
    **{key: kept[key] for key in ("batch", "context", "modelled")},
  )


def _finish(job, fed, log):
  """Export the best parameters and print what came of the run."""
  config, number = job.config, checkpoint.latest(job.best)
  told = checkpoint.meta(job.best, number)
  params = checkpoint.restore(job.best, number, job.student.params)
  both = trajectories.concatenate([fed.train, fed.held_out])
  prompts = overlap.of(job.teacher.tokenizer, both)
  if job.student.prompts is not None:
    prompts = np.union1d(prompts, job.student.prompts)
  about = [config.data.about] if config.data.about else []
  export.save(
    job.folder / DRAFT,
    job.student,
    params,
    teacher=job.teacher,
    reference=config.target,
    card={
      "Training": {
        "step": f"{told['step']} of {config.steps}, the best by predicted S",
        "command": shlex.join(sys.orig_argv),
        "texts": f"{len(both.length):,}, of {both.length.sum():,} tokens",
        "prompts": "; ".join([*about, overlap.told(prompts)]),
      },
      "Held-out texts": told["scalars"],
      "Config": recipe.plain(config),
      "Versions": runtime.versions(),
    },
    prompts=prompts,
    dtype=config.export_dtype,
  )
  rows = summary.rows(
    config, job.folder, log.rows, told["step"], fed, job.costs
  )
  terminal.table(job.out, rows)
