"""The report of a decoding run: one dict, a table for people, a JSON file.

The JSON has these keys in every version of schema 1, null where the run did
not measure them: exact, speedup, tokens_per_call, alpha,
acceptance_by_position, predicted, autoregressive, speculative, costs, device,
versions, config. A decoder's part has tokens_per_second and seconds (the
decode loop alone), prefill_seconds, compile_seconds and outputs, one an
answer: prompt_sha256 (of the prompt's token ids as little-endian int32, that
is of what the model was given), token_ids, finish_reason, rounds and more.
"""

import collections
import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import rich.table

from specjax import memory, runtime
from specjax.errors import UserError
from specjax.models import transformer

SCHEMA = 1


def build(config, *, model, dtype, slots, batches, seconds, interrupted):
  """Return the report of the batches that ended.

  Args:
    config: the run's ConfigDict.
    model: the `load.Model`.
    batches: list of `play.Batch`.
    seconds: {"load": ..., "compile": ...}.
    interrupted: whether prompts are missing because of Ctrl-C.
  """
  return {
    "schema": SCHEMA,
    "interrupted": interrupted,
    "exact": None,
    "speedup": None,
    "tokens_per_call": None,
    "alpha": None,
    "acceptance_by_position": None,
    "predicted": None,
    "autoregressive": _decoder(batches, seconds["compile"]),
    "speculative": None,
    "costs": None,
    "model": {
      "parameters": transformer.num_parameters(model.config),
      "dtype": str(np.dtype(dtype)),
      "vocab_size": model.config.vocab_size,
      "context": model.config.context,
      "slots": slots,
      "load_seconds": seconds["load"],
    },
    "peak_memory_bytes": memory.peak(),
    "device": runtime.device(),
    "versions": runtime.versions(),
    "config": config.to_dict(),
  }


def _decoder(batches, compile_seconds):
  answers = [answer for batch in batches for answer in batch.answers]
  seconds = sum(batch.seconds for batch in batches)
  tokens = sum(len(answer.token_ids) for answer in answers)
  return {
    "tokens": tokens,
    "tokens_per_second": tokens / seconds if seconds else None,
    "seconds": seconds,
    "prefill_seconds": sum(batch.prefill_seconds for batch in batches),
    "compile_seconds": compile_seconds,
    "target_calls": sum(batch.steps for batch in batches),
    "outputs": [_output(answer) for answer in answers],
  }


def _output(answer):
  ids = np.array(answer.prompt_ids, "<i4")
  return {
    "id": answer.prompt.id,
    "kind": answer.prompt.kind,
    "turn": answer.turn,
    "prompt_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
    "prompt_tokens": len(ids),
    "token_ids": list(answer.token_ids),
    "text": answer.text,
    "finish_reason": answer.finish_reason,
    "rounds": list(answer.rounds),
  }


def table(report):
  """Return the report's numbers as a rich table."""
  run, model = report["autoregressive"], report["model"]
  outputs = run["outputs"]
  reasons = collections.Counter(o["finish_reason"] for o in outputs)
  prompt_tokens = sum(o["prompt_tokens"] for o in outputs)
  device = report["device"]
  rows = [
    ("prompts", f"{len(outputs)} ({prompt_tokens} tokens)"),
    ("new tokens", f"{run['tokens']} in {run['target_calls']} target calls"),
    ("ended by", ", ".join(f"{k} {n}" for k, n in reasons.items()) or "-"),
    ("decoding", _rate(run["tokens"], run["seconds"], run["target_calls"])),
    ("prefill", f"{run['prefill_seconds']:.2f} s"),
    ("compile", f"{run['compile_seconds']:.1f} s (not in the rates)"),
    ("load", f"{model['load_seconds']:.1f} s"),
    ("memory", _peak(report["peak_memory_bytes"])),
    (
      "model",
      f"{model['parameters'] / 1e6:.4g} M parameters, {model['dtype']},"
      f" {model['slots']} slots",
    ),
    (
      "sampling",
      ", ".join(f"{k} {v}" for k, v in report["config"]["sampling"].items())
      + f", seed {report['config']['seed']}",
    ),
    ("device", f"{device['count']} x {device['kind']} ({device['machine']})"),
    ("versions", ", ".join(f"{k} {v}" for k, v in _versions(report))),
  ]
  title = "plain decoding, interrupted" if report["interrupted"] else None
  out = rich.table.Table(
    title=title, show_header=False, box=None, padding=(0, 2, 0, 0)
  )
  out.add_column(style="bold")
  out.add_column()
  for row in rows:
    out.add_row(*row)
  return out


def _rate(tokens, seconds, calls):
  if not tokens:
    return "nothing was asked for"
  return (
    f"{tokens / seconds:.1f} tokens/s, {seconds / calls * 1e3:.1f} ms a target"
    f" call ({seconds:.2f} s)"
  )


def _peak(num_bytes):
  return (
    "unknown" if num_bytes is None else f"{memory.human(num_bytes)} at peak"
  )


def _versions(report):
  shown = ("specjax", "jax", "flax", "python")
  return [(k, report["versions"][k]) for k in shown]


def check_path(path):
  """Raise UserError now if `save` could not write there later."""
  folder = Path(path).absolute().parent
  if not folder.is_dir():
    raise UserError(f"cannot write {path}: there is no folder {folder}")
  if Path(path).is_dir() or not os.access(folder, os.W_OK):
    raise UserError(f"cannot write {path}: not a writable file")


def save(path, report):
  """Write the report as JSON, whole or not at all."""
  path = Path(path).absolute()
  try:
    with tempfile.NamedTemporaryFile(
      "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as f:
      json.dump(report, f, indent=1, ensure_ascii=False)
      f.write("\n")
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)
  except OSError as e:
    raise UserError(f"cannot write {path}: {e.strerror}") from e
