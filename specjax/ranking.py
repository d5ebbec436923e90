"""Predictions of several drafts in order, as a report, a table and a winner."""

import itertools
import json
import sys
from pathlib import Path

import rich.console
import rich.table

from specjax import compare, predict, report, title
from specjax.errors import UserError

RULES = ("block", "token")


def rows(found, costs, lengths):
  """A dict for each draft, variant, verifier and K, the fastest first.

  Args:
    found: {name: [(variant, `predict.Texts`)]}; costs: {name: `timing.Costs`}.
  """
  result = []
  for name, variants in found.items():
    for (variant, some), rule in itertools.product(variants, RULES):
      prediction = predict.predict(some, rule)
      S = predict.speedups(prediction, costs[name])
      for K in lengths:
        row = _row(prediction, S, costs[name], K)
        result.append(
          {"draft": name, "sampling": variant, "verifier": rule, "K": K, **row}
        )
  return sorted(result, key=lambda row: -row["speedup"])


def _row(prediction, S, costs, K):
  tokens, number = prediction.tokens, lambda x: float(x[K])
  return {
    "tokens_per_call": number(tokens.mean),
    "tokens_per_call_interval": [number(tokens.low), number(tokens.high)],
    "speedup": number(S.mean),
    "speedup_interval": [number(S.low), number(S.high)],
    "mean_over_positions": number(prediction.by_position),
    "survival": prediction.survival[: K + 1].tolist(),
    "rounds": prediction.rounds[:, K].tolist(),  # expected, of each text
    "iid": {
      "alpha": prediction.alpha,
      "tokens_per_call": number(prediction.iid),
      "tokens_per_call_finite": number(prediction.iid_finite),
      "speedup": number(S.iid),
    },
    "parts": predict.parts(prediction, costs, K),
  }


def measured(paths, config, names):
  """[{draft, verifier, K, its sampling, tokens_per_call, speedup}] of reports.

  Args:
    paths: JSON reports of decode.py, of batch 1.
    config: what is predicted; names: the drafts that are compared.

  Raises:
    UserError: a file that is no such report, or of something else.
  """
  return [_measured(path, config, names) for path in paths if path]


def _measured(path, config, names):
  try:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    asked, K = found["config"]["draft"], found["draft"]["K"]
    speedup, tokens = found["speedup"], found["tokens_per_call"]
    verifier, batch = found["draft"]["verifier"], found["config"]["batch_size"]
    same = {
      key: found["config"][key] == _plain(config[key])
      for key in ("target", "sampling")
    }
    if asked["name"] == "lm":
      same["draft.head"] = asked["head"] == config.draft.head
    own = {key: asked.get(key, -1.0) for key in _SWEPT}
    copies = found["draft"].get("lookup")  # there was none in older ones
  except OSError as e:
    raise UserError(f"cannot read --measured={path}: {e.strerror}") from e
  except (ValueError, KeyError, TypeError):
    raise UserError(
      f"--measured={path} is no report of decode.py that speculated"
    ) from None
  name = (
    asked["weights"] or "+".join(map(str, asked["layers"])) or asked["name"]
  )
  if copies:
    name += title.COPIES
  if name not in names or batch != 1 or not speedup:
    raise UserError(
      f"--measured={path}: {name} at batch {batch} is not what is predicted:"
      f" one of {', '.join(names)} at batch 1, with both decoders"
    )
  if not all(same.values()):
    other = " and ".join(key for key, ok in same.items() if not ok)
    raise UserError(f"--measured={path}: it has another {other}")
  return {
    "draft": name,
    "verifier": verifier,
    "K": K,
    # -1 is the config's, as in a row that changes none
    **{k: -1.0 if x == config.draft[k] else x for k, x in own.items()},
    "tokens_per_call": tokens,
    "speedup": speedup,
  }


_SWEPT = ("temperature", "top_p")  # of a draft's own draws


def _plain(value):
  """A config's value as JSON has it."""
  return json.loads(json.dumps(getattr(value, "to_dict", lambda: value)()))


def add_measured(rows, points):
  """Put what was measured into the rows that it belongs to, else None."""

  def same(row, point):
    own = {key: row["sampling"].get(key, -1.0) for key in _SWEPT}
    own |= {key: row[key] for key in ("draft", "verifier", "K")}
    return all(point[key] == x for key, x in own.items())

  return [
    row | {"measured": next((p for p in points if same(row, p)), None)}
    for row in rows
  ]


