r"""How fast are the systems that people use, with the same weights and prompts?

  python -m benchmarks.peers --config=configs/smollm2.py \
      --config.prompts.path=question.jsonl --draft=runs/smollm2/draft \
      --config.max_new_tokens=128 --json=peers.json --png=peers.png
  python -m benchmarks.peers --config=configs/smollm2.py --part=batch \
      --config.prompts.path=question.jsonl --draft=runs/smollm2/draft
  python -m benchmarks.peers --config=configs/smollm2.py --prompts=2 --turns=1 \
      --config.prompts.path=question.jsonl --config.max_new_tokens=16 \
      --systems=transformers,llama.cpp,ours:plain,ours:ngram4

The first is the comparison: greedy, batch 1, first turns of prompts that are
spread over the file (Spec-Bench's question.jsonl; ids are its question_id).
transformers and llama.cpp read copies of the very weights, which are written to
the cache once (SmolLM2: 0.5 GB each in float32) and compared with the target's.
Each system is a process of its own, and one computes at a time; they take
turns. Ratios are of a turn's pairs; texts have to be equal token by token, or
to part where two logits are as close as rounding is. What is not installed is a
row that says so: --bench_python names an interpreter that has it. `batch` is
our speed-up by batch size beside what was predicted. Run it on an otherwise
idle machine.
"""

import os
import sys

import rich.console
from absl import flags

from benchmarks import foretold, peer_ours, peer_results, peer_runs
from benchmarks import peer_systems as systems
from specjax import cli, prompts, report, runtime, terminal
from specjax.errors import UserError
from specjax.models import load

_PARTS = "alone", "batch"
_CONFIG = cli.define_config()
_SYSTEMS = flags.DEFINE_list("systems", ",".join(systems.DEFAULT), "Rows.")
_DRAFT = flags.DEFINE_string("draft", "", "Folder of a trained draft.")
_PART = flags.DEFINE_list("part", "alone", f"Which of {', '.join(_PARTS)}.")
_PYTHON = flags.DEFINE_string(
  "bench_python", sys.executable, "Interpreter that has the other systems."
)
_PROMPTS = flags.DEFINE_integer("prompts", 24, "How many.")
_TURNS = flags.DEFINE_integer("turns", 3, "Times that a prompt is decoded.")
_THREADS = flags.DEFINE_integer("threads", 0, "Of each system, 0: every core.")
_BATCHES = flags.DEFINE_list("batches", "1,4,16", "Rows of `batch`.")
_FOLDER = flags.DEFINE_string(
  "folder", "", "Of the copies of the weights, else the cache."
)
_JSON = flags.DEFINE_string("json", None, "Write the record here.")
_PNG = flags.DEFINE_string("png", None, "Draw the picture here.")


def _threads():
  """Keep this process and those it starts on so many cores; return them."""
  if not hasattr(os, "sched_getaffinity"):
    cores = os.cpu_count()
    if _THREADS.value not in (0, cores):
      raise UserError(f"--threads: this system has no affinity; give {cores}")
    return cores
  cores = sorted(os.sched_getaffinity(0))
  if not 0 <= _THREADS.value <= len(cores):
    raise UserError(f"--threads must be in 0..{len(cores)}")
  kept = cores[: _THREADS.value or len(cores)]
  os.sched_setaffinity(0, kept)
  return len(kept)


def _checked():
  """The flags' `System`s, and batch sizes."""
  if wrong := [part for part in _PART.value if part not in _PARTS]:
    raise UserError(f"--part={wrong[0]}: known are {', '.join(_PARTS)}")
  if _TURNS.value < 1 or _PROMPTS.value < 1:
    raise UserError("--turns and --prompts must be at least 1")
  try:
    sizes = [int(x) for x in _BATCHES.value]
  except ValueError as e:
    raise UserError(f"--batches are numbers of rows: {e}") from e
  if not sizes or sizes != sorted(sizes) or sizes[0] < 1:
    raise UserError("--batches must rise, from 1 on, such as 1,4,16")
  for path, flag in ((_JSON.value, "json"), (_PNG.value, "png")):
    if path is not None:
      report.check_path(path, flag)
  return [systems.parse(x) for x in dict.fromkeys(_SYSTEMS.value)], sizes


def _case(out, config, threads):
  if config.target == "random":
    raise UserError(
      "--config.target=random: other systems need weights that are a file or a"
      " folder; take configs/smollm2.py"
    )
  found = foretold.prompts(prompts.read(config), _PROMPTS.value)
  dtype = runtime.setup(config.dtype)
  opened = terminal.open_target(out, config)
  with terminal.waiting(out, "reading the weights"):
    model = load.model(opened, dtype=dtype)
  return peer_runs.Case(
    *(model, opened, config, tuple(found), str(dtype), threads),
    *(_TURNS.value, _DRAFT.value, _PYTHON.value, _FOLDER.value),
  )


def _by_batch(out, case, asked, sizes):
  """What goes into the record of `batch`."""
  todo = foretold.prompts(prompts.read(case.config), max(sizes))
  if any(len(todo) % B for B in sizes):
    raise UserError(
      f"--batches: each must divide the {len(todo)} prompts of the largest"
    )
  own = [s for s in asked if s.library == "ours" and s.k]
  own = [s for s in own if case.draft or not s.drafts]
  rows = peer_ours.by_batch(
    *(out, case.model, case.opened, own),
    *(case.config, case.draft, todo, sizes),
  )
  even = peer_ours.break_even(rows)
  return {"batch": rows, "break_even": even}


def main(argv):
  del argv
  config, out = peer_ours.check(_CONFIG.value), terminal.console()
  (asked, sizes), threads = _checked(), _threads()
  case = _case(out, config, threads)
  show = rich.console.Console(width=None if sys.stdout.isatty() else 150).print
  found = dict.fromkeys(("rows", "agreement", "batch"), ())
  found |= dict.fromkeys(("law_difference", "warm_up_seconds", "about"), {})
  found |= dict.fromkeys(("prompts", "runs", "break_even"), {})
  if "alone" in _PART.value:
    found |= peer_runs.compare(out, case, asked)
    show(peer_results.table(found["rows"], found["agreement"]))
  if "batch" in _PART.value:
    found |= _by_batch(out, case, asked, sizes)
    show(peer_results.batch_table(found["batch"], found["break_even"]))
  device = runtime.device()
  print(f"{device['name']}, {threads} threads, {case.dtype}")
  record = {"schema": report.SCHEMA, "kind": "peers", **found}
  record |= {"draft": case.draft, "threads": threads, "turns": case.turns}
  record |= {"command": sys.orig_argv, "device": device}
  record |= {"versions": runtime.versions() | {"commit": runtime.commit()}}
  record |= {"config": config.to_dict()}
  if _JSON.value is not None:
    report.save(_JSON.value, record)
  if _PNG.value is not None:
    drawn = peer_results.picture(found["rows"], found["batch"])
    report.write(_PNG.value, drawn)


if __name__ == "__main__":
  # else JAX takes most of a GPU's memory, of which others need some
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  cli.run(main)
