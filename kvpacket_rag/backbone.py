"""Model and tokenizer as one: embed, encode alone, prefill into a context, decode step, fingerprints."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpacket_rag.assemble import Context, ContextPool, Span
from kvpacket_rag.blocks import attends_by_blocks, block_attention, text_tokens
from kvpacket_rag.fingerprint import fingerprint_tokenizer, fingerprint_values, fingerprint_weights
from kvpacket_rag.guard import ModelGuard
from kvpacket_rag.probe import ProbeReport, probe
from kvpacket_rag.rope import realign
from kvpacket_rag.runner import BoundContext, ModelRunner


class Backbone:
    """A frozen causal language model, proved fit for packets.

    Args:
        model: is put in evaluation mode. Neither its weights nor PEFT's switches in it may change afterwards; see
            :class:`~kvpacket_rag.guard.ModelGuard`.
        tokenizer: of the model.
        name: as the user knows it; never part of an identity.

    Raises:
        UnsupportedModelError: the model cannot be served from packets.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or type(model).__name__
        self.runner = ModelRunner(self.model)
        self.report: ProbeReport = probe(self.runner)
        self.plan = self.report.plan
        self.dtype, self.device = self.runner.dtype, self.runner.device
        self.pool = ContextPool(self.plan, self.dtype, self.device)
        self.weights_fingerprint = fingerprint_weights(self.model)
        self.tokenizer_fingerprint = fingerprint_tokenizer(tokenizer)
        self._guard = ModelGuard(self.model, self.name)
        self._text_lock = threading.Lock()  # tokenizers change their own settings in every call

    @property
    def hidden_size(self) -> int:
        """Width of an input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def architecture(self) -> str:
        """Class and sizes of the model: what another one must share at least to read its adapter."""
        config = self.model.config.get_text_config(decoder=True)
        return f"{type(self.model).__name__}, {config.num_hidden_layers} layers, hidden size {self.hidden_size}"

    @cached_property
    def values_fingerprint(self) -> str:
        """See :func:`fingerprint_values`."""
        return fingerprint_values(self.model)

    @property
    def context_window(self) -> int:
        """Positions a prompt and its answer may take together."""
        return self.plan.max_positions

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the generation config's and the tokenizer's."""
        config = getattr(self.model, "generation_config", None)
        found = getattr(config, "eos_token_id", None)
        ids = found if isinstance(found, list) else [found]
        return frozenset(int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None)

    def check_unchanged(self) -> None:
        """Refuse to go on when the model has become another function; see :meth:`ModelGuard.check`."""
        self._guard.check()

    def token_ids(self, text: str, plain: bool = True, starts: bool = False) -> list[int]:
        """Tokens of a piece of a prompt, without special tokens around it.

        Args:
            text: to be tokenised.
            plain: control strings in it are ordinary text.
            starts: it begins the prompt. Tokenizers of the SentencePiece kind put a space before what they are given;
                any other piece is tokenised behind a line break, as it stands in the prompt.
        """
        if not text:
            return []
        if self._line_ids and not starts:
            ids = self._tokenise("\n" + text, plain)
            if ids[: len(self._line_ids)] == self._line_ids:
                return ids[len(self._line_ids) :]
        return self._tokenise(text, plain)

    @cached_property
    def _line_ids(self) -> list[int]:
        """A line break in front of a text, for tokenizers that put a space before every text; nothing for others."""
        line = self._tokenise("\n", True)
        return line if self._tokenise("\na", True)[len(line) :] != self._tokenise("a", True) else []

    def _tokenise(self, text: str, plain: bool) -> list[int]:
        with self._text_lock:
            return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"])

    def bos_ids(self) -> list[int]:
        """What the tokenizer puts before a text: the beginning-of-sequence token, or nothing."""
        bos = self.tokenizer.bos_token_id
        with self._text_lock:
            added = self.tokenizer("")["input_ids"]
        return [int(bos)] if bos is not None and len(added) and added[0] == bos else []

    def first_ids(self) -> list[int]:
        """The token that begins every prompt: beginning-of-sequence, or the first of the chat template."""
        if bos := self.bos_ids():
            return bos
        if not getattr(self.tokenizer, "chat_template", None):
            return []
        turn = [{"role": "user", "content": "."}]
        text = str(self.tokenizer.apply_chat_template(turn, tokenize=False))
        return self.token_ids(text, plain=False, starts=True)[:1]

    def control_ids(self, texts: Sequence[str]) -> frozenset[int]:
        """Those of the texts that are control tokens, as ids."""
        if not texts:
            return frozenset()
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        return frozenset(special[text] for text in texts if text in special)

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, control tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def embed(self, ids: Sequence[int]) -> Tensor:
        """(tokens, hidden) input embeddings."""
        return self.model.get_input_embeddings()(torch.tensor(list(ids), dtype=torch.long, device=self.device))  # type: ignore[no-any-return]

    @torch.no_grad()
    def encode(self, rows: Sequence[Tensor], sink: int = 0, *, whole: bool = False) -> list[tuple[Tensor, ...]]:
        """Prefill every row alone from position 0, in one padded batch.

        Args:
            rows: each (tokens,) ids or (tokens, hidden) embeddings, all of one kind.
            sink: leading tokens that are read and then left out; what follows is moved to position 0.
            whole: run the model to its end, for those who watch it.

        Returns:
            For each row one tensor a group of the plan, (layers, heads, tokens, width), on the host.

        Raises:
            PacketMismatchError: the model has become another function.
        """
        self.check_unchanged()
        lengths = [row.shape[0] for row in rows]
        inputs = torch.nn.utils.rnn.pad_sequence([row.to(self.device) for row in rows], batch_first=True)
        longest = inputs.shape[1]
        positions = torch.arange(longest, device=self.device).expand(len(rows), -1)
        mask = None
        if min(lengths) < longest:
            mask = (positions < torch.tensor(lengths, device=self.device)[:, None]).long()
        context = self.pool.take(longest, batch=len(rows))
        try:
            bound = self.runner.bind(context)
            (bound.run if whole else bound.fill)(inputs, slice(0, longest), positions, longest, mask)
            places = [Span(sink, sink, length - sink) for length in lengths]
            return [self._to_rest(context.extract(place, row), sink) for row, place in enumerate(places)]
        finally:
            self.pool.give_back(context)

    def _to_rest(self, tensors: tuple[Tensor, ...], sink: int) -> tuple[Tensor, ...]:
        """Tensors encoded from position ``sink`` as they are stored: from position 0, on the host."""
        if sink:
            groups = self.plan.groups
            tensors = tuple(realign(t, group.rotation, -sink) for t, group in zip(tensors, groups, strict=True))
        return tuple(tensor.cpu() for tensor in tensors)

    def bind(self, context: Context) -> BoundContext:
        """A context in the shape the model takes; bind once a request.

        Raises:
            PacketMismatchError: the model has become another function.
        """
        self.check_unchanged()
        return self.runner.bind(context)

    @torch.inference_mode()
    def prefill(self, bound: BoundContext, texts: Sequence[tuple[Span, list[int]]]) -> Tensor:
        """Fill in every piece of text, each seeing all that lies before it.

        One forward whatever the mix of text and packets, with a mask that hides later packets from
        earlier text; a piece at a time for the few architectures that take no such mask.

        Args:
            bound: a context that holds its packets already.
            texts: reserved places and their tokens, in order; the last one ends the prompt.

        Returns:
            (1, vocabulary): logits of the last token.
        """
        tail_only = len(texts) == 1 or _adjacent([span for span, _ in texts])
        if tail_only or self.report.one_pass:
            return self._forward_texts(bound, texts, masked=not tail_only)
        for text in texts:
            logits = self._forward_texts(bound, [text], masked=False)
        return logits

    def _forward_texts(self, bound: BoundContext, texts: Sequence[tuple[Span, list[int]]], masked: bool) -> Tensor:
        ids = torch.tensor([[i for _, tokens in texts for i in tokens]], dtype=torch.long, device=self.device)
        offsets = [torch.arange(span.num_tokens, device=self.device) for span, _ in texts]
        spans = [span for span, _ in texts]
        positions = torch.cat([o + s.position for o, s in zip(offsets, spans, strict=True)])[None]
        visible = spans[-1].slot + spans[-1].num_tokens
        if not masked:
            return bound.run(ids, slice(spans[0].slot, visible), positions, visible)
        slots = torch.cat([o + s.slot for o, s in zip(offsets, spans, strict=True)])
        return bound.run(ids, slots, positions, visible, self.runner.masks(slots, visible))

    @torch.inference_mode()
    def step(self, bound: BoundContext, context: Context, token: int) -> Tensor:
        """Append one token and return the logits (1, vocabulary) of the next."""
        return self._forward_texts(bound, [(context.reserve(1), [token])], masked=False)

    @contextmanager
    def reading(
        self,
        embeddings: Tensor,
        mask: Tensor,
        positions: Tensor,
        wanted: Tensor | None = None,
        packets: Sequence[slice] = (),
    ) -> Iterator[Tensor]:
        """One forward over a whole row with a given mask and no cache, as training does; keeps gradients.

        Run the backward pass within it: the model is locked meanwhile, and ready to compute again what was
        not kept.

        Args:
            embeddings: (1, tokens, hidden).
            mask: (tokens, tokens), True where a row's token may look.
            positions: (tokens,).
            wanted: (n,) places in the row whose logits are computed; None for all.
            packets: parts of the row that see themselves alone, in causal order; the mask has to say so too.

        Yields:
            (1, wanted tokens, vocabulary) logits.
        """
        rows = torch.arange(len(positions), device=self.device)
        blocks: AbstractContextManager[None] = nullcontext()
        if packets and attends_by_blocks(self.model):
            rows = text_tokens(len(positions), packets, self.device)
            blocks = block_attention(self.model, packets, rows)
        additive = self.runner.additive(mask[rows], positions[rows, None] - positions[None])
        with self.runner.lock, blocks:
            output, _ = self.runner.forward(
                embeddings, positions[None], None, additive, "all" if wanted is None else wanted, keep=False
            )
            yield output


def _adjacent(spans: Sequence[Span]) -> bool:
    return all(before.slot + before.num_tokens == after.slot for before, after in pairwise(spans))


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded at all; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
