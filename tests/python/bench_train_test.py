"""tf-smb bench train: how rules are written, what is simulated, what it prints and refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from tf_smb import errors, rules
from tf_smb.bench import cli, rule_specs, train_report
from tf_smb.bench.rule_specs import parse_rule, parse_rules
from tf_smb.bench.train_runs import PROCESSES, SIMULATION, Run

KEYS = {
    "workers",
    "rule",
    "seed",
    "learning_rate",
    "center_accuracy",
    "seconds",
    "bytes_exchanged",
    "seconds_waiting",
    "mode",
    "epochs",
    "batch",
    "skewed",
}

# --- How rules are written -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("delta", rules.DeltaAveraging(10)),
        ("delta(8)", rules.DeltaAveraging(8)),
        ("delta(8,1.5)", rules.DeltaAveraging(8, 1.5)),
        ("elastic(10, 0.2)", rules.ElasticAveraging(10, 0.2)),
        ("periodic(16)", rules.PeriodicAveraging(16)),
        ("read-then-accumulate(1,0.2)", rules.ReadThenAccumulate(1, 0.2)),
    ],
)
def test_rule_is_read(text, rule):
    (phase,) = parse_rule(text).phases
    assert phase == rule_specs.PhaseSpec(0, rule)
    assert phase.is_synchronous == isinstance(rule, rules.PeriodicAveraging)


def test_list_and_schedule_are_read():
    plain, elastic, schedule = parse_rules("plain,elastic(4,0.2),0:periodic(1)+500:delta(8)")
    assert plain.is_plain
    assert elastic.text == "elastic(4,0.2)"
    assert [phase.begin_step for phase in schedule.phases] == [0, 500]
    assert [phase.is_synchronous for phase in schedule.phases] == [True, False]
    assert schedule.ends_asynchronous
    assert not parse_rule("0:delta(8)+500:periodic(1)").ends_asynchronous


@pytest.mark.parametrize(
    ("text", "anchor", "seen"),
    [
        ("1:periodic(1)+500:delta(8)", "SMB-E470", "'1:periodic(1)+500:delta(8)'"),
        ("0:periodic(1)+0:delta(8)", "SMB-E470", "later and later"),
        ("0:periodic(1)+delta(8)", "SMB-E471", "'delta(8)'"),
        ("x:delta(8)", "SMB-E471", "STEP:RULE"),
        ("", "SMB-E472", "got ''"),
        ("sync(8)", "SMB-E472", "delta(PERIOD[,GAIN])"),
        ("delta(8", "SMB-E472", "'delta(8'"),
        ("0:plain", "SMB-E472", "'plain'"),
        ("periodic(8,1)", "SMB-E473", "at most 1 number(s)"),
        ("delta(8,1,1)", "SMB-E473", "at most 2 number(s)"),
        ("delta(often)", "SMB-E474", "'delta(often)'"),
        ("delta(1.5)", "SMB-E474", "whole number"),
        ("delta()", "SMB-E474", "'delta()'"),
        ("delta(0)", "SMB-E290", "0"),
        ("elastic(1,2)", "SMB-E291", "2"),
    ],
)
def test_bad_rule_is_told_with_what_is_accepted(text, anchor, seen):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        parse_rule(text)
    assert str(caught.value).endswith(f" [{anchor}]")
    assert seen in str(caught.value)


# --- What is refused -----------------------------------------------------------------


def refusal(capsys, *arguments):
    assert cli.main(["train", *arguments]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_refusals_are_one_sentence(capsys, tmp_path, data):
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, x_train=np.zeros(3))
    (tmp_path / "runs").write_text('{"workers": 1}\n')
    for arguments, anchor in (
        ([], "SMB-E479"),
        (["--rules", "fly"], "SMB-E472"),
        (["--workers", "0"], "SMB-E455"),
        (["--seeds", "1,2"], "SMB-E456"),
        (["--data", str(tmp_path / "none.npz")], "SMB-E475"),
        (["--data", str(wrong)], "SMB-E475"),
        (["--data", str(data), "--samples", "9999"], "SMB-E476"),
        (["--data", str(data), "--epochs", "1", "--workers", "64"], "SMB-E478"),
        (["--from", str(tmp_path / "runs")], "SMB-E480"),
    ):
        assert refusal(capsys, *arguments).endswith(f" [{anchor}]"), arguments


def test_help_lists_it(capsys):
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out


# --- Training ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Images that are easy to tell apart: a bright block for each label, and noise."""
    generator = np.random.default_rng(0)

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = generator.integers(0, 10, count).astype(np.uint8)
        x = generator.integers(0, 100, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(x, labels, strict=True):
            row, column = 14 * (label // 5), 5 * (label % 5)
            image[row + 2 : row + 12, column + 1 : column + 6] += 60
        return x, labels

    path = tmp_path_factory.mktemp("data") / "blocks.npz"
    (x_train, y_train), (x_test, y_test) = images(2000), images(500)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def train(capfd, data: Path, *arguments: str) -> list[dict]:
    common = ["--data", str(data), "--seeds", "1", "--epochs", "2", "--json"]
    assert cli.main(["train", *common, *arguments]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_json_and_table(capfd, data, tmp_path):
    lines = train(
        capfd,
        data,
        *("--workers", "1,2", "--rules", "plain,delta(5)", "--mode", SIMULATION),
        *("--learning-rates", "0.02,0.05", "--seeds", "2"),
    )
    assert [(line["workers"], line["rule"]) for line in lines[::3]] == [
        (1, "plain"),
        (1, "delta(5)"),
        (2, "delta(5)"),
    ]
    for line in lines:
        assert set(line) >= KEYS
        assert line["mode"] == (PROCESSES if line["rule"] == "plain" else SIMULATION)
        assert (line["bytes_exchanged"] == 0) == (line["rule"] == "plain")
    assert [line["seed"] for line in lines[:3]] == [0, 0, 1]
    assert sum(line["chosen"] for line in lines[:3]) == 2
    results = tmp_path / "results"
    results.write_text("\n".join(map(json.dumps, lines)))
    assert cli.main(["train", "--from", str(results)]) == 0
    table = capfd.readouterr().out
    assert "± " in table
    assert table.count("*") == 1 + 3  # of the grid: its title, and each case's best


def test_one_worker_of_delta_averaging_trains_as_plain_keras(capfd, data):
    plain, delta = train(
        capfd,
        data,
        *("--workers", "1", "--rules", "plain,delta(7)", "--mode", SIMULATION),
        *("--learning-rates", "0.02"),
    )
    assert plain["center_accuracy"] > 0.3
    for key in ("center_accuracy", "held_out_accuracy"):
        assert delta[key] == pytest.approx(plain[key], abs=0.005)


def test_only_the_papers_form_diverges(capfd, data):
    papers, elastic = train(
        capfd,
        data,
        *("--workers", "16", "--rules", "read-then-accumulate(1,0.2),elastic(1,0.2)"),
        *("--mode", SIMULATION, "--learning-rates", "0.05", "--epochs", "10", "--batch", "20"),
    )
    assert not papers["finite"] or papers["center_accuracy"] < 0.2
    assert elastic["finite"]
    assert elastic["center_accuracy"] > 0.4


@pytest.mark.parametrize("rule", ["periodic(3)", "0:periodic(1)+10:delta(5)"])
def test_same_seed_gives_the_same_result(data, rule):
    centers = [_simulated_center(data, rule) for _ in range(2)]
    for first, second in zip(*centers, strict=True):
        np.testing.assert_array_equal(first, second)


def _simulated_center(data: Path, rule: str) -> list[np.ndarray]:
    from tf_smb.bench import simulation, train_model

    loaded = train_model.load_data(data)
    shares = train_model.divide(loaded.train.y, 3, skewed=False)
    outcome = simulation.simulate(
        train_model.Loop(loaded.train),
        train_model.first_weights(0, loaded.train),
        parse_rule(rule),
        [train_model.make_batches(share, 20, 30, (0, i)) for i, share in enumerate(shares)],
        learning_rate=0.05,
        settle_steps=2,
    )
    assert outcome.finite
    return outcome.center


def test_skewed_shares_have_their_own_labels(data):
    from tf_smb.bench import train_model

    labels = train_model.load_data(data).train.y
    shares = train_model.divide(labels, 5, skewed=True)
    assert sorted(np.concatenate(shares)) == list(range(len(labels)))
    assert all(len(set(labels[share])) <= 4 for share in shares)


@pytest.mark.slow
def test_processes_print_the_same_keys(capfd, data):
    (line,) = train(
        capfd,
        data,
        *("--workers", "2", "--rules", "elastic(5)", "--mode", PROCESSES),
        *("--learning-rates", "0.05"),
    )
    assert set(line) == set(Run.__dataclass_fields__)
    assert line["mode"] == PROCESSES
    assert line["center_accuracy"] > 0.15
    assert line["bytes_exchanged"] > 0


# --- Report --------------------------------------------------------------------------


def make_run(**changes) -> Run:
    values = {
        **dict(workers=4, rule="delta(10)", seed=0, learning_rate=0.05, center_accuracy=0.99),
        **dict(held_out_accuracy=0.98, finite=True, seconds=1.0, bytes_exchanged=1),
        **dict(seconds_waiting=0.1, mode=SIMULATION, epochs=1, batch=1, samples=1),
        **dict(skewed=False, settle_steps=0, chosen=True),
    }
    return Run(**{**values, **changes})


def test_interval_is_students():
    runs = [make_run(seed=seed, center_accuracy=a) for seed, a in enumerate((0.98, 0.99, 1.0))]
    (group,) = train_report.groups(runs)
    assert group.mean == pytest.approx(99)
    assert group.interval == pytest.approx(4.303 / 3**0.5)


def test_difference_is_to_plain_and_divergence_is_said():
    text = train_report.format_runs(
        [
            make_run(workers=1, rule="plain", center_accuracy=0.991),
            make_run(),
            make_run(rule="read-then-accumulate(1,0.2)", finite=False, center_accuracy=0.098),
        ]
    )
    assert "-0.10" in text
    assert "9.80, diverged" in text


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    train_report.plot([make_run(workers=1, rule="plain"), make_run(), make_run(workers=8)], path)
    assert "<svg" in path.read_text()
