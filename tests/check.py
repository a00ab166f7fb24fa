"""`make check`: lint the files that a change touches, and run the fast tests of what they belong to.

A change is what git finds in the working tree; if that is clean, the last commit. Arguments go to pytest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
# Where the tests of a folder are. The first prefix that fits a file counts; a changed test stands for itself.
TESTS = {
    "tests/": (),
    "router/http/": ("tests/router/http",),
    "router/answers/": ("tests/router/answers", "tests/router/test_parsed_answers.py"),
    "router/adapters/": ("tests/router/adapters",),
    "router/telemetry/": ("tests/router/telemetry", "tests/end_to_end/test_metrics.py"),
    "router/text/": ("tests/router/test_tokenizer.py", "tests/router/test_detokenizer.py", "tests/router/test_chat.py"),
    "router/": ("tests/router", "tests/end_to_end/test_generate.py"),
    "grammars/": ("tests/router/test_guided.py", "tests/engine/test_guidance.py", "tests/engine/test_late_masks.py"),
    "engine/guidance/": ("tests/engine/test_guidance.py", "tests/engine/test_late_masks.py"),
    "engine/models/": ("tests/engine/test_models_parity.py", "tests/engine/test_runner.py"),
    "engine/runners/cuda/": ("tests/engine/test_device_runner.py",),
    "engine/runners/": ("tests/engine/test_runner.py", "tests/engine/test_sampler.py"),
    "engine/serving/": ("tests/engine/test_codec.py", "tests/engine/test_server.py", "tests/engine/test_sessions.py"),
    "engine/": ("tests/engine/test_scheduler*.py", "tests/engine/test_p*.py", "tests/engine/test_loop.py"),
    "kernels/triton/": ("tests/kernels/triton",),
    "kernels/": ("tests/kernels/test_*.py",),
    "channel/": ("tests/channel",),
    "checkpoints/": ("tests/checkpoints",),
    "fleet/": ("tests/fleet",),
    "runtime/": ("tests/test_event_loop.py", "tests/router/telemetry/test_logs.py"),
    "settings/": ("tests/settings",),
    "clients/": ("tests/clients",),
    "bench/": ("tests/bench",),
    "protos/": ("tests/test_protos.py",),
    "docs/": ("tests/test_pages.py",),
    "README.md": ("tests/test_pages.py",),
    "CONTRIBUTING.md": ("tests/test_pages.py",),
}
ALWAYS = ("tests/test_architecture.py",)
FAST = "not thorough and not slow and not nightly and not gpu and not counterpart"


def main(arguments: list[str]) -> int:
    changed = changed_files()
    python = [path for path in changed if path.endswith((".py", ".pyi")) and (ROOT / path).exists()]
    if python:
        for command in (["check"], ["format", "--check", "--quiet"]):
            if subprocess.run([BIN / "ruff", *command, "--force-exclude", *python], cwd=ROOT, check=False).returncode:
                return 1
    tests = tests_of(changed)
    print(f"{len(changed)} changed files: {' '.join(tests)}")
    # The tests of Triton's kernels run where those have changed, and in CI.
    which = FAST if any("triton" in path for path in changed) else f"{FAST} and not simulated"
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", which, *tests, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def changed_files() -> list[str]:
    """Return the paths that differ from HEAD, with those that git does not know; else those of the last commit."""

    def paths(*command: str) -> list[str]:
        found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return found.stdout.split("\n")[:-1]

    changed = paths("diff", "--name-only", "HEAD") + paths("ls-files", "--others", "--exclude-standard")
    return sorted(changed or paths("diff", "--name-only", "HEAD~1", "HEAD"))


def tests_of(changed: list[str]) -> list[str]:
    found = dict.fromkeys(ALWAYS)
    for path in changed:
        prefix = next((prefix for prefix in TESTS if path.startswith(prefix)), None)
        own = [path] if path.startswith("tests/") and Path(path).name.startswith("test_") else []
        for pattern in own or TESTS.get(prefix or "", ()):
            found.update(dict.fromkeys(str(each.relative_to(ROOT)) for each in sorted(ROOT.glob(pattern))))
    return list(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
