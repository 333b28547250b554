"""One sequence on its way through the engine, and guesses at how it goes on."""

from dataclasses import dataclass, field

from pools import Blocks


@dataclass(eq=False)
class Request:
    """From a prompt of `num_prompt` tokens to `max_len` tokens.

    Attributes:
        name: (number of the request, number of the sample).
        tokens: token ids known so far.
        num_samples: requests that this one becomes at its first new token.
        drafts: guesses at the next tokens, run together with the last known one.
        num_computed: tokens whose keys, values and state are in the cache.
        state_column: which of its state blocks holds the state after those.
        row: its row of the block table, while it runs.
        blocks: what that row holds.
    """

    name: tuple[int, int]
    tokens: list[int]
    num_prompt: int
    max_len: int
    num_samples: int = 1
    drafts: list[int] = field(default_factory=list)
    num_computed: int = 0
    state_column: int = 0
    row: int = -1
    blocks: Blocks = field(default_factory=list)

    @property
    def to_run(self) -> list[int]:
        return (self.tokens + self.drafts)[self.num_computed :]


def guess(tokens: list[int], count: int) -> list[int]:
    """Return up to `count` drafts: what followed when the last two tokens, or the last one, were seen before."""
    for length in (2, 1):
        for start in reversed(range(len(tokens) - length)):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length :][:count]
    return []
