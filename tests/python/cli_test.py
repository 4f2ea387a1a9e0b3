"""The command line as a user types it: refusals, help, version."""

import subprocess
import sys
from pathlib import Path

import pytest

import tf_smb
from tf_smb import cli


def tf_smb_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tf_smb.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


TRUE = ("--", "true")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "-n", "0", *TRUE), ("-n", "1 to 1024", "got '0'")),
        (("run", "-n", "-1", *TRUE), ("-n", "1 to 1024", "got '-1'")),
        (("run", "-n", "x", *TRUE), ("-n", "1 to 1024", "got 'x'")),
        (("run", "-n", "1025", *TRUE), ("-n", "1 to 1024", "got '1025'")),
        (("run", "-n", "²", *TRUE), ("-n", "1 to 1024", "got '²'")),
        (("run", *TRUE), ("-n",)),
        (("run",), ("--", "tf-smb run -n 2 -- python train.py")),
        (("run", "-n", "2"), ("--", "tf-smb run -n 2 -- python train.py")),
        (("run", "-n", "2", "python", "train.py"), ("--", "got: -n 2 python train.py")),
        (("run", "-n", "2", "--"), ("no command after --",)),
        (("run", "-n", "2", "--", ""), ("no command after --",)),
        (("run", "-n", "2", "--", "pyhton", "x.py"), ("no program 'pyhton' on PATH",)),
        (("run", "-n", "2", "--", "./no/such"), ("no program './no/such'",)),
        (("run", "-n", "2", "--", __file__), ("python", __file__, "not an executable")),
        (("run", "-n", "2", "--wat", *TRUE), ("unknown option '--wat'",)),
        (("run", "-n", "2", "python", *TRUE), ("'python'", "only be options")),
        (("run", "-n", "2", "--output", "some", *TRUE), ("--output", "'some'", "chief", "all")),
        (("run", "-n", "2", "--on-failure", "cry", *TRUE), ("--on-failure", "'cry'", "continue")),
        (("run", "-n", "2", "--grace-seconds", "-1", *TRUE), ("0 to 86400", "got '-1'")),
        (("run", "-n", "2", "--grace-seconds", "nan", *TRUE), ("0 to 86400", "got 'nan'")),
        (("run", "-n", "2", "--cores-per-worker", "0", *TRUE), ("from 1 to", "got '0'")),
        (("run", "-n", "2", "--log-dir", "/dev/null/x", *TRUE), ("'/dev/null/x'", "log files")),
        (("run", "-n", "2", "--json", *TRUE), ("--json", "--compare")),
        (("rum", "-n", "2"), ("no command 'rum'", "run, serve, ls, stat, rm, bench, version")),
        ((), ("no command", "run, serve, ls, stat, rm, bench, version")),
        (("version", "2"), ("takes no arguments", "'2'")),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_refused_in_one_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...], capfd: pytest.CaptureFixture
):
    try:
        exit_code = cli.main(arguments)
    except SystemExit as end:
        exit_code = end.code
    shown, said = capfd.readouterr()
    assert (exit_code, shown) == (2, "")
    assert said.startswith("tf-smb") and said.count("\n") == 1
    for word in words:
        assert word in said


@pytest.mark.parametrize("arguments", [("run", "-n", "0", *TRUE), ("run", "-n", "1", "--", "nix")])
def test_refused_without_a_traceback(arguments: tuple[str, ...]):
    result = tf_smb_command(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tf-smb run: ") and result.stderr.count("\n") == 1


def test_bad_environment_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setenv("TF_SMB_JOB_ID", "x" * 101)
    assert cli.main(["run", "-n", "1", *TRUE]) == 2
    assert "TF_SMB_JOB_ID must be a text of 1 to 100 " in capfd.readouterr().err


def test_help():
    assert "bench" in tf_smb_command("--help").stdout
    result = tf_smb_command("run", "--help")
    assert result.returncode == 0
    for word in ("-n", "--output", "--compare", "exit code", "tf-smb run -n 2 -- python train.py"):
        assert word in result.stdout


def test_version():
    for name in ("version", "--version"):
        result = tf_smb_command(name)
        assert result.returncode == 0
        assert result.stdout.startswith(f"tf_smb {tf_smb.__version__}, Python 3.")
        assert "shm://  shared memory, one-sided read, one-sided write" in result.stdout
        assert "loopback://  " in result.stdout
        assert "numpy" in result.stdout


def test_tensorflow_is_not_imported():
    code = "import sys, tf_smb.cli; print([m for m in sys.modules if m in ('tensorflow', 'keras')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_the_command_may_have_dashes_of_its_own(tmp_path: Path):
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:])")
    result = tf_smb_command(
        *("run", "-n", "1", "--", sys.executable, str(script), "-n", "--help", "--", "x")
    )
    assert result.stdout == "['-n', '--help', '--', 'x']\n"
