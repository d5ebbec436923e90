"""Sweeps: points that never share a folder, run once, and resume.

Most run a script that does at once what it is told to, in a checkout of its
own; one decodes with configs/tiny.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from configs import common, smollm2, tiny, tiny_train
from specjax import engines, folders, gather, point, points, standing, sweep
from specjax.engines import local
from specjax.errors import UserError
from specjax.rows import flat

ROOT = Path(__file__).parents[1]

# What decode.py does, as the prompt says.
SCRIPT = """
import json, os, pathlib, signal, sys, time
asked = dict(x.lstrip("-").split("=", 1) for x in sys.argv[1:])
how = asked["config.prompt"]
with open("runs.txt", "a") as file:
  file.write(how + "\\n")
part = {"outputs": [{"finish_reason": "stop", "logprobs": [-float("inf")]}]}
report = {"speedup": 1.5, "tokens_per_call": 2.5, "predicted": {"speedup": 1.4}}
report |= {"autoregressive": part, "speculative": None, "config": {}}
if how == "fail":
  print("on stdout")
  sys.exit("error: no such weights")
if how == "nan":
  report["predicted"]["speedup"] = float("nan")
if how == "nonfinite":
  part["outputs"] += [{"finish_reason": "nonfinite"}]
if how == "nothing":
  sys.exit(0)
if how == "oom":
  os.kill(os.getpid(), signal.SIGKILL)
if how.startswith("wait"):
  end = time.time() + 200  # whatever becomes of the test
  while not pathlib.Path("go").exists() and time.time() < end:
    time.sleep(0.02)
pathlib.Path(asked["json"]).write_text(json.dumps(report))
"""
CONFIG = '''"""What is tested."""
from configs import common

def get_config(arg=""):
  c = common.decoding()
  c.target = "some"
  return c

def sweep(add):
  for prompt in {prompts}:
    add(prompt=prompt)
'''


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  """A folder with such a script, in which this process works."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  Path("decode.py").write_text(SCRIPT)
  Path("runs.txt").write_text("")
  return tmp_path


def _sweep(prompts, *more, **options):
  Path("c.py").write_text(CONFIG.format(prompts=list(prompts)))
  command = ["--config=c.py", "--workdir=s", *more]
  command = [sys.executable, "-m", "specjax.sweep", *command]
  return subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )


def _swept(prompts, *more):
  """(exit code, stdout, stderr) of a sweep over prompts."""
  process = _sweep(prompts, *more)
  out, err = process.communicate(timeout=120)
  assert "Traceback" not in err, err
  return process.returncode, out, err


def _config():
  return tiny.get_config().lock()


def _points(*overrides, common=()):
  def named(add):
    for some in overrides:
      add(some)

  return points.collect("configs/tiny.py", _config(), common, named)


def _made(prompt, folder="s"):
  """The folder of a point with a prompt."""
  config = common.decoding()
  config.target = "some"
  found = points.collect(
    "c.py", config.lock(), (), lambda add: add(prompt=prompt)
  )
  points.prepare(folder, "c.py", points.DECODE, {}, found, "local")
  return Path(folder) / found[0].name


def _runs():
  return Path("runs.txt").read_text().split()


def _until(what, seconds=60):
  end = time.time() + seconds
  while not what():
    assert time.time() < end
    time.sleep(0.02)


@pytest.mark.parametrize(
  "overrides, name",
  [
    ({}, "default"),
    (
      {"sampling.temperature": 0.7, "draft.num_tokens": 2},
      "draft.num_tokens=2,sampling.temperature=0.7",
    ),
    ({"draft.layers": (0, 29), "chat": False}, "chat=false,draft.layers=0+29"),
    ({"draft.temperature": -1.0}, "draft.temperature=-1.0"),
    ({"stop": ""}, "stop="),
  ],
)
def test_a_folder_is_named_by_what_is_overridden(overrides, name):
  assert folders.name(overrides) == name


