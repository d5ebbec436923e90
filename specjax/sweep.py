r"""Run the points that a config's sweep(add) names, those that are not done.

  python -m specjax.sweep --config=configs/tiny.py --workdir=sweeps/tiny
  python -m specjax.sweep --config=configs/smollm2.py --workdir=sweeps/smollm2 \
      --config.max_new_tokens=32 --config.prompts.path=configs/prompts.jsonl \
      --config.prompts.limit=4
  python -m specjax.sweep --config=configs/tiny_train.py --workdir=sweeps/loss \
      --launcher=print > commands.sh
  python -m specjax.sweep --config=configs/smollm2.py --workdir=sweeps/b \
      --launcher=slurm --partition=gpu --gpus=1 --minutes=60
  python -m specjax.sweep --config=configs/smollm2.py --workdir=sweeps/b \
      --launcher=ray --address=auto --gpus=1

A config of decode.py makes points that decode, one of train_draft.py points
that train; --config.KEY=VALUE is for all of them. Every point is a folder in
--workdir and one command that can be repeated (specjax/point.py); `print`
writes these commands to stdout and runs none. The same sweep typed again runs
what is missing, failed or was stopped; new points are added. Exit code 0 when
all points are done, else 1. Progress goes to stderr, the table to stdout.
"""

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from specjax import cli, engines, points, signals
from specjax.errors import UserError

_NEEDS = {"slurm": "submitit", "ray": "ray"}
_OF = {  # a flag -> the launchers that it is for
  "devices": ("local",),
  "cluster": ("slurm",),
  "partition": ("slurm",),
  "minutes": ("slurm",),
  "at_once": ("slurm",),
  "address": ("ray",),
  "resources": ("ray",),
  "cpus": ("slurm", "ray"),
  "gpus": ("slurm", "ray"),
}


def main(argv):
  del argv
  config, launcher = flags.FLAGS.config, flags.FLAGS.launcher
  workdir = flags.FLAGS.workdir
  if not workdir:
    raise UserError("no folder for the sweep: type --workdir=sweeps/NAME")
  _check_flags(launcher)
  if launcher in _NEEDS:
    engines.need(_NEEDS[launcher])
  spec = config_flags.get_config_filename(flags.FLAGS["config"])
  values = cli.flatten(config)
  common = {key: values[key] for key in sorted(cli.overrides())}
  kind = points.script(config)
  found = points.collect(spec, config, common, points.of_file())
  check(kind, found)
  points.prepare(workdir, spec, kind, common, found, launcher)
  folders = [Path(workdir) / point.name for point in found]
  todo = [folder for folder in folders if points.state(folder) != "done"]
  commands = [
    [sys.executable, "-m", "specjax.point", f"--folder={x}"] for x in todo
  ]
  if launcher == "print":
    for command in commands:
      print(f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}")
    return 0
  return _run(launcher, commands, todo, folders)


def _check_flags(launcher):
  """Raise UserError for a flag of another launcher: it would do nothing."""
  for name, owners in _OF.items():
    if flags.FLAGS[name].present and launcher not in owners:
      raise UserError(
        f"--{name} is for --launcher={' or '.join(owners)}, not for {launcher}"
      )
  _resources()


def _resources():
  """--resources as {name: number}."""
  try:
    pairs = (text.split("=") for text in flags.FLAGS.resources)
    return {name: float(number) for name, number in pairs}
  except ValueError:
    raise UserError(
      "--resources must be NAME=NUMBER, such as TPU=4, got"
      f" {','.join(flags.FLAGS.resources)}"
    ) from None


def check(kind, found):
  """Raise UserError for a point that its script would refuse at once."""
  from specjax import recipe, settings

  refuse = settings.checked if kind == points.DECODE else recipe.check
  for point in found:
    try:
      refuse(point.config)
    except UserError as e:
      raise UserError(f"point {point.name}: {e}") from e


def _engine(launcher, commands):
  """The engine's iterator over what happens to the commands."""
  given = flags.FLAGS
  if launcher == "local" or not commands:  # no cluster for nothing
    from specjax.engines import local

    return local.run(commands, devices=given.devices)
  asked = {"cpus": given.cpus, "gpus": given.gpus}
  if launcher == "slurm":
    from specjax.engines import slurm

    names = ("cluster", "partition", "minutes", "at_once")
    asked |= {name: given[name].value for name in names}
    folder = Path(given.workdir) / "slurm"
    return slurm.run(commands, folder=folder, **asked)
  from specjax.engines import ray

  resources = _resources() or None
  return ray.run(commands, address=given.address, resources=resources, **asked)


def _run(launcher, commands, todo, folders):
  """Run the commands and show what came of all points; the exit code."""
  from specjax import standing, terminal

  out = terminal.console()
  told = {}
  terminal.note(out, standing.before(folders))
  with _stoppable(launcher) as heard:
    try:
      engine = _engine(launcher, commands)
      with contextlib.closing(engine), standing.shown(out, todo) as show:
        for index, line in engine:
          if line is not None:
            told[todo[index]] = line
          show(index, line)
    except KeyboardInterrupt:
      done = sum(points.state(folder) == "done" for folder in folders)
      terminal.note(
        out,
        f"stopped: {done} of {len(folders)} points are done; to go on, type:"
        f" {shlex.join(sys.orig_argv)}",
      )
      return 128 + (heard[0] if heard else signal.SIGINT)
  found = [standing.of(folder, told.get(folder, "")) for folder in folders]
  standing.table(found)
  return 0 if all(one.state == "done" for one in found) else 1


@contextlib.contextmanager
def _stoppable(launcher):
  """Give a list of the signals that were heard; each is a KeyboardInterrupt.

  When a login ends, jobs of a cluster go on; processes of this machine save.
  """
  heard = []

  def hear(number, frame):
    heard.append(number)
    raise KeyboardInterrupt

  kinds = [signal.SIGINT, signal.SIGTERM]
  kinds += [signal.SIGHUP] if launcher == "local" else []
  with signals.heard(kinds, hear):
    yield heard


def _define():
  cli.define_config()
  flags.DEFINE_string("workdir", None, "Folder of the sweep.")
  names = ["print", "local", "slurm", "ray"]
  flags.DEFINE_enum("launcher", "local", names, "What runs the points.")
  flags.DEFINE_list("devices", "", "local: ids, a point at a time on each.")
  flags.DEFINE_enum(
    *("cluster", "slurm", ["slurm", "local"]),
    "slurm: or local, all jobs at once as processes of this machine.",
  )
  flags.DEFINE_string("partition", "", "slurm: of the jobs.")
  flags.DEFINE_integer("minutes", 60, "slurm: the most that a job takes.")
  flags.DEFINE_integer("at_once", 0, "slurm: most jobs at a time; 0: all.")
  flags.DEFINE_string(
    "address", "", "ray: of the cluster; none: one of its own."
  )
  flags.DEFINE_list("resources", "", "ray: NAME=NUMBER of a point, as TPU=4.")
  flags.DEFINE_integer("cpus", 0, "slurm, ray: of a point; 0: as many as apt.")
  flags.DEFINE_integer("gpus", 0, "slurm, ray: of a point.")


if __name__ == "__main__":
  # defined here alone, so that this file can be imported beside other scripts
  _define()
  cli.run(main)
