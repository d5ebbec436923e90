"""A prediction is written down, then speculation is run: how far was it off?

Foretold are tokens a call and S, from plain answers of other seeds and from
timed parts; nothing has speculated yet. Measured are tokens a call in batches,
and S at batch 1 with plain decoding in turns beside it. At T = 0 both see the
same text, so tokens a call must agree; at T > 0 they differ by what two samples
of texts do.
"""

import copy
import functools
import io

import matplotlib

matplotlib.use("Agg")  # files, no window

import matplotlib.pyplot as plt
import numpy as np
import rich.table

from specjax import (
  compare,
  metrics,
  pair,
  play,
  predict,
  ranking,
  terminal,
  title,
)
from specjax.models import load

QUIET = play.Show(lambda *a: None, lambda *a: None, lambda: None)
_SEED = 10_000  # from here on, the seeds of what is measured


def asked(config, temperature):
  """The config at one temperature."""
  c = copy.deepcopy(config)
  with c.unlocked():
    c.sampling.temperature = temperature
  return c


def prompts(found, count):
  """`count` first turns, spread evenly over a file's prompts."""
  at = [int(i * len(found) / count) for i in range(min(count, len(found)))]
  return [found[i]._replace(turns=found[i].turns[:1]) for i in at]


def repeated(todo, samples, first):
  """Every prompt `samples` times, each with a seed of its own."""
  return [
    p._replace(seed=first + j * len(todo) + i)
    for j in range(samples)
    for i, p in enumerate(todo)
  ]


def samples_at(temperature, samples):
  """Greedy answers are all the same."""
  return samples if temperature > 0 else 1


def foretell(out, config, flags, todo, dtype):
  """{temperature: what is predicted}, from plain runs and timed parts.

  Args:
    flags: drafts, lengths, temperatures, samples, turns, prompts_alone and
      lengths_alone: of the speed-up at batch 1.
    todo: list of `Prompt`; dtype: of weights and caches.
  """
  result = {}
  for T in flags["temperatures"]:
    terminal.note(out, f"foretelling T = {T:g}")
    c = asked(config, T)
    lengths = [str(K) for K in flags["lengths"]]
    want = compare.asked(c, flags["drafts"], lengths, turns=flags["turns"])
    copies = samples_at(T, flags["samples"])
    found = compare.run(out, c, want, repeated(todo, copies, 0), dtype)
    some = _alone(found, len(todo), flags["prompts_alone"])
    keep = lambda rows: {
      (row["draft"], row["K"]): row
      for row in rows
      if row["verifier"] == "block"
    }
    many = keep(ranking.rows(found.texts, found.costs, want.lengths))
    few = keep(ranking.rows(some, found.costs, want.lengths))
    result[f"{T:g}"] = [
      {"draft": name, "K": K, "tokens_a_call": _part(row, "tokens_per_call")}
      | {"alone": _part(few[name, K], "tokens_per_call", "speedup")}
      for (name, K), row in many.items()
    ]
  return result


def _part(row, *keys):
  """Some numbers of a `ranking.rows` row, each beside the formula's."""
  found = {}
  for key in keys:
    found[key] = row[key]
    found[f"{key}_interval"] = row[f"{key}_interval"]
    found[f"iid_{key}"] = row["iid"][key]
  return found


def _alone(found, count, few):
  """The texts of the first `few` of `count` prompts, in every sample."""
  keep = lambda x: x[np.arange(len(x)) % count < few]
  return {
    name: [
      (variant, predict.Texts(*map(keep, some))) for variant, some in variants
    ]
    for name, variants in found.texts.items()
  }


def measure(out, config, flags, todo, dtype):
  """{temperature: rows} of the same keys, by speculation.

  Args: those of `foretell`.
  """
  opened = terminal.open_target(out, config)
  model = load.model(opened, dtype=dtype)
  result = {}
  for T in flags["temperatures"]:
    c = asked(config, T)
    lengths = [str(K) for K in flags["lengths"]]
    want = compare.asked(c, flags["drafts"], lengths, turns=1)
    copies = samples_at(T, flags["samples"])
    many = repeated(todo, copies, _SEED)
    few = repeated(todo[: flags["prompts_alone"]], copies, _SEED)
    cases = [(n, x, K) for n, x in want.configs.items() for K in want.lengths]
    rows = result[f"{T:g}"] = []
    for name, how, K in terminal.track(out, f"measuring T = {T:g}")(cases):
      run = functools.partial(_play, out, model, opened, how, K)
      row = {"draft": name, "K": K, "tokens_a_call": _tokens(run(many), K)}
      if K in flags["lengths_alone"]:
        row["alone"] = _speedup(run(few, alone=True), K)
      rows.append(row)
  return result