def test_two_points_never_share_a_folder():
  texts = ["a", "A", "a b", "a-b", "a/b", "a,seed=1", "none", "", "()", "é"]
  texts += ["x" * 300, "x" * 301, ".", "..", "2", "a@b", "\n", "-", "nul\0"]
  values = [*texts, None, True, (), (0, 1), ("0", "1"), ("0+1",), (0, (1,))]
  values += [0.1, 0.1 + 2e-17, -0.0, 0.0, 1e300, ((0.3333, "b"),)]
  values += [((0.33333, "b"),), (("a", "b"),), ("a", "b"), (1.0, 0), (True,)]
  names = [folders.name({"k": value}) for value in values]
  names += [folders.name({"k": "a", "seed": 1}), folders.name({"ka": "a"})]
  names += [folders.name({"K": "a"}), folders.name({"k": "a", "b": (2,)})]
  assert len({name.lower() for name in names}) == len(names)
  for name in names:
    assert re.fullmatch(r"[a-z0-9_.+=,@-]+", name) and len(name) <= 100


def test_order_makes_no_other_point():
  one, two = {"seed": 1, "batch_size": 2}, {"batch_size": 2, "seed": 1}
  assert folders.name(one) == folders.name(two)


@pytest.mark.parametrize(
  "overrides, why",
  [
    ([{"draft.num_token": 2}], "no key 'draft.num_token'; did you mean 'draft"),
    ([{"num_tokens": 2}], "did you mean 'draft.num_tokens'"),
    ([{"draft": 2}], "'draft' is a group of keys; did you mean 'draft."),
    ([{"seed": "two"}], "seed must be a whole number, got 'two'"),
    ([{"seed": True}], "seed must be a whole number, got True"),
    ([{"seed": 1.0}], "seed must be a whole number"),
    ([{"chat": 1}], "chat must be True or False"),
    ([{"seed": 1}, {"seed": 2}, {"seed": 1}], "point seed=1 is there already"),
    # the same value, of the key's type
    ([{"sampling.temperature": 1}, {"sampling.temperature": 1.0}], "there"),
    ([], "adds no point"),
  ],
)
def test_a_wrong_point_is_one_line(overrides, why):
  with pytest.raises(UserError, match=re.escape(why)):
    _points(*overrides)


def test_a_key_is_set_once():
  with pytest.raises(UserError, match="--config.seed of the command line"):
    _points({"seed": 1}, common=("seed",))


def test_values_have_the_type_of_their_key():
  found = _points({"draft.layers": [0, 1], "sampling.temperature": 0})
  asked = {"draft.layers": (0, 1), "sampling.temperature": 0.0}
  assert found[0].overrides == asked
  assert found[0].config.draft.layers == (0, 1)


def test_a_mistake_in_the_file_names_its_line(checkout):
  code, out, err = _swept(["ok"], "--config.seed=-1")
  assert (code, out) == (2, "")
  assert err == "error: point prompt=ok: --config.seed must be in" + (
    " 0..4294967295, got -1\n"
  )
  code, out, err = _swept([1])
  assert err.startswith("error: c.py:11: prompt must be a str, got 1")
  assert (code, out) == (2, "") and not Path("s").exists()


def test_a_config_says_which_script_it_is_for():
  assert points.script(tiny.get_config()) == "decode.py"
  assert points.script(tiny_train.get_config()) == "train_draft.py"
  assert points.script(tiny_train.get_config("decode")) == "decode.py"
  with pytest.raises(UserError, match="neither decode.py"):
    points.script(tiny.get_config().draft)


@pytest.mark.parametrize(
  "module, number", [(smollm2, 16), (tiny, 4), (tiny_train, 6)]
)
def test_sweeps_of_the_configs(module, number):
  """They have their points, and their scripts refuse none of them."""
  config = module.get_config().lock()
  found = points.collect("c.py", config, (), module.sweep)
  assert len(found) == number
  sweep.check(points.script(config), found)


