"""What the pictures of gathered runs share: panels, legends, safe texts."""

import io
import textwrap
import warnings

import matplotlib

matplotlib.use("Agg")  # files, no window

import matplotlib.pyplot as plt

from specjax import lenient, naming

_PANELS = 6  # of a picture
GREY = dict(color="0.6", linewidth=0.8, zorder=0)


def text(words, width=44):
  """Return text that matplotlib shows as it is, wrapped to three lines."""
  lines = textwrap.wrap(lenient.printable(str(words)), width)
  if len(lines) > 3:
    lines = [*lines[:2], f"{lines[2][: width - 4]} ..."]
  return "\n".join(lines).replace("$", r"\$") or "-"


def png(figure, title):
  """Return a figure's PNG, and close it."""
  figure.suptitle(text(title, 100), fontsize=9, color="0.35")
  buffer = io.BytesIO()
  with warnings.catch_warnings():  # a name in letters that the font lacks
    warnings.filterwarnings("ignore", message="Glyph")
    figure.savefig(buffer, format="png", dpi=150)
  plt.close(figure)
  return buffer.getvalue()


def panels(groups):
  """Yield (figure, [(axes, (title, rows))]), a page of panels each.

  Args:
    groups: [(title, rows)].
  """
  for n in range(0, len(groups), _PANELS):
    page = groups[n : n + _PANELS]
    columns = min(len(page), 2)
    lines = -(-len(page) // columns)
    size = (7.2, 4.6) if columns == 1 else (10, 3.6 * lines + 0.4)
    options = dict(layout="constrained", squeeze=False)
    figure, axes = plt.subplots(lines, columns, figsize=size, **options)
    for one in axes.flat[len(page) :]:
      one.set_axis_off()
    placed = list(zip(axes.flat, page, strict=False))
    for one, (title, _) in placed:
      one.set_title(text(title) if title else "", fontsize=10)
    yield figure, placed


def grouped(rows, besides=(), more=lambda row: ""):
  """Return [(title, rows)] by what the rows differ in, and by `more`.

  Args:
    besides: of `naming.settings`; more: (row) -> what to begin a title with.
  """
  titles = naming.settings(rows, besides)
  both = [
    (", ".join(filter(None, [more(row), title])), row)
    for row, title in zip(rows, titles, strict=True)
  ]
  groups = named(both, lambda pair: pair[0])
  return [(title, [row for _, row in pairs]) for title, pairs in groups]


def named(items, key):
  """Return [(key, items that have it)], in the order of the first ones."""
  groups = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return list(groups.items())


def legend(figure, handles):
  """Put {label: handle} below all panels."""
  names = [text(label) for label in handles]
  longest = max(len(line) for name in names for line in name.split("\n"))
  fit = int(figure.get_figwidth() * 11) // (longest + 7)
  style = dict(loc="outside lower center", fontsize="small", frameon=False)
  columns = max(1, min(len(names), fit))
  figure.legend(list(handles.values()), names, ncols=columns, **style)
