"""scripts/gpu/run.py on stand-ins for the GPU and the programs: what it runs, keeps and says."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest

from gpu_machine import INFO, StandIns
from processes import has_ended, text_of, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = ROOT / "scripts" / "gpu" / "run.py"
sys.path += [str(RUN.parent), str(ROOT / "python" / "tilemoe" / "bench")]
import groups
import records
import several_gpus
import stages


class GpuRun(StandIns):
    def setUp(self):
        super().setUp()
        self.program("cuda_some_test", self.counts(failures=0))
        self.program("example_layer_cuda", "echo O differs by 3e-3")

    def counts(self, failures, skipped="RunsOnTwoDevicesAtOnce", tests=7):
        suites = json.dumps({"tests": tests, "failures": failures, "testsuites": [
            {"name": "DeviceLayerTest", "testsuite": [{"name": skipped, "result": "SKIPPED"}]}]})
        return f"echo '{suites}' >${{3#*json:}}; exit {min(failures, 1)}"

    def run_stages(self, *arguments, path="/usr/bin:/bin", python_path=""):
        return subprocess.run(
            [sys.executable, RUN, "--programs", self.folder / "programs", "--out",
             self.folder / "out", *arguments],
            text=True, capture_output=True, timeout=60,
            env={**os.environ, "PATH": f"{self.folder / 'tools'}:{path}",
                 "PYTHONPATH": str(python_path)})

    def results(self, stage, out="out"):
        """{item: values} of a stage's results file."""
        self.lines = records.read(self.folder / out / f"{stage}.jsonl")
        return {one.name.removeprefix(stage + "/"): one.values for one in self.lines}

    def test_writes_what_ran_and_where(self):
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("test: all 3 passed", said.stdout)
        self.assertIn("bench: skipped: not selected", said.stdout)
        results = self.results("test")
        self.assertEqual(list(results), ["cuda_some_test", "check", "example_layer_cuda"])
        for one in self.lines:
            self.assertEqual((one.commit, one.device), ("0123abcd", "Stand-in"))
            self.assertEqual(one.versions, {"tilemoe": "0.2.0", "driver": "1.0"})
            self.assertEqual((one.values["status"], one.values["gpus"]), ("passed", 1))
            self.assertGreaterEqual(one.values["seconds"], 0)
        counts = results["cuda_some_test"]
        self.assertEqual([counts[of] for of in ("tests", "failures", "skipped")], [7, 0, 1])
        self.assertEqual(results["check"]["said"], "3 cases, 0 failures")
        self.assertEqual(results["example_layer_cuda"]["said"], "O differs by 3e-3")

    def test_the_tests_without_gemms_run_from_ptx(self):
        passes = json.dumps({"tests": 3, "failures": 0, "testsuites": []})
        script = (f"echo '{passes}' >${{3#*json:}}; echo $2; "
                  'if [ "$CUDA_FORCE_PTX_JIT" != 1 ]; then exit 1; fi')
        programs = ["cuda_pdl_test", "cuda_routing_test", "cuda_rounding_test",
                    "cuda_route_tokens_test", "cuda_router_test", "cuda_score_and_bias_gradient_test",
                    "cuda_store_threads_test", "cuda_forward_steps_test"]
        for program in programs:
            self.program(program, script)
        said = self.run_stages("ptx")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        items = self.results("ptx")
        self.assertEqual(list(items), programs)
        self.assertEqual([item["tests"] for item in items.values()], [3] * len(programs))
        log = self.folder / "out" / "ptx" / "cuda_forward_steps_test.log"
        self.assertEqual(log.read_text(), "--gtest_filter=Combine.*\n", "the rest has GEMMs")

    def runs_archs(self, own, *others):
        """tilemoe, on a GPU that takes `own` if none is selected; it prints the arch of each run."""
        cases = "\n".join(f'{arch}) arch="{arch}, selected" ;;' for arch in (own, *others))
        line = json.dumps({"name": "kernels/LAYER/combine", "device": "Stand-in", "versions": {},
                           "commit": "0123abcd", "values": {"ms": [1, 2, 3], "arch": "ARCH"}})
        selected = f"""
            arch=$TILEMOE_ARCH
            case $arch in
            auto|"") arch="{own}, the newest" ;;
            {cases}
            *) arch="none, it needs more" ;;
            esac"""
        self.program("tilemoe", selected + """
            case "$1 $2" in
            "info --json") echo '{"version": "0.2.0", "commit": "0123abcd", "backends":
                                  [{"name": "cpu"}, {"arch": "'"$arch"'"}]}' ;;
            digest*) echo '{"arch": "'"$arch"'", "seed": 1, "cases":
                            [{"case": "'"$4"'", "inputs": "abc", "tensors": {"O": "12"}}]}' ;;
            *) echo "3 cases, 0 failures by $arch $CUDA_FORCE_PTX_JIT" ;;
            esac""")
        self.program("tilemoe_kernels", selected + f"""
            for file; do :; done; layer=$3; [ "${{3:0:1}}" = - ] && layer=7b-n256
            sed "s/LAYER/$layer/; s/ARCH/$arch/" >"$file" <<< '{line}'""")

    def by_arch(self, stage):
        found = {}
        for name, values in self.results(stage).items():
            if "status" in values:
                found.setdefault(values.get("arch"), []).append(name)
        return found

    def test_runs_each_arch_of_the_gpu(self):
        self.runs_archs("sm90", "sm80")
        self.program("cuda_layer_test", self.counts(failures=0))
        said = self.run_stages("test", "repeat", "kernels", "sanitize-1")
        self.assertIn("archs: sm90, sm80", said.stderr)
        by = self.by_arch("test")
        self.assertEqual(by["sm80"][-2:], ["cuda_weight_layouts_test-sm80", "check-sm80"])
        self.assertIn("cuda_some_test", by[None])
        self.assertNotIn("cuda_some_test-sm80", by["sm80"], "it has no GEMM")
        results = self.results("test")
        self.assertEqual(results["check"]["said"].strip(), "3 cases, 0 failures by sm90, the newest")
        self.assertEqual(results["check-sm80"]["said"].strip(), "3 cases, 0 failures by sm80, selected")
        self.assertEqual(results["cuda_layer_test-sm80"]["tests"], 7)
        for stage in ("repeat", "kernels"):
            by = self.by_arch(stage)
            self.assertTrue(set(by["sm80"]) <= {f"{name}-sm80" for name in by[None]}, stage)
            self.assertGreaterEqual(len(by["sm80"]), 5, stage)
        self.assertEqual(
            self.by_arch("sanitize-1")["sm80"], ["check-reduced-sm80", "weight-layouts-sm80"])

    def test_keeps_what_a_program_measured(self):
        """Under the item's name, each arch's own; and again when nothing is run again."""
        self.runs_archs("sm90", "sm80")
        for _ in range(2):
            said = self.run_stages("kernels")
            self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
            results = self.results("kernels")
            self.assertEqual(results["7b-n256/combine"]["ms"], [1, 2, 3])
            self.assertEqual(results["7b-n256/combine"]["arch"], "sm90, the newest")
            self.assertEqual(results["7b-n256-sm80/combine"]["arch"], "sm80, selected")
            self.assertIn("7b-n256-zipf/combine", results)
            self.assertEqual(results["routing"]["status"], "passed")
        ran = self.runs_of("tilemoe_kernels")
        self.assertEqual(ran, sum("status" in values for values in results.values()))
        self.program("tilemoe_kernels", "for file; do :; done; echo nonsense >\"$file\"")
        said = self.run_stages("--again", "kernels")
        self.assertEqual(said.returncode, 1)
        self.assertIn("kernels, wide: no result:", said.stdout)

    def test_keeps_digests_of_each_arch(self):
        self.runs_archs("sm90", "sm80")
        said = self.run_stages("digests")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        results = self.results("digests")
        for arch in ("sm90", "sm80"):
            self.assertEqual(results[f"{arch}/calibration-*"],
                             {"arch": arch, "case": "calibration-*", "seed": 1, "inputs": "abc",
                              "O": "12"})
        self.assertEqual(results["reduced-sm80"]["status"], "passed")

    def test_reads_the_older_name_of_the_field_arch(self):
        self.runs_archs("sm90", "sm80")
        program = self.folder / "programs" / "tilemoe"
        written = program.read_text()
        self.assertEqual(written.count('{"arch": '), 2)
        program.write_text(written.replace('{"arch": ', '{"kit": '))
        said = self.run_stages("digests")
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
        self.assertIn("archs: sm90, sm80\n", said.stderr)
        self.assertEqual(self.results("digests")["sm80/calibration-*"]["arch"], "sm80")

    def test_runs_no_arch_that_the_gpu_does_not(self):
        self.runs_archs("sm80")
        said = self.run_stages("repeat")
        self.assertIn("archs: sm80\n", said.stderr)
        self.assertEqual(set(self.by_arch("repeat")), {None})

    def test_the_arch_sm80_runs_from_ptx(self):
        for own, others in (("sm90", ["sm80"]), ("sm80", [])):
            self.runs_archs(own, *others)
            self.run_stages("--again", "ptx")
            name, values = list(self.results("ptx").items())[-1]
            self.assertEqual((name, values["arch"]), ("check-reduced-sm80", "sm80"))
            self.assertEqual(values["said"], "3 cases, 0 failures by sm80, selected 1")
        self.runs_archs("sm90")
        self.run_stages("--again", "ptx")
        self.assertEqual(set(self.by_arch("ptx")), {None})

    def test_the_packages_tests_of_another_arch_are_some_files(self):
        self.runs_archs("sm90", "sm80")
        (self.folder / "here").mkdir()
        (self.folder / "here" / "torch.py").touch()
        self.run_stages("--wheel", self.wheel("tilemoe"), "torch",
                        python_path=self.folder / "here")
        self.assertEqual(self.by_arch("torch"), {None: ["tests"], "sm80": ["tests-sm80"]})
        machine = stages.Machine(self.folder / "programs", wheel=self.folder / "some.whl")
        machine.archs = ["sm90", "sm80"]
        own, other = stages.torch(machine, self.folder)
        folder = ROOT / "tests" / "torch"
        self.assertIn("TILEMOE_ARCH=sm80", other.command)
        self.assertEqual(own.command[-1], folder)
        files = [word.name for word in other.command if isinstance(word, pathlib.Path)
                 and word.parent == folder]
        on_cuda = (folder / "conftest.py").read_text()
        self.assertGreater(len(files), 4)
        for file in files:
            self.assertTrue((folder / file).exists() and f'"{file}"' in on_cuda, file)
        self.assertLessEqual(own.limit_s + other.limit_s, 480)

    def test_fp8_is_checked_before_it_is_timed(self):
        machine = stages.Machine(self.folder / "programs", wheel=self.folder / "some.whl")
        items = stages.fp8(machine, self.folder)
        names = [item.name for item in items]
        self.assertEqual(names, ["check", *stages.FP8_TESTS, *stages.FP8_LAYERS, "kernels"])
        tests = (ROOT / "tests" / "cuda" / "CMakeLists.txt").read_text()
        for test in stages.FP8_TESTS:
            self.assertIn(f"tilemoe_gpu_test({test} ", tests)
        self.assertIn("fp8-*", items[0].command)
        for item in items[-1 - len(stages.FP8_LAYERS):]:
            self.assertIn(item.name + ".jsonl", str(item.command[-1]))

    def test_the_wheels_command_is_run(self):
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
        file = self.folder / "out" / "test.jsonl"
        self.killed(lambda: text_of(file).endswith("}\n"))
        statuses = {name: values["status"] for name, values in self.results("test").items()}
        self.assertEqual(statuses, {"cuda_some_test": "passed"})

    def test_continues_where_it_stopped(self):
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
        self.assertEqual(said.returncode, 1, "it was selected")
        said = self.run_stages("sizes")
        self.assertIn("sizes, wide: skipped: --wheel was not given", said.stdout)

    def test_a_test_may_be_skipped_where_one_expects_it(self):
        self.gpus(2)
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 1, "there are two GPUs")
        self.assertIn("cuda_some_test: skipped without need: DeviceLayerTest.RunsOnTwo",
                      said.stdout)
        self.gpus(1)
        self.program("cuda_some_test", self.counts(0, skipped="GivesTheSameBitsOnABusyGpu"))
        self.assertEqual(self.run_stages("test").returncode, 1, "this one needs one GPU")

    def test_what_a_gpu_is_too_small_for(self):
        said = self.run_stages("huge")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.gpus(1, mib=40960)
        said = self.run_stages("huge")
        self.assertIn("huge, deepseek-v3.2: skipped: requires 60 GiB of GPU memory", said.stdout)
        self.assertEqual(said.returncode, 1)

    def test_runs_the_package_from_its_wheel(self):
        """Every layer's command finds what the wheels have; two-gpus requires two GPUs."""
        (self.folder / "here").mkdir()
        (self.folder / "here" / "torch.py").touch()
        packages = self.folder / "packages"
        packages.mkdir()
        self.wheel("some").rename(packages / "some-1.0-py3-none-any.whl")
        wheel = self.wheel("tilemoe", torch="raise SystemExit('torch of the wheel')")
        given = ["--wheel", wheel, "--packages", packages, "sizes", "two-gpus"]
        said = self.run_stages(*given, python_path=self.folder / "here")
        self.assertEqual(said.returncode, 1)
        items = self.results("sizes")
        self.assertEqual([values["status"] for values in items.values()], ["exit status 1"] * 11,
                         said.stderr)
        log = (self.folder / "out" / "sizes" / "olmoe.log").read_text()
        self.assertEqual(log, "torch of the wheel\n")
        for values in self.results("two-gpus").values():
            self.assertIn(values["status"], ("skipped: this machine has one GPU",
                                             "skipped: cuda_layer_test was not built"))
        self.assertTrue((self.folder / "out" / "installed" / "some-1.0.dist-info").is_dir())

    def test_ranks_on_one_gpu_must_have_used_symmetric_memory(self):
        """A stand-in for Python says what the ranks' program would."""
        (self.folder / "here").mkdir()
        (self.folder / "here" / "torch.py").touch()
        for name, log, status in (
                ("exchanges_were_through_symmetric_memory", "7 exchanges", "passed"),
                ("another", "", "no result: no row was exchanged through symmetric memory")):
            program = (f"print('{name} passed'); "
                       "import sys, pathlib; place = pathlib.Path(sys.argv[6]); place.mkdir(); "
                       f"(place / '0.log').write_text('{log}\\nother'); raise SystemExit")
            wheel = self.wheel("tilemoe", torch=program)
            said = self.run_stages("--wheel", wheel, "--out", self.folder / name, "one-gpu-ranks",
                                   python_path=self.folder / "here")
            items = self.results("one-gpu-ranks", out=name)
            self.assertEqual([values["status"] for values in items.values()], [status] * 2,
                             said.stderr)
        self.assertEqual(said.returncode, 1)

    def test_reads_what_pytest_and_ncu_and_check_print(self):
        file = self.folder / "some.xml"
        file.write_text("""<testsuites><testsuite>
            <testcase classname="a" name="good"/>
            <testcase classname="a" name="bad"><failure message="no"/></testcase>
            <testcase classname="b" name="broken"><error message="no"/></testcase>
            <testcase classname="b" name="left_out"><skipped message="why"/></testcase>
            </testsuite></testsuites>""")
        self.assertEqual(stages.junit_counts(file),
                         {"tests": 4, "failures": 2, "skipped": ["b::left_out"],
                          "failed": "a::bad; b::broken"})
        file.write_text("<testsuites><testsuite/></testsuites>")
        self.assertRaises(ValueError, stages.junit_counts, file)

        table = ('some line\n"ID","Kernel Name","Grid Size","Metric Name","Metric Value"\n'
                 '"0","up(int)","(132, 1, 1)","time","1,234.5"\n'
                 '"0","up(int)","(132, 1, 1)","hits","50"\n'
                 '"1","down(int)","(66, 1, 1)","time","7"\n')
        self.assertEqual(stages.kernel_profile(table, "wide"),
                         {"profile/wide/0": {"kernel": "up", "grid": "(132, 1, 1)", "time": 1234.5,
                                             "hits": 50.0},
                          "profile/wide/1": {"kernel": "down", "grid": "(66, 1, 1)", "time": 7.0}})
        self.assertRaises(ValueError, stages.kernel_profile, "no table", "wide")
        self.assertEqual(
            stages.sanitizer_errors("x\n========= ERROR SUMMARY: 0 errors\n")["said"],
            "ERROR SUMMARY: 0 errors")

    def test_every_item_has_a_name_and_a_limit_of_its_own(self):
        """None is lost: as many sanitizer items as archs need, on every tool."""
        machine = stages.Machine(self.folder / "programs", wheel=self.folder / "some.whl")
        machine.archs, machine.gpus = ["sm90", "sm80"], [81559]
        for name, stage in (stages.STAGES | several_gpus.STAGES).items():
            items = stage(machine, self.folder)
            names = [item.name for item in items]
            self.assertEqual(len(set(names)), len(names), name)
            self.assertTrue(all(0 < item.limit_s <= 480 for item in items), name)
            if name.startswith("sanitize"):
                self.assertEqual(names, ["check-reduced", "forced-tiles", "routers",
                                         "check-reduced-sm80", "token-routers", "weight-layouts",
                                         "weight-layouts-sm80"])

    def of_several(self, gpus, mib=81559):
        """{stage: items} of a machine with this number of GPUs."""
        (self.folder / "here").mkdir(exist_ok=True)
        (self.folder / "here" / "torch.py").touch()
        sys.path.insert(0, str(self.folder / "here"))  # only to be found
        self.addCleanup(sys.path.remove, str(self.folder / "here"))
        machine = stages.Machine(self.folder / "programs", wheel=self.folder / "some.whl")
        machine.gpus = [mib] * gpus
        return {name: stage(machine, self.folder) for name, stage in several_gpus.STAGES.items()}

    def test_stages_of_several_gpus_use_all_of_them(self):
        for gpus, worlds in ((2, ["2"]), (4, ["2", "4"]), (8, ["2", "4", "8"])):
            of = self.of_several(gpus)
            for items in of.values():
                for item in items:
                    self.assertIn("NCCL_NVLS_ENABLE=0", item.command)
                    self.assertIn("TORCH_SYMM_MEM_DISABLE_MULTICAST=1", item.command)
                    self.assertIsNone(item.missing, item.name)
            after = lambda item, word: item.command[item.command.index(word) + 1]
            found = {after(item, "--world") for item in of["parallel"]}
            self.assertEqual(found, set(worlds))
            found = {after(item, "--processes") for item in of["fsdp"][1:]}
            self.assertEqual(found, {"1", *worlds})
            pull = of["ranks"][0]
            self.assertEqual(after(pull, "--links"), "nccl")
            self.assertEqual(after(pull, "--world"), min(worlds[-1], "4"))

    def test_micro_batches_depend_on_the_memory_of_a_gpu(self):
        after = lambda item, word: int(item.command[item.command.index(word) + 1])
        for mib, fsdp, shared in ((81559, (3, 3), (2, 3)), (143771, (11, 14), (7, 8))):
            for more, gpus in enumerate((2, 4)):
                of = {item.name: item for item in self.of_several(gpus, mib)["fsdp"]}
                found = after(of[f"7b-{gpus}-gpus"], "--micro-batches")
                self.assertEqual(found, fsdp[more])
                found = after(of[f"7b-{gpus}-gpus-shared-experts"], "--micro-batches")
                self.assertEqual(found, shared[more])
                for count in (1, 2):
                    self.assertEqual(after(of[f"16-layers-{count}-gpus"], "--micro-batches"), 4)

    def test_stages_of_several_gpus_say_that_one_is_not_enough(self):
        for name, items in self.of_several(1).items():
            for item in items:
                alone = name == "fsdp" and (item.name == "corpus" or "-1-gpus" in item.name)
                self.assertEqual(item.missing is None, alone, item.name)
                self.assertIn(item.missing, (None, stages.ONE_GPU))

    def test_cases_of_shards_pass_or_are_named(self):
        said = 'a warning\n{"frozen": null, "writes": null}\n[rank0] another\n'
        self.assertEqual(several_gpus.passed_cases(said), {"frozen": "passed", "writes": "passed"})
        with self.assertRaisesRegex(ValueError, "failed: writes"):
            several_gpus.passed_cases('{"frozen": null, "writes": "why"}')

    def test_a_training_that_does_not_fit_has_no_result(self):
        file = self.folder / "one.jsonl"
        line = lambda **values: records.Measurement("pretrain-study/7B", "a GPU", {}, "0", values)
        records.write(file, [line(step_ms=1.0)])
        self.assertEqual(len(several_gpus.trained(file)), 1)
        for lines in ([], [line(does_not_fit="out of memory")]):
            records.write(file, lines)
            self.assertRaises(ValueError, several_gpus.trained, file)

    def test_ends_without_a_gpu_or_programs(self):
        self.program("nvidia-smi", "exit 9", place="tools")
        said = self.run_stages("test")
        self.assertEqual(said.returncode, 1)
        self.assertIn("nvidia-smi found no GPU", said.stderr)
        (self.folder / "programs" / "tilemoe").unlink()
        self.assertIn("does not contain tilemoe; build it first", self.run_stages("test").stderr)
        self.assertIn("got 'nonsense'", self.run_stages("nonsense").stderr)


class Groups(unittest.TestCase):
    def test_ends_children_that_outlive_their_program(self):
        status, said = groups.run(["sh", "-c", "sleep 50 & echo $!; exit 3"], 20, os.environ)
        self.assertEqual(status, 3)
        until(lambda: has_ended(int(said)))


if __name__ == "__main__":
    unittest.main()
