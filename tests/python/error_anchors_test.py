"""Every error message ends with an anchor, and docs/errors.md has exactly those anchors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import error_messages
import numpy as np
import pytest
from error_messages import ANCHOR, Message, PythonFile

import tf_smb
from tf_smb import (
    Client,
    Server,
    cli,
    errors,
    inspection,
    launch_setup,
    resources,
    rules,
    settings,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
# Who makes messages, by the first and last number. Never renumber.
AREAS = {
    "cc/common": (1, 99),
    "cc/wire": (1, 99),
    "cc/box": (1, 99),
    "cc/transport": (100, 149),
    "cc/server": (150, 179),
    "cc/client": (180, 229),
    "cc/kernels": (230, 249),
    "cc/python": (250, 299),
    "tf_smb/box.py": (250, 299),
    "tf_smb/rules.py": (250, 299),
    "tf_smb/schedule.py": (250, 299),
    "tf_smb/settings.py": (250, 299),
    "tf_smb/bench": (450, 999),
    "cc/python/bench_bindings.cc": (450, 999),
    "cc/bench": (450, 999),
    "tf_smb": (300, 399),
    "strategies": (400, 449),
}


# --- The page ------------------------------------------------------------------------


@dataclass
class Entry:
    """What the page says under one anchor."""

    anchor: str
    wordings: list[str]
    rest: str


def entries() -> list[Entry]:
    """Returns what stands under each heading of an anchor, in the page's order."""
    found = []
    parts = re.split(r"^### (SMB-E\d{3})$", PAGE.read_text(), flags=re.MULTILINE)
    for anchor, text in zip(parts[1::2], parts[2::2], strict=True):
        text = text.split("\n## ")[0]
        wordings = re.findall(r"^(?:or )?`([^`]+)`$", text, re.MULTILINE)
        found.append(Entry(anchor, wordings, text))
    return found


@pytest.fixture(scope="module")
def page() -> dict[str, Entry]:
    return {entry.anchor: entry for entry in entries()}


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return error_messages.anchored_messages(ROOT)


def anchors_in_source() -> set[str]:
    """Returns all anchors in the sources, found as text only."""
    found = set()
    for folder, kinds in (
        ("cc", ("*.h", "*.cc")),
        ("tf_smb", ("*.py",)),
        ("strategies", ("*.py",)),
    ):
        for kind in kinds:
            for path in (ROOT / folder).rglob(kind):
                found |= set(ANCHOR.findall(path.read_text()))
    return found


def test_page_and_source_have_the_same_anchors():
    in_page = [entry.anchor for entry in entries()]
    assert in_page == sorted(set(in_page)), "each once, in order"
    source = anchors_in_source()
    assert source - set(in_page) == set(), "not in docs/errors.md"
    assert set(in_page) - source == set(), "in docs/errors.md only"


def test_scanner_sees_every_anchor(messages):
    assert {message.anchor for message in messages} == anchors_in_source()


def test_every_entry_has_message_cause_and_remedy():
    for entry in entries():
        assert entry.wordings, entry.anchor
        for word in ("Cause", "Remedy"):
            (said,) = re.findall(rf"^\*\*{word}:\*\* (.+)$", entry.rest, re.MULTILINE)
            assert said.endswith("."), entry.anchor


def test_page_has_the_words_of_the_source(page, messages):
    """A message that is changed in the source must be changed in the page, and the other way."""
    wrong = []
    for message in messages:
        entry = page[message.anchor]
        if not any(message.pattern().fullmatch(wording) for wording in entry.wordings):
            wrong.append(f"{message.place}: {message.anchor} is {message.shown()!r}")
    for entry in page.values():
        ours = [message.pattern() for message in messages if message.anchor == entry.anchor]
        for wording in entry.wordings:
            if not any(pattern.fullmatch(wording) for pattern in ours):
                wrong.append(f"docs/errors.md: no source says {entry.anchor} {wording!r}")
    assert wrong == []