def _play(out, model, opened, config, K, todo, alone=False):
  """The `answers.Batch`es of some prompts, of both decoders if alone."""
  c = copy.deepcopy(config)
  with c.unlocked():
    c.draft.num_tokens = K
    c.decoder = "both" if alone else "speculative"
    c.batch_size = 1 if alone else c.batch_size
  draft, sizes = drafted(out, model, opened, c, todo)
  play.warm_up(model, draft, c, sizes)
  return list(play.play(model, draft, todo, c, sizes, QUIET))


def drafted(out, model, opened, config, todo):
  """The `pair.Pair` of a config, whose method its weights say, and the sizes.

  Args:
    opened: the target's `load.Opened`; todo: list of `Prompt`.
  """
  sizes = play.sizes(opened, todo, config)
  get = functools.partial(terminal.open_model, out, draft=True)
  draft = terminal.open_draft(out, compare.named(config, get), opened, sizes)
  return pair.load(draft, model, dtype=model.params["embed"].dtype), sizes


def _tokens(batches, K):
  speculative = [b for b in batches if b.decoder == "speculative"]
  return metrics.add([b.acceptance for b in speculative], K).tokens_per_call


def _speedup(batches, K):
  """Tokens a second by speculation over those of plain decoding."""

  def rate(decoder):
    some = [b for b in batches if b.decoder == decoder]
    tokens = sum(len(a.token_ids) for b in some for a in b.answers)
    return tokens / sum(b.seconds for b in some)

  S = rate("speculative") / rate("autoregressive")
  return {"tokens_per_call": _tokens(batches, K), "speedup": S}


def compared(predicted, measured):
  """Rows that hold both, and how far the prediction and the formula are off."""
  rows = []
  for T, before in predicted.items():
    after = {(row["draft"], row["K"]): row for row in measured[T]}
    for row in before:
      now = after[row["draft"], row["K"]]
      found = {"temperature": float(T), "draft": row["draft"], "K": row["K"]}
      found["tokens_a_call"] = _beside(
        row["tokens_a_call"], "tokens_per_call", now["tokens_a_call"]
      )
      if "alone" in now:
        S = now["alone"]["speedup"]
        found["speedup"] = _beside(row["alone"], "speedup", S)
      rows.append(found)
  order = lambda row: (row["temperature"], row["draft"], row["K"])
  return sorted(rows, key=order)


def _beside(predicted, key, measured):
  return {
    "predicted": predicted[key],
    "interval": predicted[f"{key}_interval"],
    "iid": predicted[f"iid_{key}"],
    "measured": measured,
    "error": predicted[key] / measured - 1,
    "iid_error": predicted[f"iid_{key}"] / measured - 1,
  }


def table(rows):
  """Foretold and measured, side by side."""
  result = rich.table.Table(
    *("T", "draft", "K", "tokens a call", "measured", "off", "i.i.d. off"),
    *("S", "measured", "off", "i.i.d. off"),
  )
  for row in rows:
    cells = [
      *_cells(row["tokens_a_call"]),
      *(_cells(row["speedup"]) if "speedup" in row else [""] * 4),
    ]
    T = f"{row['temperature']:g}"
    result.add_row(
      T, title.label(row | {"sampling": {}}), str(row["K"]), *cells
    )
  return result


def _cells(x):
  numbers = f"{x['predicted']:.3f}", f"{x['measured']:.3f}"
  return (*numbers, f"{x['error']:+.1%}", f"{x['iid_error']:+.1%}")


def picture(rows):
  """A PNG's bytes: foretold against measured, tokens a call and S."""
  figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
  for ax, key, name in zip(
    axes,
    ("tokens_a_call", "speedup"),
    ("tokens a target call", "S"),
    strict=True,
  ):
    _scatter(ax, [row for row in rows if key in row], key)
    ax.set_xlabel(f"{name}, foretold")
    ax.set_ylabel(f"{name}, measured")
  axes[0].legend(fontsize="small", frameon=False)
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=150)
  plt.close(figure)
  return buffer.getvalue()


def _scatter(ax, rows, key):
  colours = plt.get_cmap("tab10").colors
  names = list(dict.fromkeys((r["draft"], r["temperature"]) for r in rows))
  for i, name in enumerate(names):
    own = [r[key] for r in rows if (r["draft"], r["temperature"]) == name]
    label = (
      f"{title.label({'draft': name[0], 'sampling': {}})}, T = {name[1]:g}"
    )
    measured = [x["measured"] for x in own]
    colour = colours[i % len(colours)]
    ax.plot(
      [x["predicted"] for x in own], measured, "o", color=colour, label=label
    )
    ax.plot([x["iid"] for x in own], measured, "x", color=colour, alpha=0.6)
  ax.plot([], [], "x", color="0.4", label="i.i.d. formula")
  ax.axline((1, 1), slope=1, color="0.7", linewidth=0.8, zorder=0)
