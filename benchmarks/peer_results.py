"""What the runs of benchmarks/peers.py say: rates, ratios, equal texts.

A run is the answer of benchmarks/peer_worker.py to "decode". Rates are over all
prompts of a turn; a ratio is of a turn's pair, so that what drifts meets both.
"""

import matplotlib

matplotlib.use("Agg")  # files, no window

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import rich.table

from benchmarks import clock
from specjax import attribution, canvas

# By how much logits of one text may differ between systems and still be called
# rounding, in float32: what the parity tests promise of real models.
PARITY = 1e-3
BESIDE = {
  "transformers": "transformers",
  "llama.cpp": "llama.cpp",
}  # yardsticks


def spread(values):
  """{"median", "low", "high"} over the turns."""
  return {
    "median": clock.median(values),
    "low": min(values),
    "high": max(values),
  }


def rates(runs):
  """Of a system's runs [turn][prompt]: tokens/s a turn, without the prompt.

  And with it.
  """
  bare = lambda turn: (sum(r[k] for r in turn) for k in ("timed", "seconds"))
  whole = lambda turn: (
    sum(len(r["ids"]) for r in turn),
    sum(r["prefill"] + r["seconds"] for r in turn),
  )
  per_second = lambda counted: [n / s for n, s in map(counted, runs)]
  return per_second(bare), per_second(whole)


def rows(systems, runs, notes, dtype):
  """A dict a system, in their order; those without runs say why.

  Args:
    systems: list of `peer_systems.System`; runs: {name: [turn][prompt]}.
    notes: {name: why it has no runs, or what else there is to say}.
    dtype: of the weights, where a system does not say otherwise.
  """
  found = {s.name: rates(runs[s.name]) for s in systems if s.name in runs}
  result = []
  for system in systems:
    name = system.name
    row = {"system": name, "precision": system.precision(dtype)}
    row |= {"note": notes.get(name, ""), "measured": name in found}
    if name in found:
      bare, whole = found[name]
      own = [r for turn in runs[name] for r in turn]
      row["tokens_per_second"] = spread(bare)
      row["with_the_prompt"] = spread(whole)
      row["tokens"] = sum(len(r["ids"]) for r in runs[name][0])
      row["tokens_per_call"] = sum(len(r["ids"]) for r in own) / sum(
        r["calls"] for r in own
      )
      for other in BESIDE:
        if other in found:
          pairs = zip(bare, found[other][0], strict=True)
          row[f"over_{other}"] = spread([a / b for a, b in pairs])
    result.append(row)
  return result


def first_difference(a, b):
  """The place of the first unequal token of two answers; None: all equal.

  Behind the shorter one where it is the other's beginning.
  """
  for i, (x, y) in enumerate(zip(a, b, strict=False)):
    if x != y:
      return i
  return None if len(a) == len(b) else min(len(a), len(b))


def agreement(prompts, runs, pair, logits, dtype, same_weights=True):
  """Compare a system's answers with the reference's, token by token.

  A difference is a tie-flip if both systems' logits, of the very same text,
  differ by no more than rounding, and if that closes the gap between the two
  tokens: it can lift one of two logits and lower the other, hence twice.

  Args:
    prompts: {id: token ids}; runs: {name: [turn][prompt]}, in that order.
    pair: names of the system and of the reference.
    logits: {name: (ids) -> [V]} of both.
    dtype: of the weights, which says what rounding is.
    same_weights: else a difference is no fault.

  Returns:
    {"system", "reference", "same_weights", "prompts", "equal", "unstable",
    "differences"}.
  """
  name, reference = pair
  ours, theirs = runs[name][0], runs[reference][0]
  found = {"system": name, "reference": reference, "prompts": len(prompts)}
  found["same_weights"] = same_weights
  places = [
    first_difference(a["ids"], b["ids"])
    for a, b in zip(ours, theirs, strict=True)
  ]
  texts = [[r["ids"] for r in turn] for turn in runs[name]]
  found["unstable"] = any(x != texts[0] for x in texts)
  found["equal"] = sum(place is None for place in places)
  found["differences"] = [
    _difference(
      key,
      ids,
      (ours[i]["ids"], theirs[i]["ids"]),
      places[i],
      (logits[name], logits[reference]),
      dtype,
    )
    for i, (key, ids) in enumerate(prompts.items())
    if places[i] is not None
  ]
  return found


def _difference(key, prompt, answers, place, logits, dtype):
  """Where two answers part, and whether rounding explains it."""
  tokens = [x[place] if place < len(x) else -1 for x in answers]
  text = [*prompt, *answers[0][:place]]
  a, b = (np.asarray(of(text), np.float64) for of in logits)
  difference = float(np.abs(a - b).max())
  gap = float("inf")
  if min(tokens) >= 0:
    gap = float(b.max() - b[tokens].min())
  ulp = float(jnp.finfo(dtype).eps * np.abs(b).max())
  most = max(PARITY, attribution.ROUNDING[dtype] * ulp)
  return {
    "prompt": key,
    "place": place,
    "tokens": tokens,
    "gap": gap if np.isfinite(gap) else None,
    "difference": difference,
    "tie_flip": bool(difference <= most and gap <= 2 * difference),
  }


