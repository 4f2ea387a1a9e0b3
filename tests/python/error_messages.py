"""Finds the error messages that the sources make: their words, and the anchor at their end.

A message is a list of pieces: words as they stand in the source, and holes for what is only known
when it is made. Words that are not always there, in `a ? "x" : "y"`, are optional.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tf_smb import errors

ANCHOR = re.compile(r"SMB-E\d{3}")
_AT_END = re.compile(r"\s*\[(SMB-E\d{3})\]$")


@dataclass(frozen=True)
class Piece:
    """Words of a message; None: a hole."""

    words: str | None
    optional: bool = False


HOLE = Piece(None)


@dataclass(frozen=True)
class Message:
    """A message as its source has it.

    Attributes:
        place: "file:line".
        pieces: What it is made of, without the anchor.
        anchor: For example "SMB-E012"; None if it does not end with one.
    """

    place: str
    pieces: tuple[Piece, ...]
    anchor: str | None

    def shown(self) -> str:
        """Returns it as a line: holes as <...>, optional words in braces."""
        return "".join(
            "<...>" if p.words is None else f"{{{p.words}}}" if p.optional else p.words
            for p in self.pieces
        )

    def pattern(self) -> re.Pattern[str]:
        """Returns what matches the message as the documents have it: holes are <...>."""
        parts = []
        for piece in self.pieces:
            if piece.words is None:
                parts.append(r"(?:<[^<>]*>)?")
            elif piece.optional:
                parts.append(f"(?:{re.escape(piece.words)})?")
            else:
                parts.append(re.escape(piece.words))
        return re.compile("".join(parts))


def _made(place: str, pieces: list[Piece]) -> Message:
    """Takes the anchor off the end of the last words."""
    last = pieces[-1] if pieces else HOLE
    found = None if last.words is None or last.optional else _AT_END.search(last.words)
    if found is None or last.words is None:
        return Message(place, tuple(pieces), None)
    words = last.words[: found.start()]
    return Message(place, (*pieces[:-1], *([Piece(words)] if words else [])), found.group(1))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Joins neighbours that belong together."""
    joined: list[Piece] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if before is None or before.optional or piece.optional:
            joined.append(piece)
        elif before.words is None or piece.words is None:
            if before.words is not None or piece.words is not None:
                joined.append(piece)
        else:
            joined[-1] = Piece(before.words + piece.words)
    return joined


# --- C++ ---

# ErrnoError(error, what, anchor): the system's words stand between.
_FACTORY = re.compile(
    r"(?<!\w)((?:InvalidArgument|NotFound|AlreadyExists|FailedPrecondition|PermissionDenied"
    r"|ResourceExhausted|DeadlineExceeded|Unavailable|DataLoss|Aborted|Internal|Errno)Error"
    r"|Status(?=\(\s*(?:code|StatusCode|static_cast)\b))\("
)
_TOKEN = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"'
    r"|(?P<char>(?<!\w)'(?:\\.|[^'\\])+')"
    r"|(?P<comment>//[^\n]*)"
    r"|(?P<word>[\w:]*\w)"
    r"|(?P<space>\s+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_PLAIN_CALLS = ("std::string", "std::string_view", "std::move")
# A status' own message, given on: `what: its words [its anchor]`.
_GIVEN_ON = re.compile(r"^(?:[^\"]|\"[^\"]*\")*\.message\(\)$|^(?:std::move\()?message\)?$")


@dataclass(frozen=True)
class CppCall:
    """A call of one of the functions that make a Status."""

    place: str
    arguments: list[str]
    message: Message

    @property
    def gives_on(self) -> bool:
        """Whether the message is another status', which has its anchor."""
        return any(_GIVEN_ON.match(" ".join(one.split())) for one in self.arguments)


def _without_comments(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0]) if match["comment"] else match[0]

    return _TOKEN.sub(blank, text)


def _arguments(text: str, begin: int) -> tuple[list[str], int]:
    """Returns the arguments of the call whose parenthesis ends before `begin`, and their end."""
    depth, start, arguments = 0, begin, []
    for token in _TOKEN.finditer(text, begin):
        sign = token["sign"]
        if sign in ("(", "[", "{"):
            depth += 1
        elif sign in (")", "]", "}"):
            if depth == 0:
                return [*arguments, text[start : token.start()]], token.start()
            depth -= 1
        elif sign == "," and depth == 0:
            arguments.append(text[start : token.start()])
            start = token.end()
    raise AssertionError("a call without an end")


def _cpp_pieces(expression: str) -> list[Piece]:
    """Reads a sum of literals and values."""
    pieces: list[Piece] = []
    calls: list[bool] = []  # of open parentheses: whether what they hold are no words of ours
    starts = [0]  # of open parentheses, and of all: the first piece there
    choices = [False]  # whether they hold a choice
    before = ""
    for token in _TOKEN.finditer(expression):
        if token["space"] or token["comment"]:
            continue
        if token["sign"] == "(":
            calls.append(bool(re.search(r"[\w>]$", before)) and before not in _PLAIN_CALLS)
            starts.append(len(pieces))
            choices.append(False)
        elif token["sign"] == ")":
            calls.pop()
            _end_choice(pieces, starts.pop(), choices.pop())
        elif any(calls):
            pass
        elif token["sign"] == "?":
            choices[-1] = True
        elif token["text"] is not None:
            words = re.sub(r"\\(.)", r"\1", token["text"])
            # Literals side by side are one; after ? and : they are one of two.
            if before == '"' and pieces and pieces[-1].words is not None:
                pieces[-1] = Piece(pieces[-1].words + words, pieces[-1].optional)
            else:
                pieces.append(Piece(words))
        elif token["word"] and token["word"] not in _PLAIN_CALLS:
            pieces.append(HOLE)
        before = '"' if token["text"] is not None else token[0]
    _end_choice(pieces, starts[0], choices[0])
    return _joined(pieces)