def test_a_sweep_grows_but_does_not_change(checkout):
  folder = _made("ok")
  assert (folder / "point.json").is_file()
  config = _config()
  one, two = _points({"seed": 1}), _points({"seed": 2})
  prepare = lambda found, to="t", shared=None: points.prepare(
    to, "c.py", points.DECODE, shared or {}, found, "local"
  )
  prepare(one)
  prepare(two)
  assert points.read(Path("t/sweep.json"))["points"] == ["seed=1", "seed=2"]
  with pytest.raises(UserError, match="overrides_common {}, now {'chat': True"):
    prepare(two, shared={"chat": True})
  changed = config.copy_and_resolve_references().unlock()
  changed.batch_size, changed.seed = 3, 1
  other = [points.Point("seed=1", {"seed": 1}, changed)]
  with pytest.raises(UserError, match="a point with batch_size 1, now 3"):
    prepare([points.Point("new", {}, config), *other])
  assert not Path("t/new").exists()
  with pytest.raises(UserError, match="holds .* and no sweep.json"):
    prepare(one, to=".")
  with pytest.raises(UserError, match="is a file"):
    prepare(one, to="decode.py")


def test_a_point_runs_once(checkout):
  folder = _made("ok")
  assert [point.run(folder), point.run(folder)] == [0, 0]
  assert _runs() == ["ok"]
  assert points.state(folder) == "done"
  assert points.read(folder / "DONE").keys() == {"seconds", "finished"}
  assert points.read(folder / "result.json")["speedup"] == 1.5
  assert (folder / "log.txt").read_text().startswith("$ python decode.py")


@pytest.mark.parametrize(
  "how, reason, code",
  [
    ("fail", "no such weights", 1),
    ("nan", "predicted.speedup is nan", 0),
    ("nonfinite", "1 of 2 answers ended with logits not finite", 0),
    ("nothing", "it left no result.json", 0),
    ("oom", "killed by SIGKILL, as where memory runs out", -9),
  ],
)
def test_a_point_that_failed_is_told_and_tried_again(
  checkout, how, reason, code
):
  folder = _made(how)
  for attempt in (1, 2):
    assert point.run(folder) == 1
    assert points.state(folder) == "failed"
    told = points.read(folder / "FAILED")
    assert told["reason"] == reason
    assert (told["returncode"], told["attempt"]) == (code, attempt)
  assert len(_runs()) == 2
  if how == "fail":
    assert "on stdout" in (folder / "log.txt").read_text()


def test_a_training_point_is_judged_by_its_metrics(checkout):
  """train_draft.py leaves its record and its metrics in run/."""
  folder = _made("ok")
  (folder / "run").mkdir()
  for value, wrong in ((1.0, ""), (float("nan"), "loss is nan")):
    rows = [{"step": 0, "loss": 2.0}, {"step": 1, "loss": value}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "run/metrics.jsonl").write_text(text)
    assert point._wrong(folder, points.TRAIN) == wrong
  (folder / "run/metrics.jsonl").write_text("")
  (folder / "run/record.json").write_text('{"kind": "training", "S": Infinity}')
  assert point._wrong(folder, points.TRAIN) == "S is inf"
  assert points.read(folder / "result.json")["kind"] == "training"


@contextlib.contextmanager
def _waiting(folder):
  """A point in a process of its own, which waits for the file `go`."""
  before = len(_runs())
  process = subprocess.Popen(
    [sys.executable, "-m", "specjax.point", f"--folder={folder}"],
    stderr=subprocess.PIPE,
    text=True,
  )
  _until(lambda: len(_runs()) > before)
  try:
    yield process
  finally:
    Path("go").touch()
    process.wait(60)
    _until(lambda: _is_free(folder))
    Path("go").unlink()


def test_one_process_works_in_a_folder(checkout):
  folder = _made("wait")
  busy = pytest.raises(UserError, match="another process is at work in s/pro")
  with _waiting(folder), busy:
    point.run(folder)
  assert points.state(folder) == "done" and _runs() == ["wait"]


def test_a_killed_point_leaves_no_lock_but_its_script_does(checkout):
  folder = _made("wait")
  with _waiting(folder) as process:
    process.kill()
    process.wait()
    with pytest.raises(UserError, match="another process is at work"):
      point.run(folder)
  assert (folder / "result.json").exists()  # of the script that went on
  assert points.state(folder) == "missing"
  Path("go").touch()
  assert point.run(folder) == 0 and len(_runs()) == 2


