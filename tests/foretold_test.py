"""benchmarks/foretold.py: the prediction comes first, and is about this run."""

import heads
import numpy as np
import pytest

from benchmarks import foretold
from configs import tiny
from specjax import prompts, terminal
from specjax.models import load

FLAGS = dict(
  drafts=["0+2"],
  lengths=[2, 3],
  lengths_alone=[3],
  temperatures=[0.0],
  prompts=2,
  prompts_alone=1,
  samples=1,
  turns=1,
)


def _prompt(i, *turns):
  return prompts.Prompt(str(i), "", (), turns or ("to be",), None)


def test_prompts_are_spread_over_the_file():
  found = [_prompt(i, "a", "b") for i in range(10)]
  some = foretold.prompts(found, 4)
  assert [p.id for p in some] == ["0", "2", "5", "7"]
  assert {p.turns for p in some} == {("a",)}
  assert len(foretold.prompts(found, 99)) == 10


def test_no_answer_is_foretold_from_itself():
  """Seeds of the two runs differ, and so do those of each."""
  todo = [_prompt(i) for i in range(3)]
  before = [p.seed for p in foretold.repeated(todo, 4, 0)]
  after = [p.seed for p in foretold.repeated(todo, 4, foretold._SEED)]
  assert len({*before, *after}) == 24


@pytest.fixture(scope="module", params=["0+2", "feature"])
def both(request, tmp_path_factory):
  """(predicted, measured) of a tiny model at T = 0."""
  config = tiny.get_config()
  with config.unlocked():
    config.max_new_tokens, config.batch_size = 24, 2
  todo = [_prompt(0, "to be"), _prompt(1, "or not, or not, or not")]
  out = terminal.console()
  flags = FLAGS | dict(drafts=[request.param])
  if request.param == "feature":
    model = load.model(load.random(config.architecture))
    head = heads.made(model, features=(0, 2), token=0.5, noise=1.0)
    folder = tmp_path_factory.mktemp("head")
    flags["drafts"] = [heads.saved(folder, model, head)]
  args = out, config, flags, todo, "float32"
  return foretold.foretell(*args), foretold.measure(*args)


@pytest.mark.slow  # a minute to compile
def test_greedy_tokens_a_call_are_foretold_exactly(both):
  rows = foretold.compared(*both)
  assert [row["K"] for row in rows] == [2, 3]
  found = [row["tokens_a_call"] for row in rows]
  measured = [x["measured"] for x in found]
  np.testing.assert_allclose([x["predicted"] for x in found], measured, 1e-6)
  assert max(measured) > 1.2  # there was something to foretell


@pytest.mark.slow  # a minute to compile
def test_speed_is_of_the_prompts_that_are_timed(both):
  """Its tokens a call are those of the first prompt alone."""
  predicted, measured = ({row["K"]: row for row in x["0"]} for x in both)
  before, after = predicted[3], measured[3]["alone"]
  alone = before["alone"]["tokens_per_call"]
  assert alone == pytest.approx(after["tokens_per_call"], abs=1e-6)
  assert alone != pytest.approx(before["tokens_a_call"]["tokens_per_call"])
  assert after["speedup"] > 0
  assert "alone" not in measured[2]


def test_errors_are_signed():
  row = {"temperature": 0.0, "draft": "ngram", "K": 1}
  before = {"S": 1.1, "S_interval": [1, 1.2], "iid_S": 0.9}
  found = foretold._beside(before, "S", 1.0)
  assert found["error"] == pytest.approx(0.1)
  assert found["iid_error"] == pytest.approx(-0.1)
  row |= {"tokens_a_call": found, "speedup": found}
  cells = [list(c.cells)[0] for c in foretold.table([row]).columns]
  assert cells[5] == cells[9] == "+10.0%" and cells[6] == "-10.0%"
  assert foretold.picture([row]).startswith(b"\x89PNG")