def test_numbers_say_whose_message_it_is(messages):
    homes: dict[str, set[str]] = {}
    for message in messages:
        area = max((area for area in AREAS if message.place.startswith(area)), key=len)
        homes.setdefault(message.anchor, set()).add(area)
    for anchor, areas in homes.items():
        number = int(anchor.removeprefix("SMB-E"))
        # A message that several areas make has the number of one of them.
        assert any(AREAS[area][0] <= number <= AREAS[area][1] for area in areas), (anchor, areas)


# --- The sources ---------------------------------------------------------------------


def test_every_status_has_an_anchor():
    calls = list(error_messages.cpp_calls(ROOT))
    assert len(calls) > 100
    without = [call.place for call in calls if not call.message.anchor and not call.gives_on]
    assert without == []


def test_every_exception_has_an_anchor():
    made = [message for file in error_messages.python_files(ROOT) for message in file.errors_made()]
    assert len(made) > 40
    assert [message.place for message in made if not message.anchor] == []


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ('InvalidArgumentError("x must be " + S(1) + ", got " + y + " [SMB-E001]")', True),
        ('InvalidArgumentError("x must be 1 "\n   "[SMB-E001]")', True),
        ('InvalidArgumentError("x must be 1 [SMB-E001]" + y)', False),
        ('InvalidArgumentError("x must be 1")', False),
        ('InvalidArgumentError(a ? "b [SMB-E001]" : "c")', False),
        ('ErrnoError(errno, "open " + path, "[SMB-E001]")', True),
        ('ErrnoError(errno, "open [SMB-E001]")', False),
        ('Status(StatusCode::kInternal, "text")', False),
    ],
)
def test_scanner_of_cpp(call, shown):
    (found,) = error_messages.calls_in("x.cc", f"Status F() {{ return {call}; }}  // [SMB-E002]")
    assert (found.message.anchor == "SMB-E001") == shown
    assert not found.gives_on


@pytest.mark.parametrize(
    "call",
    [
        'DataLossError("the directory: " + inner.status().message())',
        "UnavailableError(std::move(message))",
        "Status(code, std::move(message))",
    ],
)
def test_scanner_lets_messages_be_given_on(call):
    (found,) = error_messages.calls_in("x.cc", f"return {call};")
    assert found.gives_on


@pytest.mark.parametrize(
    ("code", "anchor"),
    [
        ("raise InvalidArgumentError(f'a {b} [SMB-E001]')", "SMB-E001"),
        ("raise InvalidArgumentError('a ' + b + ' [SMB-E001]')", "SMB-E001"),
        ("raise errors.NotFoundError(f'a {b}' ' [SMB-E001]') from None", "SMB-E001"),
        ("def text(): return 'a [SMB-E001]'\nraise NotFoundError(text())", "SMB-E001"),
        ("why = f'a {b} [SMB-E001]'\nraise NotFoundError(why)", "SMB-E001"),
        ("raise InvalidArgumentError(f'[SMB-E001] {b}')", None),
        ("raise InvalidArgumentError('a [SMB-E001]' if b else 'c')", None),
        ("raise InvalidArgumentError('a')", None),
        ("raise InvalidArgumentError(b)", None),
        ("parser.error('a')", None),
    ],
)
def test_scanner_of_python(code, anchor):
    (found,) = PythonFile("x.py", code).errors_made()
    assert found.anchor == anchor


# --- At run time ---------------------------------------------------------------------

LAYOUT = [("kernel", (3, 4)), ("bias", (4,))]


def arrays(value: float = 0.0) -> list[np.ndarray]:
    return [np.full(shape, value, np.float32) for _, shape in LAYOUT]


def _segment_call(call: Callable[[tf_smb.Segment], object], start: bool = True) -> None:
    with Server() as server, Client(server.address).create("run", LAYOUT) as segment:
        if start:
            segment.start(arrays(), 0)
        call(segment)


def _other_layout() -> None:
    with Server() as server:
        Client(server.address).create("run", LAYOUT)
        Client(server.address).create("run", LAYOUT[:1], on_existing="resume")


def _find_nothing() -> None:
    with Server() as server:
        inspection.find_segment("nothing", server.address)


def _attach_nothing() -> None:
    with Server() as server:
        Client(server.address).attach("nothing")