def _is_free(folder):
  try:
    with point._locked(folder):
      return True
  except UserError:
    return False


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2"])
def test_a_signal_stops_the_script_and_leaves_no_marker(checkout, name):
  folder, number = _made("wait"), signal.Signals[name]
  with _waiting(folder) as process:
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert f"was stopped by {name}" in process.stderr.read()
  assert points.state(folder) == "missing" and _is_free(folder)


def test_a_failure_stops_no_other_point(checkout):
  code, out, err = _swept(["fail", "ok", "nan", "ok2"])
  assert code == 1
  assert _runs() == ["fail", "ok", "nan", "ok2"]
  states = [line.split()[1] for line in out.split("\n")[1:5]]
  assert states == ["failed", "done", "failed", "done"]
  assert re.search(r"prompt=ok +done +\d+\.\d +1.50 +1.40 +2.50", out)
  assert (
    "prompt=fail failed, attempt 1: no such weights; log:"
    " s/prompt=fail/log.txt" in out
  )
  assert "2 of 4: prompt=ok done" in err and " left" in err
  code, out, err = _swept(["fail", "ok", "nan", "ok2"])
  assert code == 1 and _runs()[4:] == ["fail", "nan"]
  assert "4 points: 2 done, 2 failed and tried again" in err
  assert "attempt 2: no such weights" in out


def test_a_sweep_killed_half_way_does_the_rest(checkout):
  """kill -9 of all its processes; what was done is not done again."""
  prompts = ["ok", "wait", "ok2"]
  process = _sweep(prompts, start_new_session=True)
  _until(lambda: _runs() == ["ok", "wait"])
  found = subprocess.run(
    ["ps", "-s", str(process.pid), "-o", "pid="], capture_output=True, text=True
  )
  pids = [int(pid) for pid in found.stdout.split()]
  assert len(pids) == 3  # the sweep, the point, the script
  for pid in pids:
    os.kill(pid, signal.SIGKILL)
  process.communicate()
  Path("go").touch()
  code, out, err = _swept(prompts)
  assert code == 0 and _runs() == ["ok", "wait", "wait", "ok2"]
  assert "3 points: 1 done, 2 to run" in err


@pytest.mark.parametrize(
  "name",
  [
    "SIGINT",
    pytest.param("SIGTERM", marks=pytest.mark.slow),
    pytest.param("SIGHUP", marks=pytest.mark.slow),
  ],
)
def test_a_stopped_sweep_stops_its_points_and_says_how_to_go_on(checkout, name):
  process = _sweep(["ok", "wait"])
  _until(lambda: _runs() == ["ok", "wait"])
  number = signal.Signals[name]
  process.send_signal(number)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 128 + number and out == ""
  assert "stopped: 1 of 2 points are done; to go on, type: " in err
  assert err.rstrip().endswith("-m specjax.sweep --config=c.py --workdir=s")
  assert _is_free(Path("s/prompt=wait"))


def test_print_is_commands_and_nothing_else(checkout):
  """Each is whole: it runs from any folder, and twice does nothing more."""
  code, out, err = _swept(["ok", "ok2"], "--launcher=print")
  assert (code, err) == (0, "")
  lines = out.splitlines()
  assert len(lines) == 2 and _runs() == []
  for line in [*lines, lines[0]]:
    subprocess.run(line, shell=True, check=True, cwd="/", capture_output=True)
  assert _runs() == ["ok", "ok2"]
  assert _swept(["ok", "ok2", "ok3"], "--launcher=print")[1].count("\n") == 1


@pytest.mark.parametrize(
  "more, why",
  [
    (["--gpus=1"], "--gpus is for --launcher=slurm or ray, not for local"),
    (
      ["--launcher=ray", "--partition=a"],
      "--partition is for --launcher=slurm",
    ),
    (["--launcher=ray", "--resources=TPU"], "--resources must be NAME=NUMBER"),
    (["--launcher=slrm"], "--launcher=slrm: value should be one of"),
    (["--workdir="], "no folder for the sweep: type --workdir=sweeps/NAME"),
  ],
)
def test_wrong_flags_are_one_line(checkout, more, why):
  code, out, err = _swept(["ok"], *more)
  assert (code, out) == (2, "") and not Path("s").exists()
  assert re.search(why, err) and err.count("\n") == 1


