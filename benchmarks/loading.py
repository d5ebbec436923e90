r"""How much memory does loading take, over what the weights are?

  python -m benchmarks.loading --references=model.gguf,folder,hf://org/name

Each reference is loaded in a process of its own, as decode.py loads it here.
`peak` is the most that the process held (Linux: VmHWM), without what JAX and
the libraries held before; pages of a mapped file are in it.
"""

import json
import subprocess
import sys

import rich.console
import rich.table
from absl import flags

from specjax import cli, memory, report, terminal
from specjax.errors import UserError
from specjax.models import hub

_REFERENCES = flags.DEFINE_list("references", "", "What to load.")
_DTYPES = flags.DEFINE_list("dtypes", "float32,bfloat16", "Of the weights.")
_JSON = flags.DEFINE_string("json", None, "Write the numbers here.")

# Not ru_maxrss: a child starts with that of the process that forked it.
_CHILD = """
import json, pathlib, re, sys, time
import jax, jax.numpy as jnp
from specjax.models import load

def peak():
  status = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])

jnp.zeros(1).block_until_ready()
before, began = peak(), time.perf_counter()
opened = load.opened(sys.argv[1])
params, _ = load.read(opened, dtype=sys.argv[2])
seconds = time.perf_counter() - began
held = sum(x.nbytes for x in jax.tree.leaves(params))
print(json.dumps(dict(weights=held, peak=peak() - before, seconds=seconds)))
"""


def measure(reference, dtype):
  """{"weights", "peak": bytes, "seconds"} of loading a reference.

  Raises:
    UserError: it cannot be loaded, or this is no Linux.
  """
  command = [sys.executable, "-c", _CHILD, str(reference), dtype]
  found = subprocess.run(command, capture_output=True, text=True)
  if found.returncode:
    last = [*filter(None, found.stderr.splitlines()), "no reason"][-2:][0]
    raise UserError(f"loading {reference} as {dtype}: {last}")
  return json.loads(found.stdout)


def _table(rows):
  result = rich.table.Table(
    "reference", "dtype", "weights", "peak", "of the weights", "seconds"
  )
  for row in rows:
    result.add_row(
      *(row["reference"], row["dtype"]),
      *(memory.human(row[key]) for key in ("weights", "peak")),
      f"{row['peak'] / row['weights']:.2f}",
      f"{row['seconds']:.1f}",
    )
  return result


def main(argv):
  del argv
  if not _REFERENCES.value:
    raise UserError("type --references=REF,REF, such as a GGUF file or folder")
  if sys.platform != "linux":
    raise UserError("what a process held at most is read from Linux's /proc")
  out, rows = terminal.console(), []
  for reference in _REFERENCES.value:
    path = str(hub.resolve(reference, console=out))
    for dtype in _DTYPES.value:
      row = {"reference": reference, "dtype": dtype, **measure(path, dtype)}
      rows.append(row)
      terminal.note(out, f"{reference} as {dtype}: done")
  rich.console.Console(width=None if sys.stdout.isatty() else 120).print(
    _table(rows)
  )
  if _JSON.value is not None:
    report.save(_JSON.value, {"rows": rows})


if __name__ == "__main__":
  cli.run(main)
