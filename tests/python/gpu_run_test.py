"""scripts/gpu/run.py on stand-ins for the GPU and the programs: what it runs, keeps and says."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
import zipfile

from processes import has_ended, text_of, until

RUN = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu" / "run.py"
INFO = 'echo "TileMoE 0.2.0, commit 0123abcd, Release"'


class GpuRun(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.program("tilemoe", f'if [ "$1" = info ]; then {INFO}; else echo "3 cases, 0 failures"; fi')
        self.program("cuda_some_test", self.counts(failures=0))
        self.program("example_layer_cuda", "echo O differs by 3e-3")
        self.gpus(1)

    def program(self, name, script, place="programs"):
        file = self.folder / place / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\necho $0 >>{self.folder}/ran\n{script}\n")
        file.chmod(0o755)

    def gpus(self, count, mib=81559):
        answer = f'[[ "$1" = *memory.total* ]] && echo "{mib} MiB" || echo "Stand-in, 1.0, 100 MHz, 5 W"'
        self.program("nvidia-smi", "\n".join([answer] * count), place="tools")

    def counts(self, failures, skipped="RunsOnTwoDevicesAtOnce", tests=7):
        suites = json.dumps({"tests": tests, "failures": failures, "testsuites": [
            {"name": "DeviceLayerTest", "testsuite": [{"name": skipped, "result": "SKIPPED"}]}]})
        return f"echo '{suites}' >${{2#*json:}}; exit {min(failures, 1)}"

    def run_stages(self, *arguments, path="/usr/bin:/bin", python_path=""):
        return subprocess.run(
            [sys.executable, RUN, "--programs", self.folder / "programs", "--out",
             self.folder / "out", *arguments],
            text=True, capture_output=True, timeout=60,
            env={**os.environ, "PATH": f"{self.folder / 'tools'}:{path}",
                 "PYTHONPATH": str(python_path)})

    def results(self, stage):
        return json.loads((self.folder / "out" / f"gpu_{stage}.json").read_text())

    def runs_of(self, name):
        return sum(line.endswith("/" + name) for line in (self.folder / "ran").read_text().split())

    def test_writes_what_ran_and_where(self):
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("test: all 3 passed", said.stdout)
        self.assertIn("bench: skipped: not asked for", said.stdout)
        results = self.results("test")
        self.assertEqual((results["commit"], results["name"]), ("0123abcd", "Stand-in"))
        self.assertEqual(results["items"][0]["report"],
                         {"tests": 7, "failures": 0,
                          "skipped": ["DeviceLayerTest.RunsOnTwoDevicesAtOnce"]})
        self.assertEqual(results["items"][1]["report"], "3 cases, 0 failures")
        self.assertEqual(results["items"][2]["report"], ["O differs by 3e-3"])

    def test_the_rowwise_tests_run_from_ptx(self):
        passes = json.dumps({"tests": 3, "failures": 0, "testsuites": []})
        script = (f"echo '{passes}' >${{3#*json:}}; echo $2; "
                  'if [ "$CUDA_FORCE_PTX_JIT" != 1 ]; then exit 1; fi')
        programs = ["cuda_early_launch_test", "cuda_routing_test", "cuda_rounding_test",
                    "cuda_route_tokens_test", "cuda_router_test", "cuda_score_and_bias_gradient_test",
                    "cuda_store_threads_test", "cuda_forward_steps_test"]
        for program in programs:
            self.program(program, script)
        said = self.run_stages("ptx")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        items = self.results("ptx")["items"]
        self.assertEqual([item["item"] for item in items], programs)
        self.assertEqual([item["report"]["tests"] for item in items], [3] * len(programs))
        log = self.folder / "out" / "ptx" / "cuda_forward_steps_test.log"
        self.assertEqual(log.read_text(), "--gtest_filter=Combine.*\n", "the rest has products")

    def runs_kits(self, own, *others):
        """tilemoe, on a GPU that takes `own` by itself; it says which kit each run was asked for."""
        cases = "\n".join(f'{kit}) kit="{kit}, asked for" ;;' for kit in (own, *others))
        self.program("tilemoe", f"""
            kit=$TILEMOE_KIT
            case $kit in
            auto|"") kit="{own}, the newest" ;;
            {cases}
            *) kit="none, it needs more" ;;
            esac
            case "$1 $2" in
            "info --json") echo '{{"backends": [{{"name": "cpu"}}, {{"kit": "'"$kit"'"}}]}}' ;;
            "info ") echo "TileMoE 0.2.0, commit 0123abcd, Release" ;;
            digest*) echo '{{"kit": "'"$kit"'", "cases": []}}' ;;
            bench*) for file; do :; done; echo "[]" >"$file"; echo "$kit" ;;
            *) echo "3 cases, 0 failures by $kit $CUDA_FORCE_PTX_JIT" ;;
            esac""")

    def by_kit(self, stage):
        found = {}
        for item in self.results(stage)["items"]:
            found.setdefault(item.get("kit"), []).append(item["item"])
        return found

    def test_runs_each_kit_of_the_gpu(self):
        self.runs_kits("sm90", "sm80")
        self.program("cuda_layer_test", self.counts(failures=0))
        said = self.run_stages("test", "repeat", "bench", "sanitize-1")
        results = self.results("test")
        self.assertEqual(results["kits"], ["sm90", "sm80"], said.stderr)
        self.assertEqual(self.by_kit("test")["sm80"][-2:], ["cuda_weight_layouts_test-sm80", "check-sm80"])
        self.assertIn("cuda_some_test", self.by_kit("test")[None])
        self.assertNotIn("cuda_some_test-sm80", self.by_kit("test")["sm80"], "it has no product")
        reports = {i["item"]: i.get("report") for i in results["items"]}
        self.assertEqual(reports["check"].strip(), "3 cases, 0 failures by sm90, the newest")
        self.assertEqual(reports["check-sm80"].strip(), "3 cases, 0 failures by sm80, asked for")
        self.assertEqual(reports["cuda_layer_test-sm80"]["tests"], 7)
        for stage in ("repeat", "bench"):
            by = self.by_kit(stage)
            self.assertTrue(set(by["sm80"]) <= {f"{name}-sm80" for name in by[None]}, stage)
            self.assertGreaterEqual(len(by["sm80"]), 5, stage)
        self.assertEqual(
            self.by_kit("sanitize-1")["sm80"], ["check-reduced-sm80", "weight-layouts-sm80"])

    def test_keeps_digests_of_each_kit(self):
        self.runs_kits("sm90", "sm80")
        said = self.run_stages("digests")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        reports = {i["item"]: i["report"] for i in self.results("digests")["items"]}
        self.assertEqual({name: report["kit"] for name, report in reports.items()},
                         {"calibration": "sm90, the newest", "reduced": "sm90, the newest",
                          "calibration-sm80": "sm80, asked for", "reduced-sm80": "sm80, asked for"})

    def test_runs_no_kit_that_the_gpu_does_not(self):
        self.runs_kits("sm80")
        self.run_stages("repeat")
        self.assertEqual(self.results("repeat")["kits"], ["sm80"])
        self.assertEqual(set(self.by_kit("repeat")), {None})

    def test_the_sm80_kit_runs_from_ptx(self):
        for own, others in (("sm90", ["sm80"]), ("sm80", [])):
            self.runs_kits(own, *others)
            self.run_stages("--again", "ptx")
            item = self.results("ptx")["items"][-1]
            self.assertEqual((item["item"], item["kit"]), ("check-reduced-sm80", "sm80"))
            self.assertEqual(item["report"], "3 cases, 0 failures by sm80, asked for 1")
        self.runs_kits("sm90")
        self.run_stages("--again", "ptx")
        self.assertEqual(set(self.by_kit("ptx")), {None})

    def test_the_packages_tests_of_another_kit_are_some_files(self):
        self.runs_kits("sm90", "sm80")
        (self.folder / "here").mkdir()
        (self.folder / "here" / "torch.py").touch()
        self.run_stages("--wheel", self.wheel("tilemoe"), "torch",
                        python_path=self.folder / "here")
        self.assertEqual(self.by_kit("torch"), {None: ["tests"], "sm80": ["tests-sm80"]})
        sys.path.insert(0, str(RUN.parent))
        import stages
        machine = stages.Machine(self.folder / "programs", wheel=self.folder / "some.whl")
        machine.kits = ["sm90", "sm80"]
        own, other = stages.torch(machine, self.folder)
        self.assertIn("TILEMOE_KIT=sm80", other.command)
        self.assertFalse([word for word in own.command if "--file" in str(word)])
        files = [word.removeprefix("--file=") for word in map(str, other.command) if "--file" in word]
        folder = RUN.parents[2] / "tests" / "torch"
        on_cuda = (folder / "conftest.py").read_text()
        self.assertGreater(len(files), 4)
        for file in files:
            self.assertTrue((folder / file).exists() and f'"{file}"' in on_cuda, file)
        self.assertLessEqual(own.limit_s + other.limit_s, 480)

    def test_the_wheels_command_is_run(self):
        sys.path.insert(0, str(RUN.parent))
        import stages
        machine = stages.Machine(self.folder / "programs", wheel=self.folder / "some.whl")
        items = stages.command(machine, self.folder)
        ran = [item.command[item.command.index("tilemoe") + 1] for item in items]
        self.assertEqual(ran, ["info", "doctor", "check", "bench"])
        self.assertTrue(all("-m" in item.command for item in items))
        self.assertLessEqual(sum(item.limit_s for item in items), 480)

    def test_a_program_that_ran_no_test_has_failed(self):
        self.program("cuda_some_test", self.counts(failures=0, tests=0))
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 1)
        self.assertIn("cuda_some_test: no result: no test ran", said.stdout)

    def killed(self, when):
        """run.py's stage `test`, ended when a condition holds."""
        command = [sys.executable, RUN, "--programs", self.folder / "programs", "--out",
                   self.folder / "out", "test"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env={**os.environ,
                                   "PATH": f"{self.folder / 'tools'}:/usr/bin:/bin"}) as run:
            until(when)
            run.terminate()
            self.assertEqual(run.wait(timeout=20), 128 + signal.SIGTERM)

    def test_leaves_nothing_running(self):
        """Killed, it takes along what it has begun: a program's child too."""
        self.program("cuda_some_test", f"sleep 50 & echo $! >{self.folder}/child; wait")
        child = self.folder / "child"
        self.killed(lambda: text_of(child))
        until(lambda: has_ended(int(text_of(child))))

    def test_keeps_the_results_before_it_is_killed(self):
        self.program("tilemoe", f'if [ "$1" = info ]; then {INFO}; else sleep 50; fi')
        file = self.folder / "out" / "gpu_test.json"
        self.killed(lambda: text_of(file).endswith("}\n"))
        items = self.results("test")["items"]
        self.assertEqual([(i["item"], i["status"]) for i in items], [("cuda_some_test", "passed")])

    def test_goes_on_where_it_stopped(self):
        self.program("cuda_some_test", self.counts(failures=2))
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 1)
        self.assertIn("cuda_some_test: exit status 1", said.stdout)
        self.program("cuda_some_test", self.counts(failures=0))
        self.assertEqual(self.run_stages("test").returncode, 0)
        self.assertEqual(self.runs_of("cuda_some_test"), 2)
        self.assertEqual(self.run_stages("test").returncode, 0)
        self.assertEqual(self.runs_of("cuda_some_test"), 2, "it had passed at this commit")
        self.program("tilemoe", INFO.replace("0123", "4567"))
        self.run_stages("test")
        self.assertEqual(self.runs_of("cuda_some_test"), 3, "another commit")

    def test_says_what_is_missing(self):
        said = self.run_stages("sanitize-1")
        self.assertIn("forced-tiles: skipped: cuda_forward_steps_test was not built", said.stdout)
        self.assertEqual(said.returncode, 1, "it was asked for")
        said = self.run_stages("sizes")
        self.assertIn("sizes, wide: skipped: no wheel of the PyTorch package was named", said.stdout)

    def test_a_test_may_be_skipped_where_one_expects_it(self):
        self.gpus(2)
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 1, "there are two GPUs")
        self.assertIn("cuda_some_test: skipped though they need not be: DeviceLayerTest.RunsOnTwo",
                      said.stdout)
        self.gpus(1)
        self.program("cuda_some_test", self.counts(0, skipped="GivesTheSameBitsOnABusyGpu"))
        self.assertEqual(self.run_stages("test").returncode, 1, "this one needs one GPU")

    def test_what_a_gpu_is_too_small_for(self):
        said = self.run_stages("huge")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.gpus(1, mib=40960)
        said = self.run_stages("huge")
        self.assertIn("huge, deepseek-v3.2: skipped: it takes 60 GiB of a GPU's memory", said.stdout)
        self.assertEqual(said.returncode, 1)

    def wheel(self, name, **files):
        """A wheel with these modules; what a test calls torch is only there to be found."""
        file = self.folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as archive:
            for module, source in files.items():
                archive.writestr(f"{module}.py", source)
            folder = f"{name}-1.0.dist-info"
            archive.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{folder}/RECORD", "")
        return file

    def test_runs_the_package_from_its_wheel(self):
        """Every layer's command finds what the wheels have; two-gpus asks for two GPUs."""
        (self.folder / "here").mkdir()
        (self.folder / "here" / "torch.py").touch()
        packages = self.folder / "packages"
        packages.mkdir()
        self.wheel("some").rename(packages / "some-1.0-py3-none-any.whl")
        wheel = self.wheel("tilemoe", torch="raise SystemExit('torch of the wheel')")
        given = ["--wheel", wheel, "--packages", packages, "sizes", "two-gpus"]
        said = self.run_stages(*given, python_path=self.folder / "here")
        self.assertEqual(said.returncode, 1)
        self.assertTrue((self.folder / "out" / "gpu_sizes.json").exists(), said.stderr)
        items = self.results("sizes")["items"]
        self.assertEqual([item["status"] for item in items], ["exit status 1"] * 11, said.stderr)
        log = (self.folder / "out" / "sizes" / "olmoe.log").read_text()
        self.assertEqual(log, "torch of the wheel\n")
        for item in self.results("two-gpus")["items"]:
            self.assertIn(item["status"], ("skipped: this machine has one GPU",
                                           "skipped: cuda_layer_test was not built"))
        self.assertTrue((self.folder / "out" / "installed" / "some-1.0.dist-info").is_dir())
        self.assertRegex(self.results("sizes")["wheel"], "^[0-9a-f]{12}$")

    def test_ranks_on_one_gpu_must_have_used_symmetric_memory(self):
        """A stand-in for Python says what the ranks' program would."""
        (self.folder / "here").mkdir()
        (self.folder / "here" / "torch.py").touch()
        for name, log, status in (
                ("exchanges_were_through_symmetric_memory", "7 exchanges", "passed"),
                ("another", "", "no result: nothing says that rows went through symmetric memory")):
            program = (f"print('{name} passed'); "
                       "import sys, pathlib; place = pathlib.Path(sys.argv[6]); place.mkdir(); "
                       f"(place / '0.log').write_text('{log}\\nother'); raise SystemExit")
            wheel = self.wheel("tilemoe", torch=program)
            said = self.run_stages("--wheel", wheel, "--out", self.folder / name, "one-gpu-ranks",
                                   python_path=self.folder / "here")
            results = self.folder / name / "gpu_one-gpu-ranks.json"
            items = json.loads(results.read_text())["items"]
            self.assertEqual([item["status"] for item in items], [status] * 2, said.stderr)
        self.assertEqual(said.returncode, 1)

    def test_ends_without_a_gpu_or_programs(self):
        self.program("nvidia-smi", "exit 9", place="tools")
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 1)
        self.assertIn("no GPU answers here", said.stderr)
        (self.folder / "programs" / "tilemoe").unlink()
        self.assertIn("has no program tilemoe; build it first", self.run_stages("test").stderr)
        self.assertIn("no stage is called nonsense", self.run_stages("nonsense").stderr)


if __name__ == "__main__":
    unittest.main()
