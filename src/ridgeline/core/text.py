"""Token ids to text, one token at a time, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT = 6
"""Prompt tokens decoded along with the output, so that leading spaces come out as in one piece."""


class TextStream:
    """Incremental detokenisation with stop strings.

    Text is *visible* once no later token can change it: bytes of an unfinished character and a tail
    that may grow into a stop string are held back until they are decided.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stop: tuple[str, ...] = (),
    ) -> None:
        self._decode = decode
        self._stop = stop
        # tokens[:_read] are in `text`; tokens[_from:_read] are decoded again as context
        self._tokens = list(prompt[-CONTEXT:])
        self._from = 0
        self._read = len(self._tokens)
        self._context = decode(self._tokens)
        self._shown = 0
        self.text = ""
        self.stopped = False

    def put(self, token: int, may_stop: bool = True) -> str:
        """Adds one token; returns the text that became visible.

        Sets `stopped` at a stop string, unless it ends before the text `may_stop`.
        """
        self._tokens.append(token)
        decoded = self._decode(self._tokens[self._from :])
        if decoded.endswith(REPLACEMENT):
            return ""  # an unfinished character, which a later token may complete
        self._take(decoded, may_stop)
        return self._show(len(self.text) if self.stopped else len(self.text) - self._undecided())

    def finish(self) -> str:
        """Ends the text: what was held back becomes visible."""
        if self._read < len(self._tokens) and not self.stopped:
            self._take(self._decode(self._tokens[self._from :]), may_stop=True)
        return self._show(len(self.text))

    def _take(self, decoded: str, may_stop: bool) -> None:
        before = len(self.text)
        self.text += decoded[len(self._context) :]
        self._from, self._read = self._read, len(self._tokens)
        self._context = self._decode(self._tokens[self._from :])
        if may_stop:
            self._cut(before)

    def _cut(self, before: int) -> None:
        """Cuts the text at the first stop string that ends after `before`."""
        hits = [
            hit
            for stop in self._stop
            if (hit := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if hits:
            self.text = self.text[: min(hits)]
            self.stopped = True

    def _undecided(self) -> int:
        """Length of the longest tail that is a proper prefix of a stop string."""
        return max(
            (
                n
                for stop in self._stop
                for n in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:n])
            ),
            default=0,
        )

    def _show(self, end: int) -> str:
        visible = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return visible