def test_an_engine_that_is_not_installed_is_one_line():
  with pytest.raises(UserError, match="type `pip install no_such_engine`"):
    engines.need("no_such_engine")


def test_one_command_at_a_time_on_each_device(tmp_path):
  code = (
    "import os, sys, time; begin = time.time(); time.sleep(.2)\n"
    "print(os.environ['CUDA_VISIBLE_DEVICES'], begin, time.time(),"
    " file=sys.stderr)"
  )
  told = list(local.run([[sys.executable, "-c", code]] * 5, devices=["0", "3"]))
  assert sorted(i for i, x in told if x is None) == [0, 1, 2, 3, 4]
  ended = [x.split() for _, x in told if x is not None]
  assert {device for device, *_ in ended} == {"0", "3"}
  for device in ("0", "3"):
    spans = sorted((float(a), float(b)) for d, a, b in ended if d == device)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_closing_an_engine_ends_its_processes(tmp_path):
  pid = tmp_path / "pid"
  code = (
    f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    "time.sleep(60)"
  )
  engine = local.run([[sys.executable, "-c", code]] * 2)
  assert next(engine) == (0, None)
  _until(lambda: pid.exists() and pid.read_text())
  engine.close()
  with pytest.raises(ProcessLookupError):
    os.kill(int(pid.read_text()), 0)


def test_decodes_a_real_point(tmp_path):
  """configs/tiny.py, one K, through the command line: DONE, table, config."""
  config = tmp_path / "one.py"
  config.write_text(
    "from configs.tiny import get_config\n"
    "def sweep(add):\n"
    "  add({'draft.num_tokens': 3, 'draft.name': 'lm', 'draft.layers': (0,)})\n"
  )
  ran = subprocess.run(
    [
      *(sys.executable, "-m", "specjax.sweep", f"--config={config}"),
      *(f"--workdir={tmp_path / 's'}", "--config.max_new_tokens=12"),
    ],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )
  assert ran.returncode == 0, ran.stdout + ran.stderr
  (folder,) = (tmp_path / "s").glob("draft*")
  asked = points.read(folder / "point.json")["values"]
  report = points.read(folder / "result.json")
  assert report["config"]["max_new_tokens"] == 12
  assert report["config"]["draft"]["layers"] == [0] == asked["draft.layers"]
  assert report["draft"]["K"] == 3
  assert standing.of(folder, "").speedup == report["speedup"]
  assert f"{report['tokens_per_call']:.2f}" in ran.stdout


def _engine_sweep(*more):
  """A sweep by an engine: a point that fails, and others."""
  code, out, err = _swept(["ok", "fail", "ok2"], *more)
  assert code == 1, err
  assert sorted(_runs()) == ["fail", "ok", "ok2"]
  states = [line.split()[1] for line in out.split("\n")[1:4]]
  assert states == ["done", "failed", "done"]
  assert "attempt 1: no such weights" in out
  code, _, err = _swept(["ok", "ok2"], *more)
  assert code == 0 and "2 points: 2 done" in err and len(_runs()) == 3


def _engine_stops(*more):
  """Ctrl-C: the point on the engine is stopped as one of this machine is."""
  process = _sweep(["wait"], *more)
  _until(lambda: _runs() == ["wait"])
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=90)
  assert process.returncode == 130 and out == ""
  assert "stopped: 0 of 1 points are done" in err
  assert _is_free(Path("s/prompt=wait")), "the script goes on"


SUBMITIT = ("--launcher=slurm", "--cluster=local", "--minutes=5")


def test_submitit(checkout):
  pytest.importorskip("submitit", reason="pip install submitit")
  _engine_sweep(*SUBMITIT)


def test_submitit_stops(checkout):
  pytest.importorskip("submitit", reason="pip install submitit")
  _engine_stops(*SUBMITIT)


