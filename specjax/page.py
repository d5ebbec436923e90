"""Gathered runs as one HTML page that needs no other file and no network.

The template, page.html, escapes whatever it is given; the page's own policy
lets it load nothing but the pictures inside it.
"""

import base64
import collections
import re
import struct
from pathlib import Path
from typing import NamedTuple

import jinja2
import markupsafe

from specjax import figures, naming, tables
from specjax.tables import Cell, Table

_DPI = 150 / 96  # a PNG's pixels to a page's


class Part(NamedTuple):
  """A section of the page; what it lacks is empty."""

  title: str
  notes: list[str] = []
  table: Table | None = None
  figures: list[dict] = []
  failures: list = []  # of `gather.Run`
  pairs: list[tuple[str, str]] = []  # (name, text)


_BEST = "The largest measured S over all that was tried with it."
_TRAINED = (
  "alpha, E[N] and S are of the held-out texts, at the step whose draft is"
  " kept; S is predicted, at the best k, by block verification."
)
_DECODED = (
  "S is measured over plain decoding of the same prompts, compilation and"
  " prefill apart; predicted, with its 95 % interval, is what the plain texts"
  " say."
)


def render(found, rows, drawn, lacking):
  """Return the page as a text.

  Args:
    found: a `gather.Found`; rows: of `rows.flat`, one a run.
    drawn, lacking: of `figures.draw`.
  """
  places = list(dict.fromkeys(map(naming.place, filter(naming.measured, rows))))
  parts = [
    _tabled("Best setting of each draft", _BEST, tables.best(rows, places)),
    *_pictures(drawn),
    _tabled("Training runs", _TRAINED, tables.trained(rows, places)),
    _tabled("Decoding runs", _DECODED, tables.decoded(rows, places)),
    _failures(found),
    _unfinished(found),
    _skipped(found),
    _machines(rows, places),
    _commands(rows),
    _left_out(lacking),
  ]
  environment = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=False,
    keep_trailing_newline=True,
  )
  environment.filters["breakable"] = _breakable
  source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
  return environment.from_string(source).render(
    title=f"Report of {found.folder.resolve().name or found.folder}",
    summary=summary(found.runs),
    warnings=_warnings(rows, places),
    parts=[part for part in parts if part],
  )


def _tabled(title, note, table):
  return table and Part(title, [note], table)


def summary(runs):
  """Return '31 runs: 30 done, 1 failed' of `gather.Run`s."""
  counts = collections.Counter(run.status for run in runs)
  each = ", ".join(f"{n} {status}" for status, n in counts.most_common())
  return f"{len(runs)} run{'s' * (len(runs) > 1)}: {each}."


def _breakable(text):
  """A long name that may be broken behind its commas and slashes."""
  parts = re.split(r"(?<=[,/])(?=\S)", text)
  return markupsafe.Markup("<wbr>").join(parts)


def _warnings(rows, places):
  lines = []
  if len(places) > 1:
    lines.append(
      f"These runs are of {len(places)} kinds of model, dtype and device, whose"
      " speeds do not compare: each has pictures of its own, and the tables"
      " number them."
    )
  some = filter(naming.measured, rows)
  commits = sorted({f"{row['commit'] or 'unknown'}" for row in some})
  if len(commits) > 1:
    shown = ", ".join(commits[:8]) + ", ..." * (len(commits) > 8)
    lines.append(f"They are of {len(commits)} commits: {shown}.")
  wrong = [r["run"] for r in naming.done(rows, "decode") if r["exact"] is False]
  if wrong:
    lines.append(
      f"{len(wrong)} run{'s' * (len(wrong) > 1)} did not give plain decoding's"
      " tokens where these are promised; logits that agree but for rounding"
      " can part: python -m specjax.selfcheck tells."
    )
  return lines


def _pictures(drawn):
  found = []
  for kind, (title, *_) in figures.KINDS.items():
    own = [figure for figure in drawn if figure.kind == kind]
    if own:
      found.append(Part(title, figures=[_picture(one) for one in own]))
  return found


def _picture(figure):
  (width,) = struct.unpack(">I", figure.png[16:20])
  return {
    "place": figure.place,
    "caption": figure.caption,
    "data": base64.b64encode(figure.png).decode(),
    "width": round(width / _DPI),
  }


def _failures(found):
  own = [run for run in found.runs if run.status in ("failed", "unreadable")]
  return own and Part("Failures", failures=own)


def _unfinished(found):
  own = [
    (run.name, f"{run.status} {run.reason}".strip())
    for run in found.runs
    if run.status in ("interrupted", "not run")
  ]
  note = "The same command goes on with them."
  return own and Part("Not finished", [note], pairs=own)


def _skipped(found):
  note = "Files below the folder that were not read as a run."
  return found.skipped and Part("Skipped", [note], pairs=found.skipped)


def _machines(rows, places):
  keys = ("specjax", "jax", "python", "commit")
  groups = collections.Counter(
    (naming.place(row), *(str(row[key]) for key in keys))
    for row in filter(naming.measured, rows)
  )
  lines = [
    [
      Cell(str(places.index(place) + 1), "number"),
      Cell(place, "name"),
      *map(Cell, versions),
      Cell(str(n), "number"),
    ]
    for (place, *versions), n in groups.items()
  ]
  names = "place", "model, dtype, device", *keys, "runs"
  header = [Cell(name) for name in names]
  return lines and Part("Machines and versions", table=Table(header, lines))


def _commands(rows):
  own = [(row["run"], row["command"]) for row in rows if row["command"]]
  note = "A sweep adds --json or --workdir, to where a point has its folder."
  return own and Part("Commands", [note], pairs=own)


def _left_out(lacking):
  lines = [f"{figures.KINDS[k][0]}: {why}." for k, why in lacking.items()]
  return lines and Part("Left out", [" ".join(lines)])
