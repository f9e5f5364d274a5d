"""How often a request's tokens are sent: fewer, larger outputs cost the server less."""

from __future__ import annotations

from msgspec.structs import replace

from tetrad.core.request import RequestOutput
from tetrad.engine.gains import Gains, StepGain


class StreamInterval:
    """Holds a request's tokens back until `num_tokens` are together. The first goes out at once,
    and what is held goes out with the end."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[str, RequestOutput | None] = {}
        """Of each request whose first token is out: what is held."""

    def release(self, gains: Gains) -> Gains:
        """What is due, now that `gains` came."""
        if self._num_tokens == 1:
            return gains
        due: list[RequestOutput] = []
        for output in gains:
            is_first = output.rid not in self._held
            whole = _joined(self._held.get(output.rid), output)
            if output.finish:
                self._held.pop(output.rid, None)
                due.append(whole)
            elif is_first or len(whole.token_ids) >= self._num_tokens:
                self._held[output.rid] = None
                due.append(whole)
            else:
                self._held[output.rid] = whole
        return Gains([StepGain(due)])

    def forget(self, rid: str) -> None:
        """Drop what is held of a request that was aborted."""
        self._held.pop(rid, None)


def _joined(held: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    if held is None:
        return output
    return replace(
        output,
        token_ids=held.token_ids + output.token_ids,
        logprobs=held.logprobs + output.logprobs,
    )
