"""Runs that were gathered, as flat rows: report.csv, names, the best ones.

A row is a dict with every column of `COLUMNS`, "" where there is nothing to
say. Nothing here trusts a record's shapes: a value that is no number, list or
text where it should be one counts as absent.
"""

import json
import shlex

from specjax import naming, table
from specjax.lenient import at, config_of, number, numbers, said

# of a record -> column, by kind; a name of COLUMNS that is not here is below
_PATHS = {
  "decode": {
    "K": "draft.K",
    "verifier": "draft.verifier",
    "dtype": "model.dtype",
    "speedup": "speedup",
    "predicted_speedup": "predicted.speedup",
    "tokens_per_call": "tokens_per_call",
    "predicted_tokens_per_call": "predicted.tokens_per_call",
    "predicted_best_k": "predicted.best_k",
    "alpha": "alpha",
    "exact": "exact",
    "plain_tokens_per_second": "autoregressive.tokens_per_second",
    "tokens_per_second": "speculative.tokens_per_second",
    "tokens": "speculative.tokens",
    "seconds": "speculative.seconds",
    "cost_ratio": "costs.C",
  },
  "training": {
    "dtype": "dtype",
    "steps": "steps",
    "loss": "loss",
    "best_step": "best_step",
    "tokens_per_second": "tokens_per_second",
    "tokens": "tokens",
    "seconds": "seconds",
    "cost_ratio": "costs.C",
  },
}
_OF_CONFIG = {
  "temperature": "sampling.temperature",
  "batch": "batch_size",
  "seed": "seed",
}
_LISTS = {
  "accepted_by_position": "acceptance_by_position",
  "alpha_by_position": "alpha_by_position",
}
_VERSIONS = ("specjax", "jax", "python", "commit")
_FIRST = ("run", "kind", "status", "reason", "config_file")
_ALL = (
  *("model", "draft", "K", "verifier", "temperature", "batch", "seed", "dtype"),
  *("device", "devices", "cores", "speedup", "predicted_speedup"),
  *("predicted_speedup_low", "predicted_speedup_high", "exact"),
  *("tokens_per_call", "predicted_tokens_per_call", "predicted_best_k"),
  *("alpha", "accepted_by_position", "alpha_by_position"),
  *("plain_tokens_per_second", "tokens_per_second", "tokens", "seconds"),
  *("cost_ratio", "steps", "loss", "best_step", "agreement"),
  *("predicted_tokens_per_call_token", "alpha_by_depth", "survival"),
  *("peak_memory_bytes", *_VERSIONS, "command"),
)
COLUMNS = (*_FIRST, *_ALL)


def flat(runs):
  """Return (columns, rows) of `gather.Run`s: the overrides have columns too.

  A column config.KEY is there for what a sweep named in any run, and for what
  the resolved configs of one kind of run differ in.
  """
  configs = [config_of(run.record) for run in runs]
  keys = varied(runs, configs)
  drafts = naming.labels(run.record for run in runs)
  columns = [*_FIRST, *(f"config.{key}" for key in keys), *_ALL]
  rows = []
  for run, config, draft in zip(runs, configs, drafts, strict=True):
    asked = run.overrides | config  # as a config reads it, where it was read
    own = {f"config.{k}": said(asked[k]) for k in keys if k in asked}
    rows.append(dict.fromkeys(columns, "") | own | _row(run, config, draft))
  return columns, rows


def varied(runs, configs):
  """Keys that sweeps have named, then those that configs differ in, sorted."""
  named = dict.fromkeys(key for run in runs for key in run.overrides)
  differ = set()
  for kind in _PATHS:
    own = [c for run, c in zip(runs, configs, strict=True) if run.kind == kind]
    own = [config for config in own if config]
    for key in {key for config in own for key in config}:
      if len({json.dumps(config.get(key)) for config in own}) > 1:
        differ.add(key)
  return [*named, *sorted(differ - {*named})]


def _row(run, config, draft):
  record, kind = run.record, run.kind
  row = {
    "run": run.name,
    "kind": kind,
    "status": run.status,
    "reason": run.reason,
    "config_file": run.config,
    "command": shlex.join(run.command),
  }
  if not record:
    return row
  row |= {name: at(record, path) for name, path in _PATHS[kind].items()}
  row |= {name: config.get(key) for name, key in _OF_CONFIG.items()}
  row |= {name: at(record, f"versions.{name}") for name in _VERSIONS}
  row |= _evaluated(record) if kind == "training" else _decoded(record)
  row |= {
    "model": table.short_name(str(config.get("target") or "")),
    "draft": draft,
    "device": at(record, "device.name"),
    "devices": at(record, "device.count"),
    "cores": at(record, "device.cores"),
    "peak_memory_bytes": at(record, "peak_memory_bytes"),
  }
  return {name: "" if x is None else cell(x) for name, x in row.items()}


def cell(x):
  """A number or text as it is, anything else as JSON; no NaN."""
  if isinstance(x, float):
    return "" if number(x) is None else x
  return x if isinstance(x, str | int) else said(x)


def _decoded(record):
  lists = {name: numbers(record.get(key)) for name, key in _LISTS.items()}
  low, high = _pair(at(record, "predicted.speedup_interval"))
  return {
    **{name: _joined(x) for name, x in lists.items()},
    "predicted_speedup_low": low,
    "predicted_speedup_high": high,
  }


def _evaluated(record):
  """What the best draft of a training run is predicted to be worth."""
  found = best(record)
  return {
    "K": config_of(record).get("draft.num_tokens"),
    "verifier": "block",
    "predicted_speedup": at(found, "block.speedup"),
    "predicted_best_k": at(found, "block.best_k"),
    "predicted_tokens_per_call": at(found, "block.tokens_per_call"),
    "predicted_tokens_per_call_token": at(found, "token.tokens_per_call"),
    "alpha": at(found, "alpha"),
    "agreement": at(found, "agreement"),
    "alpha_by_depth": _joined(numbers(at(found, "alpha_by_depth"))),
    "survival": _joined(numbers(at(found, "block.survival"))),
  }


def best(record):
  """The evaluation of a training record whose draft is kept, {} if none."""
  step = record.get("best_step")
  some = [x for x in record.get("evaluations", []) if isinstance(x, dict)]
  return next((x for x in some if x.get("step") == step), {})


def _pair(x):
  found = numbers(x)
  return found if len(found) == 2 else (None, None)


def _joined(found):
  return " ".join(f"{x:.4g}" for x in found)