def _end_choice(pieces: list[Piece], start: int, is_choice: bool) -> None:
    """What a choice holds is not always there."""
    if is_choice:
        pieces[start:] = [Piece(piece.words, optional=True) for piece in pieces[start:]]


def cpp_calls(root: Path) -> Iterator[CppCall]:
    """Yields every place in cc/ that makes a Status that is not OK."""
    for path in sorted((root / "cc").rglob("*")):
        if path.suffix in (".h", ".cc") and path.stem != "status":
            yield from calls_in(path.relative_to(root).as_posix(), path.read_text())


def calls_in(name: str, source: str) -> Iterator[CppCall]:
    """Yields those in one source."""
    text = _without_comments(source)
    for match in _FACTORY.finditer(text):
        arguments, _ = _arguments(text, match.end())
        place = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        if match[1] == "ErrnoError":
            pieces = [*_cpp_pieces(arguments[1]), Piece(": "), HOLE]
            pieces += _cpp_pieces(arguments[2]) if len(arguments) > 2 else []
        else:
            pieces = _cpp_pieces(arguments[0])
        yield CppCall(place, arguments, _made(place, _joined(pieces)))


def cpp_messages(root: Path) -> Iterator[Message]:
    """Yields every message in cc/ that ends with an anchor, also those that no call makes."""
    for path in sorted((root / "cc").rglob("*")):
        if path.suffix not in (".h", ".cc"):
            continue
        name = path.relative_to(root).as_posix()
        text = _without_comments(path.read_text())
        calls = [] if path.stem == "status" else list(calls_in(name, text))
        yield from (call.message for call in calls if call.message.anchor)
        spans = [(m.end(), _arguments(text, m.end())[1]) for m in _FACTORY.finditer(text)]
        for match in ANCHOR.finditer(text):
            if not any(begin <= match.start() < end for begin, end in spans):
                place = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
                yield _made(place, _cpp_pieces(_innermost_argument(text, match.start())))


def _innermost_argument(text: str, at: int) -> str:
    """Returns the argument of the call that the literal at `at` is in."""
    opened: list[int] = []
    for token in _TOKEN.finditer(text):
        if token.start() >= at or token.end() > at:
            break
        if token["sign"] == "(":
            opened.append(token.end())
        elif token["sign"] == ")" and opened:
            opened.pop()
    arguments, _ = _arguments(text, opened[-1])
    return next(one for one in arguments if ANCHOR.search(one))


# --- Python ---

_CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.Error)
} | {"ArgumentTypeError"}


class PythonFile:
    """A Python source, and what its names stand for."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.tree = ast.parse(source)
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    def errors_made(self) -> Iterator[Message]:
        """Yields the message of every exception of tf_smb.errors that is made."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.args and self._called(node) in _CLASSES:
                yield self._message(node.args[0])
            elif (
                isinstance(node, ast.Call)
                and self._called(node) == "error"
                and node.args
                and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            ):
                yield self._message(node.args[0])  # a parser's

    def anchored(self) -> Iterator[Message]:
        """Yields every message with an anchor, also those that are only printed."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and not isinstance(
                self._parents[node], ast.JoinedStr | ast.FormattedValue | ast.BinOp
            ):
                message = self._message(node)
                if message.anchor:
                    yield message

    @staticmethod
    def _called(call: ast.Call) -> str:
        function = call.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return function.id if isinstance(function, ast.Name) else ""

    def _message(self, node: ast.expr) -> Message:
        pieces = _joined(self._pieces(node, self._scope(node)))
        return _made(f"{self.name}:{node.lineno}", pieces)

    def _scope(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.FunctionDef | ast.Module):
            node = self._parents[node]
        return node

    def _pieces(self, node: ast.expr, scope: ast.AST, optional: bool = False) -> list[Piece]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [Piece(node.value, optional)] if node.value else []
        if isinstance(node, ast.JoinedStr):
            return [
                piece for value in node.values for piece in self._pieces(value, scope, optional)
            ]
        if isinstance(node, ast.FormattedValue):
            if node.conversion == ord("r") or node.format_spec is not None:
                return [HOLE]
            return self._pieces(node.value, scope, optional)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [
                *self._pieces(node.left, scope, optional),
                *self._pieces(node.right, scope, optional),
            ]
        if isinstance(node, ast.IfExp):
            return [
                *self._pieces(node.body, scope, True),
                *self._pieces(node.orelse, scope, True),
            ]
        if isinstance(node, ast.Name):
            values = self._assigned(node.id, scope) or self._assigned(node.id, self.tree)
            if len(values) == 1:
                return self._pieces(values[0], scope, optional)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            returned = self._returned(node.func.id)
            if len(returned) == 1:
                return self._pieces(returned[0], self._scope(returned[0]), optional)
        return [HOLE]

    def _assigned(self, name: str, scope: ast.AST) -> list[ast.expr]:
        return [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            and self._scope(node) is scope
            and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
        ]

    def _returned(self, function: str) -> list[ast.expr]:
        return [
            inner.value
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef) and node.name == function
            for inner in ast.walk(node)
            if isinstance(inner, ast.Return) and inner.value is not None
        ]


def python_files(root: Path) -> Iterator[PythonFile]:
    """Yields the package's Python sources."""
    for folder in ("tf_smb", "strategies"):
        for path in sorted((root / folder).rglob("*.py")):
            yield PythonFile(path.relative_to(root).as_posix(), path.read_text())


def anchored_messages(root: Path) -> list[Message]:
    """Returns every message with an anchor."""
    return [
        *cpp_messages(root),
        *(message for file in python_files(root) for message in file.anchored()),
    ]