def build(found, asked, points, flags):
  """Return the whole report: `report.build`'s of the plain run and more.

  Args:
    found: a `compare.Found`; asked: a `compare.Asked`.
    points: what `measured` returned.
    flags: what the command line said, a dict.
  """
  ranked = rows(found.texts, found.costs, asked.lengths)
  ranked = add_measured(ranked, points)
  plain = found.plain["autoregressive"]
  outputs = [
    output | {"seed": seed}
    for output, seed in zip(plain["outputs"], found.seeds, strict=True)
  ]
  return {
    **found.plain,
    "autoregressive": plain | {"outputs": outputs},
    "prediction": {
      "flags": flags,
      "batch": asked.there.batch if asked.there else 1,
      "timed_verifier": compare.TIMED,
      "lengths": list(asked.lengths),
      "interval": predict.tokens_a_round.__kwdefaults__,
      "drafts": {
        name: report.of_draft(draft)
        | {"costs": report.of_costs(found.costs[name], asked.lengths[-1])}
        for name, draft in found.drafts.items()
      },
      "rows": ranked,
      "winner": ranked[0] if ranked[0]["speedup"] > 1 else None,
    },
  }


def winner(found):
  """A line: what to decode with, and how to say so."""
  best, rival = found["winner"], found["rows"][0]
  if not best:
    return (
      "no draft pays: plain decoding is faster than the best,"
      f" {title.label(rival)} at K = {rival['K']}: {rival['speedup']:.2f} x"
    )
  flags = [f"--config.draft.num_tokens={best['K']}"]
  draft = found["drafts"][best["draft"]]
  flags.append(f"--config.draft.name={draft['name']}")
  if draft["layers"]:
    layers = ",".join(map(str, draft["layers"]))
    flags.append(f"--config.draft.layers={layers}")
  elif draft["name"] != "ngram":
    weights = title.without_copies(best["draft"])
    flags.append(f"--config.draft.weights={weights}")
  if draft["lookup"]:
    flags.append(f"--config.draft.lookup={draft['lookup']}")
  for key, value in best["sampling"].items():
    flags.append(f"--config.draft.{key}={value:g}")
  flags.append(f"--config.verifier={best['verifier']}")
  return f"{title.label(best)}: {best['speedup']:.2f} x with {' '.join(flags)}"


_COLUMNS = (
  "draft",
  "verifier",
  "K",
  "tokens a call",
  "S",
  "i.i.d. tokens",
  "i.i.d. S",
)


def table(found):
  """A `rich.table.Table` of a report's "prediction", the fastest first."""
  rows = _merged(found["rows"])
  some = any(row["measured"] for row in rows)
  result = rich.table.Table(*_COLUMNS, *["measured S"] * some)
  for row in rows:
    cells = [_span(row, "tokens_per_call"), _span(row, "speedup")]
    cells += [_beside(row, "tokens_per_call"), _beside(row, "speedup")]
    point = row["measured"]
    cells += [f"{point['speedup']:.2f}" if point else ""] * some
    style = "bold" if row is rows[0] else None
    result.add_row(
      title.label(row), row["verifier"], str(row["K"]), *cells, style=style
    )
  return result


def _merged(rows):
  """One row where the verifiers agree, as they do at T = 0."""
  found = {}
  for row in rows:
    key = row["draft"], title.label(row), row["K"], round(row["speedup"], 9)
    if key not in found:
      found[key] = row
    else:
      measured = found[key]["measured"] or row["measured"]
      found[key] = found[key] | {"verifier": "either", "measured": measured}
  return list(found.values())


def noise(found):
  """A line if the timed medians are not to be trusted, else None.

  Between the quarters of the turns' times lies more than a tenth of one.
  """
  spread = {
    f"{key} of {name}" if key.startswith("round") else key: (high - low)
    / draft["costs"][key]
    for name, draft in found["drafts"].items()
    for key, (low, high) in draft["costs"]["spread"].items()
    if key == "plain_step" or key.startswith("round_")
  }
  worst = max(spread, key=spread.get)
  if spread[worst] <= 0.1:
    return None
  return (
    f"the clock was unsteady, {worst} by {spread[worst]:.0%}: use an idle"
    " machine or more --turns before believing S"
  )


def _span(row, key):
  low, high = row[f"{key}_interval"]
  span = f" ({low:.2f}-{high:.2f})" if len(row["rounds"]) > 1 else ""
  return f"{row[key]:.2f}{span}"


def _beside(row, key):
  """The formula's, and how far it is off the prediction."""
  return f"{row['iid'][key]:.2f} ({row['iid'][key] / row[key] - 1:+.0%})"


def show(found):
  """Print the winner and the table of a report's "prediction"."""
  # a table that is piped is not squeezed into 80 columns
  width = None if sys.stdout.isatty() else 120
  out = rich.console.Console(width=width, highlight=False, markup=False)
  out.print(table(found))
  out.print(winner(found), soft_wrap=True)
  if any(draft["costs"]["modelled"] for draft in found["drafts"].values()):
    line = f"S is modelled for batch {found['batch']}, timed at batch 1"
    out.print(line, soft_wrap=True)
  if line := noise(found):
    out.print(line, soft_wrap=True)
