"""Follow a JSON object or list (RFC 8259) whose text arrives in pieces, and find where it ends or goes wrong."""

from __future__ import annotations

MAX_DEPTH = 128

_SPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_WORDS = {word[0]: word[1:] for word in ("true", "false", "null")}

# A number's states: what may follow, and the states in which it may end.
_NUMBER = {
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "d", "1": "d"},
    "d": {"0": "d", "1": "d", "e": "e"},
    "e": {"0": "x", "1": "x", "-": "+", "+": "+"},
    "+": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}
_NUMBER_ENDS = frozenset("01dx")
_NUMBER_KIND = {"0": "0", **dict.fromkeys("123456789", "1"), ".": ".", "e": "e", "E": "e", "+": "+", "-": "-"}


class JsonObject:
    """Examines each character once. It takes what json.loads takes, less NaN and Infinity.

    may_be_list  whether a list may stand in the object's place

    is_complete  the object has ended
    is_broken    what came next cannot continue it, or it is nested too deep
    """

    def __init__(self, *, may_be_list: bool = False) -> None:
        self._openings = "{[" if may_be_list else "{"
        self.is_complete = False
        self.is_broken = False
        self._open: list[str] = []  # objects and lists around this place, outermost first
        self._state = "start"
        self._rest = ""  # of a word such as true
        self._hex_left = 0
        self._is_key = False

    def feed(self, text: str, at: int = 0) -> int:
        """Take the characters from `at` on. Returns the place behind the last one that belongs to the object."""
        while at < len(text) and not self.is_complete:
            if not self._take(text[at]):
                self.is_broken = True
                break
            at += 1
        return at

    def _take(self, char: str) -> bool:
        state = self._state
        if state == "string":
            return self._in_string(char)
        if state in _NUMBER:
            if (following := _NUMBER[state].get(_NUMBER_KIND.get(char, ""))) is not None:
                self._state = following
                return True
            if state not in _NUMBER_ENDS:
                return False
            self._state = state = "after"
        match state:
            case "escape":
                self._hex_left = 4
                self._state = "hex" if char == "u" else "string"
                return char == "u" or char in _ESCAPED
            case "hex":
                self._hex_left -= 1
                self._state = "hex" if self._hex_left else "string"
                return char in _HEX
            case "word":
                expected, self._rest = self._rest[0], self._rest[1:]
                self._state = "word" if self._rest else "after"
                return char == expected
            case "start":
                return char in self._openings and self._begin(char)
        if char in _SPACE:
            return True
        match state, char:
            case (("first key" | "key"), '"'):
                self._is_key, self._state = True, "string"
            case "colon", ":":
                self._state = "value"
            case ("first key", "}") | ("first item", "]"):
                self._end()
            case "after", "," if self._open[-1] == "{":
                self._state = "key"
            case "after", ",":
                self._state = "value"
            case "after", ("}" | "]") if self._open[-1] + char in ("{}", "[]"):
                self._end()
            case (("value" | "first item"), _):
                return self._begin(char)
            case _:
                return False
        return True

    def _begin(self, char: str) -> bool:
        """A value begins."""
        if char in ("{", "["):
            self._open.append(char)
            self._state = "first key" if char == "{" else "first item"
            return len(self._open) <= MAX_DEPTH
        if char == '"':
            self._is_key, self._state = False, "string"
        elif char == "-" or char in _DIGITS:
            self._state = _NUMBER_KIND[char]
        elif char in _WORDS:
            self._rest, self._state = _WORDS[char], "word"
        else:
            return False
        return True

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self._state = "colon" if self._is_key else "after"
        elif char == "\\":
            self._state = "escape"
        else:
            return char >= " "
        return True

    def _end(self) -> None:
        self._open.pop()
        self._state = "after"
        self.is_complete = not self._open
