"""What a report calls runs: drafts, settings, places; and which are best.

Works on rows of `rows.flat` and on records that nobody has checked.
"""

import json

from specjax import title
from specjax.lenient import config_of, number, printable

# keys that are told otherwise than as a run's setting
_PLACE = {"target", "dtype"}
_OF_DRAFT = {
  f"draft.{key}"
  for key in ("name", "weights", "layers", "features", "architecture")
  + ("head", "temperature", "top_p", "alpha", "lookup", "num_tokens")
}
_SHORT = {"sampling.temperature": "T", "batch_size": "batch"}


def place(row):
  """What must be the same for two speeds to be compared."""
  several = number(row["devices"]) is not None and row["devices"] > 1
  devices = f"{row['devices']} devices" if several else ""
  cores = f"{row['cores']} cores" if row["cores"] else ""
  words = row["model"], row["dtype"], row["device"], devices, cores
  return ", ".join(str(word) for word in words if word)


def measured(row):
  """Whether a run has told where it ran."""
  return bool(row["model"] or row["device"])


def settings(rows, besides=()):
  """Return a text for each row: in what it differs from the others, if at all.

  Args:
    rows: of `rows.flat`, of one kind.
    besides: config keys that are told elsewhere. The seed and what makes a
      `place` always are; of decode runs the draft and K are too.
  """
  if not rows:
    return []
  told = {"seed"} | _PLACE | {*besides}
  told |= _OF_DRAFT if rows[0]["kind"] == "decode" else set()
  keys = []
  for name in rows[0]:
    key = name.removeprefix("config.")
    if name == key or key in told or key.startswith("architecture."):
      continue
    if len({str(row[name]) for row in rows}) > 1:
      keys.append(key)
  of = lambda row: [(key, row[f"config.{key}"]) for key in keys]
  return [", ".join(_word(k, x) for k, x in of(row) if x != "") for row in rows]


def _word(key, value):
  if key == "loss":
    return _loss_words(value)
  return f"{_SHORT.get(key, key.rpartition('.')[2])} {value}"


def done(rows, kind):
  """Those rows of a kind that say how fast or how good they are.

  An interrupted training run has its curves; half a decode run is none.
  """
  ended = ("done", "interrupted") if kind == "training" else ("done",)
  return [row for row in rows if row["kind"] == kind and row["status"] in ended]


def best_settings(rows):
  """[(row, of how many)]: the largest S by place, draft and temperature."""
  groups = {}
  for row in done(rows, "decode"):
    if number(row["speedup"]) is not None:
      key = place(row), row["draft"], row["temperature"]
      groups.setdefault(key, []).append(row)
  top = lambda group: max(group, key=lambda row: row["speedup"])
  found = [(top(group), len(group)) for group in groups.values()]
  return sorted(found, key=lambda x: (place(x[0]), -x[0]["speedup"]))


def _loss_words(text):
  """'forward_kl to 0.33, then total_variation' of a schedule as `said`."""
  try:
    parts = [
      f"{name} to {until:.2g}" if until < 1 else str(name)
      for name, until, *_ in json.loads(text)
    ]
    return ", then ".join(parts)
  except (TypeError, ValueError):
    return text


def labels(records):
  """A short name for each record's draft, another one for each draft."""
  keys = [_draft(record) for record in records]
  short = {}
  for key in dict.fromkeys(keys):
    name, weights, layers, *more = key
    parts = [x for x in weights.partition("#")[0].split("/") if x]
    # every export of the trainer is called draft
    least = 2 if parts[-1:] == ["draft"] else 1
    for n in range(least, len(parts) + 2):
      words = [_base(name, parts, n, layers), *more]
      label = printable(" ".join(filter(None, words)))
      if label not in short.values():
        break
    short[key] = label if label not in short.values() else f"{label} {weights}"
  return [short[key] for key in keys]


def _base(name, parts, n, layers):
  if parts:
    return "/".join(parts[-n:])
  return f"layers {layers}" if layers else name


def _draft(record):
  """What tells one draft from another, as texts."""
  config = config_of(record)
  get = lambda key: config.get(f"draft.{key}")
  if not get("name"):
    return ("", "", "")
  layers = get("layers")
  layers = layers if isinstance(layers, list) else []
  own = [
    f"{word} {value:g}"
    for key, word, least in (
      ("head", "head", 1),
      ("temperature", "T", 0),
      ("top_p", "top-p", 0),
    )
    if (value := number(get(key))) is not None and value >= least
  ]
  if get("name") == "feature" and number(get("lookup")):
    own.append(f"copies of {get('lookup'):g}")
  if get("name") == "replay" and (alpha := number(get("alpha"))) is not None:
    own.append(f"alpha {alpha:g}")
  return (
    str(get("name")),
    str(get("weights") or ""),
    title.label({"draft": "+".join(map(str, layers)), "sampling": {}}),
    *own,
  )