def _layout(layout: list[tuple[str, tuple[int, ...]]]) -> None:
    with Server() as server:
        Client(server.address).create("run", layout)


def _named(name: str) -> None:
    with Server() as server:
        Client(server.address).create(name, LAYOUT)


REAL: dict[str, Callable[[], object]] = {
    "SMB-E010": lambda: _layout([]),
    "SMB-E017": _other_layout,
    "SMB-E019": lambda: _named("x" * 201),
    "SMB-E100": lambda: Client("nowhere"),
    "SMB-E101": lambda: Client("quic://host"),
    "SMB-E113": lambda: Client("shm://nobody-is-here"),
    "SMB-E152": _attach_nothing,
    "SMB-E180": lambda: _segment_call(lambda segment: segment.join()),
    "SMB-E181": lambda: _segment_call(lambda s: s.exchange(arrays(), 1), start=False),
    "SMB-E185": lambda: _segment_call(lambda s: s.exchange(arrays(np.nan), 1)),
    "SMB-E251": lambda: _segment_call(lambda s: s.write(arrays()[:1])),
    "SMB-E252": lambda: _segment_call(lambda s: s.write([a.T for a in arrays()])),
    "SMB-E270": lambda: Server(lease_s=0),
    "SMB-E290": lambda: rules.DeltaAveraging(communication_period=0),
    "SMB-E291": lambda: rules.ElasticAveraging(moving_rate=7),
    "SMB-E292": lambda: rules.check_rule(10),  # type: ignore[arg-type]
    "SMB-E295": lambda: settings.resolve("num_workers", "many"),
    "SMB-E310": lambda: resources.hand_out_cores(1, "many"),
    "SMB-E311": lambda: resources.hand_out_gpus(2, "0", {"CUDA_VISIBLE_DEVICES": "0"}),
    "SMB-E315": lambda: launch_setup.check_command([]),
    "SMB-E317": lambda: launch_setup.check_command(["no-such-program"]),
    "SMB-E325": _find_nothing,
}


@pytest.mark.parametrize("anchor", REAL)
def test_real_errors(anchor, page):
    with pytest.raises(errors.Error) as caught:
        REAL[anchor]()
    assert str(caught.value).endswith(f" [{anchor}]")
    assert str(caught.value).count("[SMB-E") == 1
    assert anchor in page


@pytest.mark.parametrize(
    ("arguments", "anchor"),
    [
        ([], "SMB-E308"),
        (["fly"], "SMB-E308"),
        (["run", "-n", "2", "python"], "SMB-E300"),
        (["run", "-n", "2", "--fly", "--", "true"], "SMB-E301"),
        (["run", "-n", "2", "--json", "--", "true"], "SMB-E302"),
        (["run", "-n", "0", "--", "true"], "SMB-E303"),
        (["run", "-n", "1", "--grace-seconds", "-1", "--", "true"], "SMB-E304"),
        (["run", "-n", "1", "--", "no-such-program"], "SMB-E317"),
        (["serve", "--name", "x", "--dir", "/no/such/folder"], "SMB-E305"),
        (["serve", "--name", "x", "--lease-seconds", "0"], "SMB-E306"),
        (["version", "now"], "SMB-E307"),
        (["ls", "--server", "nowhere"], "SMB-E100"),
    ],
)
def test_command_line_is_one_sentence_with_its_anchor(arguments, anchor, capsys, page):
    try:
        code = cli.main(arguments)
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code != 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(f" [{anchor}]")
    assert anchor in page


# --- The table of classes ------------------------------------------------------------


def test_page_has_every_class_and_scope():
    text = PAGE.read_text()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    codes = {row[0]: row[1:] for row in rows if row[0].isupper()}
    assert list(codes) == list(errors._BY_CODE)
    for code, kind in errors._BY_CODE.items():
        assert codes[code][0] == kind.__name__
        # TensorFlow would put its own words in the place of UNAVAILABLE's.
        tensorflow = kind.__name__ if code != "UNAVAILABLE" else "FailedPreconditionError"
        assert codes[code][1] == tensorflow
    assert [row[0] for row in rows if row[0].islower()] == [
        "call",
        "connection",
        "lease",
        "server",
    ]