def test_submitit_preemption_saves_and_runs_again(checkout):
  """What Slurm sends before it takes a machine away: USR2, to the job."""
  submitit = pytest.importorskip("submitit", reason="pip install submitit")
  folder = _made("wait")
  argv = [sys.executable, "-m", "specjax.point", f"--folder={folder}"]
  executor = submitit.AutoExecutor(folder="jobs", cluster="local")
  executor.update_parameters(timeout_min=30)
  job = executor.submit(engines.Command(argv, os.getcwd()))
  _until(lambda: _runs() == ["wait"])
  ps = ["pgrep", "-P", job.job_id]
  pid = subprocess.run(ps, capture_output=True, text=True, check=True).stdout
  os.kill(int(pid), signal.SIGUSR2)
  _until(lambda: "Requeued" in job.stderr() + job.stdout())
  assert points.state(folder) == "missing" and _is_free(folder)
  # the pickle that the queue runs now is the same command
  again = submitit.core.utils.DelayedSubmission.load(job.paths.submitted_pickle)
  Path("go").touch()
  assert "done in" in again.result() and points.state(folder) == "done"


@pytest.mark.slow
@pytest.mark.parametrize("check", [_engine_sweep, _engine_stops])
def test_ray(checkout, check):
  pytest.importorskip("ray", reason="pip install ray")
  check("--launcher=ray")


