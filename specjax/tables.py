"""The tables of a report's page, from rows of `rows.flat`."""

from typing import NamedTuple

from specjax import naming
from specjax.lenient import number


class Cell(NamedTuple):
  text: str
  kind: str = ""  # number, word, name or bad: how it is set


class Table(NamedTuple):
  header: list[Cell]
  rows: list[list[Cell]]


def best(rows, places):
  """The best setting of each draft; None without any."""
  best = naming.best_settings(rows)
  if not best:
    return None
  own = [row for row, _ in best]
  of = {id(row): str(n) for row, n in best}
  settings = naming.settings(own, ("sampling.temperature",))
  return _table(
    own,
    places,
    {
      "draft": _shown("draft"),
      "T": _shown("temperature", "g"),
      "K": _shown("K"),
      "verifier": _shown("verifier", kind=""),
      "setting": _given(own, settings),
      "S": _speedup,
      "predicted": _predicted,
      "tokens a call": _shown("tokens_per_call", ".2f"),
      "alpha": _shown("alpha", ".2f"),
      "best of": lambda row: Cell(of[id(row)], "number"),
      "run": _shown("run", kind="name"),
    },
  )


def decoded(rows, places):
  """A row a decoding run; None without any."""
  return _runs(
    [row for row in rows if row["kind"] == "decode"],
    places,
    {
      "draft": _shown("draft"),
      "K": _shown("K"),
      "setting": None,
      "S": _speedup,
      "predicted": _predicted,
      "tokens a call": _shown("tokens_per_call", ".2f"),
      "alpha": _shown("alpha", ".2f"),
      "exact": _exact,
      "plain tokens/s": _rate("plain_tokens_per_second"),
      "tokens/s": _rate("tokens_per_second"),
    },
  )


def trained(rows, places):
  """A row a training run; None without any."""
  return _runs(
    [row for row in rows if row["kind"] == "training"],
    places,
    {
      "setting": None,
      "seed": _shown("seed"),
      "steps": _shown("steps", ","),
      "best step": _shown("best_step", ","),
      "loss": _shown("loss", ".3f"),
      "alpha": _shown("alpha", ".3f"),
      "E[N] block": _shown("predicted_tokens_per_call", ".2f"),
      "E[N] token": _shown("predicted_tokens_per_call_token", ".2f"),
      "predicted S": _shown("predicted_speedup", ".2f"),
      "k": _shown("predicted_best_k"),
      "tokens/s": _rate("tokens_per_second"),
      "seconds": _shown("seconds", ",.0f"),
    },
  )


def _runs(own, places, columns):
  """The table of some runs: their names, then columns, one of settings."""
  if not own:
    return None
  columns["setting"] = _given(own, naming.settings(own))  # keeps its place
  columns = {"run": _shown("run", kind="name")} | columns
  return _table(own, places, columns | {"status": _status})


def _table(rows, places, columns):
  """A `Table` of {name: row -> Cell}; a column of nothing is left out."""
  if len(places) > 1:
    numbered = {place: str(n) for n, place in enumerate(places, 1)}
    of = lambda row: Cell(numbered.get(naming.place(row), ""))
    columns = columns | {"place": of}
  found = {
    name: [column(row) for row in rows] for name, column in columns.items()
  }
  found = {
    name: cells
    for name, cells in found.items()
    if any(cell.text for cell in cells)
  }
  return Table(
    [Cell(name, _kind(cells)) for name, cells in found.items()],
    [list(line) for line in zip(*found.values(), strict=True)],
  )


def _kind(cells):
  """How the head of a column is set."""
  kinds = {cell.kind for cell in cells if cell.text}
  return "number" if kinds == {"number"} else ""


def _given(rows, texts):
  """A column of one text a row, broken behind its commas."""
  kept = lambda word: word.replace(" ", "\xa0") if len(word) < 14 else word
  whole = [", ".join(map(kept, text.split(", "))) for text in texts]
  own = dict(zip(map(id, rows), whole, strict=True))
  return lambda row: Cell(own[id(row)], "word")


def _shown(name, form="", kind="word"):
  def cell(row):
    value = row[name]
    if number(value) is None:
      return Cell(str(value), kind if value != "" else "")
    return Cell(format(value, form), "number")

  return cell


def _rate(name):
  def cell(row):
    value = number(row[name])
    form = ",.1f" if value is not None and value < 100 else ",.0f"
    return _shown(name, form)(row)

  return cell


def _speedup(row):
  S = number(row["speedup"])
  return Cell("" if S is None else f"{S:.2f}", "number")


def _predicted(row):
  names = "predicted_speedup", "predicted_speedup_low", "predicted_speedup_high"
  S, low, high = (number(row[name]) for name in names)
  if S is None:
    return Cell("")
  span = (
    "" if None in (low, high) or low == high else f" ({low:.2f}-{high:.2f})"
  )
  return Cell(f"{S:.2f}{span}", "number")


def _exact(row):
  if row["exact"] is True:
    return Cell("yes")
  return Cell("no", "bad") if row["exact"] is False else Cell("")


def _status(row):
  return Cell(row["status"], "" if row["status"] == "done" else "bad")
