"""What a training run leaves to be gathered: record.json, docs/records.md.

Its numbers are those of metrics.jsonl and runs.jsonl, read once more, so that
one small file tells what a run was and what came of it.
"""

import json
import math
import time

from specjax import checkpoint, memory, recipe, report, summary, trainlog

SCHEMA, KIND = 1, "training"
RULES = ("block", "token")


def save(job, rows, start, at, began, *, interrupted=False):
  """Write the record of a run, whole or not at all.

  A run that had ended before keeps the one that tells how long it took.

  Args:
    job: its `session.Job`; rows: of metrics.jsonl.
    start: of `trainlog.start`; at: the step that is saved.
    began: `time.perf_counter` of its begin.
    interrupted: whether steps are left, and no draft was exported.
  """
  path = job.folder / trainlog.RECORD
  if start["step"] == at and _ended(path):
    return
  seconds = time.perf_counter() - began
  found = build(job, rows, start, at, seconds, interrupted)
  text = json.dumps(_plain(found), indent=1, allow_nan=False) + "\n"
  trainlog.write(path, text)


def _ended(path):
  """Whether the record of a whole run is there."""
  try:
    return json.loads(path.read_text())["interrupted"] is False
  except (OSError, ValueError, LookupError, TypeError):
    return False


def build(job, rows, start, at, seconds, interrupted):
  """Return the record as a dict; arguments as of `save`."""
  config, number = job.config, checkpoint.latest(job.best)
  steps = [row for row in rows if "loss" in row]
  rates = sorted(row["tokens_per_second"] for row in steps)
  return {
    "schema": SCHEMA,
    "kind": KIND,
    "interrupted": interrupted,
    "steps": at,
    "steps_planned": config.steps,
    "first_step": start["step"],
    "started": start["time"],
    "seconds": seconds,
    # a row of an older version does not say
    "tokens": sum(row.get("tokens", 0) for row in steps),
    "tokens_per_second": rates[len(rates) // 2] if rates else None,
    "loss": steps[-1]["loss"] if steps else None,
    "alpha": steps[-1]["alpha"] if steps else None,
    "best_step": number,
    "evaluations": [evaluation(row) for row in rows if summary.KEY in row],
    "curve": {
      name: [row[name] for row in steps] for name in ("step", "loss", "alpha")
    },
    "costs": report.of_costs(job.costs, config.draft.num_tokens),
    "draft": None if interrupted else "draft",
    "dtype": start["dtype"],
    "peak_memory_bytes": memory.peak(),
    "command": start["command"],
    "device": start["device"],
    "mesh": start["mesh"],
    "versions": start["versions"],
    "config": recipe.plain(config),
  }


def evaluation(row):
  """Return what a row of metrics.jsonl says of all held-out texts.

  Args:
    row: with `evaluate.scalars`; of them, the mix of all temperatures.
  """
  own = {
    key.removeprefix("mix/"): x
    for key, x in row.items()
    if key.startswith("mix/")
  }
  return {
    "step": row["step"],
    **{key: own[key] for key in ("alpha", "agreement", "forward_kl")},
    "alpha_by_depth": _listed(own, "alpha_{}"),
    **{rule: _judged(own, rule) for rule in RULES},
  }


def _judged(own, rule):
  """By one verifier: A_0 .. A_K, E[N] at K, S at the best k of 1..K."""
  return {
    "survival": [1.0, *_listed(own, f"A_{{}}_{rule}")],
    "tokens_per_call": own[f"E_N_{rule}"],
    "tokens_per_call_interval": [
      own[f"E_N_{rule}_{end}"] for end in ("low", "high")
    ],
    "speedup": own[f"S_{rule}"],
    "best_k": int(own[f"k_{rule}"]),
  }


def _listed(own, name):
  """The values of name.format(1), name.format(2), ... as far as they go."""
  found = []
  while (key := name.format(len(found) + 1)) in own:
    found.append(own[key])
  return found


def _plain(x):
  """JSON has no infinity and no NaN: null."""
  if isinstance(x, dict):
    return {key: _plain(value) for key, value in x.items()}
  if isinstance(x, list | tuple):
    return [_plain(value) for value in x]
  return None if isinstance(x, float) and not math.isfinite(x) else x
