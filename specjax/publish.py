"""What `python -m specjax.report FOLDER` does: gather, draw, write, show."""

import csv
import functools
import io
import os
import re
import sys
from pathlib import Path

import rich.console
import rich.table

from specjax import figures, gather, naming, page, report, rows, terminal
from specjax.errors import UserError
from specjax.lenient import number, printable

CSV, HTML, FIGURES = "report.csv", "report.html", "figures"
_SHOWN = 20  # rows of the table on the terminal


def publish(folder):
  """Write a folder's report.csv, report.html and figures/*.png; show a table.

  Raises:
    UserError: there is no run in it, or it cannot be written.
  """
  if not folder:
    raise UserError("no folder: type python -m specjax.report FOLDER")
  out = terminal.console()
  bar = functools.partial(terminal.track, out)
  _check_names(Path(folder))
  found = gather.gather(folder, bar("reading"))
  columns, table = rows.flat(found.runs)
  records = {run.name: run.record for run in found.runs}
  drawn, lacking = figures.draw(table, records, bar("drawing"))
  html = page.render(found, table, drawn, lacking)
  _pictures(found.folder / FIGURES, drawn)
  report.write(found.folder / CSV, _encoded(as_csv(columns, table)))
  report.write(found.folder / HTML, _encoded(html))
  for name, why in found.skipped:
    terminal.note(out, f"skipped {printable(name)}: {why}")
  show(table)
  print(page.summary(found.runs))
  names = [f"{FIGURES}/{figure.name}.png" for figure in drawn]
  for name in (CSV, HTML, *names):
    terminal.note(out, f"wrote {found.folder / name}")


def _check_names(folder):
  """Raise UserError, before anything is drawn, for a name that is taken."""
  for name in (CSV, HTML):
    if os.path.isdir(folder / name):
      raise UserError(
        f"cannot write {folder / name}: it is a folder; rename it"
      )
  if os.path.isfile(folder / FIGURES):
    raise UserError(
      f"cannot write {folder / FIGURES}/: it is a file; rename it"
    )


def _pictures(folder, drawn):
  """Write the PNGs; those of an earlier report that are no more go."""
  names = {f"{figure.name}.png" for figure in drawn}
  ours = re.compile(rf"({'|'.join(figures.KINDS)})(_\d+)?\.png")
  try:
    if names:
      folder.mkdir(exist_ok=True)
    for old in [*folder.glob("*.png")]:
      if ours.fullmatch(old.name) and old.name not in names:
        old.unlink()
  except OSError as e:
    raise UserError(f"cannot write {folder}: {e.strerror}") from e
  for figure in drawn:
    report.write(folder / f"{figure.name}.png", figure.png)


def as_csv(columns, table):
  """Return the text of a CSV file: a header, a row a run."""
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, columns, lineterminator="\n")
  writer.writeheader()
  writer.writerows(table)
  return buffer.getvalue()


def _encoded(text):
  # half a surrogate pair, as in a file's name
  return text.encode("utf-8", errors="backslashreplace")


def show(table):
  """Print the best rows: of decoding by S, of training by predicted S."""
  decoded = [row for row, _ in naming.best_settings(table)]
  trained = [
    row
    for row in naming.done(table, "training")
    if number(row["predicted_speedup"]) is not None
  ]
  trained.sort(key=lambda row: -row["predicted_speedup"])
  # a table that is piped is not squeezed into 80 columns
  width = None if sys.stdout.isatty() else 120
  console = rich.console.Console(width=width, highlight=False, markup=False)
  for own, name in ((decoded, "S"), (trained, "predicted S")):
    if own:
      console.print(_table(own[:_SHOWN], name))
    if len(own) > _SHOWN:
      console.print(f"and {len(own) - _SHOWN} more, see {CSV}")


def _table(own, name):
  settings = naming.settings(own)
  several = len({naming.place(row) for row in own}) > 1
  columns = ["draft", "K", "setting", name, "tokens a call", "alpha"]
  table = rich.table.Table(*columns, *["place"] * several)
  decode = name == "S"
  S = "speedup" if decode else "predicted_speedup"
  tokens = "tokens_per_call" if decode else "predicted_tokens_per_call"
  for row, setting in zip(own, settings, strict=True):
    numbers = [_form(row[key]) for key in (S, tokens, "alpha")]
    words = [setting, "" if decode else f"seed {row['seed']}"]
    told = ", ".join(filter(None, words))
    cells = [row["draft"], str(row["K"]), told, *numbers]
    table.add_row(*cells, *[naming.place(row)] * several)
  return table


def _form(x):
  return "-" if number(x) is None else f"{x:.2f}"
