"""S over batch x K, and where speculation breaks even."""

import matplotlib.pyplot as plt
import numpy as np

from specjax import canvas


def draw(rows):
  """Yield (figure, caption): a panel for each draft and setting.

  Args:
    rows: of `rows.flat`, with numbers for speedup, K and batch.
  """
  groups = canvas.grouped(rows, ("batch_size",), lambda row: row["draft"])
  for figure, panels in canvas.panels(groups):
    for axes, (_, group) in panels:
      _panel(axes, group)
    line = plt.Line2D([], [], color="black", lw=2.5)
    canvas.legend(figure, {"break-even, S = 1": line})
    yield (
      figure,
      "Measured speed-up; blue is faster than plain decoding, red slower. The"
      " black line parts them, where there are both.",
    )


def table(rows):
  """Return (batches, Ks, S [batch, K]), the mean of a cell, NaN without a run.

  Args:
    rows: dicts with numbers for speedup, K and batch.
  """
  batches, lengths = (sorted({r[k] for r in rows}) for k in ("batch", "K"))
  S = np.full((len(batches), len(lengths)), np.nan)
  for b, k in np.ndindex(S.shape):
    where = batches[b], lengths[k]
    own = [r["speedup"] for r in rows if (r["batch"], r["K"]) == where]
    if own:
      S[b, k] = np.mean(own)
  return batches, lengths, S


def edges(S):
  """Return [((x, x), (y, y))]: borders of neighbours on either side of 1."""
  found = []
  part = lambda a, b: not np.isnan(a + b) and (a >= 1) != (b >= 1)
  for b, k in np.ndindex(S.shape):
    if k + 1 < S.shape[1] and part(S[b, k], S[b, k + 1]):
      found.append(((k + 0.5, k + 0.5), (b - 0.5, b + 0.5)))
    if b + 1 < S.shape[0] and part(S[b, k], S[b + 1, k]):
      found.append(((k - 0.5, k + 0.5), (b + 0.5, b + 0.5)))
  return found


def _panel(axes, rows):
  batches, lengths, S = table(rows)
  shade = np.log2(np.maximum(S, 1e-9))  # twice and half are as far from 1
  options = dict(cmap="RdBu", vmin=-1, vmax=1, aspect="auto", origin="lower")
  axes.imshow(shade, **options)
  for (b, k), s in np.ndenumerate(S):
    if not np.isnan(s):
      colour = "white" if abs(shade[b, k]) > 0.7 else "black"
      style = dict(ha="center", va="center", color=colour)
      axes.text(k, b, f"{s:.2f}", **style)
  for x, y in edges(S):
    axes.plot(x, y, color="black", lw=2.5, solid_capstyle="projecting")
  axes.set_xticks(range(len(lengths)), lengths)
  axes.set_yticks(range(len(batches)), batches)
  axes.set_xlabel("K, drafted tokens a round")
  axes.set_ylabel("batch")
