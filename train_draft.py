r"""Train a draft for a target, so that more of what it drafts is accepted.

  python train_draft.py --config=configs/tiny_train.py --workdir=runs/tiny
  python train_draft.py --config=configs/tiny_train.py --workdir=runs/head \
      --config.draft.head=128 --config.optimiser.learning_rate=1e-3
  python train_draft.py --config=configs/tiny_train.py --workdir=runs/mixed \
      --config.data.from_draft=0.25 --config.data.refresh_every=60

A run is its folder: the same command goes on where it was stopped. In there,
checkpoints/ and best/ are the state, draft/ is the result, curves.png and
metrics.jsonl are how it went. What each key means: configs/training.py.
"""

from absl import flags

from specjax import cli
from specjax.errors import UserError

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_MULTIHOST = flags.DEFINE_boolean("multihost", False, "Join other processes.")


def main(argv):
  del argv
  config = _CONFIG.value
  if not _WORKDIR.value:
    raise UserError("no folder for the run: type --workdir=runs/NAME")
  # Imported here: --help and a mistyped key need not wait for JAX.
  from specjax import multihost, train

  if _MULTIHOST.value:
    multihost.join()
  return train.run(config, _WORKDIR.value)


if __name__ == "__main__":
  cli.run(main)
