"""Draw the figures of docs/theory.md: python -m benchmarks.figures docs"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")  # files, no window

import matplotlib.pyplot as plt
import numpy as np

from specjax import plots, theory

ALPHAS = (0.5, 0.7, 0.8, 0.9)
EASY, HARD, RUN = 0.95, 0.3, 40  # alphas of a text in runs of so many tokens


def best_length(folder):
  """S against K at C = 16, and the best K and S over (alpha, C)."""
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(12, 5), layout="constrained"
  )
  K = np.arange(21)
  for alpha in ALPHAS:
    (line,) = left.plot(K, theory.speedup(alpha, K, 16), label=f"α = {alpha}")
    best = theory.optimal_length(alpha, 16)
    left.plot(best.k, best.speedup, "o", color=line.get_color())
  left.axhline(1, color="0.6", linewidth=0.8)
  left.set_xticks(K[::2])
  left.set_xlabel("K, drafted tokens a round")
  left.set_ylabel("S")
  left.set_title("S = E[N] / (1 + K / C) at C = 16, dots where it is largest")
  left.legend(frameon=False)
  plots.best_map(figure, right)
  _save(figure, folder / "best_length.png")


def renewal(folder):
  """Tokens a round on a text of easy and hard runs, by four ways to count."""
  figure, ax = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
  K = np.arange(1, 13)
  found = np.array([tokens_a_round(k) for k in K]).T
  names = (
    ("renewal over round starts: what speculation does", "o-"),
    ("mean over positions", "--"),
    ("i.i.d. formula with the mean α", ":"),
  )
  for row, (name, style) in zip(found, names, strict=True):
    ax.plot(K, row, style, label=name, markersize=4)
  ax.set_xticks(K)
  ax.set_xlabel("K, drafted tokens a round")
  ax.set_ylabel("tokens a round")
  ax.set_title(f"α = {EASY} and {HARD} in runs of {RUN} tokens")
  ax.legend(frameon=False, fontsize="small")
  _save(figure, folder / "renewal.png")


def tokens_a_round(K):
  """(renewal, mean over positions, i.i.d.) of the text."""
  alpha = np.tile(np.repeat([EASY, HARD], RUN), 8)
  behind = np.append(alpha, np.zeros(K))
  A = [np.cumprod([1, *behind[s : s + K]]) for s in range(len(alpha))]
  rounds = theory.expected_rounds_along(np.array(A))
  iid = theory.expected_tokens(alpha.mean(), K)
  return len(alpha) / rounds, np.sum(A, 1).mean(), iid


def _save(figure, path):
  figure.savefig(path, dpi=110)
  plt.close(figure)
  print(f"wrote {path}")


if __name__ == "__main__":
  if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
    sys.exit("type a folder: python -m benchmarks.figures docs")
  best_length(pathlib.Path(sys.argv[1]))
  renewal(pathlib.Path(sys.argv[1]))
