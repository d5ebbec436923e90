"""specjax's own rows of benchmarks/peers.py, and its speed-up by batch size."""

import copy
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import clock, foretold
from specjax import (
  forecast,
  pair,
  play,
  predict,
  request,
  schedule,
  settings,
  terminal,
)
from specjax.errors import UserError


def config_of(system, config, draft):
  """The config that a `peer_systems.System` decodes with.

  Args:
    draft: a folder, for those that need one.
  """
  c = copy.deepcopy(config)
  with c.unlocked():
    c.decoder = "autoregressive" if system.how == "plain" else "both"
    if system.how == "config":
      return c
    c.draft.update(name="ngram", weights="", layers=(), head=0, lookup=0)
    c.draft.schedule = "constant"
    if system.drafts:
      c.draft.update(name="lm", weights=draft)  # or what its weights say
    if system.k:
      c.draft.num_tokens = system.k
    if system.how in ("auto", "adaptive"):
      # the most that they choose from
      c.draft.update(num_tokens=8, schedule=system.how)
  return c


def variants(out, model, opened, systems, config, draft, todo):
  """{name: `pair.Pair`, None for plain decoding} and the `play.Sizes`.

  Args:
    opened: the target's `load.Opened`; systems: list of `System`.
    draft: a folder; todo: list of `Prompt`.
  """
  found, sizes = {}, play.sizes(opened, todo, config)
  for system in systems:
    found[system.name] = None
    if system.how == "plain":
      continue
    c = config_of(system, config, draft)
    own, _ = foretold.drafted(out, model, opened, c, todo)
    if c.draft.schedule != "constant":
      with terminal.waiting(out, "calibrating the draft's length"):
        own = schedule.decide(model, own, c, sizes, todo)
      terminal.note(out, own.opened.chosen)
    found[system.name] = own
  return found, sizes


def decoder(model, own, sizes, config):
  """(prompt ids) -> the answer of benchmarks/peer_worker.py to "decode"."""

  def decode(prompt, max_new):
    ask = request.make(
      [prompt],
      max_new=max_new,
      stop_ids=() if config.ignore_eos else model.tokenizer.stop_ids,
      width=sizes.slots,
    )
    nothing = np.full((1, sizes.max_new), -1, np.int32)
    began = time.perf_counter()
    seconds, out = clock.decode(
      *(model.target, model.params, ask),
      steps=sizes.max_new,
      max_new_tokens=sizes.max_new,
      slots=sizes.slots,
      draft=own and pair.join(own, ask, nothing),
    )
    whole = time.perf_counter() - began
    ids = out.tokens[0, : out.length[0]].tolist()
    found = {"ids": ids, "prefill": whole - seconds, "seconds": seconds}
    return found | {"timed": len(ids), "calls": int(out.stats.steps)}

  return decode