def table(rows, agreements):
  """Rates, ratios and agreement side by side."""
  result = rich.table.Table(
    *("system", "weights", "tokens/s", "with the prompt", "a call"),
    *("x transformers", "x llama.cpp", "same text"),
  )
  same = {x["system"]: said(x) for x in agreements}
  for row in rows:
    if not row["measured"]:
      result.add_row(row["system"], row["precision"], row["note"])
      continue
    result.add_row(
      row["system"],
      row["precision"],
      _cell(row["tokens_per_second"], 1),
      f"{row['with_the_prompt']['median']:.1f}",
      f"{row['tokens_per_call']:.2f}",
      *(_cell(row.get(f"over_{key}"), 2) for key in BESIDE),
      same.get(row["system"], "reference"),
    )
  return result


def _cell(x, digits):
  """'1.95 (1.90 to 2.01)'."""
  if x is None:
    return "-"
  m, low, high = (f"{x[k]:.{digits}f}" for k in ("median", "low", "high"))
  return f"{m} ({low} to {high})"


def said(x):
  """'22 of 24, 2 tie-flips' of an `agreement`."""
  flips = sum(d["tie_flip"] for d in x["differences"])
  others = len(x["differences"]) - flips
  parts = [f"{x['equal']} of {x['prompts']}"]
  if not x["same_weights"]:
    return parts[0]
  parts += [f"{flips} tie-flip{'s' * (flips > 1)}"] * bool(flips)
  parts += [f"{others} FAULT{'S' * (others > 1)}"] * bool(others)
  return ", ".join(parts + ["changes by turn"] * x["unstable"])


def batch_table(rows, even):
  """Predicted and measured S by batch size; even: of `peer_ours`."""
  result = rich.table.Table(
    "draft", "batch", "S", "predicted", "off", "alpha", "plain tokens/s"
  )
  for row in rows:
    result.add_row(
      row["system"],
      str(row["batch"]),
      f"{row['measured']:.2f}",
      f"{row['predicted']:.2f}",
      f"{row['predicted'] / row['measured'] - 1:+.0%}",
      f"{row['alpha']:.2f}",
      f"{row['tokens_per_second']['plain']:.1f}",
    )
  for name, (predicted, measured) in even.items():
    told = [f"{x:.1f}" if x else "not here" for x in (measured, predicted)]
    result.add_row(f"{name} breaks even", "", *told)
  return result


def picture(rows, batches):
  """A PNG's bytes: tokens/s of each system, S by batch size if there is any."""
  shown = [row for row in rows if row["measured"]]
  parts = bool(shown) + bool(batches)
  figure, axes = plt.subplots(
    *(1, parts),
    figsize=(6.4 * parts, 1.2 + 0.34 * max(len(shown), 9)),
    layout="constrained",
    squeeze=False,
  )
  if shown:
    _bars(axes[0, 0], shown)
  if batches:
    _lines(axes[0, -1], batches)
  return canvas.png(figure, "greedy, the same weights, prompts and tokens")


def _bars(ax, rows):
  colours = {"transformers": "C1", "llama.cpp": "C2", "ours": "C0"}
  y = np.arange(len(rows))[::-1]
  value = np.array([row["tokens_per_second"]["median"] for row in rows])
  ends = [
    [row["tokens_per_second"][k] for row in rows] for k in ("low", "high")
  ]
  ax.barh(
    y,
    value,
    xerr=np.abs(np.array(ends) - value),
    color=[colours[row["system"].partition(":")[0]] for row in rows],
    ecolor="0.3",
  )
  for at, row in zip(y, rows, strict=True):
    ax.text(0, at, f" {row['precision']}", va="center", fontsize="x-small")
  ax.set_yticks(y, [row["system"] for row in rows])
  ax.set_xlabel("tokens/s behind the prompt, batch 1; lines: all turns")


def _lines(ax, rows):
  for i, name in enumerate(dict.fromkeys(row["system"] for row in rows)):
    own = [row for row in rows if row["system"] == name]
    x = [row["batch"] for row in own]
    ax.plot(x, [r["measured"] for r in own], "o-", color=f"C{i}", label=name)
    ax.plot(x, [r["predicted"] for r in own], "x--", color=f"C{i}")
  ax.plot([], [], "x--", color="0.4", label="predicted")
  ax.axhline(1, **canvas.GREY)
  ax.set_xscale("log", base=2)
  ax.set_xticks(x, x)
  ax.set_xlabel("batch, rows")
  ax.set_ylabel("S, over plain decoding of the same batch")
  ax.legend(frameon=False, fontsize="small")
