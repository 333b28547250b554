"""Which row of the block table a request has: the same one while it runs, or always one of the first n."""

from model_runner import ModelRunner
from request import Request


class StableRows:
    """A request keeps its row; a batch names its rows by an `idx_mapping`."""

    def __init__(self, runner: ModelRunner, max_num_reqs: int) -> None:
        self.runner, self.free = runner, list(range(max_num_reqs))

    def take(self, request: Request) -> None:
        request.row = self.free.pop()

    def give_back(self, request: Request) -> None:
        self.runner.change("clear_row", request.row)
        self.free.append(request.row)

    def arrange(self, num_tokens: dict[Request, int]) -> list[Request]:
        """Return the batch: those who run."""
        return list(num_tokens)


class DenseRows:
    """The requests fill the first rows, so a batch needs no `idx_mapping`: its row i is the table's row i."""

    def __init__(self, runner: ModelRunner, max_num_reqs: int) -> None:
        self.runner = runner
        self.order: list[Request] = []

    def take(self, request: Request) -> None:
        request.row = len(self.order)
        self.order.append(request)

    def give_back(self, request: Request) -> None:
        """Close the gap with the last row."""
        last = self.order.pop()
        if last is request:
            self.runner.change("clear_row", request.row)
        else:
            self.runner.change("move_row", last.row, request.row)
            self.order[request.row], last.row = last, request.row

    def arrange(self, num_tokens: dict[Request, int]) -> list[Request]:
        """Return the batch: all rows, those who run few tokens first, as many attention kernels want it."""
        self.order.sort(key=lambda request: num_tokens.get(request, 0))
        moves = [(request.row, row) for row, request in enumerate(self.order) if request.row != row]
        if moves:
            self.runner.change("permute_rows", [src for src, _ in moves], [dst for _, dst in moves])
        for row, request in enumerate(self.order):
            request.row = row
        return list(self.order)