def logits(model, slots):
  """(ids) -> logits [V] behind the last of them."""

  @jax.jit
  def last(params, tokens, n):
    at = jnp.arange(slots)[None]
    hidden, _, _ = model.target.apply(params, tokens, at, None)
    return model.target.unembed(params, hidden[:, n - 1])[0]

  def run(ids):
    tokens = np.zeros((1, slots), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(last(model.params, tokens, len(ids)), np.float32)

  return run


def by_batch(out, model, opened, systems, config, draft, todo, batches):
  """Rows of predicted and measured S, by draft and batch size.

  What is predicted comes first: from plain answers, and from rounds that are
  timed at that batch size. A batch is decoded until its slowest row ends, by
  either decoder.

  Args: those of `variants`, and
    batches: numbers of rows; todo has a multiple of each.
  """
  cases = [(s, B) for s in systems if s.k for B in batches]
  rows = []
  for system, B in terminal.track(out, "batches")(cases):
    c = config_of(system, config, draft)
    with c.unlocked():
      c.batch_size = B
    own, sizes = foretold.drafted(out, model, opened, c, todo)
    row = {"system": system.name, "K": system.k, "batch": B}
    rows.append(row | _batch(model, own, c, sizes, todo))
  return rows


def _batch(model, own, config, sizes, todo):
  """Of one draft and batch size."""
  run = lambda decoder: _play(model, own, config, sizes, todo, decoder)
  plain = run("autoregressive")
  # before anything is speculated
  seconds, alpha = _predicted(model, own, config, sizes, plain)
  speculative = run("speculative")
  spent = {
    name: sum(b.seconds for b in some)
    for name, some in (("plain", plain), ("speculative", speculative))
  }
  tokens = {
    name: sum(len(a.token_ids) for b in some for a in b.answers)
    for name, some in (("plain", plain), ("speculative", speculative))
  }
  rate = {name: tokens[name] / spent[name] for name in spent}
  return {
    "predicted": spent["plain"] / seconds,
    "measured": rate["speculative"] / rate["plain"],
    "alpha": alpha,
    "tokens_per_second": rate,
  }


def _play(model, own, config, sizes, todo, decoder):
  c = copy.deepcopy(config)
  with c.unlocked():
    c.decoder = decoder
  play.warm_up(model, own, c, sizes)
  return list(play.play(model, own, todo, c, sizes, foretold.QUIET))


def _predicted(model, own, config, sizes, plain):
  """(seconds that speculation will take, alpha)."""
  K, shape = own.opened.num_draft, dict(batch=sizes.batch, slots=sizes.slots)
  each = [forecast.texts_of(b) for b in plain]
  found = [row for rows in each for row in rows]
  (texts,) = forecast.texts(
    *(model, own, found, config),
    num_draft=K,
    track=lambda groups: groups,
    **shape,
  )
  prediction = predict.predict(texts, "block")
  costs = forecast.timed_costs(
    *(model, own, config, forecast.mean_context(each), shape, K),
    whole=True,
  )
  rounds = iter(prediction.rounds[:, K])
  # a batch ends with its slowest row
  of = lambda rows: [next(rounds) for _, ids in rows if ids]
  most = [max(of(rows), default=0.0) for rows in each]
  return sum(most) * costs.round[K].median, prediction.alpha


def break_even(rows):
  """{system: (by prediction, as measured)} batch sizes at which S falls to 1.

  Between tested sizes log-linear; None: not among them.
  """
  found = {}
  for name in dict.fromkeys(row["system"] for row in rows):
    own = [row for row in rows if row["system"] == name]
    sizes = np.log([row["batch"] for row in own])
    found[name] = tuple(
      _crossing(sizes, np.log([row[key] for row in own]))
      for key in ("predicted", "measured")
    )
  return found


def _crossing(x, y):
  """exp of the first x at which y falls through 0."""
  for i in range(len(x) - 1):
    if y[i] > 0 >= y[i + 1]:
      return float(np.exp(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1])))
  return None


def check(config):
  """Return the config, its draft named, if every system can decode so.

  Raises:
    UserError: it cannot.
  """
  config = settings.checked(config)
  usual = dict(temperature=0.0, min_new_tokens=0, bias="", banned=())
  usual |= dict(repetition_penalty=1.0)
  usual |= dict(presence_penalty=0.0, frequency_penalty=0.0)
  wrong = [k for k, x in usual.items() if config.sampling[k] != x]
  if wrong:
    raise UserError(
      "systems are compared at temperature 0, without penalties: type"
      f" --config.sampling.{wrong[0]}={usual[wrong[0]] or ''}"
    )
  if config.draft.name == "replay":
    raise UserError(
      "--config.draft.name=replay repeats a plain run; name a draft, such as"
      " ngram"
    )
  if config.stop or tuple(config.mesh) != (1, 1):
    raise UserError(
      "systems are compared on one device and without --config.stop: leave"
      " --config.stop and --config.mesh away"
    )
  return config
