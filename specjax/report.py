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
from pathlib import Path

import numpy as np

from specjax import memory, runtime
from specjax.errors import UserError
from specjax.models import transformer

SCHEMA = 1


def build(config, model, dtype, sizes, batches, seconds, interrupted):
  """Return the report of the batches that ended.

  Args:
    config: the run's ConfigDict.
    model: the `load.Model`; dtype: of its weights and cache.
    sizes: the `play.Sizes` that were planned.
    batches: list of `play.Batch`.
    seconds: {"load": ..., "compile": ...}.
    interrupted: whether prompts are missing because of Ctrl-C.
  """
  slots = max([sizes.slots, *(batch.slots for batch in batches)])
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
  # in the prompts' order, so that every batch size gives the same list
  answers.sort(key=lambda a: (a.turn.index, a.turn.number))
  seconds = sum(batch.seconds for batch in batches)
  tokens = sum(len(answer.token_ids) for answer in answers)
  later = sum(batch.compile_seconds for batch in batches)
  return {
    "tokens": tokens,
    "tokens_per_second": tokens / seconds if seconds else None,
    "seconds": seconds,
    "prefill_seconds": sum(batch.prefill_seconds for batch in batches),
    "compile_seconds": compile_seconds + later,
    "target_calls": sum(batch.steps for batch in batches),
    "outputs": [_output(answer) for answer in answers],
  }


def _output(answer):
  ids = np.array(answer.prompt_ids, "<i4")
  return {
    "id": answer.turn.prompt.id,
    "kind": answer.turn.prompt.kind,
    "turn": answer.turn.number,
    "prompt_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
    "prompt_tokens": len(ids),
    "token_ids": list(answer.token_ids),
    "text": answer.text,
    "finish_reason": answer.finish_reason,
    "rounds": list(answer.rounds),
  }


def rows(report):
  """Return the report's numbers for people, as (name, text) pairs."""
  run, model = report["autoregressive"], report["model"]
  config, outputs = report["config"], run["outputs"]
  reasons = collections.Counter(o["finish_reason"] for o in outputs)
  prompt_tokens = sum(o["prompt_tokens"] for o in outputs)
  peak = report["peak_memory_bytes"]
  shown = ("specjax", "jax", "flax", "python")
  return [
    (
      "answers",
      f"{len(outputs)}, to {prompt_tokens} prompt tokens"
      + (", then interrupted" if report["interrupted"] else ""),
    ),
    ("new tokens", f"{run['tokens']} in {run['target_calls']} target calls"),
    ("ended by", ", ".join(f"{k} {n}" for k, n in reasons.items()) or "-"),
    ("decoding", _rate(run["tokens"], run["seconds"], run["target_calls"])),
    ("prefill", f"{run['prefill_seconds']:.2f} s"),
    ("compile", f"{run['compile_seconds']:.1f} s (not in the rates)"),
    ("load", f"{model['load_seconds']:.1f} s"),
    ("memory", f"{memory.human(peak)} at peak" if peak else "unknown"),
    (
      "model",
      f"{short_name(config['target'])}, {model['parameters'] / 1e6:.4g} M"
      " parameters",
    ),
    (
      "program",
      f"{model['dtype']}, batch {config['batch_size']}, {model['slots']} slots",
    ),
    ("sampling", f"{_sampling(config['sampling'])}, seed {config['seed']}"),
    ("device", _device(report["device"])),
    ("versions", ", ".join(f"{k} {report['versions'][k]}" for k in shown)),
  ]


def _rate(tokens, seconds, calls):
  if not tokens:
    return "no token"
  return (
    f"{tokens / seconds:.1f} tokens/s, {seconds / calls * 1e3:.1f} ms a target"
    f" call ({seconds:.2f} s)"
  )


def _sampling(values):
  """The values that are in force; see `types.Sampling` for what is off."""
  if values["temperature"] == 0:
    return "greedy"
  on = {
    "temperature": True,
    "top_k": values["top_k"] > 0,
    "top_p": values["top_p"] < 1,
    "min_p": values["min_p"] > 0,
  }
  return ", ".join(f"{name} {values[name]}" for name in on if on[name])


def _device(device):
  if device["platform"] == "cpu":
    return f"{device['name']}, {device['cores']} cores"
  more = f" (1 of {device['count']})" if device["count"] > 1 else ""
  return f"{device['name']}{more}"


def short_name(target):
  """What a person calls a weight reference."""
  if target == "random":
    return "random weights"
  path = target.partition("#")[0].rstrip("/")
  if path.startswith("hf://"):
    return path.removeprefix("hf://")
  return path.rpartition("/")[2] or target


def check_path(path):
  """Raise UserError now if `save` could not write there later."""
  try:
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
      raise UserError(f"cannot write --json={path}: it is not a file")
    _part(path).touch()
    _part(path).unlink()
  except OSError as e:
    raise UserError(f"cannot write --json={path}: {e.strerror}") from e


def save(path, report):
  """Write the report as JSON, whole or not at all."""
  part = _part(path)
  try:
    # half a surrogate pair, as in a file's name, becomes JSON's own escape
    with open(part, "w", encoding="utf-8", errors="backslashreplace") as f:
      json.dump(report, f, indent=1, ensure_ascii=False, default=str)
      f.write("\n")
    os.replace(part, os.path.realpath(path))
  except OSError as e:
    raise UserError(f"cannot write {path}: {e.strerror}") from e
  finally:
    part.unlink(missing_ok=True)


def _part(path):
  """A file of this process beside `path`, or beside what it links to."""
  real = Path(os.path.realpath(path))
  return real.with_name(f".{os.getpid()}.{real.name}")
