"""Several answers in one decode loop: every step reads the model's weights once for all of them.

Contexts stand in the rows of shared buffers, each ending at the same slot, so that the next token of
every answer goes into the same one. In front of the shorter ones lie slots that a mask hides; these
are at the very left, where no window of a sliding layer is wasted on them. Prompts are assembled and
prefilled one by one, into their rows, by the very code that serves single requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvpacket_rag.answer import Answer, AnswerStream
from kvpacket_rag.assemble import Context
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.device_errors import is_out_of_memory, told
from kvpacket_rag.prefill import Prefilled, Prefiller
from kvpacket_rag.task import Task
from kvpacket_rag.writing import NO_MEMORY, Writing, write_answer

logger = logging.getLogger(__name__)


class Rows:
    """What several answers are decoded from.

    Args:
        backbone: the model.
        context: of as many rows as there are prompts, filled up to one slot.
        filled: the rows' own contexts, in order.
    """

    def __init__(self, backbone: Backbone, context: Context, filled: Sequence[Context]) -> None:
        device = backbone.device
        self._backbone = backbone
        self._context = context
        self._positions = torch.tensor([row.num_positions for row in filled], device=device)
        starts = torch.tensor([context.num_slots - row.num_slots for row in filled], device=device)
        self._seen = (torch.arange(context.capacity, device=device) >= starts[:, None]).long()
        self._bound = backbone.bind(context)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to every row; (rows, vocabulary) logits of the next ones."""
        place = self._context.reserve(1)
        ids = torch.tensor(tokens, dtype=torch.long, device=self._backbone.device)[:, None]
        visible = place.slot + 1
        mask = self._seen[:, :visible]
        logits = self._bound.run(ids, slice(place.slot, visible), self._positions[:, None], visible, mask)
        self._positions += 1
        return logits

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> list[int]:
        """Go on with some rows only; the last of them move into the places of those that go.

        Args:
            rows: that stay, ascending.

        Returns:
            The same rows in their new order.
        """
        order = list(range(len(rows)))
        free = [row for row in order if row not in rows]
        for row, place in zip((row for row in rows if row >= len(rows)), free, strict=True):
            for buffer in self._context.buffers:
                buffer[:, place, :, : self._context.num_slots] = buffer[:, row, :, : self._context.num_slots]
            order[place] = row
        places = torch.tensor(order, device=self._backbone.device)
        self._positions, self._seen = self._positions[places], self._seen[places]
        buffers = tuple(buffer[:, : len(rows)] for buffer in self._context.buffers)
        self._context = Context(self._context.plan, buffers, self._context.num_slots, self._context.num_positions)
        self._bound = self._backbone.bind(self._context)
        return order


def write_answers(
    backbone: Backbone, prefiller: Prefiller, tasks: Sequence[Task], started: float, max_slots: int
) -> list[Answer]:
    """The answers, in the order of the tasks.

    Args:
        backbone: the model.
        prefiller: of its engine.
        tasks: what is answered.
        started: when the prompts were handed over, by ``time.perf_counter``.
        max_slots: of all contexts that are there at once; a prompt that is longer is answered by itself.

    Raises:
        PacketMissError: a chunk cannot be reused, and its task wants that to be an error.
        DeviceError: memory ran out for a single prompt, or the device disappeared.
    """
    answers: dict[int, Answer] = {}
    for group in _groups(prefiller, tasks, max_slots, backbone.context_window):
        answers |= _write_group(backbone, prefiller, {number: tasks[number] for number in group}, started)
    return [answers[number] for number in range(len(tasks))]


def _groups(prefiller: Prefiller, tasks: Sequence[Task], max_slots: int, window: int) -> Iterator[list[int]]:
    """Numbers of tasks that are answered together: of like length, as many as the slots allow, none past the window."""
    prompts = [prefiller.num_positions(task.parts) for task in tasks]
    group: list[int] = []
    for number in sorted(range(len(tasks)), key=prompts.__getitem__, reverse=True):
        wider = [*group, number]
        slots = prompts[wider[0]] + max(tasks[member].settings.max_new_tokens for member in wider)
        if group and (slots > window or slots * len(wider) > max_slots):
            yield group
            wider = [number]
        group = wider
    if group:
        yield group


def _write_group(
    backbone: Backbone, prefiller: Prefiller, tasks: Mapping[int, Task], started: float
) -> dict[int, Answer]:
    """Answers by number; in halves where memory runs out, and one by one in the end."""
    if len(tasks) == 1:
        ((number, task),) = tasks.items()
        return {number: AnswerStream(write_answer(backbone, prefiller, task, started)).read_all()}
    with told(backbone.device, NO_MEMORY):
        answers = _try(backbone, prefiller, tasks, started)
    if answers is not None:
        return answers
    prefiller.free()
    numbers = list(tasks)
    halves = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    first, second = (_write_group(backbone, prefiller, {n: tasks[n] for n in half}, started) for half in halves)
    return first | second


def _try(
    backbone: Backbone, prefiller: Prefiller, tasks: Mapping[int, Task], started: float
) -> dict[int, Answer] | None:
    """Answers of a group, or None where memory runs out; the error and what it keeps alive is gone by then."""
    writings = {number: Writing(backbone, prefiller, task, started) for number, task in tasks.items()}
    try:
        rows, filled = _fill(backbone, prefiller, tasks, writings)
        _decode(rows, list(tasks), writings)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("memory of %s ran out for %d prompts at once: %s", backbone.device, len(tasks), str(error))
        return None
    return {number: writing.answer(filled[number]) for number, writing in writings.items()}


def _fill(
    backbone: Backbone, prefiller: Prefiller, tasks: Mapping[int, Task], writings: Mapping[int, Writing]
) -> tuple[Rows, dict[int, Prefilled]]:
    """Prefill the prompts, each into a row, and choose their first tokens."""
    filled: dict[int, Prefilled] = {}
    with ExitStack() as held:
        for task in tasks.values():
            held.enter_context(prefiller.loader.holding(task.parts))
        loaded = {number: prefiller.loader.load(task.parts) for number, task in tasks.items()}
        longest = max(prompt.num_slots for prompt in loaded.values())
        room = max(task.settings.max_new_tokens for task in tasks.values())
        context = backbone.pool.take(longest + room, batch=len(tasks))
        for row, (number, prompt) in enumerate(loaded.items()):
            filled[number] = prefiller.fill(prompt, context.row(row, longest - prompt.num_slots))
            tasks[number].reuse.act_on(filled[number].misses)
            writings[number].take(filled[number].logits)
    context.num_slots = longest
    return Rows(backbone, context, [found.context for found in filled.values()]), filled


def _decode(rows: Rows, going: list[int], writings: Mapping[int, Writing]) -> None:
    """Write all answers to their ends.

    Args:
        rows: behind the first tokens.
        going: numbers of the answers, in the order of the rows.
        writings: by number.
    """
    while stay := [row for row, number in enumerate(going) if not writings[number].done]:
        if len(stay) < len(going):
            going = [going[row] for row in rows.keep(stay)]
        logits = rows.step([writings[number].tokens[-1] for number in going])
        for row, number in enumerate(going):
            writings[number].take(logits[row : row + 1])
