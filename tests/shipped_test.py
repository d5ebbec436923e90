"""The draft that comes with the project: whole, small, and for its target."""

import json
import re
import subprocess
import sys
from pathlib import Path

from configs import smollm2
from specjax import overlap, prompts

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / smollm2.get_config().draft.shipped


def test_what_it_says_of_itself():
  """Its size, its target, its sources, and nothing of where it was made."""
  assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 40e6
  told = json.loads((FOLDER / "specjax.json").read_text())
  assert told["target"]["reference"] == smollm2.get_config().target
  card = (FOLDER / "README.md").read_text()
  assert not re.search(r"/(home|root|tmp|work|usr)/", card)
  for word in ("MIT", "Apache-2.0", "GSM8K", "GPTeacher", "float16"):
    assert word in card


def test_it_was_not_trained_on_the_projects_prompts():
  found = prompts.from_file(str(ROOT / "configs/prompts.jsonl"))
  texts = [" ".join(p.turns) for p in found]
  hashes = overlap.read(FOLDER)
  assert len(hashes) > 100_000
  assert not overlap.shared(hashes, texts).any()


def test_it_drafts(smollm2_gguf, tmp_path):
  """The config alone finds it; exact, and some of it accepted."""
  path = tmp_path / "report.json"
  words = ["--config=configs/smollm2.py", "--config.draft.schedule=constant"]
  words += ["--config.draft.lookup=0", "--config.draft.num_tokens=2"]
  words += ["--config.max_new_tokens=48", "--config.predict=False"]
  words += ["--config.prompt=What is the capital of France?"]
  run = subprocess.run(
    [sys.executable, "decode.py", *words, f"--json={path}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert run.returncode == 0, run.stderr
  found = json.loads(path.read_text())
  assert found["exact"] is True and found["tokens_per_call"] > 1.2
  assert found["overlap"] == {"prompts": 1, "shared": []}
  assert found["config"]["draft"]["weights"] == str(FOLDER.relative_to(ROOT))