def _without_a_clock(folder, shown):
  """What a sweep of decode.py makes of its points, but for times."""
  # point, state, seconds, speed-up, predicted, tokens a call
  table = re.findall(r"^(\S+) +(done) +\S+ +\S+ +\S+ +(\S+)$", shown, re.M)
  columns, rows = flat(gather.gather(folder).runs)
  timed = re.compile("second|speedup|best_k|cost_ratio|memory|command")
  kept = [name for name in columns if not timed.search(name)]
  rows = [[row[name] for name in kept] for row in rows]
  reports = [points.read(path) for path in sorted(folder.glob("*/result.json"))]
  tokens = [
    [output["token_ids"] for output in report[decoder]["outputs"]]
    for report in reports
    for decoder in ("autoregressive", "speculative")
  ]
  return {"table": table, "rows": rows, "tokens": tokens}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_engine_gives_the_same_table(tmp_path):
  """The four points of configs/tiny.py, decoded by every engine there is."""
  pytest.importorskip("submitit", reason="pip install submitit")
  pytest.importorskip("ray", reason="pip install ray")
  engines_ = {"local": (), "submitit": SUBMITIT, "ray": ("--launcher=ray",)}
  told = {}
  for name, more in engines_.items():
    folder = tmp_path / name
    ran = subprocess.run(
      [
        *(sys.executable, "-m", "specjax.sweep", "--config=configs/tiny.py"),
        *(f"--workdir={folder}", "--config.max_new_tokens=16", *more),
      ],
      capture_output=True,
      text=True,
      cwd=ROOT,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
      timeout=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told[name] = _without_a_clock(folder, ran.stdout)
  assert len(told["local"]["table"]) == len(told["local"]["rows"]) == 4
  assert told["submitit"] == told["local"]
  assert told["ray"] == told["local"]


def test_sky_yaml_fits_its_schema():
  """docs/sky.yaml has what SkyPilot's task schema asks for, and no other key.

  The keys are those of its documentation (reference/yaml-spec.rst).
  """
  task = yaml.safe_load((ROOT / "docs/sky.yaml").read_text())
  schema = {
    "name": str,
    "workdir": str,
    "resources": dict,
    "envs": dict,
    "file_mounts": dict,
    "setup": str,
    "run": str,
  }
  assert task.keys() == schema.keys()
  assert all(type(task[key]) is kind for key, kind in schema.items())
  resources = task["resources"]
  assert resources.keys() <= {"any_of", "use_spot", "disk_size", "job_recovery"}
  assert resources["use_spot"] is True
  for one in resources["any_of"]:
    assert one.keys() <= {"accelerators", "accelerator_args", "infra"}
    assert re.fullmatch(r"[A-Za-z0-9-]+:\d+", one["accelerators"])
  (mount,) = task["file_mounts"].values()
  assert mount.keys() == {"name", "mode"} and mount["mode"] == "MOUNT_CACHED"
  used = set(re.findall(r"\$\{?([A-Z]+)", task["run"] + task["setup"]))
  assert used - {"HOME", "PATH"} == task["envs"].keys()
  assert all(type(value) is str for value in task["envs"].values())
  for part in ("setup", "run"):  # a shell can read them
    subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


@pytest.mark.parametrize("gpu", [True, False])
def test_sky_yaml_installs_what_its_machine_has(tmp_path, gpu):
  """CUDA's JAX beside NVIDIA's driver, else the TPU's; tools only say so."""
  tools, told = tmp_path / "bin", tmp_path / "told"
  tools.mkdir()
  (tools / "sh").symlink_to("/bin/sh")
  for name in ("curl", "uv", "nvidia-smi")[: 2 + gpu]:
    (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {told}\n')
    (tools / name).chmod(0o755)
  lines = yaml.safe_load((ROOT / "docs/sky.yaml").read_text())["setup"]
  env = {"PATH": str(tools), "HOME": str(tmp_path)}
  subprocess.run(["/bin/bash", "-c", lines], check=True, env=env, cwd=ROOT)
  called = told.read_text().splitlines()
  assert [line.split()[:2] for line in called][1:] == [
    ["uv", "venv"],
    ["uv", "pip"],
  ]
  assert called[-1].endswith(" jax[cuda13]" if gpu else " jax[tpu]")
  (needed,) = re.findall(r"-r (\S+)", called[-1])
  assert (ROOT / needed).is_file()


def test_jobs_that_begin_together_make_the_same_folders(tmp_path):
  """Each makes all of them; another one may be half-way through."""
  (tmp_path / "s" / "seed=2").mkdir(parents=True)
  found = _points({"seed": 1}, {"seed": 2})
  points.prepare(tmp_path / "s", "c.py", points.DECODE, {}, found, "print")
  made = sorted(path.parent.name for path in tmp_path.glob("s/*/point.json"))
  assert made == ["seed=1", "seed=2"]


def test_sky_yaml_runs_one_point(checkout):
  """Its own lines, with the bucket a folder here."""
  Path("c.py").write_text(CONFIG.format(prompts=["ok", "ok2"]))
  task = yaml.safe_load((ROOT / "docs/sky.yaml").read_text())
  (bucket,) = task["file_mounts"]
  lines = task["run"].replace(bucket, "bucket").replace("~/venv", "venv")
  lines = lines.replace("python ", f"{sys.executable} ")
  envs = {"CONFIG": "c.py", "OVERRIDES": "", "SWEEP": "s"}
  envs |= {"POINT": "prompt=ok2"}
  assert envs.keys() == task["envs"].keys()
  Path("bucket").mkdir()
  command = ["bash", "-ec", lines]
  subprocess.run(command, check=True, env=os.environ | envs, timeout=120)
  assert _runs() == ["ok2"]
  assert points.state(Path("bucket/s/prompt=ok2")) == "done"


@pytest.mark.slow
def test_a_training_point_goes_on(tmp_path, monkeypatch):
  """SIGTERM saves it, the same command goes on from there."""
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  config = tiny_train.get_config()
  small = {"steps": 60, "log_every": 1, "batch_size": 4, "data.limit": 20}
  small |= {"data.samples": 1, "data.max_new": 16, "evaluation.rows": 4}
  config.update_from_flattened_dict(small)
  found = points.collect(
    "configs/tiny_train.py", config.lock(), small, lambda add: add(seed=1)
  )
  points.prepare(
    tmp_path / "s", "configs/tiny_train.py", points.TRAIN, small, found, "local"
  )
  folder = tmp_path / "s/seed=1"
  argv = [sys.executable, "-m", "specjax.point", f"--folder={folder}"]
  process, log = subprocess.Popen(argv), folder / "run/metrics.jsonl"
  _until(lambda: log.is_file() and '"loss"' in log.read_text(), 300)
  process.send_signal(signal.SIGTERM)
  assert process.wait(120) == 128 + signal.SIGTERM
  assert "SIGTERM: saved at step" in (folder / "log.txt").read_text()
  assert points.state(folder) == "missing"
  subprocess.run(argv, check=True, timeout=300)
  assert "going on from step" in (folder / "log.txt").read_text()
  assert standing.of(folder, "").predicted > 0
