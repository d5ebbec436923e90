"""The report of a decoding run as one dict, and its JSON file.

`python -m specjax.report sweeps/a` gathers all reports and records of training
below a folder. docs/records.md has every key.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from specjax import (
  files,
  memory,
  metrics,
  multihost,
  overlap,
  predict,
  runtime,
  settings,
  sharding,
)
from specjax.errors import UserError
from specjax.models import transformer, weights

SCHEMA = 1


def build(
  config,
  model,
  draft,
  dtype,
  sizes,
  batches,
  seconds,
  interrupted,
  forecast=None,
):
  """Return the report of the batches that ended.

  Args:
    config: the run's ConfigDict.
    model: the `load.Model`; dtype: of its weights and cache.
    draft: the `pair.Opened`, None for plain decoding alone.
    sizes: the `play.Sizes` that were planned.
    batches: list of `play.Batch`.
    seconds: {"load": ..., "compile": {decoder: ...}}.
    interrupted: whether prompts are missing because of Ctrl-C.
    forecast: the `forecast.Forecast` of the run, None: not predicted.
  """
  slots = max([sizes.slots, *(batch.slots for batch in batches)])
  parts = dict.fromkeys(settings.DECODERS)
  for name in settings.decoders(config):
    own = [batch for batch in batches if batch.decoder == name]
    parts[name] = _decoder(name, own, seconds["compile"][name])
  return {
    "schema": SCHEMA,
    "interrupted": interrupted,
    **_compared(_pairs(batches), config),
    **_acceptance(batches, draft),
    "predicted": forecast and _predicted(forecast, draft),
    **parts,
    "costs": forecast and of_costs(forecast.costs, draft.num_draft),
    "draft": draft and of_draft(draft),
    "overlap": _overlap(draft, batches),
    "model": {
      "parameters": transformer.num_parameters(model.config),
      "dtype": str(np.dtype(dtype)),
      "vocab_size": model.config.vocab_size,
      "context": model.config.context,
      "slots": slots,
      "load_seconds": seconds["load"],
    },
    "peak_memory_bytes": memory.peak(),
    "command": sys.orig_argv,
    "device": runtime.device(),
    "mesh": dict(zip(sharding.AXES, sharding.sizes(model.mesh), strict=True)),
    "versions": runtime.versions() | {"commit": runtime.commit()},
    "config": config.to_dict(),
  }


def _decoder(name, batches, compile_seconds):
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
    "outputs": [_output(answer, name) for answer in answers],
  }


def _pairs(batches):
  """Return [(plain, speculative)] batches of the turns that both ended."""
  ended = {}
  for batch in batches:
    if not batch.interrupted:
      asked = tuple((a.turn.index, a.turn.number) for a in batch.answers)
      ended.setdefault(asked, {})[batch.decoder] = batch
  both = [found for found in ended.values() if len(found) == 2]
  return [tuple(found[name] for name in settings.DECODERS) for found in both]


def _compared(pairs, config):
  """What both decoders made of the same turns.

  Only at T = 0 and in coupled mode are equal tokens promised. Where an answer
  differs, what comes after it in its conversation differs too.
  """
  if not pairs:
    return dict(exact=None, speedup=None, compared=None)
  sides = dict(zip(settings.DECODERS, zip(*pairs, strict=True), strict=True))
  totals = {name: _totals(side) for name, side in sides.items()}
  found = {"turns": sum(len(plain.answers) for plain, _ in pairs), **totals}
  exact = None
  if config.sampling.temperature == 0 or config.verifier == "coupled":
    found |= _agreement(pairs)
    exact = found["first_difference"] is None
  rate = lambda t: t["tokens"] / t["seconds"] if t["tokens"] else 0
  rates = [*map(rate, totals.values())]
  speedup = rates[1] / rates[0] if all(rates) else None
  return dict(exact=exact, speedup=speedup, compared=found)


def _totals(batches):
  return {
    "tokens": sum(len(a.token_ids) for b in batches for a in b.answers),
    "seconds": sum(batch.seconds for batch in batches),
    "target_calls": sum(batch.steps for batch in batches),
  }


def _agreement(pairs):
  """How many tokens agree, and the first of the answers that do not."""
  equal, differences = 0, []
  for plain, speculative in pairs:
    for a, b in zip(plain.answers, speculative.answers, strict=True):
      same = len(os.path.commonprefix([a.token_ids, b.token_ids]))
      equal += same
      if a.token_ids != b.token_ids:
        where = a.turn.index, a.turn.number, a.turn.prompt.id
        differences.append((*where, same))
  first = None
  if differences:
    _, turn, name, token = min(differences)
    first = {"id": name, "turn": turn, "token": token}
  return {
    "equal_tokens": equal,
    "different_answers": len(differences),
    "first_difference": first,
  }


def _overlap(draft, batches):
  own = draft and draft.own
  return overlap.of_run(own and own.prompts, batches)


def _acceptance(batches, draft):
  """`metrics.Acceptance` of all that speculation emitted, null without any."""
  parts = [b.acceptance for b in batches if b.acceptance is not None]
  total = metrics.add(parts, draft.num_draft) if parts else None
  return {
    "tokens_per_call": total and total.tokens_per_call,
    "alpha": total and total.alpha,
    "acceptance_by_position": total and total.by_position,
    "alpha_by_position": total and total.alpha_by_position,
    "acceptance_histogram": total and total.histogram.tolist(),
    "rounds_tested": total and total.tested.tolist(),  # at each position
  }


def _predicted(forecast, draft):
  """What the plain texts say of the draft, at its K and at every smaller k."""
  K, prediction, S = draft.num_draft, forecast.prediction, forecast.speedups
  tokens = prediction.tokens
  return {
    "verifier": draft.verifier,
    "texts": len(prediction.length),
    "tokens_per_call": float(tokens.mean[K]),
    "tokens_per_call_interval": [float(tokens.low[K]), float(tokens.high[K])],
    "speedup": S and float(S.mean[K]),
    "speedup_interval": S and [float(S.low[K]), float(S.high[K])],
    "best_k": S and S.best,
    "best_speedup": S and float(S.mean[S.best] if S.best else 1.0),
    "tokens_per_call_by_k": tokens.mean.tolist(),
    "speedup_by_k": S and S.mean.tolist(),
    "survival": prediction.survival.tolist(),  # mean of A_j over positions
    "iid": {
      "alpha": prediction.alpha,
      "tokens_per_call": float(prediction.iid[K]),
      "speedup": S and float(S.iid[K]),
    },
    "parts": S and predict.parts(prediction, forecast.costs, K),
  }


def of_costs(costs, K):
  """Seconds, with the quarters on both sides as `spread`."""
  all_costs = {"plain_step": costs.plain, "drafted_token": costs.draft}
  all_costs |= {f"target_call_{n}": x for n, x in costs.target.items()}
  all_costs |= {f"round_{k}": x for k, x in costs.round.items()}
  return {
    **{name: cost.median for name, cost in all_costs.items()},
    "rest_of_a_round": costs.overhead(K),
    "C": float(costs.cost_ratio) if np.isfinite(costs.cost_ratio) else None,
    "batch": costs.batch,
    "context": costs.context,
    "modelled": costs.modelled,
    "spread": {name: [x.low, x.high] for name, x in all_costs.items()},
  }


def of_draft(draft):
  """What a `pair.Opened` is."""
  config = draft.config
  return {
    "name": draft.name,
    "K": draft.num_draft,
    "chosen": draft.chosen or None,  # what draft.schedule made of it, and why
    "verifier": draft.verifier,
    "parameters": config and weights.num_parameters(config, draft.features),
    "layers": list(draft.layers) or None,  # of the target, whose they are
    "features": list(draft.features) or None,  # its layers that are read
    "head": len(draft.ids) if draft.ids else None,
    "lookup": draft.lookup or None,  # tokens that repeat where it copies
  }


def _output(answer, decoder):
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
    "stop_text": answer.stop_text,
    "rounds": list(answer.rounds),
    **({"accepted": list(answer.accepted)} if decoder == "speculative" else {}),
    **({"logprobs": answer.logprobs._asdict()} if answer.logprobs else {}),
  }


def check_path(path, flag="json"):
  """Raise UserError now if `save` could not write there later."""
  try:
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
      raise UserError(f"cannot write --{flag}={path}: it is not a file")
    files.part(path).touch()
    files.part(path).unlink()
  except OSError as e:
    raise UserError(f"cannot write --{flag}={path}: {e.strerror}") from e


def save(path, report):
  """Write the report as JSON, whole or not at all."""
  # half a surrogate pair, as in a file's name, becomes JSON's own escape
  text = json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n"
  write(path, text.encode("utf-8", errors="backslashreplace"))


def write(path, data):
  """Write bytes to a file, all of them or none."""
  if not multihost.first():
    return
  try:
    files.write(path, data)
  except OSError as e:
    raise UserError(f"cannot write {path}: {e.strerror}") from e


if __name__ == "__main__":
  from absl import flags

  from specjax import cli, publish

  _FOLDER = flags.DEFINE_string("folder", "", "What to gather.")
  if sys.argv[1:] and not sys.argv[1].startswith("-"):  # it needs no flag
    sys.argv[1] = f"--folder={sys.argv[1]}"
  cli.run(lambda argv: publish.publish(_FOLDER.value))
